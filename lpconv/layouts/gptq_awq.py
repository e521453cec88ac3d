"""GPTQ and AWQ: integers with zero points in groups, transposed, for reading."""

from lpconv.formats.spec import FORMATS
from lpconv.forms.facts import Component, Headers
from lpconv.forms.grid import Grid
from lpconv.forms.planes import UNSIGNED, Plane, one_by_one
from lpconv.layouts.layout import Layout

_QWEIGHT = ".qweight"


def _read_gptq(name: str, headers: Headers) -> Grid | None:
    """GPTQ: integers in groups, transposed, those of a column in words without gaps.

    `MODULE.qweight` [in / 8, out], `scales` [groups, out], `qzeros` [groups, out / 8] and `g_idx` [in], the group of
    each input. Most files are of the first version, which stores a zero point minus one and wraps (15 is 0 for 4 bits);
    ``checkpoint_format`` "gptq_v2" stores the zero point itself. Sources: AutoGPTQ 0.7,
    `nn_modules/qlinear/qlinear_cuda.py`; ModelCloud/GPTQModel, `utils/model.py` (convert_gptq_v1_to_v2_format).
    """
    bits, order = headers.quantization.get("bits"), headers.component(f"{name.removesuffix(_QWEIGHT)}.g_idx")
    kind = UNSIGNED.get(bits) if isinstance(bits, int) else None
    if kind is None or order is None or len(order.shape) != 1:
        return None
    is_first_version = headers.quantization.get("checkpoint_format", "gptq") == "gptq"
    return _grid(name, headers, kind, order, plus=int(is_first_version))


def _read_awq(name: str, headers: Headers) -> Grid | None:
    """AWQ ("gemm"): 4-bit integers in groups, transposed, eight neighbours of a row per word, even ones first.

    `MODULE.qweight` [in, out / 8], `scales` [groups, out], `qzeros` [groups, out / 8]. Number k of a word is in nibble
    0, 4, 1, 5, 2, 6, 3, 7. Sources: AutoAWQ 0.2, `utils/packing_utils.py` and `modules/linear/gemm.py`.
    """
    config = headers.quantization
    bits, version = config.get("bits", config.get("w_bit")), str(config.get("version", "gemm")).lower()
    return _grid(name, headers, "awq") if bits == 4 and version == "gemm" else None


def _grid(name: str, headers: Headers, kind: str, order: Component | None = None, *, plus: int = 0) -> Grid | None:
    """A weight under the names of both tools; None if a part is missing. With an `order`, words run along columns.

    `plus` is added to stored zero points.
    """
    module = name.removesuffix(_QWEIGHT)
    codes, scales, zeros = map(headers.component, (name, f"{module}.scales", f"{module}.qzeros"))
    if module == name or codes is None or scales is None or zeros is None:
        return None
    if len(codes.shape) != 2 or len(scales.shape) != 2 or not scales.shape[0]:
        return None
    rows = codes.shape[0] if order is None else order.shape[0]
    block = (max(-(-rows // scales.shape[0]), 1), 1)
    return Grid(
        name=f"{module}.weight",
        shape=(scales.shape[1], rows),
        format=FORMATS["int4" if kind == "awq" else kind.removeprefix("u")],
        codes=Plane(component=codes, kind=kind, axis=1 if order is None else 0),
        scales=one_by_one(scales, block),
        zeros=Plane(component=zeros, kind=kind, block=block, plus=plus, wraps=True),
        order=order,
        is_transposed=True,
    )


GPTQ, AWQ = (Layout(name=name, methods=(name,), read=read) for name, read in (("gptq", _read_gptq), ("awq", _read_awq)))
