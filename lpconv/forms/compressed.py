"""The layouts of the compressed-tensors package: codes in the weight's own shape, with one scale or a scale per tile.

Plain transformers with that package, and vLLM, open them. Only weights of `Linear` modules can be codes; the config
names the modules that are not quantised, and those with another format. See `lpconv.storage.compressed`. Such weights
from other tools, with other settings, are read as a third-party layout.

A weight may have an input scale next to it: `MODULE.input_scale`, or `MODULE.input_global_scale`, by which the input
scales of groups are divided. It comes from the largest input during calibration. The projections of keys and values may
have a scale for the cache, `ATTENTION.k_scale` and `ATTENTION.v_scale`: from calibration, or 1.
"""

from __future__ import annotations  # tensors are named below and not imported

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from lpconv.errors import UnsupportedError
from lpconv.formats.grains import Grain, get_grain
from lpconv.formats.spec import FORMATS, Format
from lpconv.forms.facts import BlockFacts, BlockStats, Component, ConvertedFacts, FormSettings, Headers, Measurement
from lpconv.forms.foreign.grid import Grid
from lpconv.forms.foreign.plane import one_by_one
from lpconv.forms.form import Form, Over
from lpconv.forms.scaled import SCALE_SUFFIX, ScaledCodes, scale_for
from lpconv.forms.tiles import FACTOR_SUFFIX, Tiles
from lpconv.storage.compressed import (
    COMPRESSED_TENSORS,
    INPUT_GLOBAL_SCALE,
    INPUT_SCALE,
    cache_scale_name,
    codes_of,
    groups_for,
    input_scale_name,
    preset_of,
    quantization_config,
)

if TYPE_CHECKING:
    from torch import Tensor

    from lpconv.forms.tile_scales import TileScales


_E4M3FN = FORMATS["e4m3fn"]
_SCALE_DTYPES = ("F32", "F16", "BF16")
# Scales of groups of 16 normal numbers are a third of the RMS, and the smallest is 2^-9: NVFP4 keeps 17 of 20 dB.
_LEAST_RMS = 0.005
_WEIGHT, _PACKED_SUFFIX, _SIZE_SUFFIX = ".weight", "_packed", "_shape"
_ONLY_READ = ("_zero_point", "_g_idx")  # parts of weights that lpconv reads as a `Grid`


