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
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from lpconv.errors import UnsupportedError
from lpconv.formats.grains import GRAINS, Grain, find_grain, get_grain
from lpconv.formats.spec import FORMATS, OF_DTYPE, Format
from lpconv.forms.coded import CodedForm
from lpconv.forms.facts import BlockFacts, BlockStats, Component, ConvertedFacts, FormSettings, Headers, Measurement
from lpconv.forms.form import Form, Over, Stored
from lpconv.forms.grid import FP8_BLOCK, Grid, block_hint, grid_of_blocks
from lpconv.forms.names import PlaneNames
from lpconv.forms.planes import INTEGERS, Plane, one_by_one
from lpconv.forms.scaled import SCALE_SUFFIX, ScaledCodes, scale_for
from lpconv.forms.tiles import FACTOR_SUFFIX, Tiles
from lpconv.layouts.layout import Layout, Scheme, odd_integers

if TYPE_CHECKING:
    from torch import Tensor

    from lpconv.forms.tile_scales import TileScales


COMPRESSED_TENSORS = "compressed-tensors"
# Names of a module's input scale: the only one, or the global scale of dynamic group scales.
INPUT_SCALE, INPUT_GLOBAL_SCALE = INPUT_SCALES = ("input_scale", "input_global_scale")
# The `kv_cache_scheme` of a config: keys and values of each layer in e4m3fn, with one scale each.
KV_CACHE_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
_CACHED = re.compile(r"(.+\.)([kv])_proj\.weight")
_BROAD = re.compile("re:|[A-Z]")  # targets that are patterns or classes, not names of modules
# Settings of weights, besides the type, that decide what codes mean.
_MEANING = ("num_bits", "strategy", "group_size", "block_structure")
MIXED = "mixed-precision"  # the `format` of a config whose groups have different ones
_E4M3FN = FORMATS["e4m3fn"]
# Scales of groups of 16 normal numbers are a third of the RMS, and the smallest is 2^-9: NVFP4 keeps 17 of 20 dB.
_LEAST_RMS = 0.005
_WEIGHT, _PACKED_SUFFIX = ".weight", "_packed"
_ONLY_READ = ("_zero_point", "_g_idx")  # parts of weights that lpconv reads as a `Grid`


@dataclass(frozen=True, kw_only=True)
class CompressedPreset:
    """A layout by its name in the package: codes of format `number`, a scale per tile of `grain` (None: one scale).

    `format` is the package's name for the layout of the files. `weights` are the settings of weights in the config;
    `inputs` are the settings of inputs, None if inputs are not quantised. If it `is_calibrated`, the file has an input
    scale for each module, which calibration on a text determines.
    """

    name: str
    format: str
    number: str
    grain: Grain | None
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None

    @property
    def is_calibrated(self) -> bool:
        """Whether the input scale is known in advance, either alone or as the global scale of group scales."""
        return input_scale_name(self.inputs) is not None

    @property
    def title(self) -> str:
        """The scheme's name, its file format, and its granularity."""
        return f"{self.name} ({self.format}, {self.grain.words if self.grain else 'one scale per tensor'})"


def _args(bits: int, kind: str, strategy: str, **more: object) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


