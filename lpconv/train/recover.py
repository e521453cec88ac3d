"""Recover what rounding to codes lost: train the scales or the codes of an output towards its source's predictions.

The model computes with its stored numbers s·c, for codes c and scales s. Gradients pass the rounding of both unchanged
(straight-through estimator; Bengio et al. 2013, arXiv 1308.3432).

Scales of 16 bits or more are trained, and codes stay (E2E-QP of EfficientQAT, Chen et al. 2024, arXiv 2407.11062).
What the optimizer steps is the logarithm of a scale, so that scales stay positive. Its gradient is that of the numbers
that share the scale: ∂L/∂log s = Σ ∂L/∂(s·c) · s·c.

Other scales are too coarse to follow a gradient: powers of two, fp8, and one scale per tensor. Their codes are trained.
The optimizer keeps a latent number u for each code, in units of its scale, and after every step the code is the one
nearest to u, which steps by the gradient at s·c. As Adam is invariant to the size of a gradient, the learning rate is
about the largest step of u, as a fraction of the distance between neighbouring codes. The latents begin at the codes.
Beginning at the source's weights would undo error feedback in the first steps.

Norms, biases and other tensors without codes keep the bits of the output.

The teacher may also be the output with a LoRA adapter. Training then starts from its own codes, or from the merged
weights rounded again with error feedback, whichever is closer to the teacher: rounding adds more errors than a small
update is worth, and scales cannot follow a large one.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from lpconv.convert.feedback import stored_parts
from lpconv.convert.run import convert
from lpconv.errors import InputError, UnsupportedError
from lpconv.formats.codes import nearest_code_
from lpconv.formats.grains import TENSOR, get_grain
from lpconv.formats.spec import FORMATS, Format
from lpconv.forms.blocks import Workspace
from lpconv.forms.form import Form, Side, Stored
from lpconv.layouts.reader import StoredTensors, stored_shapes
from lpconv.models.coded import CodedTensor, Codes
from lpconv.models.load import load
from lpconv.models.opening import open_to_train
from lpconv.models.tasks import Task
from lpconv.models.tokenizer import read_tokenizer
from lpconv.plan.files import copy_side_files, model_side_files
from lpconv.plan.options import GPTAQ
from lpconv.plan.settings import fill_options
from lpconv.progress import Progress, quiet_transformers
from lpconv.storage.checkpoint import Checkpoint, Openable
from lpconv.train.held_out import num_targets
from lpconv.train.recoverable import Recoverable
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify_output

_SCALE_STEP = 1 / 15  # step of the logarithm of a scale at a learning rate of 1
_LATENTS = "latents"
_ROWS = 256  # tokens whose probabilities are in memory at once
_NOT_FOR_MODELS = ("labels", "num_items_in_batch")  # a loss of their own would only cost time


class Distillation:
    """Replaces the loss of models by the mean KL divergence from the predictions of `teacher`, in nats per token.

    KL(p‖q) = Σ p (log p - log q) per token, for the teacher's probabilities p and the model's q (Hinton et al. 2015,
    arXiv 1503.02531, at temperature 1). Its gradient to the model's logits is q - p. `agreement` is the share of tokens
    for which the first choices of both were equal, in the last forward pass.
    """

    def __init__(self, teacher: Any) -> None:
        self.teacher = teacher.eval().requires_grad_(False)
        self.agreement = math.nan

    @torch.no_grad()
    def divergence(self, model: Any, batches: Iterable[Mapping[str, Tensor]]) -> float:
        """Mean divergence of a model over batches, weighted by targets as `in_fp32` does."""
        losses, weights = list[float](), list[float]()
        for batch in batches:
            inputs = {name: x for name, x in batch.items() if name not in _NOT_FOR_MODELS}
            got, wanted = (m.eval()(**inputs).logits.flatten(0, 1) for m in (model, self.teacher))
            losses.append(float(_Divergence.apply(got, wanted)[0]))  # type: ignore[no-untyped-call]
            weights.append(num_targets(batch))
        return statistics.fmean(losses, weights)

    @torch.no_grad()
    def kept_by_layer(self, start: Any, model: Any, batch: Mapping[str, Tensor]) -> tuple[float, ...]:
        """Share of the way from `start` to the teacher that a model's states after each layer have gone.

        1 - ‖h - t‖ / ‖s - t‖, for the states h of the model, s of the start and t of the teacher. NaN after a layer
        that the teacher's change does not reach, if the model's states changed there.
        """
        inputs = {name: x for name, x in batch.items() if name not in _NOT_FOR_MODELS}
        bodies = (m.eval().base_model for m in (start, self.teacher, model))
        states = (body(**inputs, output_hidden_states=True).hidden_states[1:] for body in bodies)
        distances = ((float((x - t).norm()), float((s - t).norm())) for s, t, x in zip(*states, strict=True))
        return tuple(1 - left / whole if whole else math.nan if left else 1.0 for left, whole in distances)

    def attach(self, model: nn.Module) -> None:
        """Change the loss of a model. It then runs without dropout, as the teacher does."""
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(self._after, with_kwargs=True)

    def _after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        with torch.no_grad():
            wanted = self.teacher.to(output.logits.device)(*args, **kwargs).logits
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
            factor, element = piece.form.code_scale(piece.parts, piece.start, piece.stop), piece.form.format
            assert element is not None, piece.form
            numbers = flat[position : position + len(piece)]
            yield numbers if isinstance(factor, float) else numbers.view(*factor.shape[:-1], -1), factor, element
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

    def with_scales(self, scales: Mapping[str, "TrainedScales"]) -> "Grid":
        """The grid with the trained scales of the tensors that have some."""
        return Grid(pieces=tuple(scales[p.form.name].use(p) if p.form.name in scales else p for p in self.pieces))

    def scale_(self, codes: Tensor) -> None:
        for numbers, factor, _ in self.parts(codes):
            numbers.mul_(factor)

    def add_gradients(self, grad: Tensor, values: Tensor, scales: Mapping[str, "TrainedScales"]) -> None:
        """Add the gradients of the logarithms of scales: sums of gradient · number over the numbers of each scale."""
        products = grad * values
        for piece, (of_numbers, factor, _) in zip(self.pieces, self.parts(products), strict=True):
            assert isinstance(factor, Tensor)
            sums = of_numbers.sum(-1, keepdim=True) if factor.shape[-1] == 1 else of_numbers
            scales[piece.form.name].add_gradient(piece, sums)

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


class TrainedScales:
    """The `fine_scales` of a stored tensor: `log` is trained, `stored` are they in their dtype, which grids share."""

    def __init__(self, form: Stored, start: Tensor) -> None:
        assert form.fine_scales is not None, form
        self._form, self._name, self._start = form, form.fine_scales.name, start.float()
        self.log = nn.Parameter(torch.zeros_like(self._start))
        self.stored = start.clone()

    def use(self, piece: Codes) -> Codes:
        """A piece of the tensor with these scales."""
        return replace(piece, parts={**piece.parts, self._name: self.stored})

    def update_(self) -> None:
        self.stored.copy_(self._start * self.log.detach().exp())

    def add_gradient(self, piece: Codes, sums: Tensor) -> None:
        """Add gradients of factors, in the shape of the form's; a scale may be that of several of them."""
        ones = torch.ones_like(self._start, requires_grad=True)
        with torch.enable_grad():
            factor = self._form.code_scale({**piece.parts, self._name: ones}, piece.start, piece.stop)
        assert isinstance(factor, Tensor)
        (grad,) = torch.autograd.grad(factor, ones, sums)
        self.log.grad = grad if self.log.grad is None else self.log.grad + grad


