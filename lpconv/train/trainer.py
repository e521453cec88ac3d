"""A `transformers.Trainer` that casts, steps, saves and fails as an arithmetic requires."""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from lpconv.errors import UnsupportedError, VerificationError
from lpconv.loss_scale import largest_gradient, unscale_
from lpconv.models.objective import IGNORED
from lpconv.progress import Progress
from lpconv.results import NonfiniteRecord, from_json, to_json
from lpconv.scaled import StepGuard, from_disk, gradients_are_finite, scaling_of, to_disk, unscaled_state_dict
from lpconv.shards import gather_whole, is_sharded
from lpconv.storage.partfile import writing
from lpconv.train.folder import last_checkpoint
from lpconv.train.held_out import held_out_metrics, num_targets
from lpconv.train.memory import StepMemory
from lpconv.train.nonfinite import first_nonfinite
from lpconv.train.prepare import ScaledLowPrecisionAdamW, TrainingSetup
from lpconv.train.processes import GradientAverage, needs_averaging

_WEIGHTS, _SCALER, _SCHEDULER = "model.safetensors", "loss_scale.json", "scheduler.pt"
_MODEL, _OPTIMIZER = "model", "optimizer"  # folders of a sharded checkpoint
MAX_SKIPPED = 40  # skipped steps in a row, enough to reduce the largest initial scale from 2^16 to 2^-24


