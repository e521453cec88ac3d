"""Round with error feedback through a model: each layer on the outputs of the rounded layers before it, on a text.

The source runs layer by layer (`models/layer_walk.py`), with its matrices read from its files. Weights of a layer are
rounded in order of use, each when all its inputs are known. Weights with the same inputs share their second moment
Σ x xᵀ. Experts come one after the other, each with the tokens routed to it.

Every rounded layer is saved as a file in the working folder with its final codes and scales. A resumed run reads it
instead of rounding again. The output is then written and verified as usual, from forms that read their codes there
(`forms/coded.py`), and the files are deleted before the output is published.

A weight that no input reaches, or that is not a matrix of a linear layer, is rounded to nearest.
"""

import dataclasses
import math
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any, Self

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from lpconv.convert.gptq import DAMPING, Factor, Moment, round_to_nearest, round_with_feedback
from lpconv.errors import InputError, UnsupportedError
from lpconv.formats.spec import Format
from lpconv.forms import Form
from lpconv.forms.blocks import Workspace, block_stats
from lpconv.forms.coded import bytes_on_grid, digest_of
from lpconv.forms.facts import Measurement
from lpconv.forms.form import Side
from lpconv.layouts.reader import StoredTensors
from lpconv.machine import share_one_heap, trim_heap
from lpconv.models.coded import Codes
from lpconv.models.layer_walk import LayerRun, LayerWalk, Matrix, Product, matrices_of
from lpconv.models.opening import model_errors
from lpconv.plan.job import Job
from lpconv.plan.memory import ROUNDED_BYTES, SLAB, held_together, windows_together
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
_SAMPLED = 2**18  # most numbers of a matrix, in evenly spaced rows, whose output errors are measured


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
    share_one_heap()  # each batch runs in a thread of its own
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
        yield _Rounding(job, workers, weights, walk, source, held_together(config, length, at_once))


def _round_layers(job: Job, staging: Staging, done: list[_Layer], progress: Progress) -> list[_Layer]:
    """All layers: those in `done` run with their rounded weights, the others are rounded and written."""
    layers = list(done)
    with open_rounding(job) as rounding:
        count = len(rounding.layers)
        progress.start("rounding layers", count, unit="layers", done=len(layers))
        for index in range(count):
            if index < len(done):
                rounding.take(index, (load_file(staging.directory / f.name) for f in done[index].files))
            else:
                records = rounding.round_layer(index)
                layers.append(_written(staging, index, count, rounding.rounded, records))
                progress.advance(1, _figures(job.plan, records))
            rounding.rounded.clear()
            trim_heap()  # or each layer adds to the peak
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
    files, stored = list[FileRecord](), dict[str, Tensor]()
    for number, (_, parts) in enumerate(rounded.values(), start=1):
        stored |= parts
        if number == len(rounded) or sum(x.nbytes for x in stored.values()) >= ROUNDED_BYTES:
            name = f"{_FOLDER}/{index:05}-{len(files)}.safetensors"
            files.append(dataclasses.replace(write_small(staging.directory / name, save(stored)), name=name))
            stored = {}
    layer = _Layer(rounded_layer=index, count=count, files=tuple(files), records=records)
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
        if self.plan is None or name not in self.plan.orders:
            return codes.part(start, stop).decode_to(torch.empty(stop - start))
        whole = codes.decode_to(torch.empty(len(codes))).view(self.forms[name].shape)
        return self.plan.in_source_order(name, whole).reshape(-1)[start:stop]


