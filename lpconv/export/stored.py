"""The weights of a checkpoint in the form they are stored in: short sums of scaled components.

value = Σ_i scale_i · component_i is all that any of our checkpoints says about a weight, and all that the rewriting of
a graph needs to know.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lpconv.checkpoint.contents import Contents
from lpconv.forms.reader import StoredTensors
from lpconv.forms.stored import Stored

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, *FLOAT8)


@dataclass(frozen=True, kw_only=True)
class Component:
    """Floating-point numbers of the weight's shape, and the factor they are multiplied by, or one for each row."""

    codes: Tensor
    scale: float | Tensor = 1.0

    @property
    def is_scaled(self) -> bool:
        """Whether there is anything to multiply by."""
        return isinstance(self.scale, Tensor) or self.scale != 1

    @property
    def value(self) -> Tensor:
        """codes · scale in fp32."""
        return self.codes.float() * (self.scale.unsqueeze(1) if isinstance(self.scale, Tensor) else self.scale)


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """One tensor of a checkpoint under its stored name."""

    name: str
    components: tuple[Component, ...]
    decoded_from: str | None = None  # codes that no graph has operators for

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
        return " + ".join(_DTYPE_NAMES[c.codes.dtype] + (" × scale" if c.is_scaled else "") for c in self.components)

    @property
    def size_bytes(self) -> int:
        """Bytes of the components."""
        return sum(c.codes.numel() * c.codes.element_size() for c in self.components)


_DTYPE_NAMES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2",
}  # fmt: skip


def stored_weights(contents: Contents) -> Iterator[StoredWeight]:
    """Every floating-point tensor of a checkpoint, one at a time, as the sum of components that it is stored as.

    Collage's integer residuals, multipoint's rows and scales of blocks are nothing that a graph could add: those
    weights come decoded, in fp32.
    """
    with StoredTensors.open(contents.directory) as stored:
        for name in stored.forms:
            components = tuple(Component(codes=codes, scale=factor) for codes, factor in stored.summands(name))
            if components[0].codes.dtype in _FLOATS:
                form, plain = stored.forms[name], not any(c.is_scaled for c in components)
                is_decoded = plain and _is_other(components[0].codes, form)
                yield StoredWeight(name=name, components=components, decoded_from=form.words if is_decoded else None)


def _is_other(codes: Tensor, form: Stored) -> bool:
    """Whether numbers have another dtype than the codes of their form, because they were decoded."""
    return form.format is not None and codes.dtype != getattr(torch, form.format.torch or "", None)
