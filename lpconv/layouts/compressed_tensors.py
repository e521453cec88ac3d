"""The layouts of the compressed-tensors package: codes in the weight's own shape, with one scale or a scale per tile.

8-bit floats are stored under the weight's own name and shape, packed codes under `NAME_packed`, with scales under
`NAME_scale`, and only for `Linear` modules. Plain transformers with that package, and vLLM, open them without lpconv.
The config names unquantised modules, because a reader treats every other `Linear` as quantised. Codes that lpconv does
not write, such as integers with zero points, are read as a `Grid`. (vllm-project/compressed-tensors 0.20,
`quantization/quant_config.py` and `quant_scheme.py`.)

A weight may have an input scale next to it: `MODULE.input_scale`, or `MODULE.input_global_scale`, by which the input
scales of groups are divided. It comes from the largest input during calibration. The projections of keys and values may
have a scale for the cache, `ATTENTION.k_scale` and `ATTENTION.v_scale`: from calibration, or 1.
"""

from __future__ import annotations  # tensors are named below and not imported

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from lpconv.errors import UnsupportedError
from lpconv.formats.grains import Grain
from lpconv.formats.spec import FORMATS, OF_DTYPE, Format
from lpconv.forms.coded import CodedForm
from lpconv.forms.facts import BlockFacts, BlockStats, Component, ConvertedFacts, FormSettings, Headers, Measurement
from lpconv.forms.form import Form, Over, Side, Stored
from lpconv.forms.grid import FP8_BLOCK, Grid, block_hint, grid_of_blocks
from lpconv.forms.planes import UNSIGNED, Plane, PlaneNames, one_by_one
from lpconv.forms.scaled import SCALE_SUFFIX, ScaledCodes, scale_for
from lpconv.forms.tiles import FACTOR_SUFFIX, Tiles
from lpconv.layouts.compressed_config import (
    COMPRESSED_TENSORS,
    INPUT_GLOBAL_SCALE,
    INPUT_SCALE,
    INT_QUANTIZED,
    NUMBERS_OF,
    STATIC,
    cache_scale_name,
    groups_for,
    input_scale_name,
    input_settings,
    preset_in,
    preset_of,
    quantization_config,
    settings_for,
)
from lpconv.layouts.layout import Layout, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from lpconv.forms.blocks import Workspace
    from lpconv.forms.tile_scales import TileScales


_E4M3FN = FORMATS["e4m3fn"]
# Scales of groups of 16 normal numbers are a third of the RMS, and the smallest is 2^-9: NVFP4 keeps 17 of 20 dB.
_LEAST_RMS = 0.005
_WEIGHT, _PACKED_SUFFIX = ".weight", "_packed"
_SIGN = 0x80  # the encoder's integers are unsigned, with this as zero
_ONLY_READ = ("_zero_point", "_g_idx")  # parts of weights that lpconv reads as a `Grid`


