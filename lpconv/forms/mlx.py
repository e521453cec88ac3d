"""mlx-lm's layout: codes in 32-bit words under the weight's own name, and a scale per group under `MODULE.scales`.

MXFP4 and MXFP8 have the bytes of `Tiles`. Integers have mlx's affine form, q · scale + bias, where q is unsigned and
the bias is -8 or -128 scales. Both numbers are fp32, since mlx computes in the dtype of the scales: bf16 would round
q · scale to 8 bits, an error of up to 0.8 steps of int8 (measured with mlx 0.32), whereas in fp32 all values are exact.
Sources: ml-explore, mlx 0.32, `mx.dequantize`; mlx-lm 0.32, `utils.load_model`.
"""

from __future__ import annotations  # tensors are named below and not imported

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from lpconv.formats.grains import GRAINS, Grain, find_grain, get_grain
from lpconv.formats.spec import FORMATS, Format
from lpconv.forms.facts import BlockFacts, Component, ConvertedFacts, EncodedBlock, FormSettings, Headers, Measurement
from lpconv.forms.foreign import MLX
from lpconv.forms.form import Over, Side
from lpconv.forms.tiles import Tiles

if TYPE_CHECKING:
    from torch import Tensor

    from lpconv.forms.blocks import Workspace


_WEIGHT, _WORD = ".weight", 32
_MODES = {"e2m1": "mxfp4", "e4m3fn": "mxfp8", "int4": "affine", "int8": "affine"}
_GROUPS = (32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Mlx(Tiles):
    """Tiles in mlx-lm's layout, for weights of `Linear` modules."""

    kind: ClassVar[str] = "mlx"
    suffixes: ClassVar[tuple[str, ...]] = (".scales", ".biases")  # of the module's name
    quantised_by: ClassVar[str | None] = MLX
    of_linears: ClassVar[bool] = True
    axis: ClassVar[tuple[int, ...]] = ()

    @classmethod
    def holds(cls, format: Format, grain: Grain | None) -> bool:
        if grain is None or format.name not in _MODES or format.name not in grain.formats:
            return False
        return grain.name == "mx" or (format.twos_complement and grain.tile[1] in _GROUPS)

    @classmethod
    def refusal(cls, shape: tuple[int, ...], format: Format, settings: FormSettings) -> str | None:
        if settings.is_expert:
            return "mlx-lm joins the experts of a layer itself"
        return super().refusal(shape, format, settings)

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        words, scales = headers.root[name], headers.root.get(_part(name, "scales"))
        group = headers.quantization.get("group_size")
        if headers.quantised_by != MLX or words.dtype != "U32" or scales is None or not isinstance(group, int):
            return None
        cols = scales.shape[-1] * group
        bits = words.shape[-1] * _WORD // max(cols, 1)
        grain = GRAINS["mx"] if scales.dtype == "U8" else find_grain(f"group:{group}")
        fmt = next((f for n in _MODES if cls.holds(f := FORMATS[n], grain) and f.storage_bits == bits), None)
        if fmt is None or grain is None:
            return None
        form = cls(name=name, shape=(*words.shape[:-1], cols), format=fmt, grain=grain)
        return form if all(map(headers.holds, form.components)) else None

    @classmethod
    def config_entries(cls, converted: ConvertedFacts) -> dict[str, Any]:
        """The `quantization` that mlx-lm reads, and a `quantization_config` by which lpconv knows its own files."""
        grain = get_grain(converted.settings["granularity"])
        assert grain is not None, "refused"
        usual = _quantization(converted.settings["format"], grain)
        modes = {n.removesuffix(_WEIGHT): _quantization(f, grain) for n, f in converted.formats.items()}
        others = {module: mode for module, mode in modes.items() if mode != usual}
        own = {"quantization": {**usual, **others}, "quantization_config": {"quant_method": MLX, **usual}}
        return own | _rotary_settings(converted.config)

    @property
    def scales(self) -> Component:
        return replace(super().scales, name=_part(self.name, "scales"))

    @property
    def biases(self) -> Component | None:
        """The component with the value of q = 0 in each group; None for floats."""
        return replace(self.scales, name=_part(self.name, "biases")) if self.format.twos_complement else None

    @functools.cached_property
    def side(self) -> tuple[Component, ...]:
        return tuple(c for c in (self.scales, self.biases) if c is not None)

    @functools.cached_property
    def late_side(self) -> tuple[Component, ...]:
        return self.side

    @functools.cached_property
    def data(self) -> tuple[Component, ...]:
        cols = self.cols * self.format.storage_bits // _WORD
        return (Component(name=self.name, dtype="U32", shape=(*self.shape[:-1], cols)),)

    def is_valid_side(self, side: Side) -> bool:
        import torch

        biases = self.with_scales(side, side[self.scales.name])
        return super().is_valid_side(side) and all(torch.equal(x, side[n]) for n, x in biases.items())

    def combine(self, looked: Sequence[BlockFacts], over: Over, fused: Sequence[Over] = ()) -> Measurement:
        measured = super().combine(looked, over, fused)
        return replace(measured, side=self.with_scales(measured.side, measured.side[self.scales.name]))

    def with_scales(self, side: Side, scales: Tensor) -> Side:
        side = super().with_scales(side, scales)
        if self.biases is None:
            return side
        return {**side, self.biases.name: scales * -(2.0 ** (self.format.storage_bits - 1))}

    def encode(self, x: Tensor, start: int, measured: Measurement, work: Workspace) -> EncodedBlock:
        import torch

        encoded = super().encode(x, start, measured, work)
        return replace(encoded, data=(encoded.data[0].view(torch.uint32),))

    def codes_in(self, data: Sequence[Tensor]) -> Tensor:
        from lpconv.storage.dtypes import TORCH_DTYPES

        return data[0].view(TORCH_DTYPES[self.codes.dtype])


def _part(name: str, part: str) -> str:
    return f"{name.removesuffix(_WEIGHT)}.{part}"


def _quantization(number: str, grain: Grain) -> dict[str, Any]:
    """mlx's settings of codes in the format `number`."""
    return {"group_size": grain.tile[1], "bits": FORMATS[number].storage_bits, "mode": _MODES[number]}


def _rotary_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings of a config of transformers 5 under their older names, as most families of mlx-lm 0.32 need."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return {}
    is_scaled = rope.get("rope_type", "default") != "default"
    return {"rope_theta": rope["rope_theta"], **({"rope_scaling": rope} if is_scaled else {})}
