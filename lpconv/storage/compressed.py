"""The on-disk layouts of the compressed-tensors package that lpconv writes, each with its config.

8-bit floats are stored under the weight's own name and shape, packed codes under `NAME_packed`, with scales under
`NAME_scale`, and only for `Linear` modules. Plain transformers with that package, and vLLM, open them without lpconv.
The config names unquantised modules, because a reader treats every other `Linear` as quantised.
(vllm-project/compressed-tensors 0.20, `quantization/quant_config.py` and `quant_scheme.py`.)
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lpconv.formats.grains import GRAINS, Grain, find_grain

COMPRESSED_TENSORS = "compressed-tensors"
# Names of a module's input scale: the only one, or the global scale of dynamic group scales.
INPUT_SCALE, INPUT_GLOBAL_SCALE = INPUT_SCALES = ("input_scale", "input_global_scale")
# The `kv_cache_scheme` of a config: keys and values of each layer in e4m3fn, with one scale each.
KV_CACHE_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
_CACHED = re.compile(r"(.+\.)([kv])_proj\.weight")
_BROAD = re.compile("re:|[A-Z]")  # targets that are patterns or classes, not names of modules
MIXED = "mixed-precision"  # the `format` of a config whose groups have different ones


@dataclass(frozen=True, kw_only=True)
class LinearModules:
    """The modules of a model that readers may treat as quantised, by name.

    Only the weights of `plain` modules can be codes; names are as in the files, and `in_model` maps them to the model's
    names if these differ. `others` are modules of a subclass of `Linear`, which may use its weight without calling it,
    modules kept in fp32, or modules with experts. `tables` are the modules that look ids up. `experts` maps the weight
    of a single expert to the module that holds all of them in memory; `joined` are these and other stored tensors that
    readers combine; `fused` are stored tensors that hold several experts.
    """

    plain: tuple[str, ...]
    others: tuple[str, ...]
    tables: frozenset[str] = frozenset()
    in_model: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)
    joined: frozenset[str] = frozenset()
    fused: frozenset[str] = frozenset()

    @property
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
    members: dict[str, list[str]] = {}
    for module, other in (others or {}).items():
        members.setdefault(other.title, []).append(module)
    known = {other.title: other for other in (others or {}).values()}
    groups = [_group(preset, ["Linear"]), *(_group(known[title], names) for title, names in members.items())]
    if others:  # readers match names before classes
        groups = [{**g, "format": p.format} for g, p in zip(groups, (preset, *known.values()), strict=True)]
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": MIXED if others else preset.format,
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": list(ignored),
        **({"kv_cache_scheme": KV_CACHE_SCHEME} if kv_cache else {}),
    }


def _group(preset: CompressedPreset, targets: list[str]) -> dict[str, Any]:
    inputs = None if preset.inputs is None else dict(preset.inputs)
    return {"targets": targets, "weights": dict(preset.weights), "input_activations": inputs,
            "output_activations": None}  # fmt: skip


_FORMATS = {"float8": "e4m3fn", "float4": "e2m1", "int8": "int8", "int4": "int4"}


def groups_for(config: Mapping[str, Any], module: str) -> tuple[Mapping[str, Any], ...]:
    """The config's groups that a module may belong to: the one that names it, or all that name classes or patterns."""
    groups = config.get("config_groups")
    known = [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    targets = [[str(t) for t in g["targets"]] if isinstance(g.get("targets"), list) else [] for g in known]
    for group, names in zip(known, targets, strict=True):
        if module in names:
            return (group,)
    return tuple(g for g, names in zip(known, targets, strict=True) if any(map(_BROAD.match, names)))


def codes_of(group: Mapping[str, Any]) -> tuple[str, Grain] | None:
    """The format and granularity of the codes that a group asks for; None for one scale, and if lpconv writes none."""
    weights = group.get("weights")
    if not isinstance(weights, dict):
        return None
    kind, size = weights.get("type", "int"), weights.get("group_size")
    number = _FORMATS.get(f"{kind}{weights.get('num_bits')}")
    named = {"channel": "row", "tensor_group": "nvfp4", "group": "mx" if kind == "float" else f"group:{size}"}
    name = "128x128" if weights.get("strategy") == "block" else named.get(str(weights.get("strategy")), "")
    grain = find_grain(name)
    if number is None or grain is None or preset_of(number, grain) is None:
        return None
    is_meant = {"128x128": weights.get("block_structure") == [128, 128], "row": True}
    return (number, grain) if is_meant.get(name, size == grain.tile[1]) else None


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """The `quant_method` in config.json, or None for an unquantised checkpoint."""
    settings = config.get("quantization_config")
    return str(settings.get("quant_method", "another method")) if isinstance(settings, dict) else None
