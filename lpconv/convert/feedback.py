"""Round with error feedback through a model: each layer on the outputs of the rounded layers before it, on a text.

The source runs layer by layer (`models/layer_walk.py`), with its matrices read from its files. Within a layer, weights
are rounded in order of use: those with the same input share its second moment Σ x xᵀ, and later ones see the outputs of
rounded weights. All experts are next at once, each with the tokens routed to it.

Every rounded layer is saved as a file in the working folder with its final codes and scales. A resumed run reads it
instead of rounding again. The output is then written and verified as usual, from forms that read their codes there
(`forms/coded.py`), and the files are deleted before the output is published.

A weight that no input reaches, or that is not a matrix of a linear layer, is rounded to nearest.
"""

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, Self

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from lpconv.convert.gptq import (
    DAMPING,
    InverseFactor,
    aimed_at_source,
    inverse_factor,
    round_to_nearest,
    round_with_feedback,
    step_to_source,
)
from lpconv.errors import InputError, UnsupportedError
from lpconv.forms import Form
from lpconv.forms.blocks import Workspace, block_stats
from lpconv.forms.coded import bytes_on_grid, digest_of
from lpconv.forms.facts import Measurement
from lpconv.forms.form import Side
from lpconv.layouts.reader import StoredTensors
from lpconv.models.coded import Codes
from lpconv.models.layer_walk import LayerWalk, Matrix, Moment, collected, matrices_of, sampled_rows
from lpconv.models.opening import model_errors
from lpconv.plan.job import Job
from lpconv.plan.memory import MOMENTS_BYTES, windows_together
from lpconv.plan.options import GPTAQ
from lpconv.plan.plan import Plan, PlannedTensor
from lpconv.progress import Progress, quiet_transformers
from lpconv.report.tensors import output_errors, tokens_per_expert, tokens_text
from lpconv.results import FileRecord, RoundingRecord, from_json, to_json
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.dtypes import TORCH_DTYPES
from lpconv.storage.header import DTYPE_BITS
from lpconv.storage.partfile import write_small
from lpconv.storage.source import Source, open_source, read_range, read_tensor
from lpconv.storage.staging import Staging
from lpconv.verify.calibrate import job_windows
from lpconv.workers import SingleThreadedTorch, Workers

_FOLDER = "journal.rounded"  # not part of the output, like the journal
_HINT = "use --rounding nearest"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layer:
    """A journal line: layer `rounded_layer` of `count` is in `files`, with its weights rounded as in `records`."""

    rounded_layer: int
    count: int
    files: tuple[FileRecord, ...]
    records: dict[str, RoundingRecord]


@contextmanager
def round_weights(job: Job, staging: Staging, progress: Progress) -> Iterator[Job]:
    """The job with the codes chosen by error feedback, computed now or in the run that this one resumes.

    Raises InputError for inputs that are not finite, UnsupportedError for a model whose layers cannot run one by one.
    """
    layers = _finished_layers(staging)
    if not layers or len(layers) < layers[0].count:
        layers = _round_layers(job, staging, layers, progress)
    records = {name: record for layer in layers for name, record in layer.records.items()}
    files = (f.name for layer in layers for f in layer.files)
    with closing(open_source(Checkpoint.of_files(_FOLDER, staging.directory, files))) as chosen:
        yield dataclasses.replace(job, plan=job.plan.with_forms(partial(_chosen_form, chosen, records)))
    shutil.rmtree(staging.directory / _FOLDER, ignore_errors=True)  # the output has their contents


def _chosen_form(chosen: Source, records: dict[str, RoundingRecord], t: PlannedTensor) -> Form:
    if t.name not in records:
        return t.form
    held = {c.name: read_tensor(chosen, c.name) for c in t.form.side}
    return t.form.with_codes(lambda c, start, stop: read_range(chosen, c.name, start, stop), held, records[t.name])


def _finished_layers(staging: Staging) -> list[_Layer]:
    """The leading layers that the journal lists without a gap."""
    layers = {line["rounded_layer"]: from_json(_Layer, line) for line in staging.done if "rounded_layer" in line}
    count = next((i for i in range(len(layers)) if i not in layers), len(layers))
    return [layers[i] for i in range(count)]