@dataclass(frozen=True, kw_only=True)
class _Layout(CodedForm):
    """Common parts of both layouts.

    `input_absmax` is the largest calibrated input, or None without calibration; then `input_scale`, if there is one,
    can be read but not written. `cache_absmax` is the same for the keys or values in the cache, whose scale is then 1.
    """

    quantised_by: ClassVar[str | None] = COMPRESSED_TENSORS
    of_linears: ClassVar[bool] = True
    names: ClassVar[PlaneNames] = PlaneNames()

    has_input_scale: bool = False
    input_absmax: float | None = None
    is_expert: bool = False
    has_cache_scale: bool = False
    cache_absmax: float | None = None

    input_name: ClassVar[str]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Form:
        form = super().of(name, shape, format, settings)
        assert isinstance(form, _Layout)
        caches = settings.kv_cache and cache_scale_name(name) is not None
        is_expert = settings.is_expert
        return replace(form, has_input_scale=settings.inputs == STATIC, has_cache_scale=caches, is_expert=is_expert)

    @classmethod
    def holds(cls, format: Format, grain: Grain | None) -> bool:
        return preset_of(format.name, grain) is not None

    @classmethod
    def refusal(cls, shape: tuple[int, ...], format: Format, settings: FormSettings) -> str | None:
        preset = preset_of(format.name, settings.grain, settings.inputs)
        if preset is None:
            words = settings.grain.words if settings.grain else "one scale"
            return f"the layout cannot store {format.name} codes with {words}"
        if settings.is_table:
            return "transformers 5.24 cannot open codes of embeddings in this layout"
        group = (preset.inputs or {}).get("group_size", 1)
        if shape[-1] % group:
            return f"rows of {shape[-1]} elements are not a multiple of {group}, the group size of input scales"
        return super().refusal(shape, format, settings)

    @classmethod
    def config_entries(cls, converted: ConvertedFacts) -> dict[str, Any]:
        return {"quantization_config": quantization_config(converted)}

    @property
    def input_scale(self) -> Component:
        """The component with the input scale."""
        return Component(name=self.name.removesuffix(_WEIGHT) + f".{self.input_name}", dtype="F32", shape=(1,))

    @property
    def cache_scale(self) -> str | None:
        return cache_scale_name(self.name) if self.has_cache_scale else None

    @property
    def _of_activations(self) -> tuple[Component, ...]:
        cached = () if self.cache_scale is None else (Component(name=self.cache_scale, dtype="F32", shape=(1,)),)
        return (self.input_scale, *cached) if self.has_input_scale else cached

    def _as_stored(self, headers: Headers) -> Self:
        """The form, with scales of inputs and of the cache if the config and the file have them."""
        leaf = input_scale_name(input_settings(headers.quantization, self.name.removesuffix(_WEIGHT)))
        has_input_scale = leaf == self.input_name and headers.holds(self.input_scale)
        cached = Component(name=cache_scale_name(self.name) or "", dtype="F32", shape=(1,))
        return replace(self, has_input_scale=has_input_scale, has_cache_scale=headers.holds(cached))

    def with_activations(self, absmax: Mapping[str, float]) -> Self:
        inputs = absmax.get(self.name.removesuffix(_WEIGHT), self.input_absmax)
        return replace(self, input_absmax=inputs, cache_absmax=absmax.get(str(self.cache_scale), self.cache_absmax))

    def begin(self, largest: float) -> Measurement:
        measured = super().begin(largest)
        return measured if self.chosen is not None else self._with_activations(measured)

    def _combine(self, looked: BlockFacts, over: Over, fused: Sequence[Over]) -> Measurement:
        return self._with_activations(super()._combine(looked, over, fused))

    def _scale_of_inputs(self, absmax: float) -> Tensor:
        """The scale of inputs of up to `absmax`, fp32 [1]; 1 if all are zero."""
        import torch

        from lpconv.formats.scale import pow2_ceil
        from lpconv.forms.tile_scales import dividing_factor

        if self.input_name == INPUT_GLOBAL_SCALE:
            return dividing_factor(self.format, absmax, pow2=self.has_pow2_scale)
        scale = _scale_for(absmax)
        return torch.tensor([pow2_ceil(scale) if self.has_pow2_scale else scale], dtype=torch.float32)

    def _with_activations(self, measured: Measurement) -> Measurement:
        import torch

        side = dict(measured.side)
        if self.has_input_scale:
            assert self.input_absmax is not None, "not calibrated"
            side[self.input_scale.name] = self._scale_of_inputs(self.input_absmax)
        if self.cache_scale is not None:
            side[self.cache_scale] = torch.tensor([_scale_for(self.cache_absmax or 0.0)], dtype=torch.float32)
        return replace(measured, side=side)


