"""mlx-lm's layout: codes in 32-bit words under the weight's own name, and a scale per group under `MODULE.scales`.

MXFP4 and MXFP8 have the bytes of `Tiles`. Integers have mlx's affine form, q · scale + bias, where q is unsigned and
the bias is minus half their range, such as -8 scales of 4 bits. Both numbers are fp32, since mlx computes in the dtype
of the scales: bf16 would round q · scale to 8 bits, an error of up to 0.8 steps of int8 (measured with mlx 0.32). In
fp32, values are exact for scales of up to 16 bits, such as all that lpconv chooses. Only a scale that restores a weight
that is already on a grid may have 24 bits; mlx then rounds q · scale too, and its values may differ from lpconv's in
the last bits of fp32.
Sources: ml-explore, mlx 0.32, `mx.dequantize`; mlx-lm 0.32, `utils.load_model`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lpconv.formats.grains import GRAINS, Grain, find_grain, get_grain
from lpconv.formats.spec import FORMATS, Format
from lpconv.forms.facts import ConvertedFacts, FormSettings, Headers
from lpconv.forms.form import Stored
from lpconv.forms.planes import PlaneNames
from lpconv.forms.tiles import Tiles
from lpconv.layouts.layout import Layout, Scheme
from lpconv.storage.header import DTYPE_BITS

_AFFINE = (2, 3, 4, 5, 6, 8)  # bits of the affine mode of `mx.quantize`
_MODES = {"e2m1": "mxfp4", "e4m3fn": "mxfp8", **{f"int{bits}": "affine" for bits in _AFFINE}}
# Families of which mlx-lm's `sanitize` joins scales and biases of experts like their weights, and which were compared.
_JOINED = ("mixtral", "olmoe", "phimoe", "qwen2_moe")
_GROUPS = (32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Mlx(Tiles):
    """Tiles in mlx-lm's layout, for weights of `Linear` modules."""

    kind: ClassVar[str] = "mlx"
    names: ClassVar[PlaneNames] = PlaneNames(word="U32", scale=".scales", bias=".biases", of_module=True)
    suffixes: ClassVar[tuple[str, ...]] = names.suffixes
    quantised_by: ClassVar[str | None] = "mlx"
    of_linears: ClassVar[bool] = True

    @classmethod
    def holds(cls, format: Format, grain: Grain | None) -> bool:
        if grain is None or format.name not in _MODES or format.name not in grain.formats:
            return False
        return grain.name == "mx" or (format.twos_complement and grain.tile[1] in _GROUPS)

    @classmethod
    def refusal(cls, shape: tuple[int, ...], format: Format, settings: FormSettings) -> str | None:
        if settings.is_expert and settings.family not in _JOINED:
            return f"mlx-lm cannot join codes of the experts of {settings.family}"
        return super().refusal(shape, format, settings)

    @classmethod
    def config_entries(cls, converted: ConvertedFacts) -> dict[str, Any]:
        """The `quantization` that mlx-lm reads, and a `quantization_config` by which lpconv knows its own files."""
        grain = get_grain(converted.settings["granularity"])
        assert grain is not None, "refused"
        usual = _quantization(converted.settings["format"], grain)
        modes = {n.removesuffix(".weight"): _quantization(f, grain) for n, f in converted.formats.items()}
        others = {module: mode for module, mode in modes.items() if mode != usual}
        own = {"quantization": {**usual, **others}, "quantization_config": {"quant_method": cls.quantised_by, **usual}}
        return own | older_settings(converted.config)


def _quantization(number: str, grain: Grain) -> dict[str, Any]:
    """mlx's settings of codes in the format `number`."""
    return {"group_size": grain.tile[1], "bits": FORMATS[number].storage_bits, "mode": _MODES[number]}


def older_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a config of transformers 5 under their older names, as most families of mlx-lm 0.32 need."""
    experts = {"num_experts": config["num_local_experts"]} if "num_local_experts" in config else {}
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return experts
    is_scaled = rope.get("rope_type", "default") != "default"
    return {"rope_theta": rope["rope_theta"], **({"rope_scaling": rope} if is_scaled else {}), **experts}


def _read(name: str, headers: Headers) -> Stored | None:
    """The weight whose words are `name`; their group size is that of the config, or of MXFP4 and MXFP8."""
    words, scales = headers.root[name], headers.root.get(Mlx.names.part(name, Mlx.names.scale))
    group = headers.quantization.get("group_size")
    if words.dtype != Mlx.names.word or scales is None or not isinstance(group, int):
        return None
    if not words.shape or not scales.shape:
        return None
    cols = scales.shape[-1] * group
    bits = words.shape[-1] * DTYPE_BITS[words.dtype] // max(cols, 1)
    grain = GRAINS["mx"] if scales.dtype == "U8" else find_grain(f"group:{group}")
    fmt = next((f for n in _MODES if Mlx.holds(f := FORMATS[n], grain) and f.storage_bits == bits), None)
    if fmt is None or grain is None:
        return None
    form = Mlx(name=name, shape=(*words.shape[:-1], cols), format=fmt, grain=grain)
    return form if all(map(headers.holds, form.components)) else None


def _unread_part(headers: Headers) -> str | None:
    """Scales next to codes in 32-bit words under the weight's own name, as only mlx writes them."""
    pairs = ((n, f"{n.removesuffix(Mlx.names.scale)}.weight") for n in headers.root if n.endswith(Mlx.names.scale))
    return next((n for n, weight in pairs if weight in headers.root and headers.root[weight].dtype == "U32"), None)


_OPENS = "mlx-lm"
LAYOUT = Layout(
    name="mlx",
    methods=("mlx",),
    read=_read,
    unread_part=_unread_part,
    is_judged=False,
    form=Mlx,
    schemes=(
        Scheme("MLX_MXFP4", "e2m1", "mx", 4.25, _OPENS, "Apple computers; 4-bit floats"),
        Scheme("MLX_MXFP8", "e4m3fn", "mx", 8.25, _OPENS, "Apple computers; 8-bit floats"),
        *(
            Scheme(f"MLX_INT{b}", f"int{b}", "group:64", b + 1, _OPENS, f"Apple computers; {b}-bit integers")
            for b in _AFFINE
        ),
    ),
    opening="This directory has mlx-lm's layout: {codes}. mlx-lm opens it with `pip install mlx-lm`; lpconv is not "
    "needed:",
    python=("from mlx_lm import load", "model, tokenizer = load({path!r})"),
    tag="mlx",
    library="mlx",
)
