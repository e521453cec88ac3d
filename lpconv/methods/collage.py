"""Collage (Yu et al. 2024, arXiv 2405.03637): an ordinary 16-bit checkpoint, and what its rounding lost beside it."""

from lpconv.methods.method import Method

__all__ = ["COLLAGE"]

COLLAGE = Method(
    name="collage",
    title="Collage",
    summary="An ordinary 16-bit checkpoint that any tool opens, with the rounding error kept in a residual file.",
    encoder="pair",
    formats=("bf16", "fp16"),
    default_format="bf16",
    residuals=("bf16", "exact16", "int8"),
)