@dataclass(frozen=True, kw_only=True)
class Compressed(_Layout, ScaledCodes):
    """Codes with one scale. lpconv writes `scale_dtype` F32; the package saves it in the dtype of the model."""

    kind: ClassVar[str] = "compressed"
    input_name: ClassVar[str] = INPUT_SCALE

    scale_dtype: str = "F32"

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Form:
        """Like `ScaledCodes.of`, but always with a power of two next to weights of another granularity.

        Readers that keep scales in bf16 would change other scales.
        """
        settings = settings if settings.grain is None else replace(settings, scale="pow2")
        return super().of(name, shape, format, settings)

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        codes, scale = headers.root[name], headers.root.get(name + SCALE_SUFFIX)
        if codes.dtype != _E4M3FN.safetensors or scale is None:
            return None
        form = cls(name=name, shape=codes.shape, format=_E4M3FN, scale_dtype=scale.dtype)._as_stored(headers)
        return form if scale.dtype in cls.names.scale_dtypes and all(map(headers.holds, form.components)) else None

    @property
    def components(self) -> tuple[Component, ...]:
        scale, codes = super().components
        return replace(scale, dtype=self.scale_dtype), *self._of_activations, codes

    @property
    def shares_scale(self) -> bool:
        """Whether fused weights must share a scale, as with an input scale.

        Readers that multiply in fp8 use one scale for fused weights, and would round those with another scale again.
        """
        return self.has_input_scale and self.chosen is None

    def _combine(self, looked: BlockFacts, over: Over, fused: Sequence[Over]) -> Measurement:
        import torch

        from lpconv.forms.blocks import block_stats

        measured = super()._combine(looked, over, fused)
        if not fused:
            return measured
        others = [sum(each(lambda x, _, work: block_stats(x, work)), BlockStats()) for each in fused]
        scales = [scale_for(stats, self.format, pow2=self.has_pow2_scale) for stats in (measured.stats, *others)]
        name, one = self.name + SCALE_SUFFIX, torch.tensor([max(scales)], dtype=torch.float32)
        on_grid = measured.on_grid and torch.equal(one, measured.side[name])
        return replace(measured, side={**measured.side, name: one}, on_grid=on_grid)

    def guess(self, sample: Callable[[], Tensor]) -> Measurement | None:
        guessed = None if self.shares_scale else super().guess(sample)
        return guessed and self._with_activations(guessed)

    @property
    def grid(self) -> Grid | None:
        if len(self.shape) != 2 or 0 in self.shape:
            return None
        scale, codes = self.components[0], self.components[-1]
        return grid_of_blocks(self.name, self.shape, self.format, one_by_one(codes), scale)


@dataclass(frozen=True, kw_only=True)
class CompressedTiles(_Layout, Tiles):
    """Codes with a scale per tile, in the layout of a `Preset`. The scales of integers are bf16.

    compressed-tensors itself saves scales in the dtype of the model, and earlier versions of lpconv wrote fp32.

    Plain transformers stacks experts, and ignores NVFP4's tensor scale for all of them
    (huggingface/transformers#48371). So with power-of-two scales, which every reader uses unchanged, the tensor scale
    of an expert (`is_expert`) is 1.
    """

    kind: ClassVar[str] = "compressed tiles"
    names: ClassVar[PlaneNames] = PlaneNames(
        packed=_PACKED_SUFFIX, factor=FACTOR_SUFFIX, size="_shape", integer_scale="BF16"
    )
    suffixes: ClassVar[tuple[str, ...]] = names.suffixes
    whole: ClassVar[type[Form]] = Compressed
    input_name: ClassVar[str] = INPUT_GLOBAL_SCALE

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Form:
        preset = preset_of(format.name, settings.grain, settings.inputs)
        is_bytes = preset is not None and preset.format == INT_QUANTIZED
        return super(CompressedTiles, CompressedBytes if is_bytes else cls).of(name, shape, format, settings)

    @functools.cached_property
    def _rule(self) -> TileScales:
        return replace(super()._rule, has_factor=not (self.is_expert and self.has_pow2_scale))

    def _combine(self, looked: BlockFacts, over: Over, fused: Sequence[Over]) -> Measurement:
        """Combine all blocks. Raises UnsupportedError for experts that need a tensor scale.

        Plain transformers ignores the tensor scale of experts.
        """
        measured = super()._combine(looked, over, fused)
        if self.grain.has_factor and not self._rule.has_factor and 0 < measured.stats.rms < _LEAST_RMS:
            raise UnsupportedError(
                f"`{self.name}`: numbers of {measured.stats.rms:.1g} are too small for e4m3fn scales alone, and plain "
                "transformers leaves the second scale of experts out",
                hint="--scale exact keeps it, for vLLM and lpconv; or use --granularity mx",
            )
        return measured

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        weight = name.removesuffix(_PACKED_SUFFIX)
        if any(weight + part in headers.root for part in _ONLY_READ):
            return None
        for preset in map(preset_in, groups_for(headers.quantization, weight.removesuffix(_WEIGHT))):
            if preset is not None and preset.grain is not None:
                form = cls._of_codes(weight, name, preset.grain, preset.number, headers)
                if form is not None and (form.format.name, form.codes.name) == (preset.number, name):
                    return form._as_stored(headers)
        return None

    @property
    def side(self) -> tuple[Component, ...]:
        return (*super().side, *self._of_activations)


