"""Mend the scales of a checkpoint that others quantised, and leave all else as it lies.

*Unequal scales.* Readers put some weights into one matrix (q, k, v; gate, up) and take one scale for it. Of those that
have their own, each gets the largest, so that no code grows beyond its format; its codes take up the factor between the
two, or the scales of its groups where it has such (NVFP4). That is exact where the factor is a power of two and nothing
falls below the grid's least step; what changed elsewhere is counted, number by number.

*Inverted scales.* One layout divides by the scale that the other multiplies by. A weight that is absurdly large, and
like the others with the reciprocal, has it inverted. Without weights to compare with, `against` has to say so.

A file keeps its header, its order and every byte that is not named above. What was lost cannot be made up: scales that
are zero, no number or missing are refused.
"""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from lpconv.checkpoint.contents import Contents, read_contents
from lpconv.checkpoint.header import read_header
from lpconv.checkpoint.partfile import PartFile, write_small
from lpconv.checkpoint.place import open_file
from lpconv.checkpoint.source import Source, open_source, read_range
from lpconv.checkpoint.staging import MARKER, SUMS, Staging, check_apart
from lpconv.checkpoint.unchanged import watch, watched_files
from lpconv.convert.compare import compare
from lpconv.convert.defects import AGAIN, beyond_repair, check_repairable
from lpconv.convert.files import copy_side_files, write_sums
from lpconv.convert.inspect import inspect
from lpconv.convert.mend import Changes, Mend, pieces
from lpconv.convert.scales import (
    FACTOR,
    Scales,
    fused_factors,
    grids_of,
    is_inverted,
    judged,
    lost,
    scales_in,
    unsound,
    usual_bound,
)
from lpconv.errors import UnsupportedError, VerificationError
from lpconv.forms.decoded import open_values
from lpconv.forms.foreign.grid import Grid
from lpconv.forms.ranges import block_ranges
from lpconv.progress import Progress
from lpconv.report.numbers import shown
from lpconv.results import FileRecord, RepairedTensor, RepairResult, ordered_json_text, to_json
from lpconv.version import __version__

__all__ = ["repair"]

_RUNS = {MARKER, SUMS, "report.json", "report.html"}  # what a conversion of ours said of the files
# How far from the largest weight of the source a bound may be: rounded up to a power of two, and two roundings more.
_LEAST, _MOST = 0.45, 2.5


def repair(
    directory: Path, output: Path, *, against: Path | None = None, force: bool, progress: Progress
) -> RepairResult:
    """Write the checkpoint again with scales that readers can take, and say what that changed.

    `against` is the model that was quantised: it tells inverted scales from lost ones, and the output must agree with
    it. Raises UnsupportedError where nothing can be repaired, or something lost would have to be made up;
    VerificationError where the output is not what it should be.
    """
    check_apart(directory, output)
    contents = read_contents(directory)
    check_repairable(contents, inspect(contents.directory).problems)
    watched = watch(contents.directory, watched_files(contents))
    with closing(open_source(contents)) as source:
        grids = grids_of(contents, source)
        found = scales_in(grids, source)
        check_repairable(contents, tuple(unsound(found, grids, source, contents)))
        mends = _mends(grids, found, against)
        identity = {"repair": str(directory)}
        with Staging(output, identity, resume=False, force=force) as staging, staging.discarded_on_failure():
            progress.start("repairing", sum(e.info.num_bytes for e in source.entries.values()))
            writer = _Writer(contents, source, staging.directory, mends)
            files = tuple(writer.weights(file, progress) for file in contents.weight_files)
            tensors = writer.records(found)
            writer.rest(files, tensors)
            left = _left(contents, staging.directory, tensors, against, progress)
            watched.check()
            staging.publish()
    return RepairResult(
        path=str(directory),
        output=str(output),
        layout=str(contents.config["quantization_config"].get("quant_method")),
        tensors=tensors,
        num_tensors=len(grids),
        left=left,
        files=files,
    )


def _mends(grids: Mapping[str, Grid], found: Mapping[str, Scales], against: Path | None) -> dict[str, Mend]:
    """What is to be done, by weight; raises UnsupportedError for what cannot be, and where there is nothing."""
    mends = {n: _inverted(grids[n], found, against) for n in grids if is_inverted(found[n])}
    dropped = tuple(lost({n: s for n, s in found.items() if n not in mends}))
    if dropped:
        raise beyond_repair(dropped[0])
    known = {n: replace(s, one=mends[n].new) if n in mends else s for n, s in found.items()}
    for names, factor in fused_factors(known).values():
        if factor == 1:
            continue
        ones = [s for n in names if (s := known[n].one) is not None]
        kinds = {(grids[n].format, grids[n].factor is None, grids[n].divides) for n in names}
        shared = min(ones) if grids[names[0]].divides else max(ones)
        mine = {n: Mend(grid=grids[n], is_inverted=n in mends, old=known[n].one, new=shared) for n in names}
        if len(kinds) > 1 or not all(m.can_rescale for m in mine.values()):
            raise beyond_repair(f"{shown(names)}: weights that readers fuse are not stored alike")
        mends |= {n: m for n, m in mine.items() if m.is_inverted or m.ratio != 1}
    if not mends:
        raise UnsupportedError(
            "there is nothing to repair: no scale is inverted, and those of weights that readers fuse are equal",
            hint="`lpconv inspect --strict` says what else may be wrong",
        )
    return mends


