"""The `quantization_config` of compressed-tensors, in both directions: presets, groups of modules, scales of inputs.

Sources: vllm-project/compressed-tensors 0.20, `quantization/quant_config.py`, `quant_scheme.py`, `utils/match.py`.
"""

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lpconv.errors import InputError, UnsupportedError
from lpconv.formats.grains import GRAINS, Grain, find_grain, get_grain
from lpconv.formats.spec import FORMATS, INTEGERS
from lpconv.forms.facts import ConvertedFacts
from lpconv.layouts.linears import MATCHING_S, expression

COMPRESSED_TENSORS = "compressed-tensors"
# Names of a module's input scale: the only one, or the global scale of dynamic group scales.
INPUT_SCALE, INPUT_GLOBAL_SCALE = INPUT_SCALES = ("input_scale", "input_global_scale")
# How readers round inputs: not at all, with scales of their own, or with scales in the file, which need calibration,
# either as the only scale or as the global scale of group scales.
INPUTS = NOT_ROUNDED, DYNAMIC, STATIC = ("none", "dynamic", "static")
INT_QUANTIZED = "int-quantized"  # codes of two's complement, one by one
_PACKED = "pack-quantized"  # codes of two's complement, packed
# The `kv_cache_scheme` of a config: keys and values of each layer in e4m3fn, with one scale each.
_KV_CACHE_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
_CACHED = re.compile(r"(?!(?:.+\.)?vis(?:ion|ual))(.+\.)([kv])_proj\.weight")  # a vision tower has no cache
# Settings of weights, besides the type, that decide what codes mean.
_MEANING = ("num_bits", "strategy", "group_size", "block_structure")
_MIXED = "mixed-precision"  # the `format` of a config whose groups have different ones


@dataclass(frozen=True, kw_only=True)
class CompressedPreset:
    """A layout by its name in the package: codes of format `number`, a scale per tile of `grain` (None: one scale).

    `format` is the package's name for the layout of the files. `weights` are the settings of weights in the config;
    `inputs` are the settings of inputs, None if inputs are not quantised.
    """

    name: str
    format: str
    number: str
    grain: Grain | None
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None

    @property
    def rounds_inputs(self) -> str:
        """How readers round inputs, one of `INPUTS`."""
        if self.inputs is None:
            return NOT_ROUNDED
        return DYNAMIC if input_scale_name(self.inputs) is None else STATIC


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
         _args(*_FP8, "token", dynamic=True)),
        ("FP8_BLOCK", "float-quantized", "e4m3fn", "128x128", _args(*_FP8, "block", block_structure=[128, 128]),
         _args(*_FP8, "group", group_size=128, dynamic=True)),
        ("W8A8", INT_QUANTIZED, "int8", "row", _args(8, "int", "channel"), _args(8, "int", "token", dynamic=True)),
        ("MXFP8", "mxfp8-quantized", "e4m3fn", "mx", _args(*_FP8, "group", **_MX),
         _args(*_FP8, "group", **_MX, dynamic=True)),
        ("MXFP4A16", "mxfp4-pack-quantized", "e2m1", "mx", _args(4, "float", "group", **_MX), None),
        ("MXFP4", "mxfp4-pack-quantized", "e2m1", "mx", _args(4, "float", "group", **_MX),
         _args(4, "float", "group", **_MX, dynamic=True)),
        ("NVFP4A16", "nvfp4-pack-quantized", "e2m1", "nvfp4", _NVFP4, None),
        ("NVFP4", "nvfp4-pack-quantized", "e2m1", "nvfp4", _NVFP4,
         {**_NVFP4, "dynamic": "local", "observer": "static_minmax"}),
    )
)  # fmt: skip
# Number formats that each `format` of a config allows for the codes.
NUMBERS_OF = {_PACKED: {*INTEGERS}, **{preset.format: {preset.number} for preset in _PRESETS}}


def input_scale_name(inputs: object) -> str | None:
    """Name of the input-scale tensor that this activation config requires, or None."""
    if not isinstance(inputs, Mapping) or inputs.get("dynamic") is True:
        return None
    return INPUT_GLOBAL_SCALE if inputs.get("dynamic") == "local" else INPUT_SCALE


