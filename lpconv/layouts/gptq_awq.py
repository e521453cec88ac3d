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
    parts, bits = _transposed_words(name, headers), headers.quantization.get("bits")
    order = headers.component(f"{name.removesuffix(_QWEIGHT)}.g_idx")
    kind = UNSIGNED.get(bits) if isinstance(bits, int) else None
    if parts is None or kind is None or order is None or len(order.shape) != 1:
        return None
    codes, scales, zeros = parts
    rows, cols = order.shape[0], codes.shape[1]
    block = (max(-(-rows // scales.shape[0]), 1), 1)
    is_first_version = headers.quantization.get("checkpoint_format", "gptq") == "gptq"
    return Grid(
        name=f"{name.removesuffix(_QWEIGHT)}.weight",
        shape=(cols, rows),
        format=FORMATS[kind.removeprefix("u")],
        codes=Plane(component=codes, kind=kind, axis=0),
        scales=one_by_one(scales, block),
        zeros=Plane(component=zeros, kind=kind, block=block, plus=int(is_first_version), wraps=True),
        order=order,
        is_transposed=True,
    )


def _read_awq(name: str, headers: Headers) -> Grid | None:
    """AWQ ("gemm"): 4-bit integers in groups, transposed, eight neighbours of a row per word, even ones first.

    `MODULE.qweight` [in, out / 8], `scales` [groups, out], `qzeros` [groups, out / 8]. Number k of a word is in nibble
    0, 4, 1, 5, 2, 6, 3, 7. Sources: AutoAWQ 0.2, `utils/packing_utils.py` and `modules/linear/gemm.py`.
    """
    parts, config = _transposed_words(name, headers), headers.quantization
    bits, version = config.get("bits", config.get("w_bit")), str(config.get("version", "gemm")).lower()
    if parts is None or bits != 4 or version != "gemm":
        return None
    codes, scales, zeros = parts
    rows, cols = codes.shape[0], scales.shape[1]
    block = (max(-(-rows // scales.shape[0]), 1), 1)
    return Grid(
        name=f"{name.removesuffix(_QWEIGHT)}.weight",
        shape=(cols, rows),
        format=FORMATS["int4"],
        codes=Plane(component=codes, kind="awq"),
        scales=one_by_one(scales, block),
        zeros=Plane(component=zeros, kind="awq", block=block),
        is_transposed=True,
    )


def _transposed_words(name: str, headers: Headers) -> tuple[Component, Component, Component] | None:
    """Codes, scales and zero points of a weight under the names of GPTQ and AWQ, or None."""
    module = name.removesuffix(_QWEIGHT)
    codes, scales, zeros = map(headers.component, (name, f"{module}.scales", f"{module}.qzeros"))
    if module == name or codes is None or scales is None or zeros is None:
        return None
    is_matrix = len(codes.shape) == 2 and len(scales.shape) == 2 and scales.shape[0] > 0
    return (codes, scales, zeros) if is_matrix else None


GPTQ, AWQ = (Layout(name=name, methods=(name,), read=read) for name, read in (("gptq", _read_gptq), ("awq", _read_awq)))
