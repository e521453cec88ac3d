"""`lpconv convert --pack`: store the weight files of any checkpoint in fewer bytes, and write them again.

An output has the files of its source under the same names: weight files packed (`storage/packed.py`), others copied.
`packed.json` marks it and names the source; SHA256SUMS has the hashes of the files as they are.
"""

import hashlib
import importlib.metadata
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lpconv.errors import InputError, UnsupportedError, UsageError
from lpconv.machine import usable_cores
from lpconv.options import options_of
from lpconv.plan.files import copy_side_files, write_sums
from lpconv.plan.job import check_disk
from lpconv.plan.options import ConvertOptions
from lpconv.plan.provenance import public_source
from lpconv.progress import Progress, Silent
from lpconv.report.numbers import code_list
from lpconv.results import ByteCounts, FileRecord, PackResult, RestoreResult, ordered_json_text, to_json
from lpconv.storage.checkpoint import Checkpoint, Openable, find_residual
from lpconv.storage.contents import OURS, PACKED, hidden_files, read_json
from lpconv.storage.header import DTYPE_BITS, read_header
from lpconv.storage.packed import BLOCK_BYTES, PACKED_HEAD, Blocks, PackedFile, packed_blocks, packed_end
from lpconv.storage.partfile import PartFile, write_small
from lpconv.storage.place import OpenFile, any_indirect, open_file
from lpconv.storage.staging import JOURNAL, MARKER, SUMS, Staging, check_free
from lpconv.verify.run import check_hashes

T = TypeVar("T")
_Piece = tuple[int, int, int]  # start and end in a file, and bytes per number
_SAMPLES = 64  # blocks that are coded for an estimate
_SHARED = ("--revision", "--force", "--trust-remote-code")  # options of `convert` that packing has too