def _fine_scales(parameters: Iterable[CodedTensor]) -> dict[str, tuple[Stored, Tensor]]:
    """Form and scales of the tensors whose scales are trained, by name; none if a parameter joins both kinds."""
    found: dict[str, tuple[Stored, Tensor]] = {}
    for p in parameters:
        fine = [x for x in map(_scales_to_train, p.pieces) if x is not None]
        if fine and len(fine) < len(p.pieces):
            return {}
        found |= {form.name: (form, scales) for form, scales in fine}
    return found


def _scales_to_train(piece: Codes) -> tuple[Stored, Tensor] | None:
    """Form and scales of a tensor if they can follow a gradient: 16 bits or more, no powers of two, more than one."""
    if piece.form.fine_scales is None:
        return None
    scales = piece.parts[piece.form.fine_scales.name]
    return None if bool((scales.float().frexp().mantissa == 0.5).all()) else (piece.form, scales)


@dataclass(frozen=True, kw_only=True, eq=False)
class Recovery:
    """The teacher of a model, the grids of the model's parameters, and the stored components."""

    start: Recoverable
    distillation: Distillation
    grids: Mapping[str, Grid]
    codes: Mapping[str, Side]
    scales: Mapping[str, tuple[Stored, Tensor]]
    words: str = ""

    @classmethod
    def open(cls, start: Recoverable, task: Task, progress: Progress) -> Self:
        """Open the source as teacher. Raises InputError if the output is not a conversion of it."""
        if start.adapter is None:
            against = VerifyOptions(against=str(start.source.directory), level="weights")
            checked = verify_output(start.output.directory, against, progress=progress)
            if not checked.passed:
                raise InputError(
                    f"`{start.output.origin.name}` is not what the source converts to: {checked.problems[0]}",
                    hint="pass the source that was converted to --source, or convert it again",
                )
        teacher = open_to_train(task, start.source, seed=0).model
        if start.adapter is not None:
            start.adapter.merge_into(teacher)
            if not all(p.isfinite().all() for p in teacher.parameters()):
                name = start.adapter.folder.name
                raise InputError(f"weights with the adapter `{name}` are not finite", hint="train the adapter again")
        return cls._of(start, Distillation(teacher), start.output, task)

    @classmethod
    def _of(cls, start: Recoverable, distillation: Distillation, output: Openable, task: Task) -> Self:
        """A recovery that starts from the codes of `output`."""
        with quiet_transformers():
            coded = load(output, model_class=task.auto, resident=True, dtype=torch.float32, allow_missing=True)
        held = {n: p for n, p in coded.named_parameters() if isinstance(p, CodedTensor)}
        stored = {n: p for n, p in held.items() if {piece.form.name for piece in p.pieces} <= {*start.names}}
        codes = {piece.form.name: piece.parts for p in stored.values() for piece in p.pieces}
        with StoredTensors.open(start.output) as files:  # of a merge, to which no source gives these again
            others = (n for n, form in files.forms.items() if start.adapter is not None and not form.is_kept)
            codes = {n: files.read_components(n) for n in others} | codes
        grids = {
            n: Grid(pieces=tuple(replace(x, parts={c.name: x.parts[c.name] for c in x.form.side}) for x in p.pieces))
            for n, p in stored.items()
        }
        return cls(
            start=start, distillation=distillation, grids=grids, codes=codes, scales=_fine_scales(stored.values())
        )

    @property
    def lr_of_merge(self) -> float | None:
        """Peak learning rate to learn an adapter's update; None for codes, which take that of a recovery.

        Adam's steps have the same size for every scale, and their errors add up as if they were random.
        """
        num_scales = sum(x.numel() for _, x in self.scales.values())
        return 0.06 * math.sqrt(2**15 / max(num_scales, 2**15)) if num_scales else None

    def with_better_start(
        self, task: Task, batches: Sequence[Mapping[str, Tensor]], folder: Path, progress: Progress
    ) -> Self:
        """The recovery from the merged weights, rounded again, if they are closer to the teacher on some batches.

        They are rounded with error feedback on the tokens of the batches. Files in `folder` are reused.
        """
        base, teacher = self.start.output, self.distillation.teacher
        text, merged, output = folder / "text.txt", folder / "merged", folder / "rounded"
        folder.mkdir(parents=True, exist_ok=True)
        windows = (ids for batch in batches for ids in batch["input_ids"])
        decoded = (read_tokenizer(base.directory).decode(ids, skip_special_tokens=True) for ids in windows)
        text.write_text("\n".join(decoded), encoding="utf-8")
        if not merged.exists():
            with quiet_transformers():
                teacher.save_pretrained(part := folder / "part")
            copy_side_files(part, base, model_side_files(base), renamed={})
            part.rename(merged)
        options, grain = self.start.options, get_grain(self.start.options.granularity or TENSOR)
        is_searched = grain is not None and grain.is_searched(FORMATS[options.format or ""])
        scale = "search" if is_searched else options.scale
        asked = replace(options, rounding=GPTAQ, calibrate=str(text), scale=scale, resume=True, force=False)
        try:
            if not stored_shapes(Checkpoint.open(merged)).keys() >= {*self.start.names}:
                raise UnsupportedError("transformers renames the weights of this model")
            convert(str(merged), output, fill_options(asked), progress=progress)
        except (InputError, UnsupportedError) as e:  # too little text, or a model that does not run layer by layer
            words = f"the old codes, because the merged weights were not rounded again: {e}"
            progress.message(words)
            return replace(self, words=words)
        old, new = (
            self.distillation.divergence(open_to_train(task, Checkpoint.open(x), seed=0).model, batches)
            for x in (base.directory, output)
        )
        words = f"KL to the teacher {old:.3g} with the old codes, {new:.3g} with the merged weights rounded again"
        return replace(self if old <= new else self._of(self.start, self.distillation, output, task), words=words)

    @torch.no_grad()
    def optimizer(self, model: nn.Module, **settings: Any) -> "GridAdamW":
        """The optimizer of the coded parameters of `model`, which get the numbers of the codes to start from."""
        for name, grid in self.grids.items() if self.words else ():
            values = [Codes.from_form(p.form, self.codes[p.form.name]).part(p.start, p.stop) for p in grid.pieces]
            flat = torch.cat([x.decode_to(torch.empty(len(x))) for x in values])
            (p := model.get_parameter(name)).copy_(flat.view(p.shape))
        trained = {p: self.grids[n].to(p.device) for n, p in model.named_parameters() if n in self.grids}
        for p in model.parameters():
            p.requires_grad_(p in trained)
        device = next(iter(trained)).device
        scales = {n: TrainedScales(form, x.to(device)) for n, (form, x) in self.scales.items()}
        return GridAdamW(trained, scales, **settings)

    def publish(self, output: Path, values: Mapping[str, Tensor], optimizer: "GridAdamW") -> None:
        """Convert the source again with the trained scales, or the codes of `values`, and verify the result."""
        new = {
            n: form.with_scales(self.codes[n], optimizer.scales[n].stored.cpu()) for n, (form, _) in self.scales.items()
        }
        numbers: dict[str, Tensor] = {}
        forms: dict[str, Form] = {}
        for name, grid in self.grids.items():
            for piece, (part, _, _) in zip(grid.pieces, grid.parts(values[name].contiguous()), strict=True):
                if (form := piece.form).name not in new:
                    whole = numbers.setdefault(form.name, torch.empty(form.num_elements))
                    whole[piece.start : piece.stop] = part.reshape(-1)
                    forms[form.name] = cast(Form, form)  # it takes codes
        work = Workspace()
        for name, form in forms.items():
            side = {c.name: self.codes[name][c.name] for c in form.side}
            new[name] = stored_parts(form, numbers[name], side, work)
        convert(self.start.source, output, self.start.options, codes={**self.codes, **new})


