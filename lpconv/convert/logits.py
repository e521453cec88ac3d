"""Run source and output on the same inputs and compare what they say.

One model at a time is in memory. Inputs are made from the config alone with a fixed seed: token ids for text models,
noise for images and audio. Where the head of the architecture has no weights in the checkpoint, the bare model's hidden
states are compared instead, because random heads would compare nothing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from lpconv.checkpoint.contents import Contents
from lpconv.errors import ResourceError, UnsupportedError
from lpconv.machine import available_memory
from lpconv.models.empty import count_parameters
from lpconv.models.load import architecture, load
from lpconv.models.quiet import quiet_transformers
from lpconv.results import LogitsCheck

__all__ = ["check_logits", "check_memory", "check_model", "example_inputs"]

_BATCH, _LENGTH, _SEED = 2, 32, 0
_COPIES_IN_MEMORY = 2  # the model, and the values that it is given


def check_model(contents: Contents, stored_elements: int) -> None:
    """Refuse a model before it is built: one that the weight files cannot be, or that memory does not hold.

    `stored_elements` are those of the weight files. Only its own code knows the size of a model that brings some.
    Raises InputError, ResourceError, and UnsupportedError where transformers does not build the model.
    """
    if "auto_map" not in contents.config:
        check_memory(count_parameters(contents, stored_elements), copies=_COPIES_IN_MEMORY, what="running the model")


def check_memory(num_parameters: int, *, copies: int, what: str) -> None:
    """Raise ResourceError unless memory holds so many copies of a model in fp32."""
    needed, available = 4 * num_parameters * copies, available_memory()
    if needed > available:
        raise ResourceError(
            f"{what} in fp32 needs {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are free",
            hint="free some memory, or use a larger machine",
            details={"needed_bytes": needed, "available_bytes": available},
        )


def check_logits(source: Path, output: Path, config: dict[str, Any], *, trust_remote_code: bool) -> LogitsCheck:
    """Outputs of both models in fp32 on the CPU. Raises UnsupportedError where no inputs can be made for the model."""
    with quiet_transformers():
        return _check(source, output, config, trust_remote_code)


def _check(source: Path, output: Path, config: dict[str, Any], trust_remote_code: bool) -> LogitsCheck:
    # Both directories are local; the flag decides whether their own Python files may run.
    options = {"trust_remote_code": True} if trust_remote_code else {}
    cls = architecture(config)
    model, info = cls.from_pretrained(source, dtype=torch.float32, output_loading_info=True, **options)
    if info["missing_keys"]:
        cls = transformers.AutoModel
        model = cls.from_pretrained(source, dtype=torch.float32, **options)
    inputs = example_inputs(model)
    name = type(model).__name__
    wanted = _run(model.eval(), inputs)
    del model
    got = _run(load(output, dtype=torch.float32, model_class=cls, **options), inputs)
    return _compare(wanted, got, name, _describe(inputs))


def example_inputs(model: Any) -> dict[str, Tensor]:
    """Inputs for one forward pass, the same for every run of the same config."""
    make = _INPUTS.get(model.main_input_name)
    if make is None:
        raise UnsupportedError(
            f"no example inputs for a model that reads `{model.main_input_name}`", hint="use --verify weights"
        )
    inputs = make(model.config, torch.Generator().manual_seed(_SEED))
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = _token_ids(model.config, torch.Generator().manual_seed(_SEED + 1))["input_ids"]
    return inputs


def _token_ids(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    text = config.get_text_config()
    length = min(_LENGTH, getattr(text, "max_position_embeddings", _LENGTH) or _LENGTH)
    ids = torch.randint(0, text.vocab_size, (_BATCH, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _pixels(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": torch.randn(_BATCH, getattr(config, "num_channels", 3), height, width, generator=generator)}


def _spectrogram(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    frames = 2 * config.max_source_positions
    return {"input_features": torch.randn(_BATCH, config.num_mel_bins, frames, generator=generator)}


_INPUTS: dict[str, Callable[[Any, torch.Generator], dict[str, Tensor]]] = {
    "input_ids": _token_ids,
    "pixel_values": _pixels,
    "input_features": _spectrogram,
}


def _run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.inference_mode():
        out = model(**inputs)
    found = next((out[k] for k in ("logits", "last_hidden_state") if out.get(k) is not None), None)
    if found is None:
        raise UnsupportedError(f"{type(model).__name__} returns no logits", hint="use --verify weights")
    logits: Tensor = found.float()
    return logits


def _describe(inputs: dict[str, Tensor]) -> str:
    shapes = ", ".join(f"{k} {list(v.shape)}" for k, v in inputs.items() if k != "attention_mask")
    return f"{shapes}, random with seed {_SEED}"


def _compare(wanted: Tensor, got: Tensor, model: str, inputs: str) -> LogitsCheck:
    difference = (wanted - got).double()
    log_p, log_q = wanted.double().log_softmax(-1), got.double().log_softmax(-1)
    return LogitsCheck(
        max_abs_diff=float(difference.abs().max()),
        rel_error=float(difference.norm() / wanted.double().norm()) if wanted.any() else float(difference.norm()),
        bit_equal=bool(((wanted == got) | (wanted.isnan() & got.isnan())).all()),
        top1_agreement=float((wanted.argmax(-1) == got.argmax(-1)).double().mean()),
        mean_kl=float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        model_class=model,
        inputs=inputs,
    )
