"""The model of a checkpoint in fp32, ready to be traced, and inputs to trace it with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from lpconv.checkpoint.contents import Contents
from lpconv.convert.logits import check_memory, example_inputs
from lpconv.errors import LpconvError, UnsupportedError
from lpconv.hf.empty import count_parameters
from lpconv.hf.load import architecture, load_with_missing
from lpconv.hf.quiet import quiet_transformers
from lpconv.machine import out_of_memory

__all__ = ["AXES", "Opened", "open_model", "other_inputs"]

# Dynamic axes of each input, by their position.
_TEXT = {0: "batch", 1: "sequence"}
AXES: Mapping[str, Mapping[int, str]] = {
    "input_ids": _TEXT,
    "attention_mask": _TEXT,
    "token_type_ids": _TEXT,
    "decoder_input_ids": {0: "batch", 1: "decoder_sequence"},
    "pixel_values": {0: "batch"},
    "input_features": {0: "batch"},
}
# No two axes of one length, nor of a length that a model's own axes are likely to have: torch.export would take strides
# that happen to agree for the same, and the graph would work for this length only or not at all.
_LENGTHS = {"sequence": 13, "decoder_sequence": 11}
# The model, ONNX Runtime's copy of it, and the fp32 values that it folds 16-bit weights into.
_COPIES_IN_MEMORY = 3


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model in evaluation mode, the inputs to trace it with, and the name of the output that is exported."""

    model: nn.Module
    inputs: dict[str, Tensor]
    output: str
    missing: tuple[str, ...]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Every parameter under each of its names: a tied weight has several, and the graph takes one of them."""
        return {name: p.detach() for name, p in self.model.named_parameters(remove_duplicate=False)}

    @property
    def axes(self) -> dict[str, dict[int, str]]:
        """The dynamic axes of each input."""
        return {name: dict(AXES[name]) for name in self.inputs}

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The exported output in PyTorch."""
        with torch.inference_mode():
            found: Tensor = self.model(**inputs)[self.output]
        return found


def open_model(contents: Contents, stored_elements: int) -> Opened:
    """Open a checkpoint; where it holds no weights for its architecture's head, the bare model.

    Attention is the plain one (``eager``), which every opset can say. Raises UnsupportedError for models that
    transformers does not open or lpconv has no inputs for, InputError where the files cannot be this model's,
    ResourceError where memory will not do. `stored_elements` are those of the weight files.
    """
    check_memory(count_parameters(contents, stored_elements), copies=_COPIES_IN_MEMORY, what="exporting")
    with quiet_transformers():
        model, missing = _load(contents, architecture(contents.config))
        if missing:
            model, missing = _load(contents, transformers.AutoModel)
    inputs = _inputs(model)
    with torch.inference_mode():
        out = model(**inputs)
    output = next((k for k in ("logits", "last_hidden_state") if out.get(k) is not None), None)
    if output is None:
        raise UnsupportedError(f"{type(model).__name__} returns no logits", hint="this model cannot be exported")
    return Opened(model=model, inputs=inputs, output=output, missing=missing)


def other_inputs(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs of other sizes on every dynamic axis, the last tokens of the first row masked as padding is."""
    changed = {name: torch.cat([x, x[:1].flip(-1)]) for name, x in inputs.items()}
    for name, x in changed.items():
        if 1 in AXES[name]:
            changed[name] = x[:, : max(2, x.shape[1] // 2)].contiguous()
    if "attention_mask" in changed:
        changed["attention_mask"][0, -(changed["attention_mask"].shape[1] // 4) - 1 :] = 0
    if "token_type_ids" in changed:
        changed["token_type_ids"][:, changed["token_type_ids"].shape[1] // 2 :] = 1
    return changed


def _load(contents: Contents, cls: Any) -> tuple[Any, tuple[str, ...]]:
    try:
        model, missing = load_with_missing(contents.directory, dtype=torch.float32, model_class=cls)
        model.set_attn_implementation("eager")
    except LpconvError:
        raise
    except Exception as e:  # transformers raises anything at all for checkpoints it does not know
        text = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        raise out_of_memory(e) or UnsupportedError(
            f"the model does not open: {text}", hint="lpconv exports what this release of transformers opens"
        ) from e
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # keys and values of past tokens would be outputs
    return model, missing


def _inputs(model: Any) -> dict[str, Tensor]:
    inputs = example_inputs(model)
    if getattr(model.config, "type_vocab_size", 0) > 1 and "input_ids" in inputs:
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    return {name: x[:, : _LENGTHS[AXES[name][1]]].contiguous() if 1 in AXES[name] else x for name, x in inputs.items()}