def input_settings(config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
    """The settings by which readers round the inputs of a quantised module; None if they do not."""
    groups = groups_for(config, module)
    inputs = groups[0].get("input_activations") if groups else None
    return inputs if isinstance(inputs, Mapping) else None


def cache_scale_name(weight: str) -> str | None:
    """Name of the scale of the keys or values that a projection writes into the cache; None for other weights."""
    match = _CACHED.fullmatch(weight)
    return None if match is None else f"{match[1]}{match[2]}_scale"


def preset_of(number: str, grain: Grain | None, inputs: str | None = None) -> CompressedPreset | None:
    """The preset for a format, a granularity and one of `INPUTS`, or None.

    If `inputs` is None, it is the usual preset, the first one that needs no calibration. A granularity that does not
    support the format counts as one scale per tensor.
    """
    grain = grain if grain is None or not grain.formats or number in grain.formats else None
    if grain is not None and number in INTEGERS and grain.tile[0] == 1 and inputs in (None, NOT_ROUNDED):
        return _integers(number, grain)
    asked = (NOT_ROUNDED, DYNAMIC) if inputs is None else (inputs,)
    presets = (p for p in _PRESETS if (p.number, p.grain) == (number, grain))
    return next((p for p in presets if p.rounds_inputs in asked), None)


def _integers(number: str, grain: Grain) -> CompressedPreset:
    """The preset of packed integers with a scale per group or row."""
    bits, size = FORMATS[number].bits, grain.tile[1]
    return CompressedPreset(
        name=f"W{bits}A16",
        format=_PACKED,
        number=number,
        grain=grain,
        weights=_args(bits, "int", "group", group_size=size) if size else _args(bits, "int", "channel"),
    )


def quantization_config(converted: ConvertedFacts) -> dict[str, Any]:
    """The `quantization_config` of config.json. Raises UnsupportedError for experts in several formats.

    transformers reads all experts in the usual format.
    """
    grain, usual = get_grain(converted.settings["granularity"]), converted.settings["format"]
    of_experts = {converted.formats.get(n, "keep") for n in converted.experts}
    if of_experts <= {"keep"}:
        of_experts = {usual}
    if len(of_experts) > 1:
        raise UnsupportedError(
            f"transformers reads all experts in one format, but these have {', '.join(sorted(of_experts))}",
            hint="give all of them the same format with --rule",
        )
    preset = preset_of(of_experts.pop(), grain, converted.inputs)
    assert preset is not None, "refused"
    targets = ["Linear"]  # readers match names before classes
    others: dict[str, tuple[CompressedPreset, list[str]]] = {}
    for name, number in converted.formats.items():
        other, module = preset_of(number, grain, converted.inputs), name.removesuffix(".weight")
        if other is not None and other != preset:
            others.setdefault(other.name, (other, []))[1].append(module)
        elif module in converted.named:
            targets.append(module)
    parts = ((preset, targets), *others.values())
    groups = (_group(other, targets, is_mixed=bool(others)) for other, targets in parts)
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": _MIXED if others else preset.format,
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": list(converted.ignored),
        **({"kv_cache_scheme": _KV_CACHE_SCHEME} if converted.kv_cache else {}),
    }


def _group(preset: CompressedPreset, targets: list[str], *, is_mixed: bool) -> dict[str, Any]:
    inputs = None if preset.inputs is None else dict(preset.inputs)
    group = {"targets": targets, "weights": dict(preset.weights), "input_activations": inputs}
    return {**group, "output_activations": None, **({"format": preset.format} if is_mixed else {})}


def _groups(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The config's groups with settings of weights."""
    groups = config.get("config_groups")
    values = groups.values() if isinstance(groups, dict) else ()
    return [g for g in values if isinstance(g, dict) and isinstance(g.get("weights"), dict)]


def _targets(group: Mapping[str, Any]) -> list[str]:
    targets = group.get("targets")
    return [t for t in targets if isinstance(t, str)] if isinstance(targets, list) else []


def weight_settings(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The settings of weights in the groups of a config, also of ModelOpt; without groups, the config itself."""
    is_grouped = isinstance(config.get("config_groups"), dict)
    return [group["weights"] for group in _groups(config)] if is_grouped else [config]


def settings_for(config: Mapping[str, Any], module: str) -> list[Mapping[str, Any]]:
    """The settings that the weight of a module may have: of its groups, or of all if none of them is for it."""
    return [group["weights"] for group in groups_for(config, module) or _groups(config)]


def groups_for(config: Mapping[str, Any], module: str) -> tuple[Mapping[str, Any], ...]:
    """The config's groups that a module may belong to: the one that names it, or all that name a class.

    As in compressed-tensors, names come before expressions, these in alphabetical order, and of groups with the same
    target the last counts. Raises InputError for an expression that takes too long.
    """
    groups = _groups(config)[::-1]
    named = next((g for g in groups if module in _targets(g)), None)
    if named is None:
        expressions = sorted({t for g in groups for t in _targets(g) if t.startswith("re:")})
        target = next((e for e in expressions if _matches(e, module)), None)
        named = next((g for g in groups if target in _targets(g)), None)
    if named is not None:
        return (named,)
    return tuple(g for g in groups[::-1] if any(t[:1].isupper() for t in _targets(g)))


def _matches(target: str, module: str) -> bool:
    try:
        pattern = expression(target)
        return pattern is not None and pattern.match(module, timeout=MATCHING_S) is not None
    except TimeoutError as e:
        what = f"config.json: the target `{target:.60}` is too long, or takes over {MATCHING_S:g} s to match a name"
        raise InputError(what, hint="correct config_groups, or download config.json again") from e


def missing_input_scales(config: Mapping[str, Any], modules: Iterable[str], names: Container[str]) -> Iterator[str]:
    """Input scales that the schemes of modules require, but which are not among the `names` of tensors."""
    for module in modules:
        groups = groups_for(config, module)
        leaf = input_scale_name(groups[0].get("input_activations")) if len(groups) == 1 else None
        if leaf is not None and f"{module}.{leaf}" not in names:
            yield f"{module}.{leaf}"


def preset_in(group: Mapping[str, Any]) -> CompressedPreset | None:
    """The preset whose codes a group of a config means, whatever its inputs; None if lpconv writes no such codes."""
    weights = group["weights"]
    grain = find_grain(f"group:{weights.get('group_size')}") or GRAINS["row"]
    known = (*_PRESETS, *(_integers(n, grain) for n in INTEGERS))
    meant = [weights.get("type", "int"), *map(weights.get, _MEANING)]
    return next((p for p in known if meant == [p.weights["type"], *map(p.weights.get, _MEANING)]), None)
