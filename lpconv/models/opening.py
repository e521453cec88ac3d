"""Opening a model for a purpose: to run, to trace, to train, to time. Accepts every output of lpconv.

Models that cannot be opened are refused before a weight is read, as far as the config tells.
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
from lpconv.models.load import load_resident, load_rows, load_with_missing, without_cache
from lpconv.models.plugin import LpconvQuantizer
from lpconv.models.presets import PRESETS
from lpconv.models.tasks import Task, architecture, main_input, resolve_auto_class, task_of
from lpconv.progress import quiet_transformers
from lpconv.storage.checkpoint import Checkpoint, Openable

_DOES_NOT_OPEN = "the model cannot be opened"
FIT_HINT = "check that config.json and the tokenizer belong to the weights"
_WHAT_OPENS = "check that config.json belongs to the weights and that the installed transformers knows the model"


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model in evaluation mode. `missing` names parameters that the checkpoint lacks, which are random.

    `read_whole` names matrices that this rank read whole instead of only its rows.
    """

    model: Any
    missing: tuple[str, ...] = ()
    read_whole: tuple[str, ...] = ()

    @property
    def task(self) -> Task:
        return task_of(type(self.model).__name__)


@contextmanager
def model_errors(what: str, *, hint: str, error: type[LpconvError] = UnsupportedError) -> Iterator[None]:
    """Convert exceptions of transformers, which may be of any type for unknown checkpoints, into lpconv errors.

    The result is `error` with `what` in front, ResourceError if memory ran out, or PeerLostError if another process of
    the run was lost.
    """
    try:
        yield
    except LpconvError:
        raise
    except Exception as e:
        raise out_of_memory(e) or peer_lost(e) or error(f"{what}: {error_line(e)}", hint=hint) from e


def open_to_run(checkpoint: Openable, **options: Any) -> Opened:
    """Open the model in fp32 as the class that its config names, or as the bare model if weights for that are missing.

    A random head would make comparisons meaningless and send random gradients into all layers. `options` go to
    `from_pretrained`.
    """
    with quiet_transformers(), model_errors(_DOES_NOT_OPEN, hint=_WHAT_OPENS):
        model, missing = load_with_missing(checkpoint, dtype=torch.float32, **options)
        if missing:
            bare = transformers.AutoModel
            model, missing = load_with_missing(checkpoint, dtype=torch.float32, model_class=bare, **options)
    return Opened(model=without_cache(model), missing=missing)


def open_to_trace(checkpoint: Openable) -> Opened:
    """`open_to_run` with implementations that every opset has: ``eager`` attention and ``batched_mm`` experts."""
    opened = open_to_run(checkpoint)
    with model_errors(_DOES_NOT_OPEN, hint=_WHAT_OPENS):
        opened.model.set_attn_implementation("eager")
        opened.model.set_experts_implementation("batched_mm")
    return opened


