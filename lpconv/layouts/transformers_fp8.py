"""transformers' own fp8 and mxfp8: e4m3fn codes in the weight's own shape, a scale per block.

Introduced by DeepSeek-V3: e4m3fn blocks, and `NAME_scale_inv`, which multiplies. Scales are fp32 or bf16 numbers, or
powers of two as e8m0 or bytes (``scale_fmt`` ue8m0; "mxfp8" has one for 32 numbers of a row). Sources: transformers
5.23, `integrations/finegrained_fp8.py`; the config of deepseek-ai/DeepSeek-V3.

The config says that inputs are rounded at
run time, where readers have no choice, and names unquantised modules: readers treat every other `Linear` as quantised.
Blocks must be whole: transformers divides the size of a weight by the number of its scales, so it would treat smaller
last blocks as equal.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from lpconv.errors import UnsupportedError
from lpconv.formats.grains import GRAINS, Grain, get_grain
from lpconv.formats.spec import OF_DTYPE, Format
from lpconv.forms.facts import ConvertedFacts, FormSettings, Headers
from lpconv.forms.form import Stored
from lpconv.forms.grid import block_hint, grid_of_blocks
from lpconv.forms.planes import PlaneNames, one_by_one
from lpconv.forms.tiles import Tiles
from lpconv.layouts.layout import Layout, Scheme

_SCALE_INV = "_scale_inv"
# Config entries that lpconv writes, by granularity.
_WRITTEN: Mapping[str, Mapping[str, str]] = {
    "128x128": {"quant_method": "fp8"},
    "mx": {"quant_method": "mxfp8", "scale_fmt": "ue8m0"},
}


@dataclass(frozen=True, kw_only=True)
class FineGrained(Tiles):
    """Tiles in transformers' layout. With a scale for 32 numbers of a row the config says "mxfp8" instead of "fp8"."""

    kind: ClassVar[str] = "fine-grained"
    names: ClassVar[PlaneNames] = PlaneNames(scale=_SCALE_INV)
    suffixes: ClassVar[tuple[str, ...]] = names.suffixes
    quantised_by: ClassVar[str | None] = "fp8"
    of_linears: ClassVar[bool] = True

    @classmethod
    def holds(cls, format: Format, grain: Grain | None) -> bool:
        return format.name == "e4m3fn" and grain is not None and grain.name in ("128x128", "mx")

    @classmethod
    def refusal(cls, shape: tuple[int, ...], format: Format, settings: FormSettings) -> str | None:
        grain = settings.grain
        if grain is None or not cls.holds(format, grain):
            return f"the layout cannot store {format.name} codes with {grain.words if grain else 'one scale'}"
        if settings.is_table:
            return "transformers reads no codes of embeddings in this layout"
        height, width = grain.tile
        if len(shape) < 2 or shape[-2] % height or shape[-1] % width:
            return f"its sizes are not multiples of {height} x {width}, the blocks that transformers decodes"
        return super().refusal(shape, format, settings)

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        block = headers.quantization.get("weight_block_size")
        grain = next((GRAINS[n] for n in _WRITTEN if block == list(GRAINS[n].tile)), None)
        return cls._of_codes(name, name, grain, "", headers) if grain else None

    @classmethod
    def config_entries(cls, converted: ConvertedFacts) -> dict[str, Any]:
        """The `quantization_config`.

        Raises UnsupportedError if the name of an unquantised module is the end or start of a quantised module's name:
        transformers would leave both unquantised.
        """
        grain = get_grain(converted.settings["granularity"])
        assert grain is not None, "refused"
        for module in (n.removesuffix(".weight") for n in converted.formats):
            clash = next((n for n in converted.ignored if module.endswith(n) or module.startswith(n + ".")), None)
            if clash is not None:
                raise UnsupportedError(
                    f"transformers would skip `{module}` along with `{clash}`, which is not quantised",
                    hint=f"pass --exclude '{module}.weight', or use another --layout",
                )
        written = {"activation_scheme": "dynamic", "weight_block_size": list(grain.tile)}
        modules = {"modules_to_not_convert": list(converted.ignored)}
        return {"quantization_config": {**_WRITTEN[grain.name], **written, **modules}}


def _read(name: str, headers: Headers) -> Stored | None:
    """The weight whose codes are `name`: as lpconv writes it, else as a `Grid`."""
    codes, scale = headers.component(name), headers.component(name + _SCALE_INV)
    if codes is None or scale is None or codes.dtype not in ("F8_E4M3", "F8_E5M2") or len(codes.shape) < 2:
        return None
    hint = block_hint(headers.quantization.get("weight_block_size")) or ()
    return FineGrained.recognise(name, headers) or grid_of_blocks(
        name, codes.shape, OF_DTYPE[codes.dtype], one_by_one(codes), scale, hint
    )


def _inputs(settings: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
    """Groups of a token as wide as the blocks of weights."""
    block = block_hint(settings.get("weight_block_size"))
    if block is None or settings.get("activation_scheme") != "dynamic":
        return None
    powers = {"scale_dtype": "torch.uint8"} if settings.get("scale_fmt") == "ue8m0" else {}
    return {"num_bits": 8, "type": "float", "strategy": "group", "group_size": block[1], "dynamic": True, **powers}


_OPENS = "transformers; SGLang and vLLM (not tested)"
LAYOUT = Layout(
    name="transformers",
    methods=("fp8", "mxfp8"),
    read=_read,
    inputs=_inputs,
    dequantizer="FineGrainedFP8Config",
    fused_by="vLLM and SGLang",
    form=FineGrained,
    schemes=(
        Scheme("TRANSFORMERS_FP8", "e4m3fn", "128x128", 8, _OPENS, "plain transformers, in DeepSeek-V3's layout"),
        Scheme("TRANSFORMERS_MXFP8", "e4m3fn", "mx", 8.25, _OPENS, "plain transformers, MXFP8"),
    ),
    opening="This directory has transformers' own layout: {codes}. transformers opens it with `pip install "
    "accelerate`; lpconv is not needed. Without a GPU that multiplies fp8, it decodes the weights:",
    tag="fp8",
)
