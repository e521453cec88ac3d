"""Student's t distribution, for confidence intervals of small samples."""

import math


def t_quantile(freedom: int, confidence: float = 0.95) -> float:
    """Quantile t for which mean ± t · s / √n covers the true mean with this confidence.

    `freedom` is n - 1, at least 1.
    """
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        if _probability_within(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


def _probability_within(angle: float, freedom: int) -> float:
    """P(|T| ≤ √freedom · tan(angle)), exactly.

    The regularised incomplete beta function is a finite sum for integer degrees of freedom (Abramowitz & Stegun 26.7.3
    and 26.7.4).
    """
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2
    term, total = (cosine if is_odd else 1.0), 0.0
    for power in range(1 + is_odd, freedom, 2):
        total += term
        term *= cosine**2 * power / (power + 1)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