class Clock:
    """Wall-clock seconds by activity; `seconds` is in order of first use. `progress` shows the phases among them."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    def add(self, what: str, seconds: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    @contextmanager
    def spending(self, what: str) -> Iterator[None]:
        """Add the time of the block to an activity, even if the block fails."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(what, time.perf_counter() - started)

    @contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Like `spending`, and show the activity as a phase."""
        self.progress.start(what, 0)
        with self.spending(what):
            yield


class DivergedError(VerificationError):
    """A loss, or gradients at every loss scale, were not finite; the message names the layer and step."""


class LowPrecisionTrainer(Trainer):  # type: ignore[misc]  # transformers is untyped
    """Trains the model of a `TrainingSetup`. Beyond Trainer, at each step:

    Random numbers are seeded from (seed, step, rank), so that a twin drops the same units and a resumed run continues
    bit for bit. The loss scale multiplies the loss and is divided out before clipping; a step with non-finite gradients
    is skipped. `last` holds the step's values for records. A non-finite loss ends the run. `clock` counts the time of
    evaluations and checkpoints.
    """

    def __init__(
        self,
        prepared: TrainingSetup,
        *,
        seed: int,
        memory: StepMemory | None,
        clock: Clock,
        accuracy: Callable[[Any, Mapping[str, Tensor]], float],
        **kwargs: Any,
    ) -> None:
        self.optimizer: Any = None
        super().__init__(model=prepared.model, **kwargs)
        self.prepared, self.seed, self.memory, self.clock = prepared, seed, memory, clock
        self.accuracy = accuracy
        self._is_sharded = any(is_sharded(p) for p in prepared.model.parameters())
        is_alone = self.accelerator.num_processes == 1
        averages = not (is_alone or self._is_sharded) and needs_averaging(prepared.model)
        if averages or self._is_sharded:
            self._keep_unwrapped()
        self.average = GradientAverage(prepared.model.parameters()) if averages else None
        self.guard = StepGuard(prepared.model) if scaling_of(prepared.model) else None
        self.num_skipped = self.num_skipped_in_a_row = 0
        self.last: dict[str, float] = {}
        self.first_nonfinite: NonfiniteRecord | None = None
        self.evaluated: list[list[float]] = []  # (targets, loss, accuracy or NaN) of each batch in the last evaluation
        self.compute_loss_func = type(self).compute_loss  # so Trainer does not divide by the number of batches
        self._inputs: list[dict[str, Any]] = []  # the batches of the step so far

    def _keep_unwrapped(self) -> None:
        """Keep accelerate from wrapping the model, so that gradients stay local until they are averaged."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            kind = self.accelerator.distributed_type.value.lower()
            raise UnsupportedError(
                f"accelerate's {kind} does not support scaled tensors, and widens 16-bit weights",
                hint="use torchrun with --parallel fsdp2 or ddp, and no accelerate config; or choose a recipe that "
                "keeps fp32 weights",
            )
        self.accelerator.prepare_model(self.model, evaluation_mode=True)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = self.prepared.make_optimizer()
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    @torch.no_grad()
    def evaluation_loop(self, dataloader: Collection[dict[str, Any]], *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Means over targets: Trainer weights the loss of a batch by its number of examples."""
        self.evaluated = []
        self.model.eval()
        with self.clock.spending("evaluations"):
            for i, inputs in enumerate(dataloader):
                self.clock.progress.advance(0, f"evaluating, batch {i + 1} of {len(dataloader)}")
                with self.compute_loss_context_manager():
                    loss, outputs = self.compute_loss(self.model, inputs, return_outputs=True)
                figures = num_targets(inputs), float(loss), self.accuracy(outputs, inputs)
                rows = self.accelerator.gather(torch.tensor([figures], dtype=torch.float64, device=loss.device))
                sizes = rows[:, :1]  # of the parts of the batch on each process
                self.evaluated.append([float(sizes.sum()), *(rows[:, 1:] * (sizes / sizes.sum())).sum(0).tolist()])
        return EvalLoopOutput(None, None, held_out_metrics(self.evaluated), len(self.eval_dataset))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.clock.spending("checkpoints"), writing(Path(self.args.output_dir)):
            super()._save_checkpoint(*args, **kwargs)

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        return self.prepared.around_forward(self.args.device.type)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        if len(self._inputs) == self.args.gradient_accumulation_steps:
            self._inputs = []
        self._seed(len(self._inputs))
        self._inputs.append(inputs)
        is_last = len(self._inputs) == self.args.gradient_accumulation_steps
        with self.average.backward() if self.average and is_last else nullcontext():
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        scale = self.prepared.loss_scale.scale
        value = float(self.accelerator.gather(loss.detach().float() / scale).mean())
        if len(self._inputs) > 1:  # each batch adds its part
            value += self.last["loss"]
        self.last = {"loss": value, "loss_scale": self.guard.scale if self.guard else scale}
        if not math.isfinite(value):
            self._note_nonfinite("the run was stopped")
            step = self.state.global_step + 1
            raise self._diverged(f"the loss is {value} at step {step}", step - self.num_skipped_in_a_row)
        return loss / scale

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over the batch's targets; in training, times the loss scale and the batch's share of the targets.

        `num_items_in_batch` counts the targets of this process in all batches of the step. Classes divide a sum by
        their argument of that name or, like most that are not causal, ignore it and return a mean. With the number of
        this batch both are the same.
        """
        num_targets = self._num_targets(inputs)
        outputs = model(**inputs, **({"num_items_in_batch": num_targets} if self.model_accepts_loss_kwargs else {}))
        loss = outputs.loss
        if torch.is_grad_enabled():  # models of a recovery train in evaluation mode
            if self.accelerator.num_processes > 1 or self.args.gradient_accumulation_steps > 1:
                in_step = num_targets if num_items_in_batch is None else num_items_in_batch
                # The gradients of processes will be averaged, those of batches added.
                share = float(num_targets / self.accelerator.gather(in_step[None]).double().mean())
                loss = loss if share == 1 else loss * share
            loss = loss * self.prepared.loss_scale.scale
        return (loss, outputs) if return_outputs else loss

    def _num_targets(self, inputs: Mapping[str, Any]) -> Tensor:
        labels: Tensor = inputs["labels"]
        return (labels[..., self.train_dataset.first_target :] != IGNORED).sum()

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        return sum(map(self._num_targets, batch_samples), torch.zeros((), dtype=torch.long)).to(device)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Override of Trainer's clipping: divide by the loss scale first, and skip a step that is not finite.

        Optimizers ignore parameters without a gradient, so dropping the gradients skips the step.
        """
        overflowed = self._unscale()
        norm = math.nan if overflowed else float(gather_whole(super()._clip_grad_norm(model)))
        self.num_skipped += overflowed
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if overflowed else 0
        self.last |= {"grad_norm": norm, "skipped": float(overflowed)}
        if overflowed:
            self.model.zero_grad()
        if self.num_skipped_in_a_row >= MAX_SKIPPED:
            raise self._diverged(
                f"gradients were not finite for {MAX_SKIPPED} steps in a row at any loss scale",
                self.state.global_step + 2 - MAX_SKIPPED,
            )
        return norm

    def _unscale(self) -> bool:
        """Divide the gradients by the loss scale and update it. Returns whether any gradient was not finite."""
        parameters = list(self.model.parameters())
        if self.average is not None:
            self.average.finish(parameters)
        if self.guard is not None:
            overflowed = not self.agree(gradients_are_finite(parameters))
            if overflowed:
                self._note_nonfinite("the step was skipped")
            self.guard.update(overflowed)
            return overflowed
        loss_scale = self.prepared.loss_scale
        overflowed = unscale_(parameters, loss_scale.scale)
        if overflowed:
            self._note_nonfinite("the step was skipped")
        largest = largest_gradient(parameters) if loss_scale.name == "logmax" and not overflowed else None
        loss_scale.update(overflowed, max_gradient=largest)
        return overflowed

    def _seed(self, batch: int) -> None:
        step = self.state.global_step * self.args.gradient_accumulation_steps + batch
        seed_step(self.seed, step, self.args.process_index)

    def agree(self, flag: bool) -> bool:
        return bool(self.accelerator.gather(torch.tensor([flag], device=self.args.device)).all())

    def _note_nonfinite(self, outcome: str) -> None:
        """Find the first non-finite layer, once per run, by repeating the step with a check after each layer.

        Of several batches, the first one with a non-finite value is meant.
        """
        if self.first_nonfinite is not None:
            return

        if self.memory is not None:
            self.memory.stop()

        num_items = self._get_num_items_in_batch(self._inputs, self.args.device)

        def repeat(batch: int) -> Tensor:
            self._seed(batch)
            with self.compute_loss_context_manager():
                inputs = self._prepare_inputs(self._inputs[batch])
                loss: Tensor = self.compute_loss(self.model, inputs, num_items_in_batch=num_items)
            return loss

        places = [first_nonfinite(self.model, partial(repeat, i)) for i in range(len(self._inputs))]
        layer, direction = next(filter(None, gather_object(places)), ("a parameter's own gradient", "backward"))
        self.first_nonfinite = NonfiniteRecord(
            step=self.state.global_step + 1, layer=layer, direction=direction, outcome=outcome
        )

    def _diverged(self, what: str, since: int) -> DivergedError:
        """The error for a diverged run. Deletes the checkpoint of the weights that diverge, from step `since` on."""
        first, folder = self.first_nonfinite, Path(self.args.output_dir)
        assert first is not None
        shutil.rmtree(folder / f"checkpoint-{since - 1}", ignore_errors=True)
        kept = last_checkpoint(folder)
        saved = f"the last good checkpoint is `{kept}`" if kept else "no checkpoint was saved before"
        return DivergedError(
            f"{what}; the first non-finite value: `{first.layer}`, {first.direction}, step {first.step}",
            # Before the first update no learning rate can be the cause.
            hint=f"{'lower --lr, or ' * (since > 1)}choose a recipe with the range of fp32, such as amp-bf16; {saved}",
            details={"step": self.state.global_step + 1, "first_nonfinite": to_json(first)},
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._is_sharded:
            save_sharded(Path(output_dir or self.args.output_dir), self.model, self.own_optimizer)
        else:
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._is_sharded:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self._is_sharded or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer = self.own_optimizer
        state, holder = _optimizer_state(self.model, optimizer)
        state_dict_loader.load(state, checkpoint_id=Path(checkpoint) / _OPTIMIZER)
        set_optimizer_state_dict(holder, optimizer, state)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))

    @property
    def own_optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the weights of a checkpoint for resuming: scaled parameters as data and scale."""
        folder = Path(output_dir or self.args.output_dir)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: x.contiguous() for name, x in to_disk(self.model).items()}
            save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.create_optimizer()  # first, because optimizers with pairs reset the weights to their start
        if self._is_sharded:
            state = unscaled_state_dict(self.model)  # this rank's part, whatever the number of ranks that saved
            state_dict_loader.load(state, checkpoint_id=Path(resume_from_checkpoint) / _MODEL)
            from_disk(self.model, state)
        else:
            from_disk(self.model, load_file(Path(resume_from_checkpoint) / _WEIGHTS))

    def _save_scaler(self, output_dir: str) -> None:
        """Save the loss scale and the counts of skipped steps, in place of GradScaler's state."""
        state = {
            "loss_scale": self.prepared.loss_scale.state_dict(),
            "guard": self.guard.state_dict() if self.guard else None,
            "num_skipped": self.num_skipped,
            "first_nonfinite": to_json(self.first_nonfinite),
        }
        if self.args.should_save:
            (Path(output_dir) / _SCALER).write_text(json.dumps(state), encoding="utf-8")

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = json.loads((Path(checkpoint) / _SCALER).read_text(encoding="utf-8"))
        self.prepared.loss_scale.load_state_dict(state["loss_scale"])
        if self.guard is not None:
            self.guard.load_state_dict(state["guard"])
        self.num_skipped = state["num_skipped"]
        if state["first_nonfinite"] is not None:
            self.first_nonfinite = from_json(NonfiniteRecord, state["first_nonfinite"])


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)


def save_sharded(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write each rank's part of weights and optimizer state below `folder`; called by all ranks."""
    try:
        state_dict_saver.save(unscaled_state_dict(model), checkpoint_id=folder / _MODEL)
        state_dict_saver.save(_optimizer_state(model, optimizer)[0], checkpoint_id=folder / _OPTIMIZER)
    except CheckpointException as e:  # not an Exception; wraps the error of each rank
        raise next(iter(e.failures.values()))[0] from e


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], nn.Module]:
    """The state of an optimizer, and the module whose parameters it steps."""
    holder = optimizer.data if isinstance(optimizer, ScaledLowPrecisionAdamW) else model
    return get_optimizer_state_dict(holder, optimizer), holder
