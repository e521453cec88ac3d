"""Example inputs for a model, by the kind of its input, made from its config alone with a fixed seed.

A model reads token ids, pixels, a spectrogram or sound; the table `_KINDS` has a line for each. A model that matches
texts with images reads two. Letters in shapes: B batch, L sequence length.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lpconv.data.texts import SEQ_LEN, check_seq_len, num_positions
from lpconv.errors import UnsupportedError
from lpconv.models.tasks import SEQ2SEQ, TEXT_AND_IMAGE, task_of

_BATCH, _LENGTH, _SEED = 2, 32, 0
_SAMPLES = 8000  # audio samples: half a second at the usual 16 kHz
# Distinct lengths, and none that a model's own axes are likely to have: torch.export would take equal strides
# for the same axis, and the graph would work for this length only or not at all.
_TRACED = {"sequence": 13, "decoder_sequence": 11}


def vocabulary_size(config: Any) -> int:
    return int(config.get_text_config().vocab_size)


def max_length(config: Any) -> int | None:
    """Number of tokens that the model has positions for, or None if its config names no limit."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return num_positions({"max_position_embeddings": positions, "model_type": config.model_type})


def sequence_length(config: Any, wanted: int | None) -> int:
    """`wanted` tokens, by default 128 or the model's maximum. Raises UsageError if the model has fewer positions."""
    limit = max_length(config)
    check_seq_len(wanted, limit)
    return wanted or min(SEQ_LEN, limit or SEQ_LEN)


def random_ids(shape_BL: tuple[int, int], vocab_size: int, *, seed: int, first: int = 0) -> Tensor:
    """Uniformly random ids from `first` on, equal for equal seeds on every machine."""
    return torch.randint(first, vocab_size, shape_BL, generator=torch.Generator().manual_seed(seed))


def example_inputs(model: Any) -> dict[str, Tensor]:
    """Inputs for one forward pass, the same for every run with the same config.

    Raises UnsupportedError if the model reads another kind of input.
    """
    return inputs_for(type(model), model.config, main=model.main_input_name)


def inputs_for(model_class: Any, config: Any, *, main: str | None = None) -> dict[str, Tensor]:
    """`example_inputs` from a class and config, without a model; `main` overrides the class's `main_input_name`."""
    main = main or model_class.main_input_name
    if main not in _KINDS:
        raise UnsupportedError(
            f"lpconv cannot make example inputs for a model that reads `{main}`", hint="use --verify weights"
        )
    make, _ = _KINDS[main]
    inputs = make(config, torch.Generator().manual_seed(_SEED))
    if model_class.__name__ in TEXT_AND_IMAGE:
        inputs |= _token_ids(config, torch.Generator().manual_seed(_SEED))
        inputs |= _pixels(config.vision_config, torch.Generator().manual_seed(_SEED + 1))
    if getattr(config, "is_encoder_decoder", False):
        generator = torch.Generator().manual_seed(_SEED + 1)
        inputs["decoder_input_ids"] = _token_ids(config, generator)["input_ids"]
    return inputs


def read_windows(model: Any, ids_NL: Tensor, *, whole: bool = False, **further: Any) -> None:
    """Run a model's body, or the `whole` model, on windows of text. Of models for text and images, run the text part.

    A decoder after an encoder reads the same text, shifted as the class shifts labels.
    """
    further |= {"input_ids": ids_NL, "attention_mask": torch.ones_like(ids_NL)}
    if task_of(type(model).__name__) is SEQ2SEQ:
        model(**further, labels=ids_NL)
    elif model.config.is_encoder_decoder:
        model.base_model(**further, decoder_input_ids=ids_NL)
    else:
        body = model.get_decoder() if hasattr(model.config, "text_config") else model.base_model
        (model if whole else body)(**further)


def describe_inputs(inputs: Mapping[str, Tensor]) -> str:
    shapes = ", ".join(f"{k} {list(v.shape)}" for k, v in inputs.items() if k != "attention_mask")
    return f"{shapes}, random with seed {_SEED}"


def _token_ids(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    length = min(_LENGTH, max_length(config) or _LENGTH)
    ids_BL = torch.randint(0, vocabulary_size(config), (_BATCH, length), generator=generator)
    return {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL)}


def _pixels(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return {"pixel_values": torch.randn(_BATCH, getattr(config, "num_channels", 3), height, width, generator=generator)}


def _spectrogram(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    frames = 2 * config.max_source_positions
    return {"input_features": torch.randn(_BATCH, config.num_mel_bins, frames, generator=generator)}


def _sound(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_values": torch.randn(_BATCH, _SAMPLES, generator=generator)}


# What makes inputs, and the names of their dynamic axes by position; none if they cannot be traced.
_KINDS: dict[str, tuple[Callable[[Any, torch.Generator], dict[str, Tensor]], dict[int, str]]] = {
    "input_ids": (_token_ids, {0: "batch", 1: "sequence"}),
    "pixel_values": (_pixels, {0: "batch"}),
    "input_features": (_spectrogram, {0: "batch"}),
    "input_values": (_sound, {}),
}
_DECODER_AXES = {0: "batch", 1: "decoder_sequence"}


def dynamic_axes(name: str) -> dict[int, str]:
    """The dynamic axes of an input; auxiliary inputs have those of the tokens, or of the decoder's tokens."""
    _, axes = _KINDS.get(name, _KINDS["input_ids"])
    return dict(_DECODER_AXES if name.startswith("decoder") else axes)


def tracing_inputs(model: Any) -> dict[str, Tensor]:
    """`example_inputs` for tracing: with token types if the model has them, every dynamic axis of another length."""
    inputs = example_inputs(model)
    fixed = next((name for name in inputs if not dynamic_axes(name)), None)
    if fixed is not None:
        raise UnsupportedError(f"`{type(model).__name__}` reads `{fixed}`", hint="this model cannot be exported")
    if getattr(model.config, "type_vocab_size", 0) > 1 and "input_ids" in inputs:
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    for name, x in inputs.items():
        if (along := dynamic_axes(name).get(1)) is not None:
            inputs[name] = x[:, : _TRACED[along]].contiguous()
    return inputs


def resize_inputs(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs of other sizes on every dynamic axis, with the last tokens of the first row masked like padding."""
    changed = {name: torch.cat([x, x[:1].flip(-1)]) for name, x in inputs.items()}
    for name, x in changed.items():
        if 1 in dynamic_axes(name):
            changed[name] = x[:, : max(2, x.shape[1] // 2)].contiguous()
    if "attention_mask" in changed:
        changed["attention_mask"][0, -(changed["attention_mask"].shape[1] // 4) - 1 :] = 0
    if "token_type_ids" in changed:
        changed["token_type_ids"][:, changed["token_type_ids"].shape[1] // 2 :] = 1
    return changed
