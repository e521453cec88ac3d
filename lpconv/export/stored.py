"""The weights of a checkpoint in the form they are stored in: short sums of scaled components.

value = Σ_i scale_i · component_i is all that any of our checkpoints says about a weight, and all that the rewriting of
a graph needs to know.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lpconv.checkpoint.contents import Contents
from lpconv.checkpoint.residual import read_residual
from lpconv.checkpoint.source import Source, open_source, read_tensor
from lpconv.errors import UnsupportedError
from lpconv.mcf.split import FP16_RESIDUAL_SCALE, RESIDUALS

__all__ = ["FLOAT8", "Component", "StoredWeight", "check_exportable", "has_fp8", "stored_weights"]

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, *FLOAT8)
_FLOAT8_DTYPES = {"F8_E4M3", "F8_E5M2"}
_SCALE = "_scale"
# What the low component of each residual form is multiplied by; the integer forms are bit patterns, no summands.
_RESIDUAL_SCALES = {"bf16": 1.0, "fp16": 1 / FP16_RESIDUAL_SCALE}


@dataclass(frozen=True, kw_only=True)
class Component:
    """Floating-point numbers of the weight's shape, and the factor they are multiplied by."""

    codes: Tensor
    scale: float = 1.0

    @property
    def value(self) -> Tensor:
        """codes · scale in fp32."""
        return self.codes.float() * self.scale


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """One tensor of a checkpoint under its stored name."""

    name: str
    components: tuple[Component, ...]

    @property
    def value(self) -> Tensor:
        """The weight in fp32: the same operations, in the same order, as the graph's."""
        total = self.components[0].value
        for component in self.components[1:]:
            total = total + component.value
        return total

    @property
    def form(self) -> str:
        """The form in words, such as ``e4m3fn × scale``."""
        return " + ".join(_DTYPE_NAMES[c.codes.dtype] + (" × scale" if c.scale != 1 else "") for c in self.components)

    @property
    def size_bytes(self) -> int:
        """Bytes of the components."""
        return sum(c.codes.numel() * c.codes.element_size() for c in self.components)


_DTYPE_NAMES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2",
}  # fmt: skip


def check_exportable(contents: Contents) -> None:
    """Refuse checkpoints that another library quantised. Raises UnsupportedError."""
    method = _quantization(contents).get("quant_method", "lpconv")
    if method != "lpconv":
        raise UnsupportedError(
            f"the checkpoint is quantised by `{method}`, whose weights lpconv does not export",
            hint="export a conversion in lpconv's own layout; `lpconv restore` undoes --layout compressed-tensors",
        )


def has_fp8(contents: Contents) -> bool:
    """Whether any tensor is in 8 bits, from headers alone."""
    with closing(open_source(contents)) as source:
        return any(e.info.dtype in _FLOAT8_DTYPES for e in source.entries.values())


def stored_weights(contents: Contents) -> Iterator[StoredWeight]:
    """Every floating-point tensor of a checkpoint, one at a time, as the sum of components that it is stored as.

    Collage's integer residuals are no numbers that a graph could add, so those weights come merged, in fp32.
    """
    lows, form = _residuals(contents)
    with closing(open_source(contents)) as source:
        for name in source.entries:
            weight = _stored(source, name, scaled=bool(_quantization(contents)))
            if weight is None:
                continue
            yield weight if name not in lows else _completed(weight, lows[name], form)


def _quantization(contents: Contents) -> dict[str, Any]:
    found = contents.config.get("quantization_config")
    return found if isinstance(found, dict) else {}


def _residuals(contents: Contents) -> tuple[dict[str, Tensor], str]:
    residuals = read_residual(contents.directory)
    return (dict(residuals.tensors()), residuals.form) if residuals else ({}, "")


def _stored(source: Source, name: str, *, scaled: bool) -> StoredWeight | None:
    """A tensor without its residual; None for what is no weight: scales, integers, fp64."""
    if scaled and name.endswith(_SCALE) and name.removesuffix(_SCALE) in source.entries:
        return None
    codes = read_tensor(source, name)
    if codes.dtype not in _FLOATS:
        return None
    if scaled and name + _SCALE in source.entries:
        scale = float(read_tensor(source, name + _SCALE))
        return StoredWeight(name=name, components=(Component(codes=codes[0], scale=scale),))
    return StoredWeight(name=name, components=(Component(codes=codes),))


def _completed(weight: StoredWeight, low: Tensor, form: str) -> StoredWeight:
    (high,) = weight.components
    if form not in _RESIDUAL_SCALES:
        merged = RESIDUALS[form].merge(high.codes, low)
        return StoredWeight(name=weight.name, components=(Component(codes=merged),))
    return StoredWeight(name=weight.name, components=(high, Component(codes=low, scale=_RESIDUAL_SCALES[form])))
