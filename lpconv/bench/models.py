"""The model of a case, in fp32 with random or real weights, and a batch for it."""

import os
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lpconv.bench.cases import Case
from lpconv.checkpoint.contents import read_contents
from lpconv.checkpoint.resolve import resolve
from lpconv.errors import UnsupportedError, UsageError
from lpconv.models.load import architecture
from lpconv.models.presets import PRESETS, Preset
from lpconv.models.quiet import quiet_transformers

__all__ = ["Opened", "blocks_of", "make_batch", "model_on_meta", "open_model", "step_loss"]

_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers")


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What a case runs: its class, its config, and the directory its weights are read from (None: they are random)."""

    model_class: Any
    config: Any
    directory: str | None

    def build(self, device: str) -> nn.Module:
        """The model in fp32 and evaluation mode (which switches dropout off) on `device`."""
        with quiet_transformers():
            if self.directory is not None and device != "meta":
                made = self.model_class.from_pretrained(self.directory, config=self.config, dtype=torch.float32)
            else:
                with torch.device(device):
                    made = self.model_class(self.config)
        model: nn.Module = made.to(device).eval()
        return model


def open_model(case: Case) -> Opened:
    """Find the model that the case names: ``demo``, a directory, a preset, an alias or a hub id, in this order."""
    if case.model in PRESETS and not os.path.isdir(case.model):
        opened = _preset(PRESETS[case.model])
    else:
        opened = _checkpoint(case.model)
    _shorten(opened.config, case.layers)
    _check_seq(opened.config, case.seq)
    opened.config.use_cache = False  # a forward pass over whole sequences; decoding token by token is not measured
    opened.config._attn_implementation = "sdpa"
    return opened


def model_on_meta(opened: Opened) -> nn.Module:
    """The model without memory, for counting."""
    return opened.build("meta")


def _preset(preset: Preset) -> Opened:
    config = getattr(transformers, preset.config_class)(**preset.settings)
    return Opened(model_class=getattr(transformers, preset.model_class), config=config, directory=None)


def _checkpoint(name: str) -> Opened:
    directory = resolve(name).directory
    try:
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except ValueError as e:
        raise UnsupportedError(
            f"transformers does not open `{name}`: {str(e).splitlines()[0]}",
            hint="choose a preset of about its size: " + ", ".join(PRESETS),
        ) from e
    cls = architecture(read_contents(directory).config)
    cls = transformers.AutoModel if getattr(cls, "from_config", None) else cls
    if getattr(config, "is_encoder_decoder", False) or getattr(cls, "main_input_name", "input_ids") != "input_ids":
        raise UnsupportedError(f"`{name}` does not read token ids alone", hint="encoders and decoders of text work")
    if cls is transformers.AutoModel:
        cls = transformers.AutoModel._model_mapping[type(config)]
    return Opened(model_class=cls, config=config, directory=str(directory))


def _shorten(config: Any, layers: int | None) -> None:
    if layers is None:
        return
    key = next((k for k in _LAYER_KEYS if hasattr(config, k)), None)
    own = getattr(config, key) if key else 0
    if key is None or not 1 <= layers <= own:
        raise UsageError(f"--layers {layers}: the model has {own}", hint=f"pass 1 to {own}")
    setattr(config, key, layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]


def _check_seq(config: Any, seq: int) -> None:
    most = getattr(config, "max_position_embeddings", None)
    most = most - 2 if most and config.model_type == "roberta" else most  # its positions begin behind the padding id
    if most is not None and seq > most:
        raise UsageError(f"--seq {seq} is more than the model's {most} positions", hint=f"pass at most {most}")


def make_batch(case: Case, config: Any, *, batch: int | None = None, seq: int | None = None) -> dict[str, Tensor]:
    """Random token ids of (batch, seq), the same for the same seed on every device."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = (batch or case.batch, seq or case.seq)
    ids = torch.randint(5, config.get_text_config().vocab_size, shape, generator=generator)
    return {"input_ids": ids.to(case.device)}


def step_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss with its inputs as labels; without a head, the mean square of what it returns."""
    if _has_head(model):
        loss: Tensor = model(**batch, labels=batch["input_ids"]).loss
        return loss
    return model(**batch)[0].float().square().mean()  # type: ignore[no-any-return]


def _has_head(model: Any) -> bool:
    own = model.module if isinstance(model, DistributedDataParallel) else model
    return own.get_output_embeddings() is not None


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of the model: the longest list of modules in it; the model itself where there is none."""
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    return max(lists, key=len) if lists else [model]
