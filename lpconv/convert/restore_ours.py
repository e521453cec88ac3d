"""Restore a plain checkpoint from a converted one, under the source's names, shapes and dtypes.

The result is bit-exact if the form is: unit and Scalify with fp32 codes and power-of-two scales, Collage with exact16.
Exactness is claimed only if the files have the hashes of the conversion, its record says that decoding lost nothing,
and the decoded tensors have the recorded RMS and largest magnitude. The source is not read: `lpconv verify` does that.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from lpconv.errors import InputError
from lpconv.forms.blocks import Workspace, block_stats
from lpconv.forms.facts import BlockStats
from lpconv.forms.ranges import block_ranges
from lpconv.plan.files import copy_side_files, model_side_files, plain_config, weight_index
from lpconv.plan.plan import shard_names
from lpconv.progress import Progress
from lpconv.results import FileRecord, RestoreResult, TensorRecord, ordered_json_text
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.dtypes import TORCH_DTYPES
from lpconv.storage.gguf import GGUF
from lpconv.storage.header import DTYPE_BITS, TensorInfo, encode_header
from lpconv.storage.partfile import PartFile, write_small
from lpconv.storage.residual import residual_files
from lpconv.storage.staging import MARKER, SUMS, Staging
from lpconv.storage.unchanged import watch, watched_files
from lpconv.verify.reader import OutputReader, read_provenance
from lpconv.verify.run import check_hashes
from lpconv.version import __version__


def restore_ours(directory: Path, output: Path, *, force: bool, progress: Progress) -> RestoreResult:
    """Write the plain checkpoint of a converted one into `output`, with shards, side files and config of the source.

    A small `lpconv.json` records what was restored, and lets `force` replace it. Raises InputError for a directory that
    is not an lpconv output, or whose files do not match SHA256SUMS.
    """
    provenance = read_provenance(directory)
    changed = check_hashes(directory, progress).mismatched
    if changed:
        raise InputError(f"`{changed[0]}` does not match its SHA-256 in {SUMS}", hint="download the output again")
    checkpoint = Checkpoint.open(directory)
    watched = watch(directory, [MARKER, *watched_files(checkpoint), *residual_files(directory)])
    with (
        OutputReader.from_directory(directory) as reader,
        Staging(output, {"restore": str(directory)}, force=force) as staging,
        staging.discard_on_failure(),
    ):
        records = list(reader.records.values())
        exact = all(_is_exact(r) for r in records if r.action == "convert")
        progress.start("restoring", sum(r.bytes_in for r in records))
        files, index = [], {}
        for name in checkpoint.weight_files:
            members = [r for r in records if reader.file_of(r.name) == name]
            target = name if checkpoint.kind != GGUF else shard_names(1)[0]
            files.append(_write(reader, target, members, staging.directory, progress))
            index.update(dict.fromkeys((r.name for r in members), target))
        if len(checkpoint.weight_files) > 1:
            total = sum(r.bytes_in for r in records)
            write_small(
                staging.directory / "model.safetensors.index.json", ordered_json_text(weight_index(index, total))
            )
        write_small(staging.directory / "config.json", ordered_json_text(plain_config(checkpoint)))
        copy_side_files(
            staging.directory, checkpoint, model_side_files(checkpoint), renamed={"README.source.md": "README.md"}
        )
        write_small(staging.directory / MARKER, ordered_json_text(_origin(provenance, exact=exact)))
        watched.check()
        staging.publish()
    return RestoreResult(
        path=str(directory),
        output=str(output),
        method=str(provenance["method"]),
        exact=exact,
        num_tensors=len(records),
        files=tuple(files),
    )


def _is_exact(record: TensorRecord) -> bool:
    """Whether decoding gives the source's bits. F64 is excluded, because errors are measured after rounding to fp32."""
    return record.action == "convert" and record.max_rel_error == 0 and record.source_dtype != "F64"


def _write(
    reader: OutputReader, name: str, members: list[TensorRecord], directory: Path, progress: Progress
) -> FileRecord:
    ordered = sorted(members, key=lambda r: (-DTYPE_BITS[r.source_dtype], r.name))
    infos, position = [], 0
    for r in ordered:
        end = position + math.prod(r.shape) * DTYPE_BITS[r.source_dtype] // 8
        infos.append(TensorInfo(name=r.name, dtype=r.source_dtype, shape=r.shape, begin=position, end=end))
        position = end
    header = encode_header(infos, {"format": "pt"})
    work = Workspace()
    with ThreadPoolExecutor(1) as flusher:
        part = PartFile(directory, name, len(header) + position, flusher)
        part.append(header)
        for record, info in zip(ordered, infos, strict=True):
            statistics = BlockStats()
            for start, stop in block_ranges(info.num_elements, reader.forms[record.name].cols):
                value = reader.values(record.name, start, stop)
                if record.action == "convert":
                    statistics = statistics + block_stats(value, work)
                    value = value.to(TORCH_DTYPES[record.source_dtype])
                part.append(value.view(torch.uint8).numpy().data)
                progress.advance((stop - start) * DTYPE_BITS[info.dtype] // 8)
            if _is_exact(record) and not _has_figures(statistics, record):
                raise InputError(
                    f"tensor `{record.name}` does not decode to the values recorded in {MARKER}",
                    hint="run `lpconv verify --level weights` for details",
                )
        return part.finish()


def _has_figures(statistics: BlockStats, record: TensorRecord) -> bool:
    rms = record.rms or 0.0
    return statistics.absmax == record.absmax and math.isclose(statistics.rms, rms, rel_tol=1e-4)


def _origin(provenance: dict[str, Any], *, exact: bool) -> dict[str, Any]:
    """lpconv.json of a restored checkpoint: what it was restored from, and whether its bits are the source's."""
    converted = {k: provenance.get(k) for k in ("method", "format", "residual")}
    return {
        "format_version": 1,
        "kind": "restore",
        "exact": exact,
        "converted": converted,
        "source": provenance["source"],
        "version": __version__,
    }
