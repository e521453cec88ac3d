"""Defects of quantised checkpoints that headers and config show, without torch or data.

*Problems* are contradictions: an incomplete weight, a config that does not match the files. *Warnings* are files that
some readers refuse, or load with worse results than expected. `scale_defects.py` also reads the scales.
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lpconv.forms import Headers, Stored
from lpconv.forms.grid import Grid
from lpconv.layouts import READ
from lpconv.layouts.compressed_config import missing_input_scales, weight_settings
from lpconv.layouts.headers import ACTIVATIONS, is_part, judged_grids
from lpconv.layouts.layout import Layout
from lpconv.layouts.linears import MATCHING_S, expression, fused_groups
from lpconv.report.numbers import code_list
from lpconv.summed import Summed

_GLOB = re.compile(r"[*?\[]")
_SURELY_CODES = (".weight_packed", ".qweight")


@dataclass(frozen=True, kw_only=True)
class Findings(Summed):
    """Problems and warnings about a checkpoint, as text."""

    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def from_headers(headers: Headers, forms: Mapping[str, Stored]) -> Findings:
    """Contradictions among names, sizes and config."""
    method = headers.quantised_by
    codes = [n for n, i in headers.root.items() if i.dtype.startswith(("F8", "F4")) or n.endswith(_SURELY_CODES)]
    if method is None and codes:
        return Findings(problems=(f"{code_list(codes)}: quantised, but config.json has no quantization_config",))
    if method not in READ:
        return Findings()
    grids = judged_grids(forms, headers.quantization)
    mixed = () if READ[method].mixes_types else _mixed_fused_weights(forms)
    problems = (*_incomplete_weights(headers, forms), *_config_mismatches(headers, READ[method], forms, grids))
    return Findings(problems=problems, warnings=(*_block_warnings(grids), *mixed))


def _incomplete_weights(headers: Headers, forms: Mapping[str, Stored]) -> Iterator[str]:
    known = {c.name for form in forms.values() for c in form.components}
    lone = [n for n in headers.root if n not in known and n.rpartition(".")[2] not in ACTIVATIONS]
    lone += [n for n, form in forms.items() if form.is_kept and is_part(n, form.data[0].dtype, forms)]
    if lone:
        yield f"{code_list(lone)}: incomplete weight: a part is missing, or has the wrong dtype or size"
    method = str(headers.quantised_by)
    if forms and all(form.is_kept for form in forms.values()) and not lone and not READ[method].mixes_types:
        yield f"config.json says `{method}`, but no weight is quantised: if all are plain, remove quantization_config"


def _config_mismatches(
    headers: Headers, layout: Layout, forms: Mapping[str, Stored], grids: Mapping[str, Grid]
) -> Iterator[str]:
    """Formats, group sizes and module lists of the config that do not match the files."""
    config, coded = headers.quantization, {n: f for n, f in forms.items() if f.format is not None}
    setting = config.get(layout.numbers_key)
    wanted = layout.numbers_of.get(str(setting))
    other = [n for n, f in coded.items() if wanted and f.format is not None and f.format.name not in wanted]
    if other:
        yield f"config.json says `{setting}`, but {code_list(other)} has {coded[other[0]].words}"
    yield from _mismatched_sizes(weight_settings(config), grids)
    missing = [*missing_input_scales(config, (n.removesuffix(".weight") for n in coded), headers.root)]
    if missing:
        yield f"config.json asks for static input scales, but {code_list(missing)} is missing"
    try:
        ignored = _ignored_modules(config, [n.removesuffix(".weight") for n in forms])
    except TimeoutError:
        yield f"config.json: the expressions for unquantised modules are too long, or match for over {MATCHING_S:g} s"
        return
    named = [n for n in coded if n.removesuffix(".weight") in ignored]
    if named:
        yield f"{code_list(named)}: quantised, but config.json says that it is not"
    if layout.excludes_by_name:
        leaves = {n.removesuffix(".weight").rpartition(".")[2] for n in coded}
        plain = [n for n, form in forms.items() if form.format is None and len(form.shape) == 2]
        plain = [n for n in plain if n.removesuffix(".weight").rpartition(".")[2] in leaves]
        unnamed = [n for n in plain if n.removesuffix(".weight") not in ignored]
        if unnamed:
            yield f"{code_list(unnamed)}: not quantised, but config.json does not exclude it"


def _mismatched_sizes(schemes: Sequence[Mapping[str, Any]], grids: Mapping[str, Grid]) -> Iterator[str]:
    """Group sizes and zero points that do not match the config's only scheme."""
    if len(schemes) != 1:
        return
    (scheme,) = schemes
    block = scheme.get("weight_block_size", scheme.get("block_structure"))
    if isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block):
        blocks = {n: tuple(min(b, size) for b, size in zip(block, g.matrix, strict=True)) for n, g in grids.items()}
        other = [n for n, wanted in blocks.items() if grids[n].block != wanted]
        if other:
            yield f"config.json has blocks of {block[0]} x {block[1]}; {code_list(other)} has {grids[other[0]].words}"
    size = scheme.get("group_size", scheme.get("q_group_size"))
    if isinstance(size, int) and size > 0:
        other = [n for n, g in grids.items() if g.block[1] != min(size, g.matrix[1]) or g.block[0] != 1]
        if other:
            yield f"config.json has groups of {size}, but {code_list(other)} has {grids[other[0]].words}"
    symmetric = scheme.get("symmetric")
    with_zeros = [n for n, g in grids.items() if g.zeros]
    without = [n for n in grids if n not in with_zeros]
    if symmetric is True and with_zeros:
        yield f"config.json says symmetric: true, but {code_list(with_zeros)} has zero points"
    if symmetric is False and without:
        yield f"config.json says symmetric: false, but {code_list(without)} has no zero points"


