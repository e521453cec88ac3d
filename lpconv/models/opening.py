"""A model opened for a purpose: to run, to trace, to train, to time. Each takes any of our outputs.

What cannot be opened is refused before a weight is read, as far as the config tells.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lpconv.errors import LpconvError, UnsupportedError, peer_lost
from lpconv.machine import out_of_memory
from lpconv.models.load import load_with_missing
from lpconv.models.plugin import LpconvQuantizer
from lpconv.models.presets import PRESETS
from lpconv.models.quiet import quiet_transformers
from lpconv.models.rows import load_rows
from lpconv.models.tasks import Task, architecture, concrete, main_input, task_of
from lpconv.storage.checkpoint import Checkpoint, Openable

_DOES_NOT_OPEN = "the model does not open"
_WHAT_OPENS = "lpconv runs what this release of transformers opens; does config.json belong to the weights?"


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model in evaluation mode, and its task. `missing` names parameters that the checkpoint lacks: random ones.

    `read_whole` names matrices of which a rank was to open its rows, and held all for a while.
    """

    model: Any
    missing: tuple[str, ...] = ()
    read_whole: tuple[str, ...] = ()

    @property
    def task(self) -> Task:
        """What the model is for."""
        return task_of(type(self.model).__name__)


@contextmanager
def model_errors(what: str, *, hint: str, error: type[LpconvError] = UnsupportedError) -> Iterator[None]:
    """Turn what transformers raises inside, which is anything at all for checkpoints it does not know, into an error
    of ours: `error` with `what` in front, ResourceError where memory ran out, PeerLostError where another
    process of the run went."""
    try:
        yield
    except LpconvError:
        raise
    except Exception as e:
        raise out_of_memory(e) or peer_lost(e) or error(f"{what}: {first_line(e)}", hint=hint) from e


def check_runs(model: Any, inputs: Mapping[str, torch.Tensor]) -> None:
    """Run the model once on the first of the inputs. Raises UnsupportedError where it does not run."""
    with quiet_transformers(), model_errors("the model does not run", hint=_WHAT_OPENS), torch.no_grad():
        model(**{name: x[:1] for name, x in inputs.items()})


def open_to_run(checkpoint: Openable, **options: Any) -> Opened:
    """The model in fp32 in the class that its config names; where the checkpoint lacks any of that, the bare model.

    Random heads would compare nothing, and send random gradients through all below. `options` go to `from_pretrained`.
    """
    with quiet_transformers(), model_errors(_DOES_NOT_OPEN, hint=_WHAT_OPENS):
        model, missing = load_with_missing(checkpoint, dtype=torch.float32, **options)
        if missing:
            bare = transformers.AutoModel
            model, missing = load_with_missing(checkpoint, dtype=torch.float32, model_class=bare, **options)
    return Opened(model=_without_cache(model), missing=missing)


def open_to_trace(checkpoint: Openable) -> Opened:
    """`open_to_run` with attention (``eager``) and products of experts (``batched_mm``) that every opset has.

    Raises UnsupportedError for models that transformers does not open.
    """
    opened = open_to_run(checkpoint)
    with model_errors(_DOES_NOT_OPEN, hint=_WHAT_OPENS):
        opened.model.set_attn_implementation("eager")
        opened.model.set_experts_implementation("batched_mm")
    return opened


