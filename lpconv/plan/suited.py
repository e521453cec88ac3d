"""Defaults that depend on the checkpoint: a format that makes it smaller, and groups that divide its matrices."""

import dataclasses
from collections.abc import Collection, Iterable
from contextlib import closing

from lpconv.layouts.reader import is_coded
from lpconv.plan.options import ConvertOptions, FilledOptions
from lpconv.plan.settings import fill_options
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.header import DTYPE_BITS, TensorInfo
from lpconv.storage.source import open_source

_WHAT = ("scheme", "method", "format", "layout", "granularity", "budget_bits")  # options that say what to write
GROUPS = (128, 64, 32)  # usual group sizes, which runtimes have kernels for


def suited_options(options: ConvertOptions, checkpoint: Checkpoint) -> tuple[FilledOptions, tuple[str, ...]]:
    """The filled options for a checkpoint, and notes for the user on what was decided from its headers.

    Without options that say what to write, a checkpoint in 16 bits gets e4m3fn with a scale per row, since fp16 would
    not make it smaller, and a quantised one gets fp16 and a note. Integers without a granularity get the largest usual
    group that divides every matrix.
    """
    filled = fill_options(options)
    given = {name for name in _WHAT if getattr(options, name) is not None}
    has_open_groups = filled.granularity.startswith("group:") and not given & {"scheme", "granularity"}
    if is_coded(checkpoint):
        held = checkpoint.config.get("quantization_config", {})
        is_larger = not given and held and held.get("format") != filled.format
        note = (
            f"the source is quantised ({held.get('quant_method')}), and without options it gets {filled.format}, which "
            "is usually larger; --format e4m3fn or --scheme W4A16 keep it small"
        )
        return filled, (note,) if is_larger else ()
    if given and not has_open_groups:
        return filled, ()
    with closing(open_source(checkpoint)) as source:
        infos = [entry.info for entry in source.entries.values()]
    if has_open_groups:
        size = largest_group(t.shape[-1] for t in infos if len(t.shape) > 1)
        chosen = dataclasses.replace(options, granularity=f"group:{size}")
        return fill_options(chosen), (f"{filled.format} gets a scale per {size} of a row; --granularity changes that",)
    if not _is_narrow(infos):
        return filled, ()
    note = "the checkpoint has 16 bits, so it gets e4m3fn with a scale per row; for 16 bits pass --format fp16"
    return fill_options(dataclasses.replace(options, format="e4m3fn", granularity="row")), (note,)


def largest_group(columns: Iterable[int]) -> int:
    """The largest usual group that divides the columns of every matrix, or the smallest usual one."""
    wide = [n for n in columns if n >= GROUPS[-1]]
    return next((size for size in GROUPS if not any(n % size for n in wide)), GROUPS[-1])


def _is_narrow(infos: Collection[TensorInfo]) -> bool:
    """Whether most floating-point elements have 16 bits."""
    narrow = sum(t.num_elements for t in infos if t.dtype in ("F16", "BF16"))
    return 2 * narrow > sum(t.num_elements for t in infos if t.dtype in DTYPE_BITS and DTYPE_BITS[t.dtype] >= 16)
