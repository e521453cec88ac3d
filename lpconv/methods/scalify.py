"""Scalify (Balanca et al. 2024, arXiv 2407.17353): unit scaling's container, with scales that propagate as it runs.

The paper rounds scales down (§3.2), which keeps the second moment of the codes in [1, 4).
"""

from lpconv.methods.method import Method

__all__ = ["SCALIFY"]

SCALIFY = Method(
    name="scalify",
    title="Scalify",
    summary="Weights as unit-RMS codes with one power-of-two scale per tensor, propagated when the model runs.",
    encoder="scaled",
    formats=("fp32", "fp16", "bf16", "e4m3fn", "e5m2"),
    default_format="fp16",
    scale_rounding="floor",
)
