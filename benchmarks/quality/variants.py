"""`lpconv` with a variant of error feedback that it does not have, for `peers.py`: `variants.py NAME convert ...`."""

import sys
from collections.abc import Callable
from functools import partial

import torch

from lpconv.cli.main import app
from lpconv.convert import gptq


def qronos(share: float, damping: float | None = gptq.DAMPING) -> None:
    """Qronos (Zhang, Zhang, Colbert & Saab 2025, arXiv 2505.11695), algorithm 1, with a `share` of its steps.

    The first column is rounded from w_1 + (W D)_1 / H_11, because all others are still those of the source. These then
    move to where they are best given that column, and from there on each is rounded as by GPTQ. So this is gptaq,
    except for the first column. Without `damping`, the reference's is added to H: 1e-6 of the largest eigenvalue.
    """
    factor_of = gptq.Moment.factor

    def factor(self: gptq.Moment) -> gptq.Factor:
        squares_C, shift_CC = self.hessian_CC.diagonal().clone(), self.shift_CC
        if damping is None:
            gptq.DAMPING = float(1e-6 * torch.linalg.eigvalsh(self.hessian_CC)[-1] / squares_C.mean())
        made = factor_of(self)
        first = made.order[-1]
        if made.aim_CC is not None and shift_CC is not None:
            made.aim_CC[:, -1] = shift_CC[:, first] * (made.lower_CC[-1, -1] / squares_C[first])
        return made

    gptq.AIM, gptq.Moment.factor = share, factor  # type: ignore[method-assign]


QRONOS: dict[str, Callable[[], None]] = {
    "qronos": partial(qronos, 1, None),
    **{f"qronos, {share:g} of the step": partial(qronos, share) for share in (1, 0.5, 0.25)},
}

if __name__ == "__main__":
    if sys.argv[1] in QRONOS:
        QRONOS[sys.argv.pop(1)]()
    app()