@contextmanager
def open_rounding(job: Job) -> Iterator["_Rounding"]:
    """The rounding of a job's layers, before the first one."""
    config, tokens, length = job_windows(job)
    with (
        closing(Workers(job.source, job.memory.workers)) as workers,
        model_errors("the model cannot be run layer by layer", hint=_HINT),
        _Weights.open(job.checkpoint) as weights,
        quiet_transformers(),
        ExitStack() as opened,
    ):
        weights.plan = job.plan
        at_once = windows_together(config, length)
        walk = LayerWalk.from_files(job.plain, weights, tokens.windows, at_once=at_once)
        source = None
        if job.plan.options.rounding == GPTAQ:
            stored = opened.enter_context(StoredTensors.open(job.checkpoint))
            source = LayerWalk.from_files(job.plain, stored, tokens.windows, at_once=at_once)
        yield _Rounding(job, workers, weights, walk, source)


def _round_layers(job: Job, staging: Staging, done: list[_Layer], progress: Progress) -> list[_Layer]:
    """All layers: those in `done` run with their rounded weights, the others are rounded and written."""
    layers = list(done)
    with open_rounding(job) as rounding:
        count = len(rounding.layers)
        progress.start("rounding layers", count, unit="steps", done=len(layers))
        for index in range(count):
            if index < len(done):
                rounding.take(load_file(staging.directory / f.name) for f in done[index].files)
                rounding.advance(index)
                continue
            records = rounding.round_layer(index)
            layers.append(_written(staging, index, count, rounding.rounded, records))
            rounding.advance(index)
            progress.advance(1, _figures(job.plan, records))
    if not any(layer.records for layer in layers):
        raise UnsupportedError("no weight with codes of at most 8 bits belongs to a linear layer", hint=_HINT)
    return layers


def _figures(plan: Plan, records: Mapping[str, RoundingRecord]) -> str:
    """Output errors of a rounded layer, and tokens of its experts."""
    errors = output_errors(records.values())
    if errors is None:
        return "no weights"
    layers = {layer for layer, _ in tokens_per_expert(records)}
    planned = {t.name: records.get(t.name) for t in plan.tensors if layers and t.can_be_rounded}
    tokens = {expert: count for expert, count in tokens_per_expert(planned).items() if expert[0] in layers}
    text = "output error {:.2g} → {:.2g}".format(*errors)
    return f"{text}, {tokens_text(tokens)}" if tokens else text


def _written(
    staging: Staging, index: int, count: int, rounded: dict[str, tuple[Form, Side]], records: dict[str, RoundingRecord]
) -> _Layer:
    name = f"{_FOLDER}/{index:05}.safetensors"
    stored = {n: x for _, parts in rounded.values() for n, x in parts.items()}
    file = dataclasses.replace(write_small(staging.directory / name, save(stored)), name=name)
    layer = _Layer(rounded_layer=index, count=count, files=(file,), records=records)
    staging.append(to_json(layer))
    return layer


