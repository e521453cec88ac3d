"""Unit scaling (Blake et al. 2023, arXiv 2303.11257): unit-RMS codes and one static power-of-two scale per tensor."""

from lpconv.methods.method import Method

__all__ = ["UNIT"]

UNIT = Method(
    name="unit",
    title="unit scaling",
    summary="Weights as unit-RMS codes with one power-of-two scale per tensor, fixed before the run.",
    encoder="scaled",
    formats=("fp32", "fp16", "bf16", "e4m3fn", "e5m2"),
    default_format="fp16",
    scale_rounding="nearest",
)
