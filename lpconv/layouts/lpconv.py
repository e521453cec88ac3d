"""lpconv's own layout: the forms in `FORMS`, which `from_pretrained` opens after `import lpconv.hf`."""

from lpconv.forms import FORMS, Headers, Stored
from lpconv.layouts.layout import Layout, Scheme


def read_own(name: str, headers: Headers) -> Stored:
    """The tensor stored as `name`, in the first form that recognises it; `Kept` takes all."""
    return next(form for kind in FORMS.values() if (form := kind.recognise(name, headers)))


_OPENS = "transformers with `import lpconv.hf` or trust_remote_code"
LAYOUT = Layout(
    name="lpconv",
    methods=("lpconv",),
    read=read_own,
    schemes=(
        Scheme("UNIT_FP16", "fp16", "", 16, _OPENS, "scaled training in fp16; half of fp32", method="unit"),
        Scheme("UNIT_FP8", "e4m3fn", "", 8, _OPENS, "scaled training in fp8", method="unit"),
        Scheme(
            "COLLAGE", "", "", 32, "transformers, as plain bf16; lpconv adds what bf16 lost",
            "training in bf16 without an fp32 copy; nothing is lost", method="collage", residual="exact16",
        ),
        Scheme(
            "MULTIPOINT", "int4", "", 4.5, _OPENS,
            "4.5 bits per weight without calibration data; rows that need more get more", method="multipoint",
        ),
    ),
    python=("import lpconv", "model = lpconv.load({path!r})"),
)  # fmt: skip
