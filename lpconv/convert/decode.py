"""Decode a third-party quantised checkpoint to a plain one in a chosen dtype.

The original weights are unknown, so the result is not compared with any source; the record says only whether the dtype
represents every decoded value.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import torch

from lpconv.errors import UnsupportedError
from lpconv.formats.spec import FORMATS
from lpconv.forms import Kept
from lpconv.forms.facts import block_ranges
from lpconv.forms.reader import DecodedSource, StoredTensors
from lpconv.plan.files import INDEX, copy_side_files, model_side_files, plain_config, weight_index
from lpconv.plan.plan import shard_names
from lpconv.progress import Progress
from lpconv.results import FileRecord, RestoreResult, ordered_json_text
from lpconv.storage.checkpoint import Checkpoint, Openable, watch, watched_files
from lpconv.storage.compressed import quantization_method
from lpconv.storage.dtypes import TORCH_DTYPES
from lpconv.storage.header import DTYPE_BITS, TensorInfo, encode_header
from lpconv.storage.partfile import PartFile, write_small
from lpconv.storage.source import Source, read_range
from lpconv.storage.staging import MARKER, Staging, check_apart
from lpconv.version import __version__

DTYPES = ("fp32", "bf16", "fp16")


def decode_checkpoint(
    model: Openable, output: Path, *, dtype: str | None, force: bool, progress: Progress
) -> RestoreResult:
    """Write the plain checkpoint of a quantised one, with decoded weights in `dtype` (default: the config's).

    Tensors that are not quantised keep their bits. Raises UnsupportedError for plain checkpoints and unknown layouts,
    InputError if parts of a weight are missing or invalid.
    """
    checkpoint = Checkpoint.open(model)
    directory = checkpoint.directory
    check_apart(directory, output)
    method = quantization_method(checkpoint.config)
    if method is None:
        raise UnsupportedError(f"`{directory}` is a plain checkpoint already", hint="there is nothing to restore")
    config, watched = plain_config(checkpoint), watch(directory, watched_files(checkpoint))
    target = FORMATS[dtype or _dtype_of(config)]
    with closing(StoredTensors.open(checkpoint)) as stored:
        kept = {name for name, form in stored.forms.items() if isinstance(form, Kept)}
        source = DecodedSource(stored)
        infos = {n: e.info.dtype if n in kept else target.safetensors or "" for n, e in source.entries.items()}
        identity = {"restore": str(directory)}
        with Staging(output, identity, force=force) as staging, staging.discard_on_failure():
            progress.start("decoding", sum(e.info.num_bytes for e in source.entries.values()))
            files, lost = _write_all(source, infos, checkpoint, staging.directory, progress)
            key = "torch_dtype" if "torch_dtype" in config else "dtype"
            config = config if dtype is None else {**config, key: target.torch}
            write_small(staging.directory / "config.json", ordered_json_text(config))
            copy_side_files(staging.directory, checkpoint, model_side_files(checkpoint), renamed={})
            write_small(staging.directory / MARKER, ordered_json_text(_origin(method, target.name, exact=not lost)))
            watched.check()
            staging.publish()
    return RestoreResult(
        path=str(directory),
        output=str(output),
        method=method,
        exact=not lost,
        dtype=target.name,
        num_tensors=len(infos),
        files=files,
    )


def _dtype_of(config: dict[str, object]) -> str:
    """The format of the config's dtype; fp32 if it is none of `DTYPES`."""
    dtype = config.get("dtype", config.get("torch_dtype"))
    return next((n for n in DTYPES if FORMATS[n].torch == dtype), "fp32")


def _write_all(
    source: Source, dtypes: dict[str, str], checkpoint: Checkpoint, directory: Path, progress: Progress
) -> tuple[tuple[FileRecord, ...], bool]:
    """Write the weight files and their index. Returns the files, and whether any value was rounded."""
    files, lost, index = [], False, {}
    for old, new in zip(checkpoint.weight_files, shard_names(len(checkpoint.weight_files)), strict=True):
        members = [n for n in dtypes if source.entries[n].file == old]
        record, rounded = _write(source, members, dtypes, directory, new, progress)
        files.append(record)
        lost |= rounded
        index.update(dict.fromkeys(members, new))
    if len(files) > 1:
        total = sum(source.entries[n].info.num_elements * DTYPE_BITS[d] // 8 for n, d in dtypes.items())
        write_small(directory / INDEX, ordered_json_text(weight_index(index, total)))
    return tuple(files), lost


def _write(
    source: Source, names: Sequence[str], dtypes: dict[str, str], directory: Path, file: str, progress: Progress
) -> tuple[FileRecord, bool]:
    infos, position, lost = [], 0, False
    for name in sorted(names, key=lambda n: (-DTYPE_BITS[dtypes[n]], n)):
        shape = source.entries[name].info.shape
        end = position + source.entries[name].info.num_elements * DTYPE_BITS[dtypes[name]] // 8
        infos.append(TensorInfo(name=name, dtype=dtypes[name], shape=shape, begin=position, end=end))
        position = end
    header = encode_header(infos, {"format": "pt"})
    with ThreadPoolExecutor(1) as flusher:
        part = PartFile(directory, file, len(header) + position, flusher)
        part.append(header)
        for info in infos:
            for start, stop in block_ranges(info.num_elements, 8):  # whole bytes in the narrowest dtype
                value = read_range(source, info.name, start, stop)
                if source.entries[info.name].info.dtype != info.dtype:
                    decoded, value = value, value.to(TORCH_DTYPES[info.dtype])
                    lost |= not torch.equal(decoded.nan_to_num(), value.float().nan_to_num())
                part.append(value.view(torch.uint8).numpy().data)
                progress.advance((stop - start) * DTYPE_BITS[source.entries[info.name].info.dtype] // 8)
        return part.finish(), lost


def _origin(method: str, dtype: str, *, exact: bool) -> dict[str, object]:
    """lpconv.json of a decoded checkpoint: how it was quantised, and whether the dtype represents all values."""
    converted = {"method": method, "dtype": dtype}
    return {"format_version": 1, "kind": "restore", "exact": exact, "converted": converted, "version": __version__}
