"""What an inspection reads of the weights: scales of quantised ones, and with `--stats` statistics of all values.

Statistics are those of the decoded weights for checkpoints quantised by another tool, and saturated codes are counted:
only few codes have the largest magnitude, unless scales are too small.
"""

from contextlib import closing
from dataclasses import replace

import torch

from lpconv.forms import Headers, Stored
from lpconv.forms.blocks import Workspace, block_stats
from lpconv.forms.facts import BlockStats, block_ranges
from lpconv.forms.grid import Grid
from lpconv.inspect.headers import VALUES, describe, inspect
from lpconv.layouts import READ
from lpconv.layouts.defects import Findings
from lpconv.layouts.headers import judged_grids, recognise
from lpconv.layouts.reader import DecodedSource, StoredTensors
from lpconv.layouts.scale_defects import FACTOR, from_scales
from lpconv.models.ties import find_ties, tie_warnings
from lpconv.progress import Progress, Silent
from lpconv.report.numbers import code_list
from lpconv.results import InspectResult, StoredTensor
from lpconv.storage.checkpoint import Checkpoint, Openable
from lpconv.storage.source import Source, open_source, read_range

NOT_JUDGED = f"scales that are wrong by less than a factor of {FACTOR:.0f} (use `lpconv verify --against`)"
_READABLE = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
# Suspicious share of saturated codes: 0.3 of 4 bits, half of it for each further bit, but at least that of 8 bits. A
# scale of half the right size saturates 0.15 of 8-bit and 0.45 of 4-bit codes.
_MANY_OF_8 = 0.05


def judge_scales(record: InspectResult, model: Openable) -> InspectResult:
    """Add the defects found in the scales to a checkpoint's record.

    Returns `record` unchanged if the headers have problems, or if the scales are stored among the codes. Raises
    InputError if files cannot be read.
    """
    if "scales" not in record.not_checked or record.problems or record.not_judged:
        return record
    checkpoint = Checkpoint.open(model)
    with closing(open_source(checkpoint)) as source:
        forms = recognise(Headers.of(checkpoint.config, {n: e.info for n, e in source.entries.items()}))
        settings = checkpoint.config.get("quantization_config") or {}
        added = from_scales(forms, source, settings, is_ours=record.method is not None)
    if added is None:
        return record
    return replace(
        record,
        problems=added.problems,
        warnings=(*record.warnings, *added.warnings),
        checked=(*record.checked, "scales"),
        not_checked=(NOT_JUDGED, *(what for what in record.not_checked if what != "scales")),
    )


def inspect_with_statistics(model: Openable, progress: Progress | None = None) -> InspectResult:
    """`inspect`, with statistics in each tensor's record. Also opens `.bin` checkpoints.

    Codes of lpconv are measured unscaled. A checkpoint quantised by another tool is read only if it has no problems.
    """
    checkpoint, progress = Checkpoint.open(model), progress or Silent()
    with closing(open_source(checkpoint)) as source:
        infos = [(e.info, e.file) for e in source.entries.values()]
        if checkpoint.kind != "torch":
            record = inspect(checkpoint)
        else:
            record = describe(checkpoint, infos, found=Findings())
        if record.layout not in READ:
            measured = _with_statistics(record, source, progress)
            shapes = {n: (e.info.shape, e.info.dtype) for n, e in source.entries.items()}
            ties = tie_warnings(shapes, checkpoint.config, find_ties(source, checkpoint))
            return replace(measured, warnings=(*measured.warnings, *ties))
    record = judge_scales(record, checkpoint)
    if record.problems or record.not_judged:
        return record
    with StoredTensors.open(checkpoint) as stored:
        measured = _with_statistics(record, DecodedSource(stored), progress)
        grids = {} if stored.is_ours else judged_grids(stored.forms, checkpoint.config["quantization_config"])
        tensors = tuple(_with_share(t, stored, grids[t.name]) if t.name in grids else t for t in measured.tensors)
        many = tuple(w for t in tensors if (w := _saturation_warning(t, stored.forms[t.name])))
    return replace(measured, tensors=tensors, warnings=(*measured.warnings, *many))


def _saturation_warning(t: StoredTensor, form: Stored) -> str | None:
    share = t.saturated_share
    if share is None or form.format is None or share <= max(_MANY_OF_8, 4.8 / 2**form.format.storage_bits):
        return None
    return f"`{t.name}`: {share:.0%} of the codes have the largest value, so its scales may be too small"


def _with_statistics(record: InspectResult, source: Source, progress: Progress) -> InspectResult:
    progress.start("reading", sum(source.entries[t.name].info.num_bytes for t in record.tensors))
    work = Workspace()
    tensors = tuple(_measure_tensor(source, t, work, progress) for t in record.tensors)
    nan, inf = [t.name for t in tensors if t.num_nan], [t.name for t in tensors if t.num_inf]
    return replace(
        record,
        tensors=tensors,
        problems=(*record.problems, *([f"{code_list(nan)}: contains NaN"] if nan else [])),
        warnings=(*record.warnings, *([f"{code_list(inf)}: infinite numbers"] if inf else [])),
        checked=(*record.checked, "values"),
        not_checked=tuple(n for n in record.not_checked if n != VALUES),
    )


def _measure_tensor(source: Source, t: StoredTensor, work: Workspace, progress: Progress) -> StoredTensor:
    info = source.entries[t.name].info
    if info.dtype not in _READABLE or not info.num_bytes:
        progress.advance(info.num_bytes)
        return t
    total = BlockStats()
    for start, stop in block_ranges(info.num_elements):
        x = read_range(source, t.name, start, stop, buffer=work.raw)
        total = total + block_stats(x.to(torch.float32) if x.itemsize == 1 else x, work)
        progress.advance(x.nbytes)
    return replace(t, rms=total.rms, absmax=total.absmax, num_nan=total.num_nan, num_inf=total.num_inf)


def _with_share(t: StoredTensor, stored: StoredTensors, grid: Grid) -> StoredTensor:
    """The record of a weight with the share of its codes at the smallest or largest number of the format."""
    at_end = 0
    low, high = grid.codes.ends
    for start, stop in block_ranges(grid.num_elements, grid.cols):
        raw = stored.read(grid, start, stop, {})[:: len(grid.planes)]  # the codes of each span come first
        for codes, span in zip(raw, grid.spans(start, stop), strict=True):
            numbers = grid.codes.numbers(codes, span)
            at_end += int(((numbers <= low) | (numbers >= high)).sum())
    return replace(t, saturated_share=at_end / grid.num_elements)
