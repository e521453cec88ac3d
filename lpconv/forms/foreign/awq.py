"""AWQ ("gemm"): 4-bit integers in groups, transposed, eight neighbours of a row per word, even ones first.

`MODULE.qweight` [in, out / 8], `scales` [groups, out], `qzeros` [groups, out / 8]. Number k of a word is in nibble 0,
4, 1, 5, 2, 6, 3, 7. Sources: AutoAWQ 0.2, `utils/packing_utils.py` and `modules/linear/gemm.py`.
"""

from lpconv.formats.spec import FORMATS
from lpconv.forms.facts import Headers
from lpconv.forms.foreign.grid import Grid
from lpconv.forms.foreign.plane import Plane, one_by_one

METHODS = ("awq",)
_CODES = ".qweight"


def find(name: str, headers: Headers) -> Grid | None:
    """The weight whose codes are `name`."""
    module = name.removesuffix(_CODES)
    codes, scales = headers.component(name), headers.component(f"{module}.scales")
    zeros, config = headers.component(f"{module}.qzeros"), headers.quantization
    bits, version = config.get("bits", config.get("w_bit")), str(config.get("version", "gemm")).lower()
    if module == name or codes is None or scales is None or zeros is None or bits != 4 or version != "gemm":
        return None
    if len(codes.shape) != 2 or len(scales.shape) != 2 or not scales.shape[0]:
        return None
    rows, cols = codes.shape[0], scales.shape[1]
    block = (max(-(-rows // scales.shape[0]), 1), 1)
    return Grid(
        name=f"{module}.weight",
        shape=(cols, rows),
        format=FORMATS["int4"],
        codes=Plane(component=codes, kind="awq"),
        scales=one_by_one(scales, block),
        zeros=Plane(component=zeros, kind="awq", block=block),
        on_its_side=True,
    )