@dataclass(frozen=True, kw_only=True)
class CompressedBytes(CompressedTiles):
    """Codes of int8 with a scale per row, one by one under the weight's own name, in two's complement."""

    kind: ClassVar[str] = "compressed bytes"
    names: ClassVar[PlaneNames] = replace(CompressedTiles.names, packed="", size="")

    @functools.cached_property
    def codes(self) -> Component:
        return Component(name=self.name, dtype="I8", shape=self.shape)

    @functools.cached_property
    def grid(self) -> Grid:
        packed = super().grid
        return replace(packed, codes=one_by_one(packed.codes.component))

    def as_stored(self, codes: Tensor, start: int, side: Side, work: Workspace) -> Tensor:
        import torch

        return codes.bitwise_xor(_SIGN).view(torch.int8)

    def codes_in(self, data: Sequence[Tensor]) -> Tensor:
        import torch

        return data[0].view(torch.uint8).bitwise_xor(_SIGN)


def _scale_for(absmax: float) -> float:
    """The scale that maps `absmax` to the largest e4m3fn number, 1 for zero."""
    return max(absmax / _E4M3FN.max, 2.0**-126) if absmax else 1.0


def _read(name: str, headers: Headers) -> Stored | None:
    """The weight whose codes are `name`: as lpconv writes it, else as a `Grid`."""
    kinds: tuple[type[Compressed | CompressedTiles], ...] = (Compressed, CompressedTiles, CompressedBytes)
    known = (kind.recognise(name, headers) for kind in kinds)
    return next(filter(None, known), None) or _as_grid(name, headers)


def _as_grid(name: str, headers: Headers) -> Grid | None:
    """The layouts of the compressed-tensors package, as llm-compressor and others publish them; vLLM's native format.

    `MODULE.weight` are codes stored one by one (float-quantized, int-quantized, mxfp8-quantized), with `weight_scale`.
    Codes of fewer bits are `weight_packed`: bytes of two e2m1 (nvfp4- and mxfp4-pack-quantized) or words of integers
    (pack-quantized, with `weight_shape`). NVFP4's `weight_global_scale` divides. Sources: vllm-project/
    compressed-tensors 0.20, `compressors/*/base.py` and `pack_quantized/helpers.py`.
    """
    weight = name.removesuffix(_PACKED_SUFFIX)
    codes, scale = headers.component(name), headers.component(weight + SCALE_SUFFIX)
    if codes is None or scale is None or len(codes.shape) < 2:
        return None
    if weight == name:
        return _one_each(codes, scale, headers)
    if codes.dtype != "U8":
        return _packed_integers(weight, codes, scale, headers)
    factor = headers.component(weight + FACTOR_SUFFIX)
    if (scale.dtype == "F8_E4M3") != (factor is not None):
        return None
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    plane = Plane(component=codes, kind="e2m1")
    return grid_of_blocks(weight, shape, FORMATS["e2m1"], plane, scale, factor=factor, divides=factor is not None)


