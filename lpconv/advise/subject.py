"""The model under advice, opened once in fp32; its converted copies, test windows, and the remaining time."""

import copy
import itertools
import math
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lpconv.advise.candidates import Settings, convert_options
from lpconv.advise.options import NO_TEXT, AdviseOptions
from lpconv.convert.apply import decoded_tensors
from lpconv.convert.run import with_error_feedback
from lpconv.errors import InputError
from lpconv.forms import Kept
from lpconv.layouts import LAYOUTS
from lpconv.models.coded import CodedTensor
from lpconv.models.load import load_from_state
from lpconv.models.rounded_inputs import InputRounding
from lpconv.models.tasks import NONE
from lpconv.models.tokenizer import Tokens, read_tokenizer
from lpconv.plan.files import output_config
from lpconv.plan.job import Job, prepare
from lpconv.plan.settings import fill_options
from lpconv.probe.checkpoint import Batches, ProbeSetup, prepare_run
from lpconv.probe.options import ProbeOptions
from lpconv.progress import Progress, quiet_transformers
from lpconv.report.numbers import code_list
from lpconv.results import TensorRecord
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.staging import Staging
from lpconv.train.data import is_text, read_rows, with_template
from lpconv.verify.outputs import compare_outputs, outputs_of

Window = dict[str, Tensor]
_MAX_WINDOWS = 64
_PROBED = 2  # windows in the probed step


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model to advise on. `prepared` is its probe setup, `windows` are batches of one sequence without repeats.

    `metric` is the kind of gap: "loss" if the model predicts tokens, else "output", the relative error of its outputs.
    """

    prepared: ProbeSetup
    windows: tuple[Window, ...]
    _own: list[Any] = field(default_factory=list)  # cache of the model's own figures

    @property
    def name(self) -> str:
        """The user's name for the model."""
        return self.prepared.checkpoint.origin.name

    @property
    def model(self) -> Any:
        """The model, in fp32."""
        return self.prepared.opened.model

    @property
    def metric(self) -> str:
        return "output" if self.prepared.task is NONE else "loss"

    @property
    def source_bytes(self) -> int:
        """The size of the model's weight files."""
        checkpoint = self.prepared.checkpoint
        return sum((checkpoint.directory / f).stat().st_size for f in checkpoint.weight_files)

    @property
    def batches(self) -> Batches:
        """Small batches for a probe."""
        return replace(self.prepared.batches, batch_size=_PROBED)

    def with_tensors(self, state: dict[str, Tensor]) -> Any:
        """Another model of the same class, with tensors by checkpoint name."""
        with quiet_transformers():
            config, how = copy.deepcopy(self.model.config), {"experts_implementation": "eager"}
            return load_from_state(type(self.model), config, state, dtype=torch.float32, **how)[0]

    def gap(self, model: Any, index: int) -> float:
        """The gap of another model on a window. The original model is run on each window only once, in order."""
        if index == len(self._own):
            self._own.append(self._figure(self.model, self.windows[index]))
        own, other = self._own[index], self._figure(model, self.windows[index])
        if self.metric == "loss":
            return float(other - own)
        error = compare_outputs(own, other).rel_error
        return math.inf if error is None else error

    def _figure(self, model: Any, window: Window) -> Any:
        """The loss of a model on a window, or its outputs."""
        with torch.inference_mode():
            return outputs_of(model, window) if self.metric == "output" else float(self.prepared.loss(model(**window)))


def open_subject(checkpoint: Checkpoint, options: AdviseOptions, progress: Progress) -> Subject:
    """Open the model of a checkpoint, and cut the text into windows."""
    with tempfile.TemporaryDirectory() as folder:
        asked = ProbeOptions(
            data=_text_file(options, checkpoint, Path(folder)), batch_size=options.batch_size, seq_len=options.seq_len,
            seed=options.seed, revision=options.revision, allow_missing=options.allow_missing,
        )  # fmt: skip
        prepared = prepare_run(checkpoint, asked, progress, hint=NO_TEXT)
    if prepared.opened.missing:
        raise InputError(
            f"the checkpoint lacks these weights, so they would be random: {code_list(prepared.opened.missing)}",
            hint="download the checkpoint again",
        )
    if options.data is not None:
        prepared = replace(prepared, data_words=Path(options.data).name)
    one = replace(prepared.batches, batch_size=1, tokens=_shuffled(prepared.batches.tokens, options.seed))
    count = min(_MAX_WINDOWS, len(one.tokens.windows))
    return Subject(prepared=prepared, windows=tuple(itertools.islice(one, count)))


def _shuffled(tokens: Tokens, seed: int) -> Tokens:
    """The windows in random order, so that the first few sample the whole text instead of its beginning."""
    order = torch.randperm(len(tokens.windows), generator=torch.Generator().manual_seed(seed))
    return replace(tokens, windows=tokens.windows[order])


def _text_file(options: AdviseOptions, checkpoint: Checkpoint, folder: Path) -> Path | None:
    """A plain text file: the data file itself, or the text column of the data."""
    if options.data is None or is_text(options.data):
        return None if options.data is None else Path(options.data)
    rows = with_template(read_rows(options.training("fp32", steps=1)), read_tokenizer(checkpoint.directory))
    path = folder / "texts.txt"
    path.write_text("\n".join(rows.texts(rows.train)), encoding="utf-8")
    return path


def job_of(subject: Subject, settings: Settings) -> Job:
    """The planned job of a conversion, with its source open; a context manager that closes it."""
    options = fill_options(convert_options(settings, verify="none"))
    return prepare(subject.prepared.checkpoint, Path("advised"), options, headers_only=True)


def open_converted(
    subject: Subject, settings: Settings, progress: Progress, *, phase: str = "encoding"
) -> tuple[Any, tuple[TensorRecord, ...]]:
    """The model as it would be served from the output of a conversion, and the record of each tensor."""
    with (
        job_of(subject, settings) as job,
        tempfile.TemporaryDirectory() as folder,
        Staging(Path(folder) / "advised", {}, force=False) as staging,
        with_error_feedback(job, staging, progress) as rounded,
    ):
        state, records = decoded_tensors(rounded, progress, phase=phase)
        for name, inputs in roundings_of(job).items():
            form = Kept(name=name, shape=tuple(state[name].shape), dtype="F32")
            state[name] = CodedTensor.from_form(form, {name: state[name]}, inputs=inputs)
    return subject.with_tensors(state), records


def roundings_of(job: Job) -> dict[str, InputRounding]:
    """How readers of a conversion's output will round inputs with their own scales, by the name of the weight."""
    config, layout = output_config(job.plain, job.plan), LAYOUTS[job.plan.options.layout]
    names = (t.name for t in job.plan.tensors if t.format is not None and not t.form.has_input_scale)
    settings = {n: layout.inputs(config.get("quantization_config", {}), n.removesuffix(".weight")) for n in names}
    roundings = {name: InputRounding.of(asked, None) for name, asked in settings.items() if asked is not None}
    return {name: rounding for name, rounding in roundings.items() if rounding is not None}
