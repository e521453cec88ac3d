"""One advice: probe, candidates, forecasts, a choice, and what carries it out."""

import dataclasses
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lpconv.advise.bits import base_for, parts_of, raise_costly_tensors
from lpconv.advise.candidates import Conversion, convert_options
from lpconv.advise.choice import best, judged, rank_rows
from lpconv.advise.forecast import Forecast
from lpconv.advise.infer import Conversions, job_of, open_converted
from lpconv.advise.options import AdviseOptions
from lpconv.advise.record import gates_of, training_settings
from lpconv.advise.subject import Deadline, Subject, open_subject
from lpconv.advise.train import Trials
from lpconv.bench.worker import measure_peaks
from lpconv.errors import LpconvError, UnreadError
from lpconv.kernels.compiled import eagerly
from lpconv.models.quiet import quiet_transformers
from lpconv.options import words_for
from lpconv.plan.provenance import versions
from lpconv.plan.settings import command_line
from lpconv.probe.advice import findings, loss_scales
from lpconv.probe.record import GRADIENT_ROLES
from lpconv.probe.track import probe
from lpconv.progress import Progress
from lpconv.report.advise import findings_of, recommendation, unknowns
from lpconv.results import AdviceResult, AdviceRow, LayerPart, Recommendation, to_json
from lpconv.storage.checkpoint import Checkpoint
from lpconv.train.options import FinetuneOptions

_INFER_SHARE = 0.4  # of the time, where there is training to advise on as well
_PARTS_SHARE = 0.3  # of what conversions take, for the parts of layers, which no choice depends on


