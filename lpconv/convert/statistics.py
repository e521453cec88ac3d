"""`inspect --stats`: RMS, largest magnitude and non-finite counts of every floating tensor, by reading the data."""

import dataclasses
from pathlib import Path

import torch

from lpconv.checkpoint.contents import read_contents
from lpconv.checkpoint.header import DTYPE_BITS
from lpconv.checkpoint.source import TORCH_DTYPES, Source, open_source
from lpconv.convert.inspect import describe, inspect
from lpconv.forms.blocks import BLOCK_ELEMENTS, Workspace, block_stats
from lpconv.forms.facts import BlockStats
from lpconv.progress import Progress
from lpconv.results import InspectResult, StoredTensor

__all__ = ["inspect_with_statistics"]

_READABLE = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}


def inspect_with_statistics(directory: Path, progress: Progress, *, name: str | None = None) -> InspectResult:
    """`inspect`, with statistics in each tensor's record. Opens `.bin` checkpoints too. Codes are measured unscaled."""
    contents = read_contents(directory)
    source = open_source(contents)
    try:
        infos = [(e.info, e.file) for e in source.entries.values()]
        if contents.kind == "safetensors":
            found = inspect(directory, name=name)
        else:
            found = describe(contents, infos, name=name or str(directory))
        progress.start("reading", sum(source.entries[t.name].info.num_bytes for t in found.tensors))
        work = Workspace()
        return dataclasses.replace(found, tensors=tuple(_measured(source, t, work, progress) for t in found.tensors))
    finally:
        source.close()


def _measured(source: Source, t: StoredTensor, work: Workspace, progress: Progress) -> StoredTensor:
    num_bytes = source.entries[t.name].info.num_bytes
    if t.dtype not in _READABLE or not num_bytes:
        progress.advance(num_bytes)
        return t
    total, size = BlockStats(), DTYPE_BITS[t.dtype] // 8
    for start in range(0, num_bytes, BLOCK_ELEMENTS * size):
        raw = work.raw[: min(BLOCK_ELEMENTS * size, num_bytes - start)]
        source.read_bytes(t.name, start, raw)
        x = raw.view(TORCH_DTYPES[t.dtype])
        total = total + block_stats(x.to(torch.float32) if size == 1 else x, work)
        progress.advance(raw.numel())
    return dataclasses.replace(t, rms=total.rms, absmax=total.absmax, num_nan=total.num_nan, num_inf=total.num_inf)
