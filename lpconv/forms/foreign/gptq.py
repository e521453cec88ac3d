"""GPTQ: integers in groups, transposed, eight (4 bits) of one column per word.

`MODULE.qweight` [in / 8, out], `scales` [groups, out], `qzeros` [groups, out / 8] and `g_idx` [in], the group of each
input. Most files are of the first version, which stores a zero point minus one and wraps (15 is 0 for 4 bits);
``checkpoint_format`` "gptq_v2" stores the zero point itself. Sources: AutoGPTQ 0.7,
`nn_modules/qlinear/qlinear_cuda.py`; ModelCloud/GPTQModel, `utils/model.py` (convert_gptq_v1_to_v2_format).
"""

from lpconv.formats.spec import FORMATS
from lpconv.forms.facts import Headers
from lpconv.forms.foreign.grid import Grid
from lpconv.forms.foreign.plane import INTEGERS, Plane, one_by_one

METHODS = ("gptq",)
_CODES = ".qweight"


def find(name: str, headers: Headers) -> Grid | None:
    """The weight whose codes are `name`."""
    module, bits = name.removesuffix(_CODES), headers.quantization.get("bits")
    codes, scales = headers.component(name), headers.component(f"{module}.scales")
    zeros, order = headers.component(f"{module}.qzeros"), headers.component(f"{module}.g_idx")
    kind = INTEGERS.get(bits) if isinstance(bits, int) else None
    if module == name or kind is None or codes is None or scales is None or zeros is None or order is None:
        return None
    if len(codes.shape) != 2 or len(order.shape) != 1 or len(scales.shape) != 2 or not scales.shape[0]:
        return None
    rows, cols = order.shape[0], codes.shape[1]
    block = (max(-(-rows // scales.shape[0]), 1), 1)
    is_first_version = headers.quantization.get("checkpoint_format", "gptq") == "gptq"
    return Grid(
        name=f"{module}.weight",
        shape=(cols, rows),
        format=FORMATS["int4" if kind == "uint4" else "int8"],
        codes=Plane(component=codes, kind=kind, axis=0),
        scales=one_by_one(scales, block),
        zeros=Plane(component=zeros, kind=kind, block=block, plus=int(is_first_version), wraps=True),
        order=order,
        on_its_side=True,
    )
