"""The on-disk layouts of the compressed-tensors package that lpconv writes, each with the config that names it.

Codes of 8-bit floats lie under the weight's own name and shape, packed ones under `NAME_packed`, with scales under
`NAME_scale`, and only in `Linear` modules. Plain transformers with that package, and vLLM, open them without lpconv.
The config names what is not quantised, because a reader takes every other `Linear` for codes.
(vllm-project/compressed-tensors 0.20, `quantization/quant_config.py` and `quant_scheme.py`.)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lpconv.formats.grains import GRAINS, Grain, known_grain

COMPRESSED_TENSORS = "compressed-tensors"
# The scale of a module's inputs, by its name there: alone, or of the scales that groups get as inputs come.
INPUT_SCALE, INPUT_GLOBAL_SCALE = INPUT_SCALES = ("input_scale", "input_global_scale")
MIXED = "mixed-precision"  # the `format` of what has several, each in its group


@dataclass(frozen=True, kw_only=True)
class LinearModules:
    """The modules of a model that readers may take for quantised, by name.

    Only the weights of `plain` ones can be codes: by the names that files have, with `in_model` where the model has
    another. `others` are of a subclass of `Linear`, which may use its weight without calling it, are kept in fp32, or
    hold experts. `tables` are the modules that look ids up. `experts` are weights of one expert each, with the module
    that has all of them in memory, `joined` these and others that readers do not take as they are; `fused` are stored
    tensors that hold several experts.
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
        """The names of the weights that can be codes."""
        return frozenset(f"{name}.weight" for name in self.plain)

    def without(self, quantised: Iterable[str]) -> tuple[str, ...]:
        """The modules whose weight is not among `quantised`: what `ignore` must name, as files and the model do."""
        weights = set(quantised)
        kept = [name for name in self.plain if f"{name}.weight" not in weights]
        return tuple(dict.fromkeys(n for name in (*kept, *self.others) for n in (name, self.in_model.get(name, name))))


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A layout by the package's own name for it: codes of `number`, a scale for each tile of `grain` (None: one).

    `format` is what the package calls the way they lie in files. `weights` says of them what all presets say and what
    this one adds; `inputs` is what it asks readers to do with inputs, None where these stay as they are. Where it
    `is_calibrated`, each module has a scale of its inputs in the file, which calibration on a text finds.
    """

    name: str
    format: str
    number: str
    grain: Grain | None
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None

    @property
    def is_calibrated(self) -> bool:
        """Whether inputs have a scale that is known before they are: alone, or beside those of their groups."""
        return input_scale_of(self.inputs) is not None

    @property
    def title(self) -> str:
        """Both names, and what has a scale."""
        return f"{self.name} ({self.format}, {self.grain.words if self.grain else 'one scale per tensor'})"


def _args(bits: int, kind: str, strategy: str, **more: object) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


_FP8 = (8, "float")
_MX: dict[str, Any] = {"group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
_E4M3 = "torch.float8_e4m3fn"
_NVFP4 = _args(4, "float", "tensor_group", group_size=16, scale_dtype=_E4M3, zp_dtype=_E4M3)
# Who is not asked to quantise inputs takes weights as they are: vLLM multiplies in low precision only where it is.
# Mostly readers scale inputs on the way, so that a file holds nothing of them; else it `is_calibrated`.
_PRESETS = tuple(
    Preset(name=name, format=layout, number=number, grain=GRAINS.get(grain), weights=weights, inputs=inputs)
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


def input_scale_of(inputs: Mapping[str, Any] | None) -> str | None:
    """The name, in its module, of the scale that what a config asks of inputs needs; None where it needs none."""
    if inputs is None or inputs.get("dynamic") is True:
        return None
    return INPUT_GLOBAL_SCALE if inputs.get("dynamic") == "local" else INPUT_SCALE


_INTEGERS = {"int4": 4, "int8": 8}


def preset_of(number: str, grain: Grain | None, *, calibrated: bool = False) -> Preset | None:
    """The layout of codes of a format with scales of a granularity, None where there is none; with `calibrated` the one
    that has scales of inputs, too.

    A format that the granularity is not for has one scale for the tensor.
    """
    grain = grain if grain is None or not grain.formats or number in grain.formats else None
    if grain is not None and number in _INTEGERS and number in grain.formats:
        return None if calibrated else _integers(number, grain)
    asked = (number, grain, calibrated)
    return next((p for p in _PRESETS if (p.number, p.grain, p.is_calibrated) == asked), None)


def _integers(number: str, grain: Grain) -> Preset:
    """Integers in words, a scale for each group."""
    bits = _INTEGERS[number]
    return Preset(
        name=f"W{bits}A16",
        format="pack-quantized",
        number=number,
        grain=grain,
        weights=_args(bits, "int", "group", group_size=grain.tile[1]),
    )


def quantization_config(
    ignored: Iterable[str], preset: Preset, others: Mapping[str, Preset] | None = None
) -> dict[str, Any]:
    """The `quantization_config` of config.json; `ignored` are the names of `Linear` modules that are not quantised, and
    `others` the presets of those that have not the usual one."""
    members: dict[str, list[str]] = {}
    for module, other in (others or {}).items():
        members.setdefault(other.title, []).append(module)
    known = {other.title: other for other in (others or {}).values()}
    groups = [_group(preset, ["Linear"]), *(_group(known[title], names) for title, names in members.items())]
    if others:  # a reader asks for a name before it asks for a class
        groups = [{**g, "format": p.format} for g, p in zip(groups, (preset, *known.values()), strict=True)]
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": MIXED if others else preset.format,
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": list(ignored),
    }


def _group(preset: Preset, targets: list[str]) -> dict[str, Any]:
    inputs = None if preset.inputs is None else dict(preset.inputs)
    return {"targets": targets, "weights": dict(preset.weights), "input_activations": inputs,
            "output_activations": None}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Presets:
    """The layouts of a checkpoint: `usual`, and `others` by the names of modules."""

    usual: Preset
    others: Mapping[str, Preset]

    def of(self, module: str) -> Preset:
        """That of a module that is quantised."""
        return self.others.get(module, self.usual)


def presets_in(config: Mapping[str, Any]) -> Presets | None:
    """The layouts whose config this is to the letter, as lpconv writes it; None for the settings of other writers."""
    ignored, groups = config.get("ignore"), config.get("config_groups")
    if not isinstance(ignored, list) or not isinstance(groups, dict) or not groups:
        return None
    found = [_preset_in(group) for group in groups.values()]
    usual = found[0]
    if usual is None or None in found:
        return None
    others = {
        name: preset
        for preset, group in zip(found[1:], list(groups.values())[1:], strict=True)
        for name in group["targets"]
        if preset is not None
    }
    return Presets(usual=usual, others=others) if config == quantization_config(ignored, usual, others) else None


def _preset_in(group: Any) -> Preset | None:
    """The preset that a group of the config is of."""
    names = ("weights", "input_activations", "targets")
    weights, inputs, targets = map(group.get, names) if isinstance(group, dict) else (None, None, None)
    if not isinstance(weights, dict) or not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        return None
    grain = known_grain(f"group:{weights.get('group_size')}")
    known = [*_PRESETS, *(_integers(n, grain) for n in _INTEGERS if grain is not None)]
    return next((p for p in known if (p.weights, p.inputs) == (weights, inputs)), None)


def quantized_by(config: Mapping[str, Any]) -> str | None:
    """The `quant_method` that config.json names, None for an unquantised checkpoint."""
    found = config.get("quantization_config")
    return str(found.get("quant_method", "another method")) if isinstance(found, dict) else None