def pack(
    model: Openable,
    output: Path | str,
    options: ConvertOptions,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> PackResult:
    """Store a checkpoint without loss in fewer bytes; `restore` writes its files again. A dry run estimates the size.

    Raises UsageError for options of other conversions and for a packed checkpoint, UnsupportedError for weights in
    other files than safetensors.
    """
    for declared in options_of(ConvertOptions).values():
        if declared.flag not in _SHARED and getattr(options, declared.field) != declared.default:
            raise UsageError(f"--pack does not support {declared.flag}", hint="leave it out, or convert first")
    checkpoint = Checkpoint.open(model, revision=options.revision).local_copy()
    name, directory, names, output = checkpoint.origin.name, checkpoint.directory, _names(checkpoint), Path(output)
    progress = progress or Silent()
    if checkpoint.kind != "safetensors":
        raise UnsupportedError(f"`{name}` is not in safetensors", hint="convert it first, and pack the output")
    if any_indirect(directory, names):
        raise UsageError(f"`{name}` is packed", hint="copy it, or unpack it with `lpconv restore`")
    checkpoint.check_apart(output)
    check_free(output, force=options.force, marker=PACKED)
    read, written = _sizes(directory / n for n in names)
    files: tuple[FileRecord, ...] = ()
    if left := (*checkpoint.ignored_files, *hidden_files(directory)):
        progress.message(f"left out, because they are hidden or not read as weights here: {code_list(left)}")
    if not dry_run:
        check_disk(output, written)
        checkpoint.check_promised()
        versions = {n: importlib.metadata.version(n) for n in ("lpconv", "pcodec")}
        record = {"format_version": 1, "source": to_json(public_source(checkpoint.record())), "versions": versions}
        files = _write(checkpoint, output, record, force=options.force, progress=progress)
        written = sum(f.size_bytes for f in files)
    sizes, num = ByteCounts(read=read, written=written), len(checkpoint.tensors)
    return PackResult(path=name, output=str(output), num_tensors=num, files=files, bytes=sizes)


def is_packed(directory: Path) -> bool:
    """Whether a directory is an output of `pack`. Raises the errors of opening it."""
    return (directory / PACKED).exists() and any_indirect(directory, Checkpoint.open(directory).weight_files)


def unpack(directory: Path, output: Path, *, force: bool, progress: Progress) -> RestoreResult:
    """Write the source of an output of `pack` again, with a SHA256SUMS.

    Raises InputError if a file does not match SHA256SUMS, or does not decode to its source.
    """
    if changed := check_hashes(directory, progress).mismatched:
        raise InputError(f"`{changed[0]}` does not match {SUMS}", hint="download the checkpoint again")
    checkpoint, is_output = Checkpoint.open(directory), (directory / MARKER).exists()
    record = None if is_output else read_json(directory / PACKED)
    check_disk(output, sum(max(end for _, end, _ in _pieces(directory / name)) for name in _names(checkpoint)))
    files, num = _write(checkpoint, output, record, force=force, progress=progress), len(checkpoint.tensors)
    return RestoreResult(
        path=str(directory), output=str(output), method="pack", exact=True, num_tensors=num, files=files
    )


def _names(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The weight files, and those of a residual."""
    residual = find_residual(checkpoint.directory)
    return checkpoint.weight_files + (residual.files if residual else ())


def _write(
    checkpoint: Checkpoint, output: Path, record: dict[str, Any] | None, *, force: bool, progress: Progress
) -> tuple[FileRecord, ...]:
    """Pack the weight files, or unpack those that are packed; copy all others and write the `record` of the packing."""
    watched, files, directory = checkpoint.watch(), list[FileRecord](), checkpoint.directory
    marker, threads = MARKER if record is None else PACKED, len(usable_cores())
    indexes = (p.name for p in directory.glob("*.safetensors.index.json"))
    ours = (n for n in sorted(OURS - {JOURNAL, SUMS, PACKED}) if (directory / n).is_file())
    with (
        Staging(output, {"pack": str(directory)}, force=force, marker=marker) as staging,
        ThreadPoolExecutor(threads) as pool,
        ThreadPoolExecutor(1) as flusher,
    ):
        for name in _names(checkpoint):
            part, digest, rows = PartFile(staging.directory, name, None, flusher), hashlib.sha256(), list[bytes]()
            with closing(open_file(directory / name)) as file:
                original = file.sha256 if isinstance(file, PackedFile) else None
                progress.start(f"writing {name}", file.size_bytes)
                part.append(b"" if original else PACKED_HEAD)
                for data, blocks in _in_order(pool, threads, partial(_recoded, file), _pieces(directory / name)):
                    digest.update(data)
                    for block, row in blocks:
                        part.append(block)
                        rows.append(row)
                    progress.advance(len(data))
            if original not in (None, digest.hexdigest()):
                raise InputError(f"`{directory / name}` does not decode to its source", hint="pack the source again")
            part.append(b"" if original else packed_end(rows, digest.digest()))
            files.append(part.finish())
        copy_side_files(staging.directory, checkpoint, ["config.json", *indexes, *ours, *checkpoint.side_files])
        if record is not None:
            write_small(staging.directory / PACKED, ordered_json_text(record))
        write_sums(staging.directory, files)
        watched.check()
        staging.publish()
    return tuple(files)


def _recoded(file: OpenFile, piece: _Piece) -> tuple[bytes, Blocks]:
    """A piece of the original, and its blocks for the output: coded ones, or of a packed file, the piece itself."""
    begin, end, itemsize = piece
    buffer = bytearray(end - begin)
    file.read_into(begin, memoryview(buffer))
    data = bytes(buffer)
    return data, [(data, b"")] if isinstance(file, PackedFile) else packed_blocks(data, itemsize)


def _in_order(
    pool: ThreadPoolExecutor, ahead: int, work: Callable[[_Piece], T], pieces: Iterable[_Piece]
) -> Iterator[T]:
    pending = deque[Future[T]]()
    for piece in pieces:
        pending.append(pool.submit(work, piece))
        if len(pending) > ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _pieces(path: Path, size: int = 64 * BLOCK_BYTES) -> Iterator[_Piece]:
    """The header of a file and its tensors, in pieces of at most `size` bytes."""
    header = read_header(path)
    spans = [(header.data_start + t.begin, header.data_start + t.end, t.dtype) for t in header.tensors.values()]
    for begin, end, dtype in [(0, header.data_start, "U8"), *spans]:
        for start in range(begin, end, size):
            yield start, min(start + size, end), max(DTYPE_BITS[dtype] // 8, 1)


def _sizes(paths: Iterable[Path]) -> tuple[int, int]:
    """Bytes of some files, and an estimate of those of packed ones, from blocks all over them."""
    size, sampled, coded = 0, 0, 0
    for path in paths:
        pieces = list(_pieces(path, BLOCK_BYTES))
        with closing(open_file(path)) as file:
            size += file.size_bytes
            for piece in pieces[:: -(-len(pieces) // _SAMPLES)]:
                sampled += piece[1] - piece[0]
                coded += sum(len(block) for block, _ in _recoded(file, piece)[1])
    return size, size * coded // sampled