class _Weights(StoredTensors):
    """The tensors of the source, except that those in `rounded` have their decoded values."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rounded: dict[str, tuple[Form, Side]] = {}
        self.plan: Plan | None = None  # may store rounded tensors in another order of elements

    def values(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self.rounded:
            return super().values(name, start, stop)
        codes = Codes.from_form(*self.rounded[name])
        if self.plan is None or name not in self.plan.reordered:
            return codes.part(start, stop).decode_to(torch.empty(stop - start))
        whole = codes.decode_to(torch.empty(len(codes))).view(self.forms[name].shape)
        return self.plan.reorder(name, whole, back=True).reshape(-1)[start:stop]


class TensorRounding:
    """The stored components of a tensor in `parts`, by name. Matrices that are never rounded here keep nearest codes.

    The scales are those of rounding to nearest; if they are searched, columns count by the size of their inputs.
    """

    def __init__(self, t: PlannedTensor, workers: Workers, measured: Measurement, count: int) -> None:
        assert t.form.takes_codes, t.form
        (data,) = t.form.data
        self.form, self._workers, self._measured = t.form, workers, measured
        self._codes = torch.empty(data.num_bytes, dtype=torch.uint8)
        codes = self._codes.view(TORCH_DTYPES.get(data.dtype, torch.uint8)).view(data.shape)
        self.parts = {**{c.name: measured.side[c.name] for c in t.form.side}, data.name: codes}
        self._size = t.info.num_elements // count
        self._signal = self._noise = self._nearest = self._max_steps = 0.0
        self._num_inputs = [0] * count  # of each matrix

    @classmethod
    def begin(cls, t: PlannedTensor, workers: Workers, moments: Mapping[Matrix, Moment]) -> Self | None:
        """Choose the scales of a tensor, given the moments of its matrices. None if it has NaN or Inf."""
        own = {m: moment for m, moment in moments.items() if m.name == t.name}
        count = next(iter(own)).count
        form = t.form
        if not any(moment.is_transposed for moment in own.values()):  # otherwise a row has one input
            form = form.with_importance(_importance(own, count, t.info.shape[-1]).squeeze(0))
        with SingleThreadedTorch():
            measured = workers.measure(dataclasses.replace(t, form=form))
        if not measured.stats.is_finite:
            return None
        rounding = cls(t, workers, measured, count)
        if count > 1:
            for index in range(count):
                rounding._round_to_nearest(index)
        return rounding

    def round(self, matrix: Matrix, inverse: InverseFactor, moment: Moment, step_CC: Tensor | None) -> None:
        """Round one matrix with error feedback, aimed at the outputs of the source if `step_CC` leads there."""
        weight_RC, scales_RC = map(moment.oriented, self._weight_and_scales(matrix.index))
        assert self.form.format is not None
        aim_RC = weight_RC if step_CC is None else aimed_at_source(weight_RC, inverse, step_CC)
        rounded_RC = round_with_feedback(aim_RC, inverse, scales_RC, self.form.format)
        self._store(matrix.index, moment.oriented(rounded_RC))
        sample, scales = sampled_rows(weight_RC), sampled_rows(scales_RC)
        self._signal += moment.squared_outputs(sample)
        self._noise += moment.squared_outputs(sample - sampled_rows(rounded_RC))
        self._nearest += moment.squared_outputs(sample - round_to_nearest(sample, scales, self.form.format))
        self._num_inputs[matrix.index] = moment.num_inputs
        self._note_distance(rounded_RC, weight_RC, scales_RC)

    def record(self) -> RoundingRecord:
        """The record of the rounding of all matrices."""
        signal = self._signal or 1.0
        return RoundingRecord(
            output_error=self._noise / signal,
            nearest_error=self._nearest / signal,
            num_inputs=sum(self._num_inputs),
            max_steps=self._max_steps,
            sha256=digest_of(self.parts),
            num_nearest=self._num_inputs.count(0),
            expert_inputs=tuple(self._num_inputs) if len(self._num_inputs) > 1 else (),
        )

    def _round_to_nearest(self, index: int) -> None:
        weight, scales = self._weight_and_scales(index)
        assert self.form.format is not None
        rounded = round_to_nearest(weight, scales, self.form.format)
        self._store(index, rounded)
        self._note_distance(rounded, weight, scales)

    def _weight_and_scales(self, index: int) -> tuple[Tensor, Tensor]:
        """A matrix of the source and the scale of each of its numbers, fp32, as stored."""
        start, shape = index * self._size, self.form.shape[-2:]
        weight = self._workers.read_numbers(self.form.name, start, start + self._size).float()
        scales = self.form.scale_of_each(self._measured.side, start, start + self._size)
        return weight.view(shape), scales.view(shape)

    def _note_distance(self, rounded: Tensor, weight: Tensor, scales: Tensor) -> None:
        """Note the largest distance of a number; overwrites `rounded`."""
        self._max_steps = max(self._max_steps, float(rounded.sub_(weight).div_(scales).abs_().amax()))

    def _store(self, index: int, rounded: Tensor) -> None:
        """Store the codes of a matrix of numbers on the form's grid."""
        (component,), start = self.form.data, index * self._size
        place, _ = self.form.place(start, start + self._size, self._measured.side)
        with self._workers.borrow() as work:
            raw = bytes_on_grid(self.form, rounded.reshape(-1), start, self._measured, work)
        begin = place * DTYPE_BITS[component.dtype] // 8
        self._codes[begin : begin + len(raw)] = raw


def _importance(moments: Mapping[Matrix, Moment], count: int, columns: int) -> Tensor:
    """How much the error of each column matters, fp32 [count, columns]; equally for matrices without a moment."""
    importance = torch.ones(count, columns)
    for matrix, moment in moments.items():
        diagonal = moment.hessian_CC.diagonal()
        importance[matrix.index] = diagonal + DAMPING * diagonal.mean()
    return importance


