"""What results record: the source and its model card, versions, warnings, and each tensor's plan and measurements."""

import dataclasses
import importlib.metadata
import math
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from lpconv.formats.grains import TENSOR, get_grain
from lpconv.formats.spec import FORMATS, OF_DTYPE
from lpconv.forms.facts import BlockError, BlockStats, Measurement
from lpconv.layouts.compressed_config import COMPRESSED_TENSORS
from lpconv.models.ties import tie_warnings
from lpconv.plan.job import Job
from lpconv.plan.options import NEAREST
from lpconv.plan.plan import MISFIT, Plan, PlannedTensor
from lpconv.plan.suited import largest_group
from lpconv.report.numbers import code_list, count_text, plural
from lpconv.report.printable import printable
from lpconv.report.tensors import is_expert, nothing_converted, overflow_text, tokens_per_expert, tokens_text
from lpconv.results import ComparedTensor, SourceRecord, TensorRecord
from lpconv.results.verify import LOST_DB
from lpconv.storage.contents import hidden_files
from lpconv.storage.header import is_lfs_pointer
from lpconv.storage.place import open_regular
from lpconv.version import __version__

_MAX_CHARACTERS = 2**16  # of a card, which begins with its front matter
_NO_TEXT = ("", "~", "null", "false", "no")  # values of YAML that are not strings
_REPEATED = ("base_model", "license", "license_name", "license_link")


def public_source(source: SourceRecord) -> SourceRecord:
    """The source as a published file may name it: hub ids stay, local directories lose their path."""
    if source.revision is not None:
        return source
    directory = Path(source.resolved).name
    name = source.name if Path(source.name).name == source.name else directory
    # File names may contain bytes that are not valid text.
    return dataclasses.replace(source, name=printable(name), resolved=printable(directory))


def inherited_facts(directory: Path, hub_id: str | None) -> dict[str, str]:
    """The licence of a checkpoint, and the hub model that it is or was made from; empty without a card.

    A card that is not text, or whose front matter is not YAML, is ignored.
    """
    try:
        with open(directory / "README.md", encoding="utf-8", opener=open_regular) as file:
            parts = file.read(_MAX_CHARACTERS).split("---\n")
        # As text: dates and numbers need not be valid, and merged keys cannot grow without bound.
        front_matter = yaml.load(parts[1], yaml.BaseLoader) if len(parts) > 2 and not parts[0].strip() else {}
    except (OSError, ValueError, OverflowError, RecursionError, yaml.YAMLError):
        front_matter = {}
    known = front_matter if isinstance(front_matter, dict) else {}
    facts = {k: printable(v) for k in _REPEATED if isinstance(v := known.get(k), str) and v not in _NO_TEXT}
    return facts | ({"base_model": hub_id} if hub_id else {})


def versions() -> dict[str, str]:
    """Versions of lpconv, Python and the libraries that process the weights."""
    names = ("torch", "transformers", "safetensors", "numpy", "pcodec")
    return {
        "lpconv": __version__,
        "python": platform.python_version(),
        **{n: importlib.metadata.version(n) for n in names},
    }


def plan_warnings(job: Job, *, verb: str) -> tuple[str, ...]:
    """Warnings about the plan of a job; `verb` is that of `nothing_converted`."""
    plan, warnings = job.plan, []
    if hidden := hidden_files(job.checkpoint.directory):
        warnings.append(f"hidden files are not copied: {code_list(hidden)}")
    if ignored := job.checkpoint.ignored_files:
        warnings.append(f"left out, because transformers does not read them here: {code_list(ignored)}")
    if pointers := [n for n in job.checkpoint.side_files if is_lfs_pointer(job.checkpoint.directory / n)]:
        warnings.append(f"pointers of Git LFS in place of files: {code_list(pointers)}; run `git lfs pull` first")
    warnings += job.fit.warnings
    shapes = {t.name: (t.info.shape, t.info.dtype) for t in plan.tensors}
    warnings += tie_warnings(shapes, job.plain.config, {t.name: t.tied_to for t in plan.tensors if t.tied_to})
    if missing := job.fit.missing:
        lacks = f"the source lacks {plural(len(missing), 'weight')} of its model: {code_list(missing)}"
        warnings.append(f"{lacks}, and so does the output")
    formats = {t.format.name for t in plan.tensors if t.format}
    if nothing := nothing_converted(formats, plan.format_name, verb=verb):
        warnings.append(nothing)
    wide = sum(t.format is not None and t.info.dtype == "F64" for t in plan.tensors)
    if wide:
        warnings.append(f"F64 tensors ({wide}) are first rounded to fp32; errors are measured from the rounded values")
    is_integer = any(t.format is not None and t.format.twos_complement for t in plan.tensors)
    if plan.options.granularity != TENSOR and plan.options.scale == "pow2" and is_integer:
        warnings.append("power-of-two scales cost integers up to 6 dB; use --scale exact to avoid that")
    warnings += [*joined_warnings(plan), *_group_warnings(plan)]
    warnings += _nearest_warnings(plan)
    warnings += plan.warnings
    if plan.options.residual is not None and not any(s.residual for s in plan.shards):
        warnings.append(f"the source is already {plan.options.format}, so nothing is lost and no residual is stored")
    return tuple(warnings)


