"""One conversion by many workers: each writes a part, and the last step checks and combines all parts.

A plan is a pure function of headers and options, so every worker makes the same plan and takes its share of the weight
files. Part i of n is published as `OUT.parts/i-of-n`. Workers share only the source and that folder. A part that exists
is complete, because it appears by a rename; an interrupted worker leaves `i-of-n.partial`, which the next one resumes.
Files of parts become files of the output by hard links, so parts stay intact until the output is published, and every
step can be repeated after a crash.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lpconv.errors import InputError, OutputExistsError, UnsupportedError, UsageError
from lpconv.machine import peak_rss_bytes
from lpconv.plan.files import write_sums
from lpconv.plan.job import Job, check_disk, identity, open_model, prepare
from lpconv.plan.options import ConvertOptions
from lpconv.plan.plan import Plan, PlannedShard
from lpconv.plan.settings import fill_options
from lpconv.plan.suited import suited_options
from lpconv.progress import Progress, Silent
from lpconv.results import ByteCounts, PartResult, from_json, json_text, to_json
from lpconv.storage.checkpoint import Openable
from lpconv.storage.contents import read_json
from lpconv.storage.partfile import fsync_directory, write_small, writing
from lpconv.storage.place import sha256_of
from lpconv.storage.remote import is_url
from lpconv.storage.staging import MARKER, PARTS, Staging, check_free, differing_settings, folder_next_to, read_marker

_FOLDER = re.compile(r"([1-9]\d*)-of-([1-9]\d*)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Part `number` of `count`, counted from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Parse ``i/n``. Raises UsageError."""
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UsageError(
                f"`{text}` is not a valid part of a conversion", hint="write i/n with i from 1 to n, such as 2/5"
            )
        return cls(number=int(match[1]), count=int(match[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def folder(self, output: Path) -> Path:
        """The folder in which this part of `output` is published."""
        return folder_next_to(output, PARTS) / f"{self.number}-of-{self.count}"


def check_shareable(options: ConvertOptions) -> None:
    """Raise UsageError for options with work that each worker would have to repeat, with possibly different results."""
    if options.calibrate is not None:
        raise UsageError(
            "a conversion with --calibrate cannot be split: layers run in order, so each worker would run the model",
            hint="convert with one process, which streams the weights; --resume continues after the last rounded layer",
        )


def part_folders(output: Path) -> dict[Part, Path]:
    """The folders of an output's finished parts, in order."""
    folder = folder_next_to(output, PARTS)
    matches = {p: _FOLDER.fullmatch(p.name) for p in (folder.iterdir() if folder.is_dir() else ())}
    parts = {Part(number=int(m[1]), count=int(m[2])): p for p, m in matches.items() if m is not None}
    return dict(sorted(parts.items(), key=lambda it: (it[0].count, it[0].number)))


def folder_for_parts(output: Path | str) -> Path:
    """The output folder of a shared conversion. Raises UnsupportedError for a URL."""
    if is_url(str(output)):
        raise UnsupportedError(
            f"parts can only be written to a local folder, not to `{output}`",
            hint="pass a folder, and copy the finished output to its place",
        )
    return Path(output)


def share_of(plan: Plan, part: Part) -> tuple[PlannedShard, ...]:
    """The files of a part: the largest file first, each to the part with the fewest bytes to read so far."""
    shares = [list[PlannedShard]() for _ in range(part.count)]
    for shard in sorted(plan.shards, key=lambda s: (-s.bytes_read, s.root.name)):
        min(shares, key=lambda share: sum(s.bytes_read for s in share)).append(shard)
    return tuple(sorted(shares[part.number - 1], key=plan.shards.index))


def convert_part(
    model: Openable, output: Path | str, options: ConvertOptions, part: Part, *, progress: Progress | None = None
) -> PartResult:
    """Write one part of the conversion of `model` into `output`, for `finish` to combine.

    Raises OutputExistsError if another worker writes or wrote the part, unless `options.resume` finds a part made by
    the same command.
    """
    started = time.perf_counter()
    progress = progress or Silent()
    check_shareable(options)
    output = folder_for_parts(output)
    folder = part.folder(output)
    checkpoint = open_model(model, output, fill_options(options))
    options, _ = suited_options(options, checkpoint)
    check_free(output, resume=True, force=options.force)
    if not (options.resume and (folder / MARKER).is_file()):
        check_free(folder, resume=options.resume, force=options.force)
    # Verification happens when the parts are combined, so workers need no memory for both models.
    with prepare(checkpoint, output, dataclasses.replace(options, verify="none", gates=())) as job:
        from lpconv.convert.apply import write_shards  # imports torch (seconds)

        if options.resume and (folder / MARKER).is_file():
            done = _read_part(job, part, folder, progress)
            progress.message(f"part {part} of `{output}` is complete: there is nothing to resume")
            return done
        shards = share_of(job.plan, part)
        check_disk(folder, sum(f.size_bytes for s in shards for f in s.files))
        with Staging(folder, _identity(job), resume=options.resume, force=options.force) as staging:
            written = write_shards(job, shards, staging, progress)
            job.watch.check()
            result = PartResult(
                part=part.number,
                parts=part.count,
                output=str(output),
                shards=written,
                bytes=ByteCounts(
                    read=sum(t.info.num_bytes for s in shards for t in s.tensors),
                    written=sum(f.size_bytes for s in shards for f in s.files),
                ),
                seconds=time.perf_counter() - started,
                peak_rss_bytes=peak_rss_bytes(),
                identity=_identity(job),
            )
            write_small(staging.directory / MARKER, json_text(result))
            write_sums(staging.directory, [f for s in written for f in s.files])
            staging.publish()
        if not options.force and os.path.lexists(output):  # another batch has published it meanwhile
            remove_parts(output)
            check_free(output, force=False)
        return result


def _identity(job: Job) -> dict[str, Any]:
    """Facts that all parts of an output must share: `identity`, without times of files that every machine downloads.

    The hub's commit identifies the contents of those files.
    """
    known = identity(job)
    if job.checkpoint.origin.revision is not None:
        sizes = [[name, size] for name, size, _ in known["source files"]]
        known |= {"source files": sizes, "source commit": job.checkpoint.origin.revision}
    return known


def checked_parts(job: Job, progress: Progress) -> tuple[PartResult, ...]:
    """All parts of the job's output, with the same plan, version and source, and files that match their hashes.

    Raises InputError for missing parts, OutputExistsError for a part that exists twice, has another origin, or is
    damaged.
    """
    there = part_folders(job.output)
    counts = sorted({part.count for part in there})
    place = folder_next_to(job.output, PARTS)
    if not counts:
        raise InputError(
            f"`{place}` contains no parts of a conversion", hint="write them with --shard 1/n to --shard n/n"
        )
    if len(counts) > 1:
        raise OutputExistsError(
            f"`{place}` contains files of different splits: {', '.join(p.name for p in there.values())}",
            hint=f"delete the parts of one split: those of {' or those of '.join(map(str, counts))}",
            details={"parts": [p.name for p in there.values()]},
        )
    parts = [Part(number=number, count=counts[0]) for number in range(1, counts[0] + 1)]
    missing = [part for part in parts if part not in there]
    if missing:
        begun = [p for p in missing if folder_next_to(p.folder(job.output), ".partial").exists()]
        unfinished = f"; started but not finished: {', '.join(map(str, begun))}" if begun else ""
        raise InputError(
            f"`{place}` lacks part {', '.join(map(str, missing))}{unfinished}",
            hint=f"write it with --shard {missing[0]}" + (" --resume" if missing[0] in begun else ""),
            details={"missing": [str(p) for p in missing]},
        )
    progress.start("checking parts", job.plan.bytes_out)
    return tuple(_read_part(job, part, there[part], progress) for part in parts)


def _read_part(job: Job, part: Part, folder: Path, progress: Progress) -> PartResult:
    """The record of a finished part, checked to belong to this job and to be unchanged."""
    anew = f"write it again with --shard {part} --force"
    record = read_marker(folder)
    if record.get("kind") != PartResult.kind or folder.is_symlink():
        raise OutputExistsError(f"`{folder}` is a link, or not a part", hint="move it, or choose another --output")
    result = from_json(PartResult, record)
    if (result.part, result.parts) != (part.number, part.count):
        raise OutputExistsError(f"`{folder}` contains part {result.part}/{result.parts} a second time", hint=anew)
    wanted: dict[str, Any] = to_json(_identity(job))
    changed = differing_settings(wanted, result.identity)
    if changed:
        raise OutputExistsError(
            f"part {part} in `{folder}` was made with other {', '.join(changed)}",
            hint=anew,
            details={"part": str(part), "changed": changed},
        )
    _check_files(result, share_of(job.plan, part), folder, anew, progress)
    return result


def _check_files(
    result: PartResult, shards: Sequence[PlannedShard], folder: Path, hint: str, progress: Progress
) -> None:
    """Raise an error for files that the plan does not assign to this part, or whose bytes have changed."""
    files = [f for s in result.shards for f in s.files]
    if [(f.name, f.size_bytes) for f in files] != [(f.name, f.size_bytes) for s in shards for f in s.files]:
        raise OutputExistsError(f"`{folder}` does not contain the files that the plan assigns to it", hint=hint)
    for file in files:
        path = folder / file.name
        if path.is_symlink() or not path.is_file():  # a link would become a link in the output
            raise InputError(f"`{path}` is not a file", hint=hint)
        if path.stat().st_size != file.size_bytes or sha256_of(path) != file.sha256:
            raise OutputExistsError(f"`{path}` is damaged: it no longer matches its SHA-256", hint=hint)
        progress.advance(file.size_bytes)


def adopt_parts(job: Job, parts: Sequence[PartResult], staging: Staging) -> None:
    """Link the files of all parts into a working folder, and add them to its journal as complete."""
    known = {line.get("shard") for line in staging.done}
    for result in parts:
        folder = Part(number=result.part, count=result.parts).folder(job.output)
        for shard in result.shards:
            if shard.shard not in known:
                for file in shard.files:
                    _adopt(folder / file.name, staging.directory / file.name)
                staging.done.append(to_json(shard))
                staging.append(to_json(shard))


def _adopt(path: Path, target: Path) -> None:
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target)
        except OSError:  # some file systems have no hard links
            shutil.copyfile(path, target)
        fsync_directory(target.parent)


def remove_parts(output: Path) -> None:
    """Delete the parts of a published output. Other files in their folder are kept."""
    for folder in part_folders(output).values():
        if read_json(folder / MARKER).get("kind") == PartResult.kind:
            shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # does not exist, or is not empty
        folder_next_to(output, PARTS).rmdir()
