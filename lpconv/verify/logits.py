"""Run source and output on the same inputs and compare what they say.

One model at a time is in memory. Inputs are made from the config alone with a fixed seed: token ids for text models,
noise for images and sound. Where the head of the architecture has no weights in the checkpoint, the bare model's hidden
states are compared instead, because random heads would compare nothing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lpconv.errors import UnsupportedError, VerificationError
from lpconv.models.empty import check_memory, num_parameters
from lpconv.models.inputs import describe, example_inputs, inputs_for
from lpconv.models.load import load, open_in_files
from lpconv.models.opening import model_errors, open_to_run, read_config
from lpconv.models.quiet import quiet_transformers
from lpconv.models.tasks import architecture, concrete
from lpconv.report.numbers import code_list
from lpconv.results import LogitsCheck
from lpconv.storage.checkpoint import Checkpoint

_OUTPUTS = ("logits", "last_hidden_state", "logits_per_image")
_UNLIKE, _REPORT = "the source opens and the output does not", "report this, or use another --layout"
_COPIES_IN_MEMORY = 2  # the model, and the values that it is given


def check_model(checkpoint: Checkpoint) -> None:
    """Refuse a model that memory does not hold before it is built; only its own code knows the size of one with any."""
    if "auto_map" not in checkpoint.config:
        check_memory(num_parameters(checkpoint), copies=_COPIES_IN_MEMORY, what="running the model")


def check_inputs(checkpoint: Checkpoint, *, trust_remote_code: bool) -> None:
    """Refuse a model that will not open, or that no inputs can be made for, before the work: by its config alone."""
    if trust_remote_code and "auto_map" in checkpoint.config:
        return  # which only its own code knows
    cls = architecture(checkpoint.config)
    config = read_config(checkpoint, hint="use --verify weights")
    inputs_for(concrete(cls, config), config)


def check_logits(source: Checkpoint, output: Path, *, trust_remote_code: bool, in_files: bool = False) -> LogitsCheck:
    """Outputs of both models in fp32 on the CPU. Raises UnsupportedError where no inputs can be made for the model.

    With `in_files` their matrices stay in their files, and memory is that of activations.
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
    return compare(wanted, got, cls.__name__, describe(inputs))


def _check_in_files(source: Checkpoint, output: Path) -> LogitsCheck:
    with open_in_files(source) as (model, missing):
        _check_whole(missing)
        inputs, cls = example_inputs(model), type(model)
        wanted = outputs_of(model, inputs)
    with model_errors(_UNLIKE, hint=_REPORT, error=VerificationError), open_in_files(output) as (model, _):
        return compare(wanted, outputs_of(model, inputs), cls.__name__, describe(inputs))


def _check_whole(missing: Sequence[str]) -> None:
    """Raise UnsupportedError where weights are random, since outputs of two such models say nothing."""
    if missing:
        raise UnsupportedError(
            f"the source lacks {code_list(missing)} of its model: its outputs would be those of random numbers",
            hint="use --verify weights",
        )


def outputs_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Logits in fp32, of a bare model its last hidden states. Raises UnsupportedError where it returns neither."""
    with torch.no_grad():
        out = model(**inputs)
    found = next((out[k] for k in _OUTPUTS if out.get(k) is not None), None)
    if found is None:
        raise UnsupportedError(f"{type(model).__name__} returns no logits", hint="use --verify weights")
    logits: Tensor = found.float()
    return logits


def compare(wanted: Tensor, got: Tensor, model: str, inputs: str) -> LogitsCheck:
    """Outputs of one model beside those of another on the same inputs, both named in words."""
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
