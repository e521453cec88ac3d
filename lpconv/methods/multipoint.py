"""Multipoint quantisation (Liu et al. 2020, arXiv 2002.09049): rows as sums of low-bit rows, within a bit budget."""

from lpconv.methods.method import Method

__all__ = ["MULTIPOINT"]

MULTIPOINT = Method(
    name="multipoint",
    title="Multipoint",
    summary="Each row of a matrix as one or more low-bit rows with a scale each, as many as a bit budget pays for.",
    encoder="points",
    formats=("int4", "int8", "e4m3fn", "e2m1"),
    default_format="int4",
)