def _ignored_modules(config: Mapping[str, Any], modules: Iterable[str]) -> set[str]:
    """The modules in the config's ignore lists: names or ``re:`` expressions (compressed-tensors), or globs (others).

    Raises TimeoutError if the expressions are too large, or take too long for these names.
    """
    lists = [config.get(k) for k in ("ignore", "modules_to_not_convert", "exclude_modules")]
    entries = {n for names in lists if isinstance(names, list) for n in names if isinstance(n, str)}
    expressions = [e for n in entries if n.startswith("re:") or _GLOB.search(n) if (e := expression(n)) is not None]
    end = time.monotonic() + MATCHING_S
    matched = {m for m in modules for e in expressions if e.match(m, timeout=max(end - time.monotonic(), 1e-9))}
    return matched | entries


def _block_warnings(grids: Mapping[str, Grid]) -> Iterator[str]:
    partial = [n for n, g in grids.items() if any(size % b for size, b in zip(g.matrix, g.block, strict=True))]
    if partial:
        yield f"{code_list(partial)}: the last blocks are smaller ({grids[partial[0]].words}); some readers refuse this"
    # In the config, a scale of the whole tensor may look like one tile; such scales are vectors.
    tiled = {n for n, g in grids.items() if len(g.scales.component.shape) > 1 and not g.is_transposed}
    fused = {n: grids[n].scales.block[0] for _, names in fused_groups(tiled) for n in names[:-1]}
    odd = [n for n, rows in fused.items() if grids[n].matrix[0] % rows]
    if odd:
        rows, tile = grids[odd[0]].matrix[0], fused[odd[0]]
        yield f"{code_list(odd)}: {rows} rows are not a multiple of its blocks of {tile}, so vLLM refuses to fuse it"


def _mixed_fused_weights(forms: Mapping[str, Stored]) -> Iterator[str]:
    """Fused weights that are stored in different ways: readers refuse such files, or read all as the first."""
    kinds = {n: None if form.format is None else (type(form).__name__, form.format.name) for n, form in forms.items()}
    mixed = [stem for stem, names in fused_groups(forms) if len({kinds[n] for n in names}) > 1]
    if mixed:
        yield f"{code_list(mixed)}: weights that readers fuse are stored in different ways"
