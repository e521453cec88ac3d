"""Write the plain checkpoint of a converted or third-party quantised one, under its source's names and shapes.

An output of lpconv is restored in the dtypes of its source. The result is bit-exact if the form is: unit and Scalify
with fp32 codes and power-of-two scales, Collage with exact16. Exactness is claimed only if the files have the hashes of
the conversion, its record says that decoding lost nothing, and the decoded tensors have the recorded RMS and largest
magnitude. The source is not read: `lpconv verify` does that.

A third-party checkpoint is decoded in a chosen dtype. Its original weights are unknown, so the result is not compared
with any source; the record says only whether the dtype represents every decoded value.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lpconv.errors import InputError
from lpconv.formats.spec import FORMATS
from lpconv.forms.blocks import Workspace, block_stats
from lpconv.forms.facts import BlockStats, block_ranges
from lpconv.layouts.reader import DecodedSource, StoredTensors
from lpconv.plan.files import CARD, INDEX, SOURCE_CARD, copy_side_files, plain_config, weight_index, write_sums
from lpconv.plan.plan import shard_names
from lpconv.progress import Progress
from lpconv.results import FileRecord, RestoreResult, TensorRecord, ordered_json_text
from lpconv.storage.checkpoint import Checkpoint, Watch
from lpconv.storage.dtypes import TORCH_DTYPES
from lpconv.storage.header import DTYPE_BITS, TensorInfo, encode_header, lay_out, quantization_method
from lpconv.storage.partfile import PartFile, write_small
from lpconv.storage.source import read_range
from lpconv.storage.staging import MARKER, SUMS, Staging
from lpconv.verify.reader import OutputReader, read_output
from lpconv.verify.run import check_hashes
from lpconv.version import __version__

DTYPES = ("fp32", "bf16", "fp16")
# The tensors of each weight file to write: (name, dtype, shape).
_Files = Mapping[str, Iterable[tuple[str, str, tuple[int, ...]]]]


def restore_ours(directory: Path, output: Path, *, force: bool, progress: Progress) -> RestoreResult:
    """Write the plain checkpoint of a converted one into `output`, with shards, side files and config of the source.

    A small `lpconv.json` records what was restored, and lets `force` replace it. Raises InputError for a directory that
    is not an lpconv output, or whose files do not match SHA256SUMS.
    """
    recorded = read_output(directory)
    changed = check_hashes(directory, progress).mismatched
    if changed:
        raise InputError(f"`{changed[0]}` does not match {SUMS}", hint="download the output again")
    checkpoint, provenance = recorded.checkpoint, recorded.provenance
    watched = checkpoint.watch(MARKER)
    with OutputReader.of(recorded) as reader, Staging(output, {"restore": str(directory)}, force=force) as staging:
        records = list(reader.records.values())
        exact = all(_keeps_bits(r) for r in records if r.action == "convert")
        progress.start("restoring", sum(r.bytes_in for r in records))
        tensors = {
            name if checkpoint.kind == "safetensors" else shard_names(1)[0]: [
                (r.name, r.source_dtype, r.shape) for r in records if reader.file_of(r.name) == name
            ]
            for name in checkpoint.weight_files
        }
        work = Workspace()
        files = _write_weights(staging.directory, tensors, lambda info: _restored_blocks(reader, info, work, progress))
        converted = {k: provenance.get(k) for k in ("method", "format", "residual")}
        bits = {r.name: reader.forms[r.name].bits for r in records if r.action == "convert" and not _is_exact(r)}
        origin = {"exact": exact, "converted": converted, "source": provenance["source"], "bits": bits}
        copy_side_files(staging.directory, checkpoint, renamed={SOURCE_CARD: CARD})
        _publish(staging, plain_config(checkpoint), origin, files, watched)
    return RestoreResult(
        path=str(directory),
        output=str(output),
        method=str(provenance["method"]),
        exact=exact,
        num_tensors=len(records),
        files=files,
    )


def _restored_blocks(reader: OutputReader, info: TensorInfo, work: Workspace, progress: Progress) -> Iterator[Tensor]:
    """Yield the values of a restored tensor. Raises InputError if they are not those that the conversion recorded."""
    record, statistics = reader.records[info.name], BlockStats()
    for start, stop in block_ranges(info.num_elements, reader.forms[info.name].cols):
        value = reader.values(info.name, start, stop)
        if record.action == "convert":
            statistics = statistics + block_stats(value, work)
            value = value.to(TORCH_DTYPES[info.dtype])
        yield value
        progress.advance((stop - start) * DTYPE_BITS[info.dtype] // 8)
    has_figures = statistics.absmax == record.absmax and math.isclose(statistics.rms, record.rms or 0.0, rel_tol=1e-4)
    if _is_exact(record) and not has_figures:
        raise InputError(
            f"tensor `{info.name}` does not decode to the values recorded in {MARKER}",
            hint="run `lpconv verify --level weights` for details",
        )


def _is_exact(record: TensorRecord) -> bool:
    """Whether decoding gives the source's numbers. F64 is excluded: errors are measured after rounding to fp32."""
    return record.action == "convert" and record.max_rel_error == 0 and record.source_dtype != "F64"


