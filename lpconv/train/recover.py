"""Recover what rounding to codes lost: train the codes of an output towards the predictions of its source.

The model computes with its stored numbers s·c, for codes c and fixed scales s. The optimizer keeps a latent number u
for each code, in units of its scale, and after every step the code is the one nearest to u. The gradient passes the
rounding unchanged (straight-through estimator; Bengio et al. 2013, arXiv 1308.3432): u steps by the gradient at s·c. As
Adam is invariant to the size of a gradient, the learning rate is about the largest step of u, as a fraction of the
distance between neighbouring codes.

The latents begin at the codes. Beginning at the source's weights would undo error feedback in the first steps.

Norms, biases and other tensors without codes keep the bits of the output.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from lpconv.convert.given import stored_parts
from lpconv.convert.run import convert
from lpconv.errors import InputError
from lpconv.formats.codes import nearest_code_
from lpconv.formats.spec import Format
from lpconv.forms.blocks import Workspace
from lpconv.forms.form import Side
from lpconv.forms.scaled import ScaledCodes
from lpconv.models.coded import CodedTensor, Codes
from lpconv.models.load import load
from lpconv.models.opening import open_to_train
from lpconv.models.quiet import quiet_transformers
from lpconv.models.tasks import Task
from lpconv.plan.options import VerifyOptions
from lpconv.progress import Progress
from lpconv.train.recoverable import Recoverable
from lpconv.verify.run import verify_output

_ROWS = 256  # tokens whose probabilities are in memory at once
_NOT_FOR_MODELS = ("labels", "num_items_in_batch")  # a loss of their own would only cost time


class Distillation:
    """Replaces the loss of models by the mean KL divergence from the predictions of `teacher`, in nats per token.

    KL(p‖q) = Σ p (log p - log q) per token, for the teacher's probabilities p and the model's q (Hinton et al. 2015,
    arXiv 1503.02531, at temperature 1). Its gradient to the model's logits is q - p. `agreement` is the share of tokens
    for which the first choices of both were equal, in the last forward pass.
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """The numbers that a parameter can be stored as: code · scale, with the scales of `pieces` of stored tensors."""

    pieces: tuple[Codes, ...]

    def to(self, device: torch.device) -> "Grid":
        return Grid(pieces=tuple(p.to(device) for p in self.pieces))

    def parts(self, x: Tensor) -> Iterator[tuple[Tensor, float | Tensor, Format]]:
        """Views of a parameter's numbers, with a factor that broadcasts to each, and the format of their codes."""
        flat, position = x.view(-1), 0
        for piece in self.pieces:
            form = _codes_of(piece)
            factor = form.factor(piece.parts, piece.start, piece.stop)
            numbers = flat[position : position + len(piece)]
            yield numbers if isinstance(factor, float) else numbers.view(*factor.shape[:-1], -1), factor, form.format
            position += len(piece)

    def round_(self, latents: Tensor) -> Tensor:
        for numbers, factor, element in self.parts(latents):
            nearest_code_(numbers, element).mul_(factor)
        return latents

    def divide_(self, values: Tensor) -> Tensor:
        """Replace numbers of the grid by their codes, as floating-point numbers."""
        for numbers, factor, element in self.parts(values):
            nearest_code_(numbers.div_(factor), element)
        return values

    def step(self, values: Tensor) -> float:
        """Mean distance of neighbouring codes, in units of their scales: 1 for integers, more for large floats."""
        total = 0.0
        for numbers, factor, element in self.parts(values):
            mean = 1.0 if element.twos_complement else float((numbers / factor).abs().mean()) / 2**element.mantissa_bits
            total += mean * numbers.numel()
        return total / values.numel() or 1.0

    def hold_zeros_(self, grad: Tensor, values: Tensor) -> None:
        """Zero the gradients of groups of zeros, whose scale is arbitrary, so that they stay zero."""
        for (part, *_), (numbers, *_) in zip(self.parts(grad), self.parts(values), strict=True):
            part.mul_(numbers.any(-1, keepdim=True))

    def clip_(self, latents: Tensor) -> None:
        """Keep latents within the range of their codes, from where they could not return."""
        for numbers, _, element in self.parts(latents):
            numbers.clamp_(-element.max - element.twos_complement, element.max)


