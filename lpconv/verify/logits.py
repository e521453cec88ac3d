"""Run source and output on the same inputs and compare their outputs.

One model at a time is in memory. Inputs are made from the config with a fixed seed: token ids for text models, noise
for images and sound. If the checkpoint has no weights for the architecture's head, the hidden states of the base model
are compared instead, because outputs of a random head would be meaningless.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lpconv.errors import UnsupportedError, VerificationError
from lpconv.models.empty import check_memory, num_parameters
from lpconv.models.inputs import describe_inputs, example_inputs, inputs_for
from lpconv.models.load import load, open_in_files
from lpconv.models.opening import model_errors, open_to_run, transformers_config
from lpconv.models.quiet import quiet_transformers
from lpconv.models.tasks import architecture, resolve_auto_class
from lpconv.report.numbers import code_list
from lpconv.results import LogitsCheck
from lpconv.storage.checkpoint import Checkpoint

_OUTPUTS = ("logits", "last_hidden_state", "logits_per_image")
_UNLIKE, _REPORT = "the source can be opened but the output cannot", "please report this, or use another --layout"
_COPIES_IN_MEMORY = 2  # the model, and the tensors being loaded into it


def check_model(checkpoint: Checkpoint) -> None:
    """Raise ResourceError if the model does not fit in memory, unless its own code determines its size."""
    if "auto_map" not in checkpoint.config:
        check_memory(num_parameters(checkpoint), copies=_COPIES_IN_MEMORY, what="running the model")


def check_inputs(checkpoint: Checkpoint, *, trust_remote_code: bool) -> None:
    """Raise an error, from the config alone, if the model will not open or has no inputs that lpconv can make."""
    if trust_remote_code and "auto_map" in checkpoint.config:
        return  # only the model's own code can tell
    cls = architecture(checkpoint.config)
    config = transformers_config(checkpoint, hint="use --verify weights")
    inputs_for(resolve_auto_class(cls, config), config)


def check_logits(source: Checkpoint, output: Path, *, trust_remote_code: bool, in_files: bool = False) -> LogitsCheck:
    """Compare the outputs of both models in fp32 on the CPU.

    Raises UnsupportedError if no inputs can be made for the model.

    With `in_files` the matrices are read from their files as needed, so memory holds only activations.
    """
    if in_files:
        return _check_in_files(source, output)
    # Both directories are local; the flag decides whether their own Python files may run.
    options = {"trust_remote_code": True} if trust_remote_code else {}
    with quiet_transformers():
        opened = open_to_run(source, **options)
        _check_whole(opened.missing)
        model = opened.model
        inputs, cls = example_inputs(model), type(model)
        wanted = outputs_of(model, inputs)
        del model, opened
        with model_errors(_UNLIKE, hint=_REPORT, error=VerificationError):
            got = outputs_of(load(output, dtype=torch.float32, model_class=cls, **options), inputs)
    return compare_outputs(wanted, got, cls.__name__, describe_inputs(inputs))


def _check_in_files(source: Checkpoint, output: Path) -> LogitsCheck:
    with open_in_files(source) as (model, missing):
        _check_whole(missing)
        inputs, cls = example_inputs(model), type(model)
        wanted = outputs_of(model, inputs)
    with model_errors(_UNLIKE, hint=_REPORT, error=VerificationError), open_in_files(output) as (model, _):
        return compare_outputs(wanted, outputs_of(model, inputs), cls.__name__, describe_inputs(inputs))


def _check_whole(missing: Sequence[str]) -> None:
    """Raise UnsupportedError if weights are missing, because outputs of random weights cannot be compared."""
    if missing:
        raise UnsupportedError(
            f"the source lacks the weights {code_list(missing)}, so its outputs would be random",
            hint="use --verify weights",
        )


def outputs_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Logits in fp32, or a base model's last hidden states. Raises UnsupportedError if there are neither."""
    with torch.no_grad():
        out = model(**inputs)
    output = next((out[k] for k in _OUTPUTS if out.get(k) is not None), None)
    if output is None:
        raise UnsupportedError(f"{type(model).__name__} returns no logits", hint="use --verify weights")
    logits: Tensor = output.float()
    return logits


def compare_outputs(wanted: Tensor, got: Tensor, model: str, inputs: str) -> LogitsCheck:
    """Compare the outputs of two models on the same inputs; `model` and `inputs` describe both."""
    finite = torch.isfinite(wanted)
    reference = wanted[finite].double()
    difference = reference - got[finite].double()
    log_p, log_q = wanted.double().log_softmax(-1), got.double().log_softmax(-1)
    return LogitsCheck(
        max_abs_diff=float(difference.abs().max()) if len(difference) else 0.0,
        rel_error=float(difference.norm() / (reference.norm() or 1.0)),
        bit_equal=bool(((wanted == got) | (wanted.isnan() & got.isnan())).all()),
        top1_agreement=float((wanted.argmax(-1) == got.argmax(-1)).double().mean()),
        mean_kl=float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        model_class=model,
        inputs=inputs,
    )
