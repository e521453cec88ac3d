"""Whether the files of a checkpoint hold the model that its config describes: every weight, each in its shape.

transformers fills gaps with random numbers. So names and shapes are compared before anything is read: transformers
itself loads tensors without data into a model without memory, with its own renaming, merging, tying and exceptions.
It is not even imported where the model is of a known family and nothing is wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lpconv.errors import InputError, UnsupportedError
from lpconv.forms.decoded import stored_shapes
from lpconv.models.known import known_shapes
from lpconv.report.numbers import code_list, plural
from lpconv.storage.checkpoint import Checkpoint

Shapes = Mapping[str, tuple[int, ...]]
_HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The names in which files and model differ, and the weights of another shape: that in the files, and the model's.

    `extra` are tensors among the model's layers that it does not have, so that config.json describes another one; those
    of no layer, such as heads for other tasks, which sound checkpoints have too, are `unused`. `error` is what
    transformers says where it cannot put the tensors together.
    """

    model: str = ""
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    error: str | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, in words."""
        found, what = [], f"`{self.model}`, the model of config.json"
        if self.missing:
            found.append(f"the files lack {plural(len(self.missing), 'weight')} of {what}: {code_list(self.missing)}")
        if self.extra:
            found.append(f"{what}, has no {code_list(self.extra)} in its layers")
        for name, (stored, wanted) in list(self.shapes.items())[:1]:
            count = plural(len(self.shapes), "weight")
            found.append(f"{count} in another shape than config.json says: `{name}` is {stored}, not {wanted}")
        if self.error is not None and not found:
            found.append(f"{what}, cannot be made of these tensors: {self.error}")
        return tuple(found)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is odd, in words."""
        what = f"`{self.model}`, the model of config.json, does not use {code_list(self.unused)}"
        return (what,) if self.unused else ()


def check_whole(checkpoint: Checkpoint, shapes: Shapes | None = None, *, allow_missing: bool) -> tuple[str, ...]:
    """The weights that the files lack, if `allow_missing`; none for models that transformers does not build.

    `shapes` are by default those of `stored_shapes`, whose errors are raised too. Raises InputError for missing and
    extra weights, and for wrong shapes whatever is allowed.
    """
    shapes = stored_shapes(checkpoint) if shapes is None else shapes
    try:
        fit = fit_of(checkpoint, shapes)
    except UnsupportedError:
        return ()
    if fit.shapes or (fit.problems and not allow_missing):
        go_on = "" if fit.shapes else "; --allow-missing goes on all the same"
        raise InputError(
            "; ".join(fit.problems),
            hint=f"fetch the files again, or the config.json that belongs to them{go_on}",
            details={"missing": list(fit.missing), "extra": list(fit.extra), "shapes": list(fit.shapes)},
        )
    return fit.missing


def fit_of(checkpoint: Checkpoint, shapes: Shapes) -> Fit:
    """The tensors that the files stand for beside the model that config.json describes.

    Raises UnsupportedError where transformers does not build the model.
    """
    known, is_tied = known_shapes(checkpoint.config), checkpoint.config.get("tie_word_embeddings") is True
    if known is not None and known == {**({_HEAD: known[_HEAD]} if is_tied else {}), **shapes}:
        return Fit()
    if "model_type" not in checkpoint.config:
        raise UnsupportedError("config.json names no model_type", hint="add it to compare names and shapes with")
    from lpconv.models.empty import compare_empty  # transformers takes seconds to import

    return Fit(**compare_empty(checkpoint, shapes))
