"""Student's t distribution, for the intervals of small samples."""

import math
import statistics

__all__ = ["t_quantile"]


def t_quantile(freedom: int, confidence: float = 0.95) -> float:
    """What a mean ± t · s / √n needs to hold with that confidence; `freedom` is n - 1, at least 1.

    Exact for one and two degrees of freedom; from three on by the Cornish-Fisher expansion (Abramowitz & Stegun
    26.7.5), which at three is 0.7 % low of 95 %, 2 % low of 98 %, and closer beyond.
    """
    if freedom == 1:
        return math.tan(confidence * math.pi / 2)
    if freedom == 2:
        return confidence * math.sqrt(2 / (1 - confidence**2))
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
