"""Check that the files of a checkpoint hold the model of its config: every weight in the right shape.

transformers fills gaps with random numbers. So names and shapes are compared before anything is read: transformers
loads tensors without data into a model without memory, with its own renaming, merging, tying and exceptions. For known
model families without errors it is not even imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lpconv.errors import InputError, UnsupportedError
from lpconv.layouts.reader import stored_shapes
from lpconv.models.known import known_shapes
from lpconv.report.numbers import code_list, plural
from lpconv.storage.checkpoint import Checkpoint

Shapes = Mapping[str, tuple[int, ...]]
_HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Differences between the files and the model: names, and shapes as (stored, expected).

    `extra` are tensors in the model's layers that it does not have, which means that config.json describes another
    model. `unused` are tensors outside the layers, such as heads for other tasks, and buffers of earlier releases,
    which sound checkpoints have too. `is_bare`: config.json names no class, so the model has no head. `error` is
    transformers' message if it cannot combine the tensors.
    """

    model: str = ""
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    error: str | None = None
    is_bare: bool = False

    @property
    def problems(self) -> tuple[str, ...]:
        problems, what = [], f"`{self.model}`, the model of config.json"
        if self.missing:
            problems.append(
                f"the files lack {plural(len(self.missing), 'weight')} of {what}: {code_list(self.missing)}"
            )
        if self.extra:
            problems.append(f"{what}, has no {code_list(self.extra)} in its layers")
        for name, (stored, expected) in list(self.shapes.items())[:1]:
            count = plural(len(self.shapes), "weight")
            problems.append(f"{count} with a shape that differs from config.json: `{name}` is {stored}, not {expected}")
        if self.error is not None and not problems:
            problems.append(f"{what}, cannot be built from these tensors: {self.error}")
        return tuple(problems)

    @property
    def warnings(self) -> tuple[str, ...]:
        why = "because config.json names no architectures, transformers opens" if self.is_bare else "the model is"
        return (f"{why} `{self.model}`, which does not use {code_list(self.unused)}",) if self.unused else ()


def check_complete(checkpoint: Checkpoint, shapes: Shapes | None = None, *, allow_missing: bool) -> Fit:
    """Compare the files with the model that config.json describes; without differences if transformers has none.

    `shapes` defaults to `stored_shapes`, whose errors are raised too. Raises InputError for missing and extra weights
    unless `allow_missing`, and always for wrong shapes.
    """
    shapes = stored_shapes(checkpoint) if shapes is None else shapes
    try:
        fit = compare_with_model(checkpoint, shapes)
    except UnsupportedError:
        return Fit()
    if fit.shapes or (fit.problems and not allow_missing):
        go_on = "" if fit.shapes else "; or pass --allow-missing to continue"
        raise InputError(
            "; ".join(fit.problems),
            hint=f"download the files again, or the config.json that belongs to them{go_on}",
            details={"missing": list(fit.missing), "extra": list(fit.extra), "shapes": list(fit.shapes)},
        )
    return fit


def compare_with_model(checkpoint: Checkpoint, shapes: Shapes) -> Fit:
    """Compare the stored tensors with the model that config.json describes."""
    known, is_tied = known_shapes(checkpoint.config), checkpoint.config.get("tie_word_embeddings") is True
    if known is not None and known == {**({_HEAD: known[_HEAD]} if is_tied else {}), **shapes}:
        return Fit()
    if "model_type" not in checkpoint.config:
        raise UnsupportedError(
            "config.json names no model_type", hint="add it, so that names and shapes can be checked"
        )
    from lpconv.models.empty import compare_empty  # transformers takes seconds to import

    return Fit(**compare_empty(checkpoint, shapes))