def open_to_train(
    task: Task,
    checkpoint: Openable,
    *,
    seed: int,
    num_labels: int | None = None,
    mesh: DeviceMesh | None = None,
    resident: bool = False,
) -> Opened:
    """The model in fp32 with the task's head; weights that the checkpoint lacks are drawn from `seed`.

    So a run and its twin start from the same weights. Codes, including third-party ones, are decoded, or with
    `resident` stay codes, which have no gradient. With a mesh every rank opens its rows, and the model can run once it
    is sharded. Raises UnsupportedError for models that the task has no class for, and for layouts that lpconv does not
    read.
    """
    opened = Checkpoint.open(checkpoint)
    with quiet_transformers(), model_errors(_DOES_NOT_OPEN, hint=_WHAT_OPENS):
        try:
            config = transformers.AutoConfig.from_pretrained(opened.directory, trust_remote_code=False)
            model_class = resolve_auto_class(task.auto, config)
        except (UnsupportedError, ValueError) as e:
            raise UnsupportedError(
                f"transformers has no {task.name} model for this checkpoint: {error_line(e)}",
                hint="choose another --task",
            ) from e
        torch.manual_seed(seed)
        options = {} if num_labels is None else {"num_labels": num_labels, "ignore_mismatched_sizes": True}
        if mesh is not None:
            model, missing, read_whole = load_rows(opened, mesh, model_class=model_class, **options)
            return Opened(model=without_cache(model), missing=missing, read_whole=read_whole)
        open_model = load_resident if resident else load_with_missing
        model, missing = open_model(opened, dtype=torch.float32, model_class=model_class, **options)
    if isinstance(getattr(model, "hf_quantizer", None), LpconvQuantizer):
        model.dequantize()  # weights are already decoded: this only releases the codes' scales
    return Opened(model=without_cache(model), missing=missing)


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """A model that is not built yet: its class, config and checkpoint (None: random weights)."""

    model_class: Any
    config: Any
    checkpoint: Checkpoint | None

    def build_empty(self) -> nn.Module:
        """The model on the meta device, for counting."""
        with quiet_transformers(), torch.device("meta"):
            model: nn.Module = self.model_class(self.config)
        return model

    def build(self, device: str, mesh: DeviceMesh | None = None) -> Opened:
        """Build the model in fp32 on `device`; with a mesh, for checkpoints only, every rank opens its rows."""
        missing: tuple[str, ...] = ()
        options = {"model_class": self.model_class, "config": self.config}
        with quiet_transformers():
            if self.checkpoint is None:
                assert mesh is None, "random weights are drawn whole"
                with torch.device(device):
                    model = self.model_class(self.config)
            elif mesh is not None:
                model, missing, _ = load_rows(self.checkpoint, mesh, **options)
                return Opened(model=model.eval(), missing=missing)
            else:
                model, missing = load_with_missing(self.checkpoint, dtype=torch.float32, **options)
        return Opened(model=model.to(device).eval(), missing=missing)


def blueprint(preset_or_checkpoint: str | Checkpoint) -> Blueprint:
    """The blueprint of a preset or checkpoint. Raises UnsupportedError for models that do not read token ids."""
    if isinstance(preset_or_checkpoint, str):
        preset = PRESETS[preset_or_checkpoint]
        return Blueprint(model_class=getattr(transformers, preset.model_class), config=preset.config(), checkpoint=None)
    config = read_text_config(preset_or_checkpoint, hint="choose a preset of similar size: " + ", ".join(PRESETS))
    model_class = resolve_auto_class(architecture(preset_or_checkpoint.config), config)
    return Blueprint(model_class=model_class, config=config, checkpoint=preset_or_checkpoint)


def config_of(settings: Mapping[str, Any]) -> Any:
    """The transformers config of the settings in a config.json, which stores infinity as {"__float__": "Infinity"}."""
    return transformers.AutoConfig.for_model(**transformers.PreTrainedConfig._decode_special_floats(dict(settings)))


def transformers_config(checkpoint: Checkpoint, *, hint: str) -> Any:
    """The transformers config. Raises UnsupportedError for models of another release or with their own code."""
    with quiet_transformers(), model_errors("transformers cannot open this model", hint=hint):
        return transformers.AutoConfig.from_pretrained(checkpoint.directory, trust_remote_code=False)


def read_text_config(checkpoint: Checkpoint, *, hint: str, allow_pairs: bool = False) -> Any:
    """The config of a model that reads only token ids, or maybe pairs. Raises UnsupportedError for any other."""
    config = transformers_config(checkpoint, hint=hint)
    cls = resolve_auto_class(architecture(checkpoint.config), config)
    if getattr(config, "is_encoder_decoder", False) and not allow_pairs:
        raise UnsupportedError(f"`{cls.__name__}` is an encoder-decoder model, which lpconv cannot run here", hint=hint)
    reads = main_input(checkpoint.config)
    if reads != "input_ids":
        raise UnsupportedError(f"`{cls.__name__}` reads `{reads}`, not token ids", hint=hint)
    return config


def error_line(error: Exception) -> str:
    """First line of an exception's message, with its type if that is not obvious; two lines if it ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    first = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    return first if isinstance(error, (ValueError, LpconvError)) else f"{type(error).__name__}: {first}"