def _inverted(grid: Grid, found: Mapping[str, Scales], against: Path | None) -> Mend:
    """The weight with the reciprocal of its scale; raises UnsupportedError where that is not sure to be right."""
    scales = found[grid.name]
    one = scales.one
    if one is None:  # a scale for each block
        bound = grid.format.max / scales.least
    else:
        bound = scales.bound * (one**2 if grid.divides else one**-2)
    if against is not None:
        largest = _largest(against, grid.name)
        is_sure = _LEAST * largest <= bound <= _MOST * largest
    else:
        usual = usual_bound({n: s for n, s in found.items() if not is_inverted(s)})
        is_sure = usual / FACTOR <= bound <= usual * FACTOR if usual else False
    stored = grid.factor or grid.scales.component
    if not is_sure or stored.dtype != "F32":
        raise UnsupportedError(
            f"`{grid.name}`: weights of up to {scales.bound:.2g}, or of {bound:.2g} if `{stored.name}` is inverted; it "
            "may as well be lost",
            hint=AGAIN if against is not None else "--against MODEL, what was quantised, would tell",
        )
    new = None if one is None else float(torch.tensor(one).reciprocal())
    return Mend(grid=grid, is_inverted=True, old=new, new=new)


def _largest(model: Path, name: str) -> float:
    """The largest magnitude of a weight of another checkpoint, 0 where it has none."""
    with closing(open_values(read_contents(model))) as source:
        if name not in source.entries:
            return 0.0
        count = source.entries[name].info.num_elements
        blocks = (read_range(source, name, start, stop) for start, stop in block_ranges(count, 8))
        return max(float(x.float().abs().max()) for x in blocks)


class _Writer:
    """Writes the files of a repaired checkpoint into a folder."""

    def __init__(self, contents: Contents, source: Source, directory: Path, mends: Mapping[str, Mend]) -> None:
        self._contents, self._source, self._directory, self._mends = contents, source, directory, mends
        self._changes = {n: Changes() for n in mends}

    def weights(self, file: str, progress: Progress) -> FileRecord:
        """One weight file, tensor by tensor in the order in which they lie."""
        path = self._contents.directory / file
        header = read_header(path)
        head = bytearray(header.data_start)
        with closing(open_file(path)) as f:
            f.read_into(0, memoryview(head))
        with ThreadPoolExecutor(1) as flusher:
            part = PartFile(self._directory, file, header.file_size, flusher)
            part.append(memoryview(head))
            for info in header.tensors.values():
                for piece in pieces(self._source, info, self._mends, self._changes):
                    data = piece.reshape(-1).contiguous().view(torch.uint8).numpy().data
                    part.append(data)
                    progress.advance(len(data))
            return part.finish()

    def records(self, before: Mapping[str, Scales]) -> tuple[RepairedTensor, ...]:
        """What became of each weight, known when all files are written."""
        return tuple(self._changes[n].record(n, m, before[n].one) for n, m in self._mends.items())

    def rest(self, files: tuple[FileRecord, ...], tensors: tuple[RepairedTensor, ...]) -> None:
        """Config, index and side files as they are, and what was done."""
        directory = self._contents.directory
        names = {"config.json", *(p.name for p in directory.glob("*.index.json")), *self._contents.side_files}
        copy_side_files(self._directory, self._contents, sorted(names - _RUNS), renamed={})
        done = {"format_version": 1, "kind": "repair", "version": __version__, "repaired": to_json(tensors)}
        write_small(self._directory / MARKER, ordered_json_text(done))
        write_sums(self._directory, files)


def _left(
    contents: Contents, written: Path, tensors: tuple[RepairedTensor, ...], against: Path | None, progress: Progress
) -> tuple[str, ...]:
    """Look at what was written as `inspect` and `verify` do: what is still odd. Raises VerificationError."""
    found = judged(inspect(written), written)
    repaired = {t.name for t in tensors}
    others = compare(written, contents.directory, gates=(), progress=progress).tensors
    wrong = [
        f"`{t.name}` is another one than before" for t in others if t.sqnr_db < math.inf and t.name not in repaired
    ]
    if against is not None:
        wrong += compare(written, against, gates=(), progress=progress).failures
    if found.problems or wrong:
        raise VerificationError("; ".join((*found.problems, *wrong)), hint="`lpconv inspect` says more of the source")
    return found.warnings