def _group_warnings(plan: Plan) -> Iterator[str]:
    """Warnings about matrices that stay wide because of parts of a fused weight, or because groups do not fit most."""
    if joined := [t for t in plan.tensors if t.reason.endswith(MISFIT)]:
        mend = "--allow-mixed-groups converts them for other readers"
        yield f"{code_list([t.name for t in joined])}: unconverted, since {joined[0].reason}; {mend}"
    grain = get_grain(plan.options.granularity)
    kept = [t for t in plan.tensors if t.format is None and re.search("not (a multiple|multiples) of", t.reason)]
    if 2 * len(kept) > len(kept) + sum(t.format is not None for t in plan.tensors):
        columns = [t.info.shape[-1] for t in plan.tensors if t in kept or t.format is not None]
        size = largest_group(columns)
        converts_all = grain is not None and grain.name.startswith("group") and not any(n % size for n in columns)
        has_rows = plan.options.layout == COMPRESSED_TENSORS and plan.format_name == "e4m3fn"
        other = f"group:{size}" if converts_all else "row" if has_rows else None
        mend = f"; --granularity {other} converts them" if other else ""
        yield f"{len(kept)} of {len(columns)} matrices stay unconverted: {kept[0].reason}{mend}"


def _nearest_warnings(plan: Plan) -> Iterator[str]:
    """Warnings about weights that were rounded to nearest despite error feedback."""
    narrow = [t.form for t in plan.tensors if t.format is not None and t.format.is_narrow]
    if plan.options.rounding == NEAREST or not any(form.rounding for form in narrow):
        return
    tokens = tokens_per_expert({form.name: form.rounding for form in narrow})
    nearest = [form.name for form in narrow if form.rounding is None]
    if left := [name for name in nearest if not is_expert(name)]:
        stacks = dict.fromkeys(re.sub(r"\.\d+\..*", ".*", name) for name in left)
        why = "rounded to nearest, because no layer that reads the calibration text uses them"
        yield f"{plural(len(left), 'weight')} ({code_list(stacks)}): {why}"
    if unreached := [expert for expert, count in tokens.items() if not count]:
        some, every = (len({layer for layer, _ in experts}) for experts in (unreached, tokens))
        yield (
            f"{count_text(len(unreached))} of {plural(len(tokens), 'expert')}, in {some} of {plural(every, 'layer')}: "
            f"rounded to nearest, because no token from the calibration text reaches them ({tokens_text(tokens)})"
        )


def joined_warnings(plan: Plan) -> Iterator[str]:
    """Limits of plain transformers for fused weights in compressed-tensors layouts."""
    if plan.linears is None or plan.options.layout != COMPRESSED_TENSORS:
        return
    parts = [t for t in plan.tensors if t.name in plan.linears.joined]
    joined = {t.format and t.format.name for t in parts}
    is_int8 = any(c.dtype == "I8" for t in parts for c in t.form.components)  # one by one, not packed
    is_packed = any(t.format is not None and t.format.name != "e4m3fn" for t in plan.tensors)
    granularity = plan.options.granularity
    if (None in joined and is_packed) or is_int8 or ("e4m3fn" in joined and granularity in ("128x128", "mx")):
        yield "plain transformers 5.24 cannot open experts in this form; lpconv can, and vLLM according to its source"
    if "e2m1" in joined and granularity == "nvfp4":
        is_one = plan.options.scale != "exact"
        costs = (
            "it is 1, which costs up to 3 dB" if is_one else "it computes with wrong weights, unlike vLLM and lpconv"
        )
        yield (
            "plain transformers ignores the second scale of experts (huggingface/transformers#48371): "
            f"{costs}; --scale {'exact keeps it, for vLLM and lpconv' if is_one else 'pow2 makes it 1'}"
        )