def _keeps_bits(record: TensorRecord) -> bool:
    """Whether decoding gives the source's bits, for certain: no figure tells the bits of NaN, or the sign of 0."""
    held = FORMATS[record.format]
    is_told = held.has_negative_zero and not record.num_nan and (held.has_inf or not record.num_inf)
    return is_told and _is_exact(record)


def decode_checkpoint(
    checkpoint: Checkpoint, output: Path, *, dtype: str | None, force: bool, progress: Progress
) -> RestoreResult:
    """Write the plain checkpoint of a quantised one, with decoded weights in `dtype` (default: the config's).

    Tensors that are not quantised keep their bits. Raises UnsupportedError for unknown layouts, InputError if parts of
    a weight are missing or invalid.
    """
    directory, method = checkpoint.directory, str(quantization_method(checkpoint.config))
    config, watched = plain_config(checkpoint), checkpoint.watch()
    target = FORMATS[dtype or _dtype_of(config)]
    if dtype is not None:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = target.torch
    with closing(StoredTensors.open(checkpoint)) as stored:
        source, lost = DecodedSource(stored), False

        def blocks(info: TensorInfo) -> Iterator[Tensor]:
            nonlocal lost
            before = source.entries[info.name].info.dtype
            for start, stop in block_ranges(info.num_elements, 8):  # whole bytes in the narrowest dtype
                value = read_range(source, info.name, start, stop)
                if before != info.dtype:
                    decoded, value = value, value.to(TORCH_DTYPES[info.dtype])
                    lost |= not torch.equal(decoded.nan_to_num(), value.float().nan_to_num())
                yield value
                progress.advance((stop - start) * DTYPE_BITS[before] // 8)

        tensors = {
            new: [
                (n, e.info.dtype if stored.forms[n].is_kept else target.safetensors or "", e.info.shape)
                for n, e in source.entries.items()
                if e.file == old
            ]
            for old, new in zip(checkpoint.weight_files, shard_names(len(checkpoint.weight_files)), strict=True)
        }
        with Staging(output, {"restore": str(directory)}, force=force) as staging:
            progress.start("decoding", sum(e.info.num_bytes for e in source.entries.values()))
            files = _write_weights(staging.directory, tensors, blocks)
            bits = {name: form.bits for name, form in stored.forms.items() if not form.is_kept}
            origin = {"exact": not lost, "converted": {"method": method, "dtype": target.name}, "bits": bits}
            copy_side_files(staging.directory, checkpoint)
            _publish(staging, config, origin, files, watched)
    return RestoreResult(
        path=str(directory),
        output=str(output),
        method=method,
        exact=not lost,
        dtype=target.name,
        num_tensors=len(source.entries),
        files=files,
    )


def _dtype_of(config: Mapping[str, Any]) -> str:
    """The format of the config's dtype; fp32 if it is none of `DTYPES`."""
    dtype = config.get("dtype", config.get("torch_dtype"))
    return next((n for n in DTYPES if FORMATS[n].torch == dtype), "fp32")


def _write_weights(
    directory: Path, tensors: _Files, blocks: Callable[[TensorInfo], Iterator[Tensor]]
) -> tuple[FileRecord, ...]:
    """Write weight files, each with the widest dtype first, and their index. `blocks` yields the values of a tensor."""
    files, infos = [], {}
    for name, members in tensors.items():
        infos[name] = lay_out(sorted(members, key=lambda t: (-DTYPE_BITS[t[1]], t[0])))
        header = encode_header(infos[name], {"format": "pt"})
        with ThreadPoolExecutor(1) as flusher:
            part = PartFile(directory, name, len(header) + sum(i.num_bytes for i in infos[name]), flusher)
            part.append(header)
            for info in infos[name]:
                for value in blocks(info):
                    part.append(value.view(torch.uint8).numpy().data)
            files.append(part.finish())
    if len(files) > 1:
        index = {i.name: name for name, members in infos.items() for i in members}
        total = sum(i.num_bytes for members in infos.values() for i in members)
        write_small(directory / INDEX, ordered_json_text(weight_index(index, total)))
    return tuple(files)


def _publish(
    staging: Staging, config: Mapping[str, Any], origin: Mapping[str, Any], files: Sequence[FileRecord], watched: Watch
) -> None:
    """Write config, SHA256SUMS and an lpconv.json that says where the weights come from, and publish the output."""
    write_small(staging.directory / "config.json", ordered_json_text(config))
    marker = {"format_version": 1, "kind": "restore", **origin, "version": __version__}
    write_small(staging.directory / MARKER, ordered_json_text(marker))
    write_sums(staging.directory, files)
    watched.check()
    staging.publish()