class GridAdamW(torch.optim.AdamW):
    """AdamW on the scales, or on latents of the codes, of parameters that hold numbers of grids between steps."""

    def __init__(self, grids: Mapping[nn.Parameter, Grid], scales: dict[str, TrainedScales], **settings: Any) -> None:
        self.scales = scales
        of_scales = {p for p, grid in grids.items() if grid.pieces[0].form.name in scales}
        self._of_scales = {p: grids[p].with_scales(scales) for p in of_scales}
        self._of_codes = {p: grid for p, grid in grids.items() if p not in of_scales}
        steps = {p: grid.step(p.detach()) for p, grid in self._of_codes.items()}
        steps |= dict.fromkeys((x.log for x in scales.values()), _SCALE_STEP)
        groups = [{"params": [p], "lr": settings["lr"] * step, "scale": 1 / step} for p, step in steps.items()]
        super().__init__(groups, **settings)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        self._take_latents()
        loss: float | None = super().step(closure)
        self._keep_latents()
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for x in self.scales.values():
            if x.log in self.state:
                x.log.copy_(self.state[x.log][_LATENTS])
            x.update_()

    @torch.no_grad()
    def _take_latents(self) -> None:
        for p, grid in self._of_scales.items():
            if p.grad is not None:
                grid.add_gradients(p.grad, p, self.scales)
                p.grad = None
        for p, grid in self._of_codes.items():
            if p.grad is not None:
                grid.hold_zeros_(p.grad, p)
            latents = self.state.get(p, {}).get(_LATENTS)
            p.copy_(grid.divide_(p) if latents is None else latents)

    @torch.no_grad()
    def _keep_latents(self) -> None:
        for p, grid in self._of_codes.items():
            grid.clip_(p)
            if p in self.state:  # a first step without gradients leaves no state
                self.state[p][_LATENTS] = p.clone()
            grid.round_(p)
        for p, grid in self._of_scales.items():
            grid.divide_(p)
        for x in self.scales.values():
            if x.log in self.state:
                self.state[x.log][_LATENTS] = x.log.detach()  # for checkpoints
            x.log.grad = None
            x.update_()
        for p, grid in self._of_scales.items():
            grid.scale_(p)