class _Rounding:
    """Rounds the layers of `walk` in order; the results are in `weights.rounded` until the walk advances.

    With `source`, which walks through the unrounded layers, weights are aimed at its outputs.
    """

    def __init__(
        self, job: Job, workers: Workers, weights: _Weights, walk: LayerWalk, source: LayerWalk | None
    ) -> None:
        self._workers, self._weights, self._walk, self._source = workers, weights, walk, source
        self._planned = {t.name: t for t in job.plan.tensors if t.can_be_rounded}
        self.layers, self.rounded = walk.layers, weights.rounded

    def advance(self, index: int) -> None:
        """Run layer `index` with its rounded weights, and forget them."""
        if index + 1 < len(self.layers):
            for walk in filter(None, (self._walk, self._source)):
                walk.advance(index)
        self.rounded.clear()

    def matrices(self, index: int) -> set[Matrix]:
        """The matrices of layer `index` to round."""
        return {m for m in matrices_of(self.layers[index]) if m.name in self._planned}

    def take(self, files: Iterator[dict[str, Tensor]]) -> None:
        """Load the rounded weights of a layer from the files of an earlier run."""
        for stored in files:
            for t in self._planned.values():
                if t.form.components[0].name in stored:
                    parts = {c.name: stored[c.name] for c in t.form.components}
                    self._weights.rounded[t.name] = t.form, parts

    def round_layer(self, index: int) -> dict[str, RoundingRecord]:
        """Round the weights of layer `index`, the next one of the walk."""
        tensors: dict[str, TensorRounding | None] = {}
        left = self.matrices(index)
        while left:
            room = MOMENTS_BYTES if self._source is None else MOMENTS_BYTES // 2  # the moments of shifts are as large
            moments = collected(self._walk, index, left, room, self._source)
            if not moments:
                break  # no input reaches the remaining weights
            left -= moments.keys()
            for moment in {id(m): m for m in moments.values()}.values():
                shared = [m for m, own in moments.items() if own is moment]
                for name in (m.name for m in shared if m.name not in tensors):
                    tensors[name] = TensorRounding.begin(self._planned[name], self._workers, moments)
                self._round_together([(m, t) for m in shared if (t := tensors[m.name]) is not None], moment)
                moment.hessian_CC, moment.shift_CC = torch.empty(0), None  # frees the largest tensors
        return {name: rounding.record() for name, rounding in tensors.items() if rounding is not None}

    def _round_together(self, matrices: list[tuple[Matrix, TensorRounding]], moment: Moment) -> None:
        """Round weights that share their inputs."""
        if not matrices:
            return
        try:
            inverse = inverse_factor(moment.hessian_CC)
        except ValueError as e:
            raise InputError(
                f"`{matrices[0][0].name}`: {e} on the text",
                hint="check with `lpconv inspect --stats` whether the weights are finite",
            ) from e
        step_CC = None if moment.shift_CC is None else step_to_source(inverse, moment.shift_CC)
        for matrix, rounding in matrices:
            rounding.round(matrix, inverse, moment, step_CC)
            self._weights.rounded[matrix.name] = rounding.form, rounding.parts


def with_codes(job: Job, codes: Mapping[str, Side]) -> Job:
    """The job with forms that store `codes`, the components of tensors by name; other tensors are rounded as planned.

    Raises InputError for a tensor that the plan stores otherwise.
    """
    forms = {t.name: _given(job.source, t, codes[t.name]) for t in job.plan.tensors if t.name in codes}
    return dataclasses.replace(job, plan=job.plan.with_forms(lambda t: forms.get(t.name, t.form)))


def stored_parts(form: Form, values: Tensor, side: Side, work: Workspace) -> dict[str, Tensor]:
    """The components to store, by name, for numbers on the form's grid (fp32, 1-D) with the scales in `side`."""
    (component,) = form.data
    raw = bytes_on_grid(form, values, 0, Measurement(stats=block_stats(values, work), side=side), work)
    codes = raw.view(TORCH_DTYPES.get(component.dtype, torch.uint8)).view(component.shape)
    return {**side, component.name: codes}


def _given(source: Source, t: PlannedTensor, parts: Side) -> Form:
    form, codes = t.form, Codes.from_form(t.form, parts)
    if not form.takes_codes or parts.keys() != {c.name for c in form.components}:
        raise InputError(
            f"the codes of `{t.name}` are not stored as {form.words}", hint="convert the source again with this lpconv"
        )
    held = {c.name: parts[c.name] for c in form.side}
    weight, got = read_tensor(source, t.name).float().view(-1), torch.empty(form.num_elements)
    distance = codes.decode_to(got).sub_(weight).abs_().div_(form.scale_of_each(held, 0, form.num_elements))
    record = RoundingRecord(max_steps=float(distance.amax()), sha256=digest_of(parts))
    return form.with_codes(codes.fetch, held, record)