def tensor_warnings(tensors: Sequence[TensorRecord]) -> tuple[str, ...]:
    """Warnings about tensors with NaN or Inf, before or after the conversion, or without their signal after it."""
    warnings = []
    for t in tensors:
        if t.num_nan or t.num_inf:
            kept = "they are kept" if not t.num_inf or FORMATS[t.format].has_inf else "Inf becomes NaN in this format"
            where = "the source" if t.source_dtype != "F64" else "fp32, to which the source is rounded"
            warnings.append(f"`{t.name}` has {t.num_nan} NaN and {t.num_inf} Inf elements in {where}; {kept}")
        if t.num_saturated:
            warnings.append(overflow_text(t))
    return (*warnings, *lost_signals(tensors), *_lost_grids(tensors))


def lost_signals(tensors: Sequence[TensorRecord | ComparedTensor]) -> Iterator[str]:
    """Warnings about tensors whose error is about as large as they are."""
    for t in tensors:
        if t.sqnr_db is not None and -math.inf < t.sqnr_db <= LOST_DB:
            lost = "all its numbers became 0" if t.sqnr_db == 0 else f"the SQNR is {t.sqnr_db:.1f} dB"
            way_out = "; --exclude leaves it unconverted" if isinstance(t, TensorRecord) else ""
            yield f"`{t.name}` lost its signal: {lost}{way_out}"


def _lost_grids(tensors: Sequence[TensorRecord]) -> Iterator[str]:
    """Warnings about weights that already seem to be codes times scales and are rounded to few bits again."""
    rounded = [t for t in tensors if t.grid and not t.on_grid and t.max_rel_error]
    rounded = [t for t in rounded if FORMATS[t.format].is_narrow]
    for grid in dict.fromkeys(t.grid for t in rounded):
        names = [t.name for t in rounded if t.grid == grid]
        yield (
            f"{code_list(names)}: {grid} codes already, it seems, and were rounded a second time: with --format "
            f"{grid}, --scale exact and their original --granularity they would be exact"
        )


def sqnr_db(signal: float, noise: float) -> float:
    """10·log10(signal / noise) for two sums of squares; inf without noise, -inf if elements became Inf."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and noise < math.inf else -math.inf


def planned_record(t: PlannedTensor) -> TensorRecord:
    """The planned record of a tensor, from headers alone."""
    format = t.format or OF_DTYPE.get(t.info.dtype)
    return TensorRecord(
        name=t.name,
        shape=t.info.shape,
        source_dtype=t.info.dtype,
        action=t.action,
        format=format.name if format else t.info.dtype,  # dtypes without a format keep their own name
        reason=t.reason,
        tied_to=t.tied_to,
        bytes_in=t.info.num_bytes,
        bytes_out=t.bytes_out,
        points=t.form.num_points,
        rounding=t.form.rounding,
    )


def tensor_record(
    t: PlannedTensor,
    scale: float | None,
    stats: BlockStats | None,
    error: BlockError | None,
    measured: Measurement | None = None,
) -> TensorRecord:
    """The record of a written tensor. `stats` and `error` are None for tensors that were only copied."""
    record = planned_record(t)
    if stats is None or error is None:
        return record
    return dataclasses.replace(
        record,
        scale=scale,
        rms=stats.rms,
        absmax=stats.absmax,
        sqnr_db=sqnr_db(stats.sum_squares, error.sum_squares),
        max_rel_error=error.max_relative,
        num_nan=stats.num_nan,
        num_inf=stats.num_inf,
        num_saturated=error.num_saturated,
        num_flushed=error.num_flushed,
        on_grid=measured is not None and measured.on_grid,
        grid=measured.grid if measured else None,
    )