def _codes_of(piece: Codes) -> ScaledCodes:
    assert isinstance(piece.form, ScaledCodes)
    return piece.form


@dataclass(frozen=True, kw_only=True, eq=False)
class Recovery:
    """The teacher of a model, the grids of the model's parameters, and the stored components."""

    start: Recoverable
    distillation: Distillation
    grids: Mapping[str, Grid]
    codes: Mapping[str, Side]

    @classmethod
    def open(cls, start: Recoverable, task: Task, progress: Progress) -> Self:
        """Open the source as teacher. Raises InputError if the output is not a conversion of it."""
        against = VerifyOptions(against=str(start.source.directory), level="weights")
        checked = verify_output(start.output.directory, against, progress=progress)
        if not checked.passed:
            raise InputError(
                f"`{start.output.origin.name}` is not what the source converts to: {checked.problems[0]}",
                hint="pass the source that was converted to --source, or convert it again",
            )
        teacher = open_to_train(task, start.source, seed=0).model
        with quiet_transformers():
            coded = load(start.output, model_class=task.auto, resident=True, dtype=torch.float32, allow_missing=True)
        stored = {n: p for n, p in coded.named_parameters() if isinstance(p, CodedTensor) and _is_narrow(p, start)}
        codes = {piece.form.name: piece.parts for p in stored.values() for piece in p.pieces}
        return cls(
            start=start,
            distillation=Distillation(teacher),
            grids={n: Grid(pieces=tuple(map(_with_scales, p.pieces))) for n, p in stored.items()},
            codes=codes,
        )

    def optimizer(self, model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
        """AdamW on the latents of the coded parameters of `model`, which have the rounded values between steps."""
        trained = {p: self.grids[n].to(p.device) for n, p in model.named_parameters() if n in self.grids}
        for p in model.parameters():
            p.requires_grad_(p in trained)
        steps = {p: grid.step(p.detach()) for p, grid in trained.items()}
        groups = [{"params": [p], "lr": settings["lr"] * step, "scale": 1 / step} for p, step in steps.items()]
        optimizer = torch.optim.AdamW(groups, **settings)

        @torch.no_grad()
        def take_latents(*_: Any) -> None:
            for p, grid in trained.items():
                if p.grad is not None:
                    grid.hold_zeros_(p.grad, p)
                latents = optimizer.state.get(p, {}).get("latents")
                p.copy_(grid.divide_(p) if latents is None else latents)

        @torch.no_grad()
        def keep_latents(*_: Any) -> None:
            for p, grid in trained.items():
                grid.clip_(p)
                if p in optimizer.state:  # a first step without gradients leaves no state
                    optimizer.state[p]["latents"] = p.clone()
                grid.round_(p)

        optimizer.register_step_pre_hook(take_latents)
        optimizer.register_step_post_hook(keep_latents)
        return optimizer

    def publish(self, output: Path, values: Mapping[str, Tensor]) -> None:
        """Convert the source again with the codes of the trained `values`, by parameter name, and verify the result."""
        numbers: dict[str, Tensor] = {}
        forms: dict[str, ScaledCodes] = {}
        for name, grid in self.grids.items():
            for piece, (part, _, _) in zip(grid.pieces, grid.parts(values[name].contiguous()), strict=True):
                forms[piece.form.name] = form = _codes_of(piece)
                whole = numbers.setdefault(form.name, torch.empty(form.num_elements))
                whole[piece.start : piece.stop] = part.reshape(-1)
        work = Workspace()
        sides = {n: {c.name: self.codes[n][c.name] for c in form.side} for n, form in forms.items()}
        codes = {n: stored_parts(form, numbers[n], sides[n], work) for n, form in forms.items()}
        convert(self.start.source, output, self.start.options, codes={**self.codes, **codes})


def _is_narrow(parameter: CodedTensor, start: Recoverable) -> bool:
    return all(piece.form.name in start.names for piece in parameter.pieces)


def _with_scales(piece: Codes) -> Codes:
    side = {c.name for c in piece.form.side}
    return replace(piece, parts={n: x for n, x in piece.parts.items() if n in side})