class Study:
    """An advice in the making."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        output: Path,
        options: AdviseOptions,
        told: Progress,
        keep: Callable[[AdviceResult], object],
        command: str | None,
    ) -> None:
        self._started_s = time.perf_counter()
        self._deadline = Deadline(60 * options.budget.minutes)
        self._model, self._output, self._options = checkpoint.origin.name, output, options
        self._told, self._keep, self._command = told, keep, command
        self._subject: Subject = open_subject(checkpoint, options, told)
        with quiet_transformers():
            peaks = measure_peaks("cpu")
        self._forecast = Forecast(self._subject.model, options, self._subject.prepared.seq_len, peaks)
        self._rows: dict[tuple[str, str], AdviceRow] = {}
        self._parts: tuple[LayerPart, ...] = ()
        self._parts_of: str | None = None
        self._findings: tuple[str, ...] = ()
        self._warnings = list(self._subject.prepared.batches.tokens.doubts)
        self._trials: Trials | None = None
        bits = options.bits if "infer" in options.purposes else None
        self._base = None if bits is None else base_for(self._subject, bits)

    def run(self) -> None:
        """Everything that was asked for, until the time is over."""
        self._probe()
        purposes = self._options.purposes
        if "infer" in purposes:
            with self._optional("infer", "conversions were not tried"):
                self._infer(self._deadline.part(_INFER_SHARE if "train" in purposes else 1.0))
        if "train" in purposes:
            with self._optional("train", "training was not tried"):
                self._trials = Trials(self._subject, self._options, self._hear, self._told)
                self._trials.run(self._deadline)

    @contextmanager
    def _optional(self, purpose: str, words: str) -> Iterator[None]:
        """A failure inside is a warning where something else was asked for too."""
        try:
            yield
        except LpconvError as e:
            if self._options.purpose == purpose or isinstance(e, UnreadError):
                raise
            self._warnings.append(f"{words}: {e.message}" + (f" ({e.hint})" if e.hint else ""))

    def _probe(self) -> None:
        """One step forward and backward; its gradients say what training needs, the rest what formats hold."""
        self._told.start("one step forward and backward", 0)
        prepared = self._subject.prepared
        with quiet_transformers(), eagerly():
            found = probe(self._subject.model, self._subject.batches, steps=1, loss=prepared.loss)
        if "train" not in self._options.purposes:
            asked = tuple(t for t in found.tensors if t.role not in GRADIENT_ROLES)
            found = dataclasses.replace(found, tensors=asked)
        self._findings = findings_of(findings(found), loss_scales(found).values())

    def _infer(self, deadline: Deadline) -> None:
        with job_of(self._subject, Conversion(name="any")):
            pass  # what no conversion takes is refused at once
        quality, before_s = self._options.budget.quality, deadline.left_s
        tried = Conversions(self._subject, quality=quality, told=self._hear, progress=self._told)
        tried.run(deadline.part(1 - _PARTS_SHARE))
        if self._base is not None:
            choice = raise_costly_tensors(self._subject, self._base, deadline.part(_PARTS_SHARE), self._told)
            tried.measure(choice, deadline)
        chosen = best(self._ranked(), "infer")
        if chosen is not None and deadline.left_s > 0:
            conversion = Conversion(name=chosen.name, settings=chosen.settings)
            model, records = open_converted(self._subject, conversion, self._told)
            taken_s = before_s - deadline.left_s
            most = Deadline(min(deadline.left_s, taken_s * _PARTS_SHARE / (1 - _PARTS_SHARE)))
            self._parts = parts_of(self._subject, model, records, most, self._told)
            self._parts_of = chosen.name

    def _hear(self, row: AdviceRow) -> AdviceRow:
        """A row that is new, or known better; it comes back judged."""
        if row.purpose == "infer":
            known = row if row.size_bytes is None else self._forecast.of_inference(row)
        else:
            known = row
        known = judged(known, self._options.budget)
        self._rows[row.purpose, row.name] = known
        if row.status in ("measured", "failed"):
            self._keep(self.result(interrupted=True))
        return known

    def _ranked(self) -> tuple[AdviceRow, ...]:
        return rank_rows(self._rows.values())

    def result(self, *, interrupted: bool) -> AdviceResult:
        """What is known so far."""
        rows = self._ranked()
        checkpoint = self._subject.prepared.checkpoint
        result = AdviceResult(
            name=self._model,
            output=str(self._output),
            facts=self._facts(),
            metric=self._subject.metric,
            source_bytes=sum((checkpoint.directory / f).stat().st_size for f in checkpoint.weight_files),
            steps_tried=self._trials.steps if self._trials is not None else 0,
            rows=rows,
            parts=self._parts,
            parts_of=self._parts_of,
            findings=self._findings,
            warnings=tuple(self._warnings),
            seconds=time.perf_counter() - self._started_s,
            options={k: to_json(v) for k, v in dataclasses.asdict(self._options).items()},
            versions=versions(),
            command=self._command,
            interrupted=interrupted,
        )
        advised = tuple(self._recommendation(result, purpose) for purpose in self._options.purposes)
        return dataclasses.replace(result, recommendations=advised, unknowns=unknowns(result))

    def _recommendation(self, result: AdviceResult, purpose: str) -> Recommendation:
        row = best(result.rows, purpose)
        return Recommendation(
            purpose=purpose,
            row=row.name if row else None,
            words=recommendation(result, row, purpose),
            command=self._carried_out(row) if row else None,
        )

    def _carried_out(self, row: AdviceRow) -> str:
        """The command that does what a row says, gates included."""
        o = self._options
        if row.purpose == "infer":
            asked = convert_options(row.settings, gates=tuple(gates_of(row)), revision=o.revision)
            return command_line(self._model, asked)
        said = {"recipe": row.name, **training_settings(o), "revision": o.revision, "gates": gates_of(row)}
        return shlex.join(["lpconv", "finetune", self._model, *words_for(FinetuneOptions, said)])

    def _facts(self) -> dict[str, str]:
        prepared = self._subject.prepared
        facts: dict[str, Any] = {
            "Model": f"{type(prepared.opened.model).__name__}, {prepared.task.words}",
            "Text": f"{prepared.data_words}, {len(self._subject.windows)} windows of {prepared.seq_len} tokens at most",
        }
        if self._trials is not None:
            facts["Training"] = self._trials.words
        return facts