_FP8 = (8, "float")
_MX: dict[str, Any] = {"group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
_E4M3 = "torch.float8_e4m3fn"
_NVFP4 = _args(4, "float", "tensor_group", group_size=16, scale_dtype=_E4M3, zp_dtype=_E4M3)
# vLLM multiplies in low precision only if the config quantises inputs; otherwise it decodes the weights. Most presets
# have dynamic input scales, which are not in the file; the others are calibrated.
_PRESETS = tuple(
    CompressedPreset(name=name, format=layout, number=number, grain=GRAINS.get(grain), weights=weights, inputs=inputs)
    for name, layout, number, grain, weights, inputs in (
        ("FP8", "float-quantized", "e4m3fn", "", _args(*_FP8, "tensor"), None),
        ("FP8", "float-quantized", "e4m3fn", "", _args(*_FP8, "tensor"),
         {**_args(*_FP8, "tensor"), "observer": "static_minmax"}),
        ("FP8_DYNAMIC", "float-quantized", "e4m3fn", "row", _args(*_FP8, "channel"),
         {**_args(*_FP8, "token"), "dynamic": True}),
        ("FP8_BLOCK", "float-quantized", "e4m3fn", "128x128", _args(*_FP8, "block", block_structure=[128, 128]),
         {**_args(*_FP8, "group", group_size=128), "dynamic": True}),
        ("MXFP8", "mxfp8-quantized", "e4m3fn", "mx", _args(*_FP8, "group", **_MX),
         {**_args(*_FP8, "group", **_MX), "dynamic": True}),
        ("MXFP4A16", "mxfp4-pack-quantized", "e2m1", "mx", _args(4, "float", "group", **_MX), None),
        ("NVFP4A16", "nvfp4-pack-quantized", "e2m1", "nvfp4", _NVFP4, None),
        ("NVFP4", "nvfp4-pack-quantized", "e2m1", "nvfp4", _NVFP4,
         {**_NVFP4, "dynamic": "local", "observer": "static_minmax"}),
    )
)  # fmt: skip


def input_scale_name(inputs: object) -> str | None:
    """Name of the input-scale tensor that this activation config requires, or None."""
    if not isinstance(inputs, Mapping) or inputs.get("dynamic") is True:
        return None
    return INPUT_GLOBAL_SCALE if inputs.get("dynamic") == "local" else INPUT_SCALE


def cache_scale_name(weight: str) -> str | None:
    """Name of the scale of the keys or values that a projection writes into the cache; None for other weights."""
    match = _CACHED.fullmatch(weight)
    return None if match is None else f"{match[1]}{match[2]}_scale"


_INTEGERS = {"int4": 4, "int8": 8}


def preset_of(number: str, grain: Grain | None, *, calibrated: bool = False) -> CompressedPreset | None:
    """The preset for a format and granularity, or None; with `calibrated` the one with input scales.

    A granularity that does not support the format counts as one scale per tensor.
    """
    grain = grain if grain is None or not grain.formats or number in grain.formats else None
    if grain is not None and number in _INTEGERS and number in grain.formats:
        return None if calibrated else _integers(number, grain)
    key = (number, grain, calibrated)
    return next((p for p in _PRESETS if (p.number, p.grain, p.is_calibrated) == key), None)


def _integers(number: str, grain: Grain) -> CompressedPreset:
    """The preset of packed integers with a scale per group."""
    bits = _INTEGERS[number]
    return CompressedPreset(
        name=f"W{bits}A16",
        format="pack-quantized",
        number=number,
        grain=grain,
        weights=_args(bits, "int", "group", group_size=grain.tile[1]),
    )


def quantization_config(
    ignored: Iterable[str],
    preset: CompressedPreset,
    others: Mapping[str, CompressedPreset] | None = None,
    *,
    kv_cache: bool = False,
) -> dict[str, Any]:
    """The `quantization_config` of config.json.

    `ignored` are the names of unquantised `Linear` modules, `others` the presets of modules that do not have the usual
    one. With `kv_cache` the file has scales of keys and values.
    """
    members: dict[str, tuple[CompressedPreset, list[str]]] = {}
    for module, other in (others or {}).items():
        members.setdefault(other.title, (other, []))[1].append(module)
    parts = ((preset, ["Linear"]), *members.values())  # readers match names before classes
    groups = (_group(other, targets, is_mixed=bool(members)) for other, targets in parts)
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": MIXED if members else preset.format,
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": list(ignored),
        **({"kv_cache_scheme": KV_CACHE_SCHEME} if kv_cache else {}),
    }