def open_to_train(
    task: Task, checkpoint: Openable, *, seed: int, num_labels: int | None = None, mesh: DeviceMesh | None = None
) -> Opened:
    """The model in fp32 with the task's head; what the checkpoint does not hold is drawn from `seed`.

    So a run and its twin begin alike. Codes, of lpconv or of others, are opened as the weights that they stand for.
    Of a mesh every rank opens its rows, and the model runs once it is sharded. Raises UnsupportedError for models that
    the task has no class for, and for layouts that lpconv does not read.
    """
    opened = Checkpoint.open(checkpoint)
    with quiet_transformers(), model_errors(_DOES_NOT_OPEN, hint=_WHAT_OPENS):
        try:
            config = transformers.AutoConfig.from_pretrained(opened.directory, trust_remote_code=False)
            model_class = concrete(task.auto, config)
        except (UnsupportedError, ValueError) as e:
            raise UnsupportedError(
                f"transformers has no {task.name} model for this checkpoint: {first_line(e)}",
                hint="choose another --task",
            ) from e
        torch.manual_seed(seed)
        options = {} if num_labels is None else {"num_labels": num_labels, "ignore_mismatched_sizes": True}
        if mesh is not None:
            model, missing, read_whole = load_rows(opened, mesh, model_class=model_class, **options)
            return Opened(model=_without_cache(model), missing=missing, read_whole=read_whole)
        model, missing = load_with_missing(opened, dtype=torch.float32, model_class=model_class, **options)
    if isinstance(getattr(model, "hf_quantizer", None), LpconvQuantizer):
        model.dequantize()  # the weights are decoded already: this only lets go of the codes' scales
    return Opened(model=_without_cache(model), missing=missing)


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """A model that is known and not built: its class, its config, and where its weights are (None: they are random)."""

    model_class: Any
    config: Any
    checkpoint: Checkpoint | None

    def empty(self) -> nn.Module:
        """The model without memory, for counting."""
        with quiet_transformers(), torch.device("meta"):
            model: nn.Module = self.model_class(self.config)
        return model

    def build(self, device: str, mesh: DeviceMesh | None = None) -> Opened:
        """The model in fp32 on `device`; of a mesh, which a checkpoint only may have, every rank opens its rows."""
        missing: tuple[str, ...] = ()
        with quiet_transformers():
            if mesh is not None:
                assert self.checkpoint is not None, "random weights are drawn whole"
                model, missing, _ = load_rows(self.checkpoint, mesh, model_class=self.model_class, config=self.config)
                return Opened(model=model.eval(), missing=missing)
            if self.checkpoint is not None:
                model, missing = load_with_missing(
                    self.checkpoint, dtype=torch.float32, model_class=self.model_class, config=self.config
                )
            else:
                with torch.device(device):
                    model = self.model_class(self.config)
        return Opened(model=model.to(device).eval(), missing=missing)


def blueprint(preset_or_checkpoint: str | Checkpoint) -> Blueprint:
    """What a preset's name or a checkpoint describes; UnsupportedError for what does not read token ids."""
    if isinstance(preset_or_checkpoint, str):
        preset = PRESETS[preset_or_checkpoint]
        return Blueprint(model_class=getattr(transformers, preset.model_class), config=preset.config(), checkpoint=None)
    config = reads_text(preset_or_checkpoint, hint="choose a preset of about its size: " + ", ".join(PRESETS))
    model_class = concrete(architecture(preset_or_checkpoint.config), config)
    return Blueprint(model_class=model_class, config=config, checkpoint=preset_or_checkpoint)


def read_config(checkpoint: Checkpoint, *, hint: str) -> Any:
    """The config as transformers has it; UnsupportedError for models of another release, or with code of their own."""
    with quiet_transformers(), model_errors("transformers does not open this model", hint=hint):
        return transformers.AutoConfig.from_pretrained(checkpoint.directory, trust_remote_code=False)


def reads_text(checkpoint: Checkpoint, *, hint: str) -> Any:
    """The config of a model that reads token ids and nothing else; UnsupportedError for any other."""
    config = read_config(checkpoint, hint=hint)
    cls = concrete(architecture(checkpoint.config), config)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"`{cls.__name__}` is an encoder with a decoder, which does not run here", hint=hint)
    reads = main_input(checkpoint.config)
    if reads != "input_ids":
        raise UnsupportedError(f"`{cls.__name__}` reads `{reads}`, not token ids", hint=hint)
    return config


def first_line(error: Exception) -> str:
    """The first line of what a library said, with the kind of error where that is not plain; two where the first ends
    in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    first = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    return first if isinstance(error, (ValueError, LpconvError)) else f"{type(error).__name__}: {first}"


def _without_cache(model: Any) -> Any:
    model.config.use_cache = False  # keys and values of past tokens would be kept for nothing
    return model
