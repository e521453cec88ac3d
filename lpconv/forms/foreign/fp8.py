"""transformers' own fp8, introduced by DeepSeek-V3: e4m3fn blocks, and `NAME_scale_inv`, which multiplies.

Scales are fp32 or bf16 numbers, or powers of two as e8m0 or bytes (``scale_fmt`` ue8m0; "mxfp8" has one for 32 numbers
of a row). Sources: transformers 5.23, `integrations/finegrained_fp8.py`; the config of deepseek-ai/DeepSeek-V3.

The config that lpconv writes is here too; the weights are in `forms/fine_grained.py`. It says that inputs are rounded
at run time, where readers have no choice, and names unquantised modules: readers treat every other `Linear` as
quantised.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from lpconv.formats.grains import GRAINS, Grain
from lpconv.formats.spec import FORMATS
from lpconv.forms.facts import Headers
from lpconv.forms.foreign.grid import Grid, block_of
from lpconv.forms.foreign.plane import one_by_one

METHODS = ("fp8", "mxfp8")
SCALE_INV = "_scale_inv"
_CODES = {"F8_E4M3": "e4m3fn", "F8_E5M2": "e5m2"}
# Config entries that lpconv writes, by granularity.
_WRITTEN: Mapping[str, Mapping[str, str]] = {
    "128x128": {"quant_method": "fp8"},
    "mx": {"quant_method": "mxfp8", "scale_fmt": "ue8m0"},
}


def find(name: str, headers: Headers) -> Grid | None:
    """The weight whose codes are `name`."""
    codes, scale = headers.component(name), headers.component(name + SCALE_INV)
    fmt = _CODES.get(codes.dtype) if codes is not None else None
    if codes is None or scale is None or fmt is None or len(codes.shape) < 2:
        return None
    block_size = headers.quantization.get("weight_block_size")
    hint = (
        tuple(block_size)
        if isinstance(block_size, list) and len(block_size) == 2 and all(type(n) is int for n in block_size)
        else ()
    )
    block = block_of(codes.shape, one_by_one(scale).size, hint)
    if block is None:
        return None
    return Grid(
        name=name, shape=codes.shape, format=FORMATS[fmt], codes=one_by_one(codes), scales=one_by_one(scale, block)
    )


def quantization_config(grain: Grain, ignored: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of e4m3fn codes with a granularity; `ignored` are the unquantised modules."""
    return {
        **_WRITTEN[grain.name],
        "activation_scheme": "dynamic",
        "weight_block_size": list(grain.tile),
        "modules_to_not_convert": list(ignored),
    }


def grain_in(config: Mapping[str, Any]) -> Grain | None:
    """The granularity of a config that lpconv wrote; None if any setting differs, as in configs of other tools."""
    ignored = config.get("modules_to_not_convert")
    if not isinstance(ignored, list):
        return None
    return next((g for n in _WRITTEN if config == quantization_config(g := GRAINS[n], ignored)), None)
