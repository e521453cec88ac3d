"""transformers' own fp8 and mxfp8, as lpconv writes them: e4m3fn codes in the weight's own shape, a scale per block.

`find_fp8` in `foreign/layouts.py` reads the layout if other tools wrote it. The config says that inputs are rounded at
run time, where readers have no choice, and names unquantised modules: readers treat every other `Linear` as quantised.
Blocks must be whole: transformers divides the size of a weight by the number of its scales, so it would treat smaller
last blocks as equal.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from lpconv.errors import UnsupportedError
from lpconv.formats.grains import GRAINS, Grain, get_grain
from lpconv.formats.spec import Format
from lpconv.forms.facts import ConvertedFacts, FormSettings, Headers
from lpconv.forms.foreign.layouts import SCALE_INV
from lpconv.forms.tiles import Tiles

# Config entries that lpconv writes, by granularity.
_WRITTEN: Mapping[str, Mapping[str, str]] = {
    "128x128": {"quant_method": "fp8"},
    "mx": {"quant_method": "mxfp8", "scale_fmt": "ue8m0"},
}


@dataclass(frozen=True, kw_only=True)
class FineGrained(Tiles):
    """Tiles in transformers' layout. With a scale for 32 numbers of a row the config says "mxfp8" instead of "fp8"."""

    kind: ClassVar[str] = "fine-grained"
    scale_suffix: ClassVar[str] = SCALE_INV
    suffixes: ClassVar[tuple[str, ...]] = (SCALE_INV,)
    quantised_by: ClassVar[str | None] = "fp8"
    of_linears: ClassVar[bool] = True
    axis: ClassVar[tuple[int, ...]] = ()
    scale_dtypes: ClassVar[tuple[str, ...]] = ("F32", "F16", "BF16")

    @classmethod
    def holds(cls, format: Format, grain: Grain | None) -> bool:
        return format.name == "e4m3fn" and grain is not None and grain.name in ("128x128", "mx")

    @classmethod
    def refusal(cls, shape: tuple[int, ...], format: Format, settings: FormSettings) -> str | None:
        grain = settings.grain
        if grain is None or not cls.holds(format, grain):
            return f"the layout cannot store {format.name} codes with {grain.words if grain else 'one scale'}"
        height, width = grain.tile
        if len(shape) < 2 or shape[-2] % height or shape[-1] % width:
            return f"its sizes are not multiples of {height} x {width}, the blocks that transformers decodes"
        return super().refusal(shape, format, settings)

    @classmethod
    def recognise(cls, name: str, headers: Headers) -> Self | None:
        block = headers.quantization.get("weight_block_size")
        grain = next((GRAINS[n] for n in _WRITTEN if block == list(GRAINS[n].tile)), None)
        is_named = headers.quantised_by in {w["quant_method"] for w in _WRITTEN.values()}
        return cls._of_codes(name, name, grain, "", headers) if is_named and grain else None

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
        return {"quantization_config": _quantization_config(grain, converted.ignored)}


def _quantization_config(grain: Grain, ignored: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of e4m3fn codes with a granularity; `ignored` are the unquantised modules."""
    return {
        **_WRITTEN[grain.name],
        "activation_scheme": "dynamic",
        "weight_block_size": list(grain.tile),
        "modules_to_not_convert": list(ignored),
    }