def _group(preset: CompressedPreset, targets: list[str], *, is_mixed: bool) -> dict[str, Any]:
    inputs = None if preset.inputs is None else dict(preset.inputs)
    group = {"targets": targets, "weights": dict(preset.weights), "input_activations": inputs}
    return {**group, "output_activations": None, **({"format": preset.format} if is_mixed else {})}


def _groups(config: object) -> list[dict[str, Any]]:
    """The config's groups with settings of weights."""
    groups = config.get("config_groups") if isinstance(config, Mapping) else None
    values = groups.values() if isinstance(groups, dict) else ()
    return [g for g in values if isinstance(g, dict) and isinstance(g.get("weights"), dict)]


def weight_settings(config: object) -> list[dict[str, Any]]:
    """The settings of weights in the config's groups."""
    return [group["weights"] for group in _groups(config)]


def groups_for(config: Mapping[str, Any], module: str) -> tuple[Mapping[str, Any], ...]:
    """The config's groups that a module may belong to: the one that names it, or all that name classes or patterns."""
    targets = [(g, g["targets"] if isinstance(g.get("targets"), list) else []) for g in _groups(config)]
    named = [g for g, names in targets if module in names]
    return tuple(named[:1] or (g for g, names in targets if any(_BROAD.match(str(n)) for n in names)))


def preset_in(group: Mapping[str, Any]) -> CompressedPreset | None:
    """The preset whose codes a group of a config means, whatever its inputs; None if lpconv writes no such codes."""
    weights = group["weights"]
    grain = find_grain(f"group:{weights.get('group_size')}")
    known = (*_PRESETS, *(_integers(n, grain) for n in _INTEGERS if grain is not None))
    meant = [weights.get("type", "int"), *map(weights.get, _MEANING)]
    return next((p for p in known if meant == [p.weights["type"], *map(p.weights.get, _MEANING)]), None)


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
        return replace(form, has_input_scale=settings.calibrated, has_cache_scale=caches, is_expert=is_expert)

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

    def _begin(self, largest: float) -> Measurement:
        return self._with_activations(super()._begin(largest))

    def _combine(self, looked: Sequence[BlockFacts], over: Over, fused: Sequence[Over]) -> Measurement:
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

    def _combine(self, looked: Sequence[BlockFacts], over: Over, fused: Sequence[Over]) -> Measurement:
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

    @functools.cached_property
    def _rule(self) -> TileScales:
        return replace(super()._rule, has_factor=not (self.is_expert and self.has_pow2_scale))

    def _combine(self, looked: Sequence[BlockFacts], over: Over, fused: Sequence[Over]) -> Measurement:
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


def _scale_for(absmax: float) -> float:
    """The scale that maps `absmax` to the largest e4m3fn number, 1 for zero."""
    return max(absmax / _E4M3FN.max, 2.0**-126) if absmax else 1.0


