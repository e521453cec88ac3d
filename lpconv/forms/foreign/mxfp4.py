"""gpt-oss: experts in MXFP4, `NAME_blocks` of 16 bytes for 32 numbers and `NAME_scales`, transposed.

The file has a row for each output, [experts, out, groups, 16]; the parameter is [experts, in, out]. Sources:
openai/gpt-oss, `gpt_oss/torch/weights.py`; transformers 5.23, `integrations/mxfp4.py`, convert_moe_packed_tensors.
"""

from lpconv.formats.spec import FORMATS
from lpconv.forms.facts import Component, Headers
from lpconv.forms.foreign.grid import Grid
from lpconv.forms.foreign.plane import Plane

METHODS = ("mxfp4",)
BLOCKS, SCALES, _GROUP = "_blocks", "_scales", 32


def find(name: str, headers: Headers) -> Grid | None:
    """The weight whose codes are `name`."""
    weight = name.removesuffix(BLOCKS)
    codes, scales = headers.component(name), headers.component(weight + SCALES)
    if weight == name or codes is None or scales is None or (codes.dtype, scales.dtype) != ("U8", "U8"):
        return None
    if len(codes.shape) != 4 or codes.shape[-1] != _GROUP // 2 or codes.shape[:-1] != scales.shape:
        return None
    experts, rows, groups, _ = codes.shape
    bytes_of_rows = Component(name=codes.name, dtype="U8", shape=(experts, rows, groups * _GROUP // 2))
    return Grid(
        name=weight,
        shape=(experts, groups * _GROUP, rows),
        format=FORMATS["e2m1"],
        codes=Plane(component=bytes_of_rows, kind="e2m1"),
        scales=Plane(component=scales, kind="e8m0", block=(1, _GROUP)),
        on_its_side=True,
    )
