"""The model of a checkpoint in fp32, ready to be traced, and inputs to trace it with."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lpconv.checkpoint.contents import Contents
from lpconv.errors import UnsupportedError
from lpconv.models.empty import check_fits
from lpconv.models.inputs import axes_of, tracing_inputs
from lpconv.models.opening import open_to_trace

__all__ = ["Traceable", "traceable"]

# The model, ONNX Runtime's copy of it, and the fp32 values that it folds 16-bit weights into.
_COPIES_IN_MEMORY = 3


@dataclass(frozen=True, kw_only=True)
class Traceable:
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
        return {name: axes_of(name) for name in self.inputs}

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The exported output in PyTorch."""
        with torch.inference_mode():
            found: Tensor = self.model(**inputs)[self.output]
        return found


def traceable(contents: Contents, stored_elements: int) -> Traceable:
    """Open a checkpoint; where it holds no weights for its architecture's head, the bare model.

    Raises UnsupportedError for models that transformers does not open or lpconv has no inputs for, InputError where the
    files cannot be this model's, ResourceError where memory will not do. `stored_elements` are those of the weight
    files.
    """
    check_fits(contents, stored_elements, copies=_COPIES_IN_MEMORY, what="exporting")
    opened = open_to_trace(contents.directory)
    inputs = tracing_inputs(opened.model)
    with torch.inference_mode():
        out = opened.model(**inputs)
    output = next((k for k in ("logits", "last_hidden_state") if out.get(k) is not None), None)
    if output is None:
        raise UnsupportedError(f"{type(opened.model).__name__} returns no logits", hint="this model cannot be exported")
    return Traceable(model=opened.model, inputs=inputs, output=output, missing=opened.missing)
