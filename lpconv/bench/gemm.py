"""The matrix products of a model, by shape. This module does not import torch."""

from dataclasses import dataclass

__all__ = ["Gemm"]


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """The Linears of one shape: their names, output size `n` and input size `k`. The head stays in 16 bits."""

    names: tuple[str, ...]
    n: int
    k: int
    is_head: bool
