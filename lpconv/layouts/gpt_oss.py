"""gpt-oss: experts in MXFP4, for reading."""

from lpconv.formats.spec import FORMATS
from lpconv.forms.facts import Component, Headers
from lpconv.forms.grid import Grid
from lpconv.forms.planes import Plane
from lpconv.layouts.layout import Layout

_BLOCKS, _MX_GROUP = "_blocks", 32


def _read(name: str, headers: Headers) -> Grid | None:
    """gpt-oss: experts in MXFP4, `NAME_blocks` of 16 bytes for 32 numbers and `NAME_scales`, transposed.

    The file has a row for each output, [experts, out, groups, 16]; the parameter is [experts, in, out]. Sources:
    openai/gpt-oss, `gpt_oss/torch/weights.py`; transformers 5.23, `integrations/mxfp4.py`, convert_moe_packed_tensors.
    """
    weight = name.removesuffix(_BLOCKS)
    codes, scales = headers.component(name), headers.component(weight + "_scales")
    if weight == name or codes is None or scales is None or (codes.dtype, scales.dtype) != ("U8", "U8"):
        return None
    if len(codes.shape) != 4 or codes.shape[-1] != _MX_GROUP // 2 or codes.shape[:-1] != scales.shape:
        return None
    experts, rows, groups, _ = codes.shape
    bytes_of_rows = Component(name=codes.name, dtype="U8", shape=(experts, rows, groups * _MX_GROUP // 2))
    return Grid(
        name=weight,
        shape=(experts, groups * _MX_GROUP, rows),
        format=FORMATS["e2m1"],
        codes=Plane(component=bytes_of_rows, kind="e2m1"),
        scales=Plane(component=scales, kind="e8m0", block=(1, _MX_GROUP)),
        is_transposed=True,
    )


GPT_OSS = Layout(name="mxfp4", methods=("mxfp4",), read=_read, dequantizer="Mxfp4Config")
