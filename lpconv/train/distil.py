"""Distillation: a model's loss is its divergence from the predictions of a teacher on the same inputs.

KL(p‖q) = Σ p (log p - log q) per token, for the teacher's probabilities p and the model's q (Hinton et al. 2015, arXiv
1503.02531, at temperature 1). Its gradient to the model's logits is q - p.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

_ROWS = 256  # tokens whose probabilities are in memory at once
_NOT_FOR_MODELS = ("labels", "num_items_in_batch")  # a loss of their own would only cost time


class Distillation:
    """Replaces the loss of models by the mean KL divergence from `teacher`, in nats per token.

    `agreement` is the share of tokens for which the first choices of both were equal, in the last forward pass.
    """

    def __init__(self, teacher: Any) -> None:
        self._teacher = teacher.eval().requires_grad_(False)
        self.agreement = math.nan

    def attach(self, model: nn.Module) -> None:
        """Change the loss of a model. It then runs without dropout, as the teacher does."""
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(self._after, with_kwargs=True)

    def _after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        with torch.no_grad():
            wanted = self._teacher.to(output.logits.device)(*args, **kwargs).logits
        width = wanted.shape[-1]
        output.loss, same = _Divergence.apply(  # type: ignore[no-untyped-call]  # torch leaves apply untyped
            output.logits.reshape(-1, width), wanted.reshape(-1, width)
        )
        self.agreement = float(same)
        return output


def _before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    model.eval()
    return args, {name: x for name, x in kwargs.items() if name not in _NOT_FOR_MODELS}


class _Divergence(torch.autograd.Function):
    """(mean KL(p‖q), share of equal first choices) for logits of q and p, [tokens, vocabulary], with gradient to q's.

    The gradient is computed with the loss, a few tokens at a time, so that probabilities are never stored.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, wanted_NV: Tensor) -> tuple[Tensor, Tensor]:
        needs_grad, num = ctx.needs_input_grad[0], len(logits_NV)
        total, same = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
        grad_NV = torch.empty_like(logits_NV) if needs_grad else None
        for start in range(0, num, _ROWS):
            rows = slice(start, start + _ROWS)
            log_q, log_p = (x[rows].float().log_softmax(-1) for x in (logits_NV, wanted_NV))
            p = log_p.exp()
            same += (log_q.argmax(-1) == log_p.argmax(-1)).sum().cpu()
            total += log_p.sub_(log_q).mul_(p).sum(dtype=torch.float64).cpu()
            if grad_NV is not None:
                grad_NV[rows] = log_q.exp_().sub_(p).div_(num)
        if grad_NV is not None:
            ctx.save_for_backward(grad_NV)
        share = same / num
        ctx.mark_non_differentiable(share)
        return (total / num).float().to(logits_NV.device), share

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_NV,) = ctx.saved_tensors
        return grad_NV * grads[0], None