def _one_each(codes: Component, scale: Component, headers: Headers) -> Grid | None:
    if codes.dtype not in ("F8_E4M3", "I8"):
        return None
    settings, size = settings_for(headers.quantization, codes.name.removesuffix(_WEIGHT)), one_by_one(scale).size
    hints = map(_tile_in, settings)
    fitting = (h for h in hints if h and tuple(-(-n // b) for n, b in zip(codes.shape[-2:], h, strict=True)) == size)
    hint, fmt = next(fitting, FP8_BLOCK), OF_DTYPE.get(codes.dtype, FORMATS["int8"])
    grid = grid_of_blocks(codes.name, codes.shape, fmt, one_by_one(codes), scale, hint)
    zeros = headers.component(codes.name + "_zero_point")
    return grid and replace(grid, zeros=None if zeros is None else one_by_one(zeros, grid.scales.block))


def _tile_in(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale, or None if the settings do not name them."""
    size = weights.get("group_size")
    return (1, size) if type(size) is int and size > 0 else block_hint(weights.get("block_structure"))


def _packed_integers(name: str, codes: Component, scale: Component, headers: Headers) -> Grid | None:
    """Integers of a width that the config names and the sizes allow; `weight_shape` must agree once it is read.

    Zero points may be packed too, along the rows of the weight, with the same offset as codes.
    """
    rows, words = codes.shape[-2:]
    for weights in settings_for(headers.quantization, name.removesuffix(_WEIGHT)):
        bits, size = weights.get("num_bits"), weights.get("group_size")
        if weights.get("type", "int") != "int" or not isinstance(bits, int) or bits not in UNSIGNED:
            continue
        group = size if isinstance(size, int) and size > 0 else 0
        cols = one_by_one(scale).size[1] * group if group else words * 32 // bits
        codes_plane = Plane(component=codes, kind=UNSIGNED[bits], plus=-(2 ** (bits - 1)))
        scales = one_by_one(scale, (1, group or cols))
        zeros = headers.component(name + "_zero_point")
        zeros_plane = None if zeros is None else one_by_one(zeros, scales.block)
        if zeros is not None and zeros.dtype == "I32":
            zeros_plane = replace(codes_plane, component=zeros, block=scales.block, axis=0)
        grid = Grid(
            name=name,
            shape=(*codes.shape[:-2], rows, cols),
            format=FORMATS[f"int{bits}"],
            codes=codes_plane,
            scales=scales,
            zeros=zeros_plane,
            order=headers.component(name + "_g_idx"),
            size=headers.component(name + "_shape"),
        )
        if grid.agrees:
            return grid
    return None


_VLLM = "transformers with compressed-tensors; vLLM (not tested)"
_TRIED = "vLLM (tested on a CPU); transformers with compressed-tensors"
# vLLM 0.32, `compressed_tensors_wNa16.py` and `kernels/linear/mixed_precision/`: of its kernels, only Humming's have
# other widths than 4 and 8.
_HUMMING = "transformers with compressed-tensors; vLLM 0.32 with Humming on CUDA (not tested)"
LAYOUT = Layout(
    name=COMPRESSED_TENSORS,
    methods=(COMPRESSED_TENSORS,),
    read=_read,
    inputs=input_settings,
    numbers_of=NUMBERS_OF,
    excludes_by_name=True,
    has_cache_scales=True,
    fused_by="vLLM and SGLang",
    form=CompressedTiles,
    schemes=(
        Scheme("FP8_DYNAMIC", "e4m3fn", "row", 8.01, _TRIED, "serving on unknown hardware; inputs in fp8"),
        Scheme("FP8", "e4m3fn", "tensor", 8, _VLLM, "serving with static input scales; inputs in fp8", calibrated=True),
        Scheme("FP8_BLOCK", "e4m3fn", "128x128", 8, _VLLM, "scales per block, as in DeepSeek-V3; inputs in fp8"),
        *(
            Scheme(f"W{n}A16", f"int{n}", "group:128", n + 0.125, opens, f"{n}-bit integers; inputs in 16 bits")
            for n, opens in ((n, {8: _VLLM, 4: _TRIED}.get(n, _HUMMING)) for n in range(8, 1, -1))
        ),
        Scheme("W8A8", "int8", "row", 8.004, _TRIED, "8-bit integers; inputs in int8", inputs="dynamic"),
        Scheme("MXFP8", "e4m3fn", "mx", 8.25, _VLLM, "GPUs that multiply MXFP8; inputs in MXFP8"),
        Scheme("MXFP4", "e2m1", "mx", 4.25, _VLLM, "GPUs that multiply MXFP4; inputs in MXFP4", inputs="dynamic"),
        Scheme("MXFP4A16", "e2m1", "mx", 4.25, _VLLM, "4-bit floats; inputs in 16 bits"),
        Scheme("NVFP4A16", "e2m1", "nvfp4", 4.5, _VLLM, "4-bit floats with finer scales; inputs in 16 bits"),
        Scheme("NVFP4", "e2m1", "nvfp4", 4.5, _VLLM, "GPUs that multiply NVFP4; inputs in NVFP4", calibrated=True),
    ),
    opening="This directory has the layout of the package compressed-tensors: {codes}. vLLM reads it. "
    "On a CPU, it serves FP8 and int8 with a scale per row (FP8_DYNAMIC, W8A8) and int4 in groups (W4A16), but has no "
    "kernel for weight-only FP8 with one scale per tensor, other integers in groups, MXFP8, MXFP4 or NVFP4. "
    "transformers opens it with `pip install compressed-tensors`; lpconv is not needed:",
    tag="compressed-tensors",
    served=(("e4m3fn", "row"), ("int8", "row"), ("int4", "group:")),
)