class TensorRounding:
    """The stored components of a tensor in `parts`, by name, with the scales of rounding to nearest in `measured`.

    The scales are those of rounding to nearest; if they are searched, columns count by the size of their inputs.
    """

    def __init__(self, t: PlannedTensor, workers: Workers, measured: Measurement, count: int) -> None:
        assert t.form.takes_codes, t.form
        (data,) = t.form.plain.data
        self.form, self._planned, self._workers, self._measured = t.form, t, workers, measured
        self._codes = torch.empty(data.num_bytes, dtype=torch.uint8)
        codes = self._codes.view(TORCH_DTYPES.get(data.dtype, torch.uint8)).view(data.shape)
        self.parts: Side = {**{c.name: measured.side[c.name] for c in t.form.plain.side}, data.name: codes}
        self._is_plain = count > 1  # until all matrices are rounded
        self._size = t.info.num_elements // count
        self._signal = self._noise = self._nearest = self._max_steps = 0.0
        self._num_inputs = [0] * count  # of each matrix

    @classmethod
    def begin(
        cls, t: PlannedTensor, workers: Workers, matrix: Matrix, squares: Tensor | None, measured: Measurement | None
    ) -> Self | None:
        """Choose the scales of a tensor of matrices like `matrix`, if not `measured`. None if it has NaN or Inf.

        `squares` are sums of squares of the inputs of each column, [columns] or [matrices, columns].
        """
        form = t.form
        if squares is not None:
            mean = squares.mean(-1, keepdim=True)
            form = form.with_importance((squares + DAMPING * mean).masked_fill(mean == 0, 1.0))  # else nothing counts
        with SingleThreadedTorch():
            measured = measured or workers.measure(dataclasses.replace(t, form=form))
        return cls(t, workers, measured, matrix.count) if measured.stats.is_finite else None

    def rounded(self, matrix: Matrix, factor: Factor) -> Self:
        """Round one matrix with error feedback. The result is another rounding if the codes need larger scales.

        The codes of a tensor with several matrices are stored by `finish`.
        """
        self._num_inputs[matrix.index] = factor.num_inputs
        if not factor.is_transposed:  # whose rows have one input
            self._measured = self.form.with_column_errors(self._measured, matrix.index, factor.column_errors())
            self.parts = {**self.parts, **{c.name: self._measured.side[c.name] for c in self.form.plain.side}}
        step = -(-self._size // _SAMPLED)
        for first_row, weight, scales in self._slabs(matrix.index, is_whole=factor.is_transposed):
            weight_RC, scales_RC = map(factor.oriented, (weight, scales))
            rounded_RC = round_with_feedback(weight_RC, factor, scales_RC, self._element)
            sample = slice(-first_row % step, None, step)
            self._note_errors(weight_RC[sample], rounded_RC[sample], scales_RC[sample], factor)
            self._store(matrix.index, first_row, factor.oriented(rounded_RC), weight, scales)
        larger = None if self._is_plain else self._store_all()
        if larger is not None:
            again = type(self)(self._planned, self._workers, larger, matrix.count).rounded(matrix, factor)
            again._nearest = self._nearest  # with its own scales
            return again
        return self

    @property
    def stored(self) -> tuple[Form, Side]:
        """The components, and the form in which they are until the last matrix is rounded."""
        return self.form.plain if self._is_plain else self.form, self.parts

    def finish(self) -> Measurement | None:
        """Round matrices that no input reached to nearest, and store all codes. Returns larger scales if needed."""
        for index in (i for i, count in enumerate(self._num_inputs) if not count):
            for first_row, weight, scales in self._slabs(index):
                self._store(index, first_row, round_to_nearest(weight, scales, self._element), weight, scales)
        return self._store_all() if self._is_plain else None

    def _store_all(self) -> Measurement | None:
        stored = self.form.from_plain(self.parts)
        if self.form.data[0].name not in stored:
            return dataclasses.replace(self._measured, side=stored)
        self.parts, self._is_plain = stored, False
        del self._codes  # a byte per number
        return None

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

    @property
    def _element(self) -> Format:
        assert self.form.format is not None
        return self.form.format

    def _slabs(self, index: int, *, is_whole: bool = False) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Rows of a matrix of the source and the scale of each of their numbers, fp32, with the index of the first row.

        All rows together if `is_whole`.
        """
        begin, cols = index * self._size, self.form.shape[-1]
        unit = math.lcm(self.form.cols, cols)
        step = self._size if is_whole else max(SLAB // unit, 1) * unit
        for start in range(begin, begin + self._size, step):
            stop = min(start + step, begin + self._size)
            weight = self._workers.read_numbers(self.form.name, start, stop).float()
            scales = self.form.scale_of_each(self._measured.side, start, stop)
            yield (start - begin) // cols, weight.view(-1, cols), scales.view(-1, cols)

    def _note_errors(self, weight_RC: Tensor, rounded_RC: Tensor, scales_RC: Tensor, factor: Factor) -> None:
        self._signal += factor.squared_outputs(weight_RC)
        self._noise += factor.squared_outputs(weight_RC - rounded_RC)
        self._nearest += factor.squared_outputs(weight_RC - round_to_nearest(weight_RC, scales_RC, self._element))

    def _store(self, index: int, first_row: int, rounded: Tensor, weight: Tensor, scales: Tensor) -> None:
        """Store the codes of rows of numbers on the form's grid, and note the largest distance to the source."""
        plain, start = self.form.plain, index * self._size + first_row * self.form.shape[-1]
        (component,), (place, _) = plain.data, plain.place(start, start + rounded.numel(), self._measured.side)
        with self._workers.borrow() as work:
            raw = bytes_on_grid(plain, rounded.reshape(-1), start, self._measured, work)
        begin = place * DTYPE_BITS[component.dtype] // 8
        self._codes[begin : begin + len(raw)] = raw
        self._max_steps = max(self._max_steps, float(weight.sub_(rounded).div_(scales).abs_().amax()))


class _Rounding:
    """Rounds the layers of `walk` in order; the results are in `weights.rounded` until the walk advances.

    With `source`, which walks through the unrounded layers, weights are aimed at its outputs.
    """

    def __init__(
        self, job: Job, workers: Workers, weights: _Weights, walk: LayerWalk, source: LayerWalk | None, held: int
    ) -> None:
        self._workers, self._weights, self._walk, self._source = workers, weights, walk, source
        self._is_search = job.plan.options.scale == "search"
        self._held = held if source is None else max(held // 2, 1)
        self._planned = {t.name: t for t in job.plan.tensors if t.can_be_rounded}
        self.layers, self.rounded = walk.layers, weights.rounded

    def matrices(self, index: int) -> set[Matrix]:
        """The matrices of layer `index` to round."""
        return {m for m in matrices_of(self.layers[index]) if m.name in self._planned}

    def take(self, index: int, files: Iterator[dict[str, Tensor]]) -> None:
        """Load the rounded weights of layer `index` from the files of an earlier run."""
        for stored in files:
            for t in self._planned.values():
                if t.form.components[0].name in stored:
                    parts = {c.name: stored[c.name] for c in t.form.components}
                    self._weights.rounded[t.name] = t.form, parts
        with self._runs(index, ()) as runs:
            self._finish(*runs)

    def round_layer(self, index: int) -> dict[str, RoundingRecord]:
        """Round the weights of layer `index`, the next one of the walk; again if experts need larger scales."""
        wanted, larger = self.matrices(index), dict[str, Measurement]()
        squares = self._squares_of_stacks(index, wanted)
        while (records := self._try_layer(index, wanted, squares, larger)) is None:
            self._weights.rounded.clear()
        return records

    def _try_layer(
        self, index: int, wanted: set[Matrix], squares: dict[str, Tensor], larger: dict[str, Measurement]
    ) -> dict[str, RoundingRecord] | None:
        """Round a layer with the scales in `larger`. None if more tensors need larger scales, which are added there."""
        tensors: dict[str, TensorRounding | None] = {}
        with self._runs(index, wanted) as (run, source):
            factor: Factor | None = None
            while matrices := run.next_matrices():
                if factor is None or not run.has_same_inputs(matrices):
                    factor = None  # frees memory
                    factor = self._factor(run, source, matrices)
                for m in matrices:
                    if m.name not in tensors:
                        single = None if factor.is_transposed else factor.squares_C  # else a row has one input
                        importance = single if m.count == 1 else squares.get(m.name)
                        planned, scales = self._planned[m.name], larger.get(m.name)
                        tensors[m.name] = TensorRounding.begin(planned, self._workers, m, importance, scales)
                    if (tensor := tensors[m.name]) is not None:
                        tensor = tensors[m.name] = tensor.rounded(m, factor)
                        self._weights.rounded[m.name] = tensor.stored
                run.pass_by(matrices)
                if source is not None:
                    source.pass_by(matrices)
            factor = None  # frees memory
            rounded = {name: tensor for name, tensor in tensors.items() if tensor is not None}
            found = {name: scales for name, t in rounded.items() if (scales := t.finish()) is not None}
            if found:
                larger.update(found)
                return None
            self._weights.rounded.update((name, t.stored) for name, t in rounded.items())
            self._finish(run, source)
        return {name: tensor.record() for name, tensor in rounded.items()}

    @contextmanager
    def _runs(self, index: int, wanted: Collection[Matrix]) -> Iterator[tuple[LayerRun, LayerRun | None]]:
        """Runs through layer `index` of the walk, and of the source. These do not wait for experts.

        Other tokens may reach an expert in the source.
        """
        with ExitStack() as opened:
            run = opened.enter_context(LayerRun(self._walk, index, wanted, held=self._held))
            source = None
            if self._source is not None:
                single = (m for m in wanted if not m.is_expert)
                source = opened.enter_context(LayerRun(self._source, index, single, held=self._held))
            yield run, source

    def _finish(self, *runs: LayerRun | None) -> None:
        """Run layers to the end, unless they are the last ones."""
        for run in runs:
            if run is not None and not run.is_last:
                run.finish()

    def _factor(self, run: LayerRun, source: LayerRun | None, matrices: tuple[Matrix, ...]) -> Factor:
        """The factor of the inputs of the matrices that are next."""
        try:
            with suppress(ArithmeticError):
                return self._moment(run, source, matrices).factor()
            return self._moment(run, source, matrices).factor(torch.float64)
        except (ValueError, ArithmeticError) as e:
            raise InputError(
                f"`{matrices[0].name}`: {e} on the text",
                hint="check with `lpconv inspect --stats` whether the weights are finite",
            ) from e

    def _moment(self, run: LayerRun, source: LayerRun | None, matrices: tuple[Matrix, ...]) -> Moment:
        """The sums over the inputs of the matrices that are next."""
        moment: Moment | None = None
        for number, product in run.products(matrices):
            moment = moment or Moment.zero(product.x.shape[-1], is_transposed=product.is_transposed)
            in_source = None if source is None else source.product(number, matrices)
            moment.add(product.x, None if in_source is None else in_source.x)
        assert moment is not None, matrices
        trim_heap()  # of activations that are no longer held
        return moment

    def _squares_of_stacks(self, index: int, wanted: Collection[Matrix]) -> dict[str, Tensor]:
        """Sums of squares of the inputs of each column, [matrices, columns], for tensors that hold several matrices.

        Their scales are chosen for all matrices at once, so the layer runs once more, with its weights of the source.
        Without a search of scales there are none.
        """
        stacks = {m for m in wanted if m.count > 1 and self._is_search}
        squares: dict[str, Tensor] = {}

        def note(product: Product) -> None:
            for m in () if product.is_transposed else product.matrices:
                if m.name not in squares:
                    squares[m.name] = torch.zeros(m.count, product.x.shape[-1])
                squares[m.name][m.index] += product.x.reshape(-1, product.x.shape[-1]).square().sum(0)

        if stacks:
            self._walk.watch(index, stacks, note)
        return squares


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
