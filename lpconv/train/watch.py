"""Record underflow and overflow in due steps of a run, and find the origin of Inf and NaN.

Values are counted before they are cast to fp8, so fp8 runs are recorded directly. In 16-bit runs the visible values are
already rounded; there the twin is recorded, whose values are those that the 16-bit format would have to represent.
"""

import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lpconv.layers import linears
from lpconv.probe.advice import own_scale
from lpconv.probe.record import GRADIENT_ROLES, ProbedTensor
from lpconv.probe.track import Tracker, track
from lpconv.results import TrackedRecord, to_json
from lpconv.results.documents import fields_from
from lpconv.scaled import operand_scales
from lpconv.scaled.pair import Role
from lpconv.scaled.places import heads
from lpconv.scaled.tensor import data_part
from lpconv.train.recipes import Arithmetic

_OPERANDS = ("weight", "input", "grad_output")  # operands of a linear layer's three products


class StepWatch:
    """Records every `every`-th step of `model`, including the first; 0 is never.

    The record is the effect of the formats of `arithmetic` on the step's tensors, gradients times 2^log2_scale(step).
    Operands of scaled fp8 are multiplied by their cast's scale, or the nearest power of two; for rows by the tensor's
    scale, which loses more. `overhead` is the time of recording divided by the other time.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        arithmetic: Arithmetic,
        log2_scale: Callable[[int], int],
        *,
        operand_scale: str = "static",
    ) -> None:
        self.model, self.every, self.arithmetic, self.log2_scale = model, every, arithmetic, log2_scale
        self._layers = _cast_layers(model) if arithmetic.precision == "fp8" else None
        self._scales = operand_scales(operand_scale)
        self._recording_s = self._elapsed_s = self._started_s = 0.0
        self._tracker: Tracker | None = None
        self._recording = ExitStack()
        self._step = 0

    def begin(self, step: int) -> None:
        """Call before step number `step`, from 1."""
        self._step, self._started_s = step, time.perf_counter()
        if self.every and (step - 1) % self.every == 0:
            self._recording.enter_context(_uncompiled(self.model))
            self._tracker = self._recording.enter_context(track(self.model, every=1))

    def end(self) -> list[dict[str, Any]] | None:
        """Call after the step. Returns its figures, or None if it was not recorded."""
        tracker, self._tracker = self._tracker, None
        self._recording.close()
        elapsed_s = time.perf_counter() - self._started_s
        self._elapsed_s += elapsed_s
        if tracker is None:
            return None
        self._recording_s += elapsed_s * tracker.overhead / (1 + tracker.overhead)
        return self.rate(self._step, tracker.result().tensors)

    def rate(self, step: int, tensors: Iterable[ProbedTensor]) -> list[dict[str, Any]]:
        records = []
        for t in tensors:
            if self._layers is not None and (t.layer not in self._layers or t.role not in _OPERANDS):
                continue
            is_gradient = t.role in GRADIENT_ROLES
            kind = self._scales.grad_input if is_gradient else self._scales.output
            if kind == "carrier":
                continue
            name = _format(self.arithmetic, is_gradient, kind)
            log2 = _log2_operand_scale(t, name, kind) + (self.log2_scale(step) if is_gradient else 0)
            r = t.exponents.rates(name, log2_scale=log2)
            lost = fields_from(TrackedRecord, r)
            if not math.isfinite(r.sqnr_db):
                lost["sqnr_db"] = None
            records.append(to_json(TrackedRecord(step=step, layer=t.layer, role=t.role, format=name, **lost)))
        return records

    @property
    def overhead(self) -> float:
        """Time of recording divided by the other time, over all steps so far."""
        rest = self._elapsed_s - self._recording_s
        return self._recording_s / rest if rest > 0 else 0.0


def watches_run(arithmetic: Arithmetic) -> bool:
    """Whether the run's own values show the effect of its format; those of a tensor do not show scales of blocks."""
    return arithmetic.precision == "fp8" and not arithmetic.has_blocks


def watches_twin(arithmetic: Arithmetic) -> bool:
    """Whether the twin's values show it. Scaled and adaptive 16-bit runs have other values than any twin."""
    return arithmetic.precision in ("fp16", "bf16") and not arithmetic.is_scaled and arithmetic.loss_scale != "adaptive"


def _log2_operand_scale(tensor: ProbedTensor, format: str, kind: str) -> int:
    """log2 of the factor that an operand is multiplied by before the cast."""
    if kind == "static" or not tensor.exponents.num_nonzero:
        return 0
    return -tensor.exponents.log2_rms if kind == "l2" else own_scale(tensor, format)


def _format(arithmetic: Arithmetic, is_gradient: bool, kind: str) -> str:
    """The format of a product's operand, or of any tensor in a 16-bit run."""
    if arithmetic.precision != "fp8":
        return arithmetic.precision
    return "e5m2" if not arithmetic.is_scaled or (is_gradient and kind != "row") else "e4m3fn"


def _cast_layers(model: nn.Module) -> frozenset[str]:
    exact = heads(model)
    layers = (x for x in linears(model) if x.kind != "experts" and x.module not in exact)
    return frozenset(x.name for x in layers if getattr(x.module.weight, "role", None) is not Role.EXACT)


def first_nonfinite(model: nn.Module, step: Callable[[], Tensor]) -> tuple[str, str] | None:
    """The first layer whose output or output gradient is not finite in `step`, and "forward" or "backward".

    `step` computes the loss of the batch in question with the same random numbers; the gradients are cleared
    afterwards. None if everything is finite, not counting the parameters' own gradients. A non-finite parameter counts
    as the forward pass of its module.
    """
    layers: list[tuple[str, str]] = []
    broken = next((n for n, p in model.named_parameters() if not _is_finite(p.detach())), None)
    if broken is not None:
        return broken, "weights"
    with ExitStack() as stack:
        stack.callback(model.zero_grad)
        for name, module in model.named_modules():
            hook = _output_hook(name or type(model).__name__, layers)
            stack.enter_context(module.register_forward_hook(hook))
        stack.enter_context(_uncompiled(model))
        loss = step()
        if loss.requires_grad:  # even if a layer was found: ranks that share a model gather it together
            loss.backward()  # type: ignore[no-untyped-call]
    return layers[0] if layers else None


def _output_hook(name: str, layers: list[tuple[str, str]]) -> Callable[[nn.Module, Any, Any], None]:
    """A hook that notes the first non-finite output, and watches its gradient."""

    def see_gradient(grad: Tensor) -> None:
        if not layers and not _is_finite(grad):
            layers.append((name, "backward"))

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for x in _tensors(output):
            if not layers and not _is_finite(x.detach()):
                layers.append((name, "forward"))
            if x.requires_grad:
                x.register_hook(see_gradient)  # type: ignore[no-untyped-call]

    return hook


def _tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors of a layer's output; only the first of a tuple, which the next layer reads."""
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        output = next((x for x in output if isinstance(x, Tensor)), None)
    return [output] if isinstance(output, Tensor) and output.is_floating_point() else []


def _is_finite(x: Tensor) -> bool:
    return bool(data_part(x).isfinite().all())


def _uncompiled(model: Any) -> AbstractContextManager[Any]:
    """Context manager that runs a compiled model eagerly, because compiled code does not call hooks added later."""
    is_compiled = model._compiled_call_impl is not None
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
