"""The modules of a model that readers of third-party layouts may treat as quantised, and expressions that name them."""

import fnmatch
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

MATCHING_S = 5.0  # time limit for expressions in a config
# Modules that readers (vLLM, SGLang, TensorRT-LLM) fuse into one matrix, by the last parts of their names. Source: the
# `packed_modules_mapping` of vLLM 0.32's models.
_FUSED = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"), ("w1", "w3"),
    ("wq", "wk", "wv"), ("q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"),
    ("key_proj", "value_proj"), ("c_fc_0", "c_fc_1"), ("wq_a", "wkv"),
)  # fmt: skip
_MEMBERS = {leaf: members for members in _FUSED for leaf in members}
_EXPERT = re.compile(r"(.*\.experts)\.(?!.*bias$)")
_COUNTS, _MAX_EXPRESSION = re.compile(r"[{,](\d{1,9})"), 1000  # characters, and repeats of an expression


@dataclass(frozen=True, kw_only=True)
class LinearModules:
    """The modules of a model that readers may treat as quantised, by name.

    Only the weights of `plain` modules can be codes; names are as in the files, and `in_model` maps them to the model's
    names if these differ. `others` are modules of a subclass of `Linear`, which may use its weight without calling it,
    modules kept in fp32, or modules with experts. `tables` are the modules that look ids up. `experts` maps the weight
    of a single expert to the module that holds all of them in memory; `joined` are these and other stored tensors that
    readers combine; `fused` are stored tensors that hold several experts. `unpackable` are weights that transformers
    needs under their own names. `family` is the `model_type` of a model.
    """

    plain: tuple[str, ...]
    others: tuple[str, ...]
    tables: frozenset[str] = frozenset()
    in_model: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)
    joined: frozenset[str] = frozenset()
    fused: frozenset[str] = frozenset()
    unpackable: frozenset[str] = frozenset()
    family: str = ""

    @cached_property
    def weights(self) -> frozenset[str]:
        """Names of the weights that can be codes."""
        return frozenset(f"{name}.weight" for name in self.plain)

    def unquantised(self, quantised: Iterable[str]) -> tuple[str, ...]:
        """The modules whose weight is not in `quantised`, for `ignore`: by their names in the files and the model."""
        weights = set(quantised)
        unquantised = [name for name in self.plain if f"{name}.weight" not in weights]
        return tuple(
            dict.fromkeys(n for name in (*unquantised, *self.others) for n in (name, self.in_model.get(name, name)))
        )


def fused_groups(names: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(common prefix, names) of every group of two or more weights that readers fuse into one matrix."""
    groups: dict[tuple[str, tuple[str, ...]], dict[int, str]] = {}
    for name in sorted(names):
        if fused := _fused_into(name):
            groups.setdefault(fused, {})[fused[1].index(name.split(".")[-2])] = name
    for (stem, _), group in groups.items():
        if len(group) > 1:
            yield stem, tuple(group[place] for place in sorted(group))


def format_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """All names, in groups that need one format: weights that readers fuse, experts of a layer, or a single name."""
    groups: dict[object, list[str]] = {}
    for name in names:
        layer = _EXPERT.match(name)
        groups.setdefault(layer[1] if layer else _fused_into(name) or name, []).append(name)
    return [tuple(group) for group in groups.values()]


def group_pattern(names: Sequence[str]) -> str:
    """A pattern for `--rule` and `--exclude` that matches the tensors of a group from `format_groups`."""
    if len(names) == 1:
        return names[0]
    if layer := _EXPERT.match(names[0]):
        return f"{layer[1]}.*"
    stem, leaves = names[0].rsplit(".", 2)[0], (name.split(".")[-2] for name in names)
    return f"re:^{stem}.({'|'.join(leaves)}).weight"


def _fused_into(name: str) -> tuple[str, tuple[str, ...]] | None:
    """(prefix, last name parts of all members) of the matrix into which readers fuse a weight, or None."""
    stem, _, leaf = name.removesuffix(".weight").rpartition(".")
    return (stem, _MEMBERS[leaf]) if leaf in _MEMBERS and name.endswith(".weight") else None


def expression(entry: str) -> Any:
    """A ``re:`` expression or glob of a config, compiled so that matches can have a time limit; None if it is invalid.

    Raises TimeoutError if it is too large.
    """
    import regex  # imported late: few configs have expressions

    if len(entry) > _MAX_EXPRESSION or math.prod(max(int(n), 1) for n in _COUNTS.findall(entry)) > _MAX_EXPRESSION:
        raise TimeoutError  # the package writes counted repeats out
    try:
        pattern = entry[3:] if entry.startswith("re:") else fnmatch.translate(entry)
        re.compile(pattern)  # its syntax is what other readers know; the package has more
        return regex.compile(pattern)
    except (re.error, regex.error, OverflowError, RecursionError):
        return None