@dataclass(frozen=True, kw_only=True)
class _Layout(ScaledCodes):
    """Common parts of both layouts.

    `input_absmax` is the largest calibrated input, or None without calibration; then `input_scale`, if there is one,
    can be read but not written. `cache_absmax` is the same for the keys or values in the cache, whose scale is then 1.
    """

    quantised_by: ClassVar[str | None] = COMPRESSED_TENSORS
    of_linears: ClassVar[bool] = True
    axis: ClassVar[tuple[int, ...]] = ()

    has_input_scale: bool = False
    input_absmax: float | None = None
    has_cache_scale: bool = False
    cache_absmax: float | None = None

    input_name: ClassVar[str]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Form:
        form = super().of(name, shape, format, settings)
        assert isinstance(form, _Layout)
        caches = settings.kv_cache and cache_scale_name(name) is not None
        return replace(form, has_input_scale=settings.calibrated, has_cache_scale=caches)

    @classmethod
    def holds(cls, format: Format, grain: Grain | None) -> bool:
        return preset_of(format.name, grain) is not None

    @classmethod
    def refusal(cls, shape: tuple[int, ...], format: Format, settings: FormSettings) -> str | None:
        preset = preset_of(format.name, settings.grain, calibrated=settings.calibrated)
        if preset is None:
            words = settings.grain.words if settings.grain else "one scale"
            return f"the layout cannot store {format.name} codes with {words}"
        group = (preset.inputs or {}).get("group_size", 1)
        if shape[-1] % group:
            return f"rows of {shape[-1]} elements are not a multiple of {group}, the group size of input scales"
        return super().refusal(shape, format, settings)

    @classmethod
    def config_entries(cls, converted: ConvertedFacts) -> dict[str, Any]:
        """The `quantization_config`. Raises UnsupportedError for experts in several formats.

        transformers reads all experts in the usual format.
        """
        grain = get_grain(converted.settings["granularity"])
        of_experts = {converted.formats[n] for n in converted.experts if n in converted.formats} or {
            converted.settings["format"]
        }
        if len(of_experts) > 1:
            raise UnsupportedError(
                f"transformers reads all experts in one format, but these have {', '.join(sorted(of_experts))}",
                hint="give all of them the same format with --rule",
            )
        usual = preset_of(of_experts.pop(), grain, calibrated=converted.calibrated)
        presets = {n: preset_of(f, grain, calibrated=converted.calibrated) for n, f in converted.formats.items()}
        assert usual is not None, "refused"
        others = {n.removesuffix(_WEIGHT): p for n, p in presets.items() if p is not None and p != usual}
        config = quantization_config(converted.ignored, usual, others, kv_cache=converted.kv_cache)
        return {"quantization_config": config}

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
        groups = groups_for(headers.quantization, self.name.removesuffix(_WEIGHT))
        inputs = [input_scale_name(g.get("input_activations")) for g in groups[:1]]
        has_input_scale = inputs == [self.input_name] and headers.holds(self.input_scale)
        cached = Component(name=cache_scale_name(self.name) or "", dtype="F32", shape=(1,))
        return replace(self, has_input_scale=has_input_scale, has_cache_scale=headers.holds(cached))

    def with_inputs(self, absmax: float) -> Self:
        return replace(self, input_absmax=absmax)

    def with_cache(self, absmax: float) -> Self:
        return replace(self, cache_absmax=absmax)

    @abstractmethod
    def scale_of_inputs(self, absmax: float) -> Tensor:
        """The scale of inputs of up to `absmax`, fp32 [1]; 1 if all are zero."""

    def begin(self, largest: float) -> Measurement:
        return self._with_activations(super().begin(largest))

    def combine(self, looked: Sequence[BlockFacts], over: Over, fused: Sequence[Over] = ()) -> Measurement:
        return self._with_activations(super().combine(looked, over, fused))

    def _with_activations(self, measured: Measurement) -> Measurement:
        import torch

        side = dict(measured.side)
        if self.has_input_scale:
            assert self.input_absmax is not None, "not calibrated"
            side[self.input_scale.name] = self.scale_of_inputs(self.input_absmax)
        if self.cache_scale is not None:
            scale = max(self.cache_absmax / _E4M3FN.max, 2.0**-126) if self.cache_absmax else 1.0
            side[self.cache_scale] = torch.tensor([scale], dtype=torch.float32)
        return replace(measured, side=side)


@dataclass(frozen=True, kw_only=True)
class Compressed(_Layout):
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
        if headers.quantised_by != cls.quantised_by or codes.dtype != _E4M3FN.safetensors or scale is None:
            return None
        form = cls(name=name, shape=codes.shape, format=_E4M3FN, scale_dtype=scale.dtype)._as_stored(headers)
        return form if scale.dtype in _SCALE_DTYPES and all(map(headers.holds, form.components)) else None

    @property
    def components(self) -> tuple[Component, ...]:
        scale, codes = super().components
        return replace(scale, dtype=self.scale_dtype), *self._of_activations, codes

    @property
    def shares_scale(self) -> bool:
        """Whether fused weights must share a scale, as with an input scale.

        Readers that multiply in fp8 use one scale for fused weights, and would round those with another scale again.
        """
        return self.has_input_scale

    def combine(self, looked: Sequence[BlockFacts], over: Over, fused: Sequence[Over] = ()) -> Measurement:
        import torch

        from lpconv.forms.blocks import block_stats

        measured = super().combine(looked, over, fused)
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

    def scale_of_inputs(self, absmax: float) -> Tensor:
        import torch

        from lpconv.formats.scale import pow2_ceil

        scale = max(absmax / self.format.max, 2.0**-126) if absmax else 1.0
        return torch.tensor([pow2_ceil(scale) if self.has_pow2_scale else scale], dtype=torch.float32)

    @property
    def grid(self) -> Grid | None:
        """The weight as a third-party `Grid`; None if it is not a matrix."""
        if len(self.shape) != 2 or 0 in self.shape:
            return None
        scale, codes = self.components[0], self.components[-1]
        return Grid(
            name=self.name,
            shape=self.shape,
            format=self.format,
            codes=one_by_one(codes),
            scales=one_by_one(scale, (self.shape[0], self.shape[1])),
        )