def _read(name: str, headers: Headers) -> Stored | None:
    """The weight whose codes are `name`: as lpconv writes it, else as a `Grid`."""
    return Compressed.recognise(name, headers) or CompressedTiles.recognise(name, headers) or _as_grid(name, headers)


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
    hints, size = map(_tile_in, _weights_for(codes.name, headers)), one_by_one(scale).size
    fitting = (h for h in hints if h and tuple(-(-n // b) for n, b in zip(codes.shape[-2:], h, strict=True)) == size)
    hint, fmt = next(fitting, FP8_BLOCK), OF_DTYPE.get(codes.dtype, FORMATS["int8"])
    grid = grid_of_blocks(codes.name, codes.shape, fmt, one_by_one(codes), scale, hint)
    zeros = headers.component(codes.name + "_zero_point")
    return grid and replace(grid, zeros=None if zeros is None else one_by_one(zeros, grid.scales.block))


def _weights_for(weight: str, headers: Headers) -> list[Mapping[str, Any]]:
    """The settings that a weight may have: of its module's groups, or of all groups if none of them is for it."""
    groups = groups_for(headers.quantization, weight.removesuffix(_WEIGHT)) or _groups(headers.quantization)
    return [group["weights"] for group in groups]


def _tile_in(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale, or None if the settings do not name them."""
    size = weights.get("group_size")
    return (1, size) if type(size) is int and size > 0 else block_hint(weights.get("block_structure"))


def _packed_integers(name: str, codes: Component, scale: Component, headers: Headers) -> Grid | None:
    """Integers of a width that the config names and the sizes allow; `weight_shape` must agree once it is read.

    Zero points may be packed too, along the rows of the weight, with the same offset as codes.
    """
    rows, words = codes.shape[-2:]
    for weights in _weights_for(name, headers):
        bits, size = weights.get("num_bits"), weights.get("group_size")
        if weights.get("type", "int") != "int" or not isinstance(bits, int) or bits not in INTEGERS:
            continue
        group = size if isinstance(size, int) and size > 0 else 0
        cols = one_by_one(scale).size[1] * group if group else words * 32 // bits
        codes_plane = Plane(component=codes, kind=INTEGERS[bits], plus=-(2 ** (bits - 1)))
        scales = one_by_one(scale, (1, group or cols))
        zeros = headers.component(name + "_zero_point")
        zeros_plane = None if zeros is None else one_by_one(zeros, scales.block)
        if zeros is not None and zeros.dtype == "I32":
            zeros_plane = replace(codes_plane, component=zeros, block=scales.block, axis=0)
        grid = Grid(
            name=name,
            shape=(*codes.shape[:-2], rows, cols),
            format=FORMATS["int4" if bits <= 4 else "int8"],
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
LAYOUT = Layout(
    name=COMPRESSED_TENSORS,
    methods=(COMPRESSED_TENSORS,),
    read=_read,
    why_unreadable=lambda settings: odd_integers(weight_settings(settings), COMPRESSED_TENSORS),
    has_cache_scales=True,
    form=CompressedTiles,
    schemes=(
        Scheme("FP8_DYNAMIC", "e4m3fn", "row", 8.01, _TRIED, "serving on unknown hardware; inputs in fp8"),
        Scheme("FP8", "e4m3fn", "tensor", 8, _VLLM, "serving with static input scales; inputs in fp8", calibrated=True),
        Scheme("FP8_BLOCK", "e4m3fn", "128x128", 8, _VLLM, "scales per block, as in DeepSeek-V3; inputs in fp8"),
        Scheme("W8A16", "int8", "group:128", 8.125, _VLLM, "8-bit integers; inputs in 16 bits"),
        Scheme("W4A16", "int4", "group:128", 4.125, _TRIED, "4-bit integers; inputs in 16 bits"),
        Scheme("MXFP8", "e4m3fn", "mx", 8.25, _VLLM, "GPUs that multiply MXFP8; inputs in MXFP8"),
        Scheme("MXFP4A16", "e2m1", "mx", 4.25, _VLLM, "4-bit floats; inputs in 16 bits"),
        Scheme("NVFP4A16", "e2m1", "nvfp4", 4.5, _VLLM, "4-bit floats with finer scales; inputs in 16 bits"),
        Scheme("NVFP4", "e2m1", "nvfp4", 4.5, _VLLM, "GPUs that multiply NVFP4; inputs in NVFP4", calibrated=True),
    ),
    opening="This directory has the layout of the package compressed-tensors: {codes}. vLLM reads it. "
    "On a CPU, it serves FP8 with a scale per row (FP8_DYNAMIC) and int4 in groups (W4A16), but has no kernel for "
    "weight-only FP8 with one scale per tensor, int8 in groups, MXFP8, MXFP4 or NVFP4. transformers opens it with "
    "`pip install compressed-tensors`; lpconv is not needed:",
    tag="compressed-tensors",
    served=(("e4m3fn", "row"), ("int4", "group:")),
)
