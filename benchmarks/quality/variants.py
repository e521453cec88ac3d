"""`lpconv` with a variant of error feedback that it does not have, for `peers.py`: `variants.py NAME convert ...`."""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from lpconv.cli.main import app
from lpconv.convert import gptq
from lpconv.forms import entropy
from lpconv.models.layer_walk import LayerRun, Matrix, Product


def qronos(share: float, damping: float | None = gptq.DAMPING) -> None:
    """Qronos (Zhang, Zhang, Colbert & Saab 2025, arXiv 2505.11695), algorithm 1, with a `share` of its steps.

    The first column is rounded from w_1 + (W D)_1 / H_11, because all others are still those of the source. These then
    move to where they are best given that column, and from there on each is rounded as by GPTQ. So this is gptaq,
    except for the first column. Without `damping`, the reference's is added to H: 1e-6 of the largest eigenvalue.
    """
    factor_of = gptq.Moment.factor

    def factor(self: gptq.Moment, dtype: torch.dtype = torch.float32) -> gptq.Factor:
        squares_C, shift_CC = self.hessian_CC.diagonal().clone(), self.shift_CC
        shift_CC = None if shift_CC is None else shift_CC.clone()
        if damping is None:
            gptq.DAMPING = float(1e-6 * torch.linalg.eigvalsh(self.hessian_CC)[-1] / squares_C.mean())
        made = factor_of(self, dtype)
        first = made.order[-1]
        if made.aim_CC is not None and shift_CC is not None:
            made.aim_CC[:, -1] = shift_CC[:, first] * (made.lower_CC[-1, -1] / squares_C[first])
        return made

    gptq.AIM, gptq.Moment.factor = share, factor  # type: ignore[method-assign]


def all_tokens(weight: float) -> None:
    """Moments of experts from all tokens, of which those that are not routed to an expert count by `weight`.

    With a weight of 1 this is llm-compressor's `moe_calibrate_all_experts`. Outputs of the model stay the same.
    """
    from transformers.models.qwen3_moe import modeling_qwen3_moe as model

    route, products = model.Qwen3MoeTopKRouter.forward, LayerRun.products
    factors_NE: dict[int | None, Tensor] = {}  # of inputs, by the thread of a batch

    def forward(router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, scores, indices = route(router, hidden_states)
        scores_NE = torch.zeros_like(logits).scatter(1, indices, scores)
        factors_NE[get_ident()] = (scores_NE > 0).float().clamp(min=weight**0.5)
        return logits, scores_NE, torch.arange(router.num_experts).expand_as(logits)

    def weighted_products(self: LayerRun, matrices: tuple[Matrix, ...]) -> Iterator[tuple[int, Product]]:
        for number, product in products(self, matrices):
            if matrices[0].is_expert:
                expert = int(re.findall(r"\.(\d+)\.", matrices[0].name)[-1])
                product = replace(product, x=product.x * factors_NE[self._runs[number]._thread.ident][:, [expert]])
            yield number, product

    model.Qwen3MoeTopKRouter.forward = forward
    LayerRun.products = weighted_products  # type: ignore[method-assign]


def one_step() -> None:
    """Entropy-coded integers without factors of columns, which no matrix is large enough for."""
    entropy._LEAST_PART = 2**62


QRONOS: dict[str, Callable[[], None]] = {
    "qronos": partial(qronos, 1, None),
    **{f"qronos, {share:g} of the step": partial(qronos, share) for share in (1, 0.5, 0.25)},
}
EXPERTS = {"all tokens": partial(all_tokens, 1), "all tokens by 0.1": partial(all_tokens, 0.1)}
ONE_STEP = {"gptq, one step": one_step}
ALL = QRONOS | EXPERTS | ONE_STEP

if __name__ == "__main__":
    if sys.argv[1] in ALL:
        ALL[sys.argv.pop(1)]()
    app()
