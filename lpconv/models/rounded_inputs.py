"""How readers round the inputs of products with a quantised weight, as the config of its checkpoint asks.

Settings are those of compressed-tensors (`input_activations`): the number format, and what shares a scale. Scales that
readers compute themselves are those of vLLM 0.32: the largest magnitude over the largest number, for a token or a group
of it; in NVFP4 rounded to e4m3fn, times the stored scale of the tensor (`utils/nvfp4_emulation_utils.py`). In MXFP8
they are the smallest power of two that clips nothing (`utils/mxfp8_utils.py`); in MXFP4 the largest magnitude is first
rounded to a power of two, up from 1.75 on (mode "even" of `utils/mxfp4_utils.py`). compressed-tensors 0.20 has the same
scales, except that it divides by 127.5 for int8.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lpconv.formats.scale import pow2_ceil, pow2_floor
from lpconv.formats.spec import FORMATS, Format
from lpconv.kernels.quantise import fake_quantise

_FLOATS = {8: "e4m3fn", 4: "e2m1"}
_STRATEGIES = ("tensor", "token", "group", "tensor_group")
_SMALLEST = 2.0**-100  # of a scale, for tokens of zeros
_UP = 1.75  # rounds to 2 in formats with one mantissa bit


@dataclass(frozen=True, kw_only=True)
class InputRounding:
    """Rounds inputs to `format`, with one scale for each `group` elements of a token (0: for the token).

    With `has_one_scale`, all tokens share it. `stored` is that scale, or divides the scales of groups (NVFP4). Scales
    are powers of two if `is_mx`.
    """

    format: Format
    group: int = 0
    has_one_scale: bool = False
    is_mx: bool = False
    stored: Tensor | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any], stored: Tensor | None) -> Self | None:
        """The rounding that settings ask for; None if they have zero points, or are otherwise unknown."""
        bits, strategy, is_float = settings.get("num_bits"), settings.get("strategy"), settings.get("type") == "float"
        fmt = FORMATS.get(_FLOATS.get(bits or 0, "") if is_float else f"int{bits}")
        if fmt is None or strategy not in _STRATEGIES or settings.get("symmetric") is False:
            return None
        return cls(
            format=fmt,
            group=settings.get("group_size") or 0,
            has_one_scale=strategy == "tensor",
            is_mx=settings.get("scale_dtype") == "torch.uint8",
            stored=stored,
        )

    @property
    def words(self) -> str:
        """The rounding in words, such as "e4m3fn per token"."""
        tokens = "with one scale" if self.has_one_scale else "per token"
        return f"{self.format.name} {f'in groups of {self.group}' if self.group else tokens}"

    def __call__(self, x: Tensor) -> Tensor:
        """The rounded inputs [..., inputs], in the dtype of `x`; there may be none, for an expert without tokens."""
        if not x.numel():
            return x
        parts = x.float().reshape(*x.shape[:-1], -1, self.group or x.shape[-1])
        scale = self._scale(parts)
        return fake_quantise(parts / scale, self.format).mul_(scale).flatten(-2).to(x.dtype)

    def _scale(self, parts: Tensor) -> Tensor:
        if self.has_one_scale and self.stored is not None:
            return self.stored.float()
        largest = parts.abs().amax(keepdim=True) if self.has_one_scale else parts.abs().amax(-1, keepdim=True)
        scale = largest / self.format.max
        if self.stored is not None:
            stored = self.stored.float()
            scale = (scale * stored).clamp(max=FORMATS["e4m3fn"].max).to(torch.float8_e4m3fn).float() / stored
        elif self.is_mx and self.format.bits == 8:
            scale = pow2_ceil(scale)
        elif self.is_mx:
            power = pow2_floor(largest)
            scale = torch.where(largest < _UP * power, power, 2 * power) * 2.0**-self.format.max_exponent
        return scale.clamp(min=_SMALLEST)