@dataclass(frozen=True, kw_only=True)
class CompressedTiles(_Layout, Tiles):
    """Codes with a scale per tile, in the layout of a `Preset`. The scales of integers are bf16.

    compressed-tensors itself saves scales in the dtype of the model, and earlier versions of lpconv wrote fp32.

    Plain transformers stacks experts, and ignores NVFP4's tensor scale for all of them
    (huggingface/transformers#48371). So with power-of-two scales, which every reader uses unchanged, the tensor scale
    of an expert (`is_expert`) is 1.
    """

    kind: ClassVar[str] = "compressed tiles"
    suffixes: ClassVar[tuple[str, ...]] = (SCALE_SUFFIX, FACTOR_SUFFIX, _PACKED_SUFFIX, _SIZE_SUFFIX)
    whole: ClassVar[type[ScaledCodes]] = Compressed
    has_short_scales: ClassVar[bool] = True
    input_name: ClassVar[str] = INPUT_GLOBAL_SCALE
    scale_dtypes: ClassVar[tuple[str, ...]] = _SCALE_DTYPES

    is_expert: bool = False

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], format: Format, settings: FormSettings) -> Form:
        form = super().of(name, shape, format, settings)
        if not isinstance(form, CompressedTiles):
            return form
        return replace(form, is_expert=settings.is_expert, scale_dtype="BF16" if format.twos_complement else "")

    def _rule(self, num_rows: int | None = None) -> TileScales:
        return replace(super()._rule(num_rows), has_factor=not (self.is_expert and self.has_pow2_scale))

    def combine(self, looked: Sequence[BlockFacts], over: Over, fused: Sequence[Over] = ()) -> Measurement:
        """Combine all blocks. Raises UnsupportedError for experts that need a tensor scale.

        Plain transformers ignores the tensor scale of experts.
        """
        measured = super().combine(looked, over, fused)
        if self.grain.has_factor and not self._rule().has_factor and 0 < measured.stats.rms < _LEAST_RMS:
            raise UnsupportedError(
                f"`{self.name}`: numbers of {measured.stats.rms:.1g} are too small for e4m3fn scales alone, and plain "
                "transformers leaves the second scale of experts out",
                hint="--scale exact keeps it, for vLLM and lpconv; or use --granularity mx",
            )
        return measured

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        weight = name.removesuffix(_PACKED_SUFFIX)
        has_more = any(weight + part in headers.root for part in _ONLY_READ)
        if headers.quantised_by != cls.quantised_by or has_more:
            return None
        for meant in map(codes_of, groups_for(headers.quantization, weight.removesuffix(_WEIGHT))):
            form = cls._of_codes(weight, name, meant[1], meant[0], headers) if meant else None
            if form is not None and meant is not None and form.format.name == meant[0] and form.codes.name == name:
                return form._as_stored(headers)
        return None

    @property
    def codes(self) -> Component:
        return replace(super().codes, name=self.name + _suffix(self.format))

    @property
    def size(self) -> Component | None:
        is_integer = self.format.twos_complement
        return Component(name=self.name + _SIZE_SUFFIX, dtype="I64", shape=(2,)) if is_integer else None

    @property
    def side(self) -> tuple[Component, ...]:
        return (*super().side, *self._of_activations)

    def scale_of_inputs(self, absmax: float) -> Tensor:
        from lpconv.forms.tile_scales import dividing_factor

        return dividing_factor(self.format, absmax, pow2=self.has_pow2_scale)


def _suffix(format: Format) -> str:
    return "" if format.safetensors else _PACKED_SUFFIX
