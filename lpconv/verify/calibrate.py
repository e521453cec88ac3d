"""Calibrate input scales that are stored in the output, from the largest input of each layer on a text; and check them.

The source runs once, in fp32, with its matrices read from its files during multiplication (`models/load.py`,
`open_in_files`), so memory holds only activations. The number of windows per pass depends only on the model, so a
machine finds the same scales however much memory is free.

The text may be one that the model writes (`--calibrate self`). Text sampled from a language model has the kinds of text
that it was trained on, in their proportions. Calibrating on it needs no data, and fits the model to no single kind
(Williams, Chrysostomou & Aletras 2025, arXiv 2410.17170).
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache

from lpconv.data import text_at
from lpconv.errors import InputError, UnsupportedError
from lpconv.models.coded import CodedTensor, watched_products
from lpconv.models.inputs import read_windows, sequence_length, vocabulary_size
from lpconv.models.load import open_in_files
from lpconv.models.opening import model_errors, read_text_config
from lpconv.models.tasks import architecture, cache_argument
from lpconv.models.tokenizer import Tokens, calibration_windows, tokenizer_of
from lpconv.plan.job import Job
from lpconv.plan.memory import windows_together
from lpconv.plan.options import CALIBRATION_TOKENS, NEAREST
from lpconv.progress import Progress
from lpconv.report.numbers import code_list, plural
from lpconv.results import CalibrationRecord, FeedbackCheck, from_json
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.partfile import write_small
from lpconv.storage.place import sha256_of
from lpconv.verify.reader import Recorded

_LAYER = re.compile(r"\.(\d+)\.")  # number of a layer in the name of its scale
_HINT = "leave --calibrate out to keep inputs unquantized"
_OWN_HINT = "pass a text with --calibrate FILE, or --calibrate demo for the sample text"
_SPARE = 1.1  # tokens to sample for each one to read: a text may have fewer tokens than were sampled
_CACHE_BYTES = 1 << 29  # keys and values of the sequences that are sampled together
_TOLERANCE = 0.02  # relative: other processors sum in another order


def calibrate(job: Job, progress: Progress) -> CalibrationRecord:
    """The largest inputs, on the job's text, of the modules that store an input scale, and keys and values.

    Raises InputError for inputs that are NaN or infinite, UnsupportedError for modules that the text never reaches.
    """
    config, tokens, length = job_windows(job)
    modules = [t.module for t in job.plan.tensors if t.form.has_input_scale]
    caches = job.plan.cache_scales
    largest: dict[str, float] = {}
    if modules or caches:
        progress.start("calibrating", tokens.windows.numel(), unit="tokens")
        largest = _largest_inputs(job.checkpoint, modules, caches, config, tokens.windows, progress)
    missed = [n for n in (*modules, *caches) if n not in largest]
    if missed:
        raise UnsupportedError(
            f"the text never reaches {code_list(missed)}, so their input scales cannot be measured",
            hint=f"leave their blocks unconverted with --exclude '{missed[0].rpartition('.')[0]}.*'",
        )
    path = text_at(str(job.plan.options.calibrate))
    return CalibrationRecord(
        text=path.name, sha256=sha256_of(path), num_tokens=tokens.windows.numel(), seq_len=length, absmax=largest
    )


def job_windows(job: Job) -> tuple[Any, Tokens, int]:
    """`calibration_windows` of a conversion."""
    o = job.plan.options
    hint = _HINT if o.rounding == NEAREST else "use --rounding nearest"
    num_tokens = o.calibration_tokens or CALIBRATION_TOKENS
    return calibration_windows(job.plain, text_at(str(o.calibrate)), num_tokens, o.calibration_seed, hint=hint)


def check_calibration(job: Job, output: Recorded, progress: Progress) -> FeedbackCheck | None:
    """Compare recorded scales with those of a second calibration. None if nothing came from a calibration or training.

    The text is looked for by its recorded name in the current folder and next to the output.
    """
    num_chosen = sum(r.rounding is not None for r in output.tensors)
    num_scales = job.plan.num_calibrated
    skipped = [f"the codes of {plural(num_chosen, 'tensor')}, which were trained or chosen by error feedback, are only "
               "bounded"] * bool(num_chosen)  # fmt: skip
    if not num_scales:
        return FeedbackCheck(skipped=skipped[0]) if skipped else None
    recorded = from_json(CalibrationRecord, output.provenance.get("calibration"))
    asked = str(job.plan.options.calibrate)
    text = next((p for p in (text_at(asked), output.directory.parent / asked) if p.is_file()), None)
    if text is None or sha256_of(text) != recorded.sha256:
        why = "is not here" if text is None else "is another file"
        skipped.append(f"scales of inputs: not checked, because the calibration text `{recorded.text}` {why}")
        return FeedbackCheck(skipped="; ".join(skipped))
    options = dataclasses.replace(job.plan.options, calibrate=str(text))
    job = dataclasses.replace(job, plan=dataclasses.replace(job.plan, options=options))
    wrong = tuple(
        f"`{n}`: the largest value is {x:.3g}, not {recorded.absmax[n]:.3g} as recorded"
        for n, x in calibrate(job, progress).absmax.items()
        if not math.isclose(x, recorded.absmax[n], rel_tol=_TOLERANCE, abs_tol=1e-9)
    )
    return FeedbackCheck(num_scales=num_scales, wrong=wrong, skipped="; ".join(skipped) or None)


def _largest_inputs(
    checkpoint: Checkpoint,
    modules: Sequence[str],
    caches: Sequence[str],
    config: Any,
    windows_NL: Tensor,
    progress: Progress,
) -> dict[str, float]:
    magnitudes: dict[str, float] = {}
    with (
        model_errors("the model fails on the text", hint=_HINT),
        open_in_files(checkpoint) as (model, missing),
        torch.no_grad(),
    ):
        if missing:
            raise UnsupportedError(f"the source lacks the weight `{missing[0]}`", hint=_HINT)
        inner = {p.pieces[0].form.name for p in model.base_model.parameters() if isinstance(p, CodedTensor)}
        has_head = model.config.is_encoder_decoder or not inner.issuperset(f"{n}.weight" for n in modules)
        num_outputs = vocabulary_size(config) if has_head else 0
        at_once = windows_together(config, windows_NL.shape[1], num_outputs=num_outputs)
        for ids_NL in torch.split(windows_NL, at_once):
            part = model if has_head else model.base_model
            cache = DynamicCache()
            cached = {cache_argument(type(part)) or "": cache, "use_cache": True} if caches else {}
            with watched_products(partial(_note, magnitudes, {*modules})):
                read_windows(model, ids_NL, whole=has_head, **cached)
            for name in caches:
                layer = cache.layers[int(_LAYER.findall(name)[0])]
                _note_values(magnitudes, name, layer.keys if name.endswith(".k_scale") else layer.values)
            progress.advance(ids_NL.numel())
    return {name: magnitudes[name] for name in (*modules, *caches) if name in magnitudes}


def _note(magnitudes: dict[str, float], modules: set[str], x: Tensor, weight: CodedTensor, is_transposed: bool) -> None:
    for name in modules.intersection(piece.form.name.removesuffix(".weight") for piece in weight.pieces):
        _note_values(magnitudes, name, x)


def _note_values(magnitudes: dict[str, float], name: str, x: Tensor) -> None:
    if not x.numel():
        return
    largest = float(x.abs().amax())
    if not math.isfinite(largest):
        raise InputError(
            f"values for `{name}` are NaN or infinite on this text, so they have no scale",
            hint="check with `lpconv inspect --stats` whether the weights are finite",
        )
    magnitudes[name] = max(magnitudes.get(name, 0.0), largest)


def write_own_text(job: Job, path: Path, progress: Progress) -> None:
    """Write as much text as calibration reads, sampled from the source at temperature 1 in fp32.

    Matrices are read from the source's files for each token, so memory stays small. Raises UnsupportedError for a
    model that does not generate text, InputError if it has no tokenizer.
    """
    options, config = job.plan.options, read_text_config(job.plain, hint=_OWN_HINT)
    model_class, tokenizer = architecture(job.plain.config), tokenizer_of((job.plain,))
    if not model_class.can_generate():
        raise UnsupportedError(f"--calibrate self: `{model_class.__name__}` does not generate text", hint=_OWN_HINT)
    length = sequence_length(config, None)
    count = math.ceil(_SPARE * (options.calibration_tokens or CALIBRATION_TOKENS) / length) + 1
    texts: list[str] = []
    progress.start("writing a text", count * length, unit="tokens")
    with (
        model_errors("the model cannot generate text", hint=_OWN_HINT),
        open_in_files(job.checkpoint) as (model, _),
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(options.calibration_seed or 0)
        together = _together(config, length)
        for start in range(0, count, together):
            ids = _sampled(model, config, min(together, count - start), length, progress)
            texts += tokenizer.batch_decode(ids, skip_special_tokens=True)
    write_small(path, "\n".join(texts))


def _sampled(model: Any, config: Any, count: int, length: int, progress: Progress) -> Tensor:
    """Ids of `count` sequences of `length` tokens, each after the token that begins a text."""

    def report(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        progress.advance(len(ids))
        return torch.zeros(len(ids), dtype=torch.bool)

    end, *special = (getattr(config.get_text_config(), f"{n}_token_id", None) for n in ("eos", "bos", "eos"))
    first = next((i for i in special if isinstance(i, int)), 0)
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=length, max_new_tokens=length,
        pad_token_id=first, eos_token_id=end, use_cache=True,
    )  # fmt: skip
    starts = torch.full((count, 1), first)
    found: Tensor = model.generate(
        starts, attention_mask=torch.ones_like(starts), generation_config=settings, stopping_criteria=[report]
    )
    return found[:, 1:]


def _together(config: Any, length: int) -> int:
    """The number of sequences to sample at once."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    values: int = 2 * text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or heads) * size
    return max(_CACHE_BYTES // (4 * length * values), 1)
