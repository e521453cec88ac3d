"""Student's t distribution, for the 95 % intervals of small samples."""

import math
import statistics

__all__ = ["t_quantile"]


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, so that a mean ± t · s / √n holds 95 %; `freedom` is n - 1, at least 1.

    Exact for one and two degrees of freedom; from three on by the Cornish-Fisher expansion (Abramowitz & Stegun
    26.7.5), which is 0.7 % low at three and closer beyond.
    """
    if freedom == 1:
        return math.tan(0.475 * math.pi)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = statistics.NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
