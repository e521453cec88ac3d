"""Compare two checkpoints in any layouts: SQNR of each tensor, worst first, and the files next to the weights.

The second checkpoint is the reference. In addition, each group of weights is fitted with one factor relative to the
reference: rounding leaves it near 1, while a wrong scale does not, even if the SQNR of the tensor hides it.

Configs, tokenizers and other small files must have equal values under the same keys. Tools may omit or write defaults,
so a key in only one file is judged by opening both files with transformers; if that fails, it counts as a difference.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lpconv.forms import Stored
from lpconv.forms.facts import block_ranges
from lpconv.gates import Gate, with_gates
from lpconv.layouts.reader import DecodedSource, StoredTensors
from lpconv.models.ties import tie_candidates, tied_by_model
from lpconv.plan.files import CARD, INDEX, LOADER, model_side_files, plain_config, summed_files
from lpconv.plan.provenance import lost_signals, sqnr_db
from lpconv.progress import Progress
from lpconv.report.numbers import code_list, plural
from lpconv.results import ComparedTensor, FilesCheck, RoundingCheck, VerifyResult, WeightsCheck, from_json
from lpconv.storage.checkpoint import RESIDUAL_FOLDER, Checkpoint, Openable
from lpconv.storage.contents import WEIGHT_ENDINGS
from lpconv.storage.source import Source, read_range
from lpconv.storage.staging import is_trained, read_marker
from lpconv.summed import Summed, joined
from lpconv.verify.roundings import GROUP, check_rounding, explains_factors, unusual

# Range of group factors that rounding to 4 bits or more can cause: a largest weight of nearly 8 may be clipped to 6
# (0.75).
_LOW, _HIGH = 0.6, 1.6
_FAINT = 1e-3  # groups with less than this share of the mean energy are skipped
_NARROWEST = 4  # bits from which those factors hold
# Share of the noise that may be a common shift, for codes up to this many bits in weights of at least so many elements.
_ONE_SIDED, _WIDEST, _FEW = 0.1, 8, 1024
# Least SQNR in dB that storing a weight in so many bits leaves for any distribution; rounding to nearest leaves more.
_LEAST_DB = {2: 1.0, 4: 8.0, 8: 15.0, 16: 40.0}
_TOKENIZER = re.compile(
    r"(tokenizer|vocab|merges|special_tokens_map|added_tokens|chat_template|normalizer)[^/]*\.(json|txt|jinja)"
    r"|additional_chat_templates/.*|[^/]*\.(model|tiktoken|vocab)"
)
# Files that transformers or another reader may load because of their names.
_LOADED = re.compile(
    rf"{_TOKENIZER.pattern}|(.*/)?([^/]*config[^/]*\.json|modules\.json|[^/]*\.index\.json"
    rf"|[^/]*\.(py|pyc|so|jinja|bin|pkl|{WEIGHT_ENDINGS}))"
)
_VOCABULARY = re.compile(r"tokenizer\.json|vocab\..*|.*\.(model|tiktoken)")
# Keys that describe the writer or the class that opens a file: reported if they differ, but not a failure.
_BOOKKEEPING = re.compile(
    r"(.*\.)?(_name_or_path|name_or_path|transformers_version|_?commit_hash|dtype|torch_dtype|auto_map|tokenizer_class"
    r"|backend|is_local|local_files_only|processor_class|special_tokens_map_file|tokenizer_file)"
)
_SHOWN, _WIDTH = 3, 60  # most differences shown per document, and characters per value
_ABSENT = object()
_FP32 = 2.0**-24  # some files store numbers such as rms_norm_eps in fp32


@dataclass(frozen=True, kw_only=True)
class _WeightSums(Summed):
    """Sums over blocks of a tensor x and its copy y.

    `signal` Σx², `noise` Σ(y - x)², `relative` the largest |y - x| / |x|, `lean` Σ(y - x), `level` Σx, `num` elements,
    `groups` groups compared, `off` groups with a wrong factor, `lost` elements that are finite in only one of both.
    """

    signal: float = 0.0
    noise: float = 0.0
    relative: float = joined(max, 0.0)
    lean: float = 0.0
    level: float = 0.0
    num: int = 0
    groups: int = 0
    off: int = 0
    lost: int = 0

    @property
    def one_sided(self) -> float:
        """Share of the noise due to the mean error: nearly 0 for rounding, 1 if all elements are shifted equally."""
        return self.lean**2 / (self.num * self.noise) if self.noise else 0.0

    @property
    def off_centre(self) -> float:
        """The same share of the weights themselves. If most are alike, rounding shifts them alike."""
        return self.level**2 / (self.num * self.signal) if self.signal else 0.0


def compare(model: Openable, reference: Openable, *, gates: Sequence[Gate], progress: Progress) -> VerifyResult:
    """Compare the weights of one checkpoint with those of `reference`.

    The comparison passes if every tensor exists with the same shape, the same elements are finite, no group has a wrong
    factor, the noise is within what the bits of the layout explain, and the `gates` pass. Training explains any noise
    and factor. Raises the errors of opening a checkpoint.
    """
    with StoredTensors.open(model) as ours, StoredTensors.open(reference) as theirs:
        a, b = DecodedSource(ours), DecodedSource(theirs)
        both = [n for n, form in ours.forms.items() if n in theirs.forms and theirs.forms[n].shape == form.shape]
        progress.start("comparing weights", sum(a.entries[n].info.num_bytes for n in both))
        is_tuned = is_trained(ours.checkpoint.directory) or is_trained(theirs.checkpoint.directory)
        records, lost = [], [_lost_bits(stored.checkpoint) for stored in (ours, theirs)]
        for name in both:
            forms, sums = (ours.forms[name], theirs.forms[name]), _compare(a, b, name)
            check = check_rounding(ours, name, b) if forms[1].is_kept and not is_tuned else None
            decoded = min((bits[name] for bits in lost if name in bits), default=None)
            problem = _problem(*forms, sums, check, decoded) if sums.lost or not is_tuned else None
            records.append(
                ComparedTensor(
                    name=name,
                    stored_as=forms[0].words,
                    reference=forms[1].words,
                    sqnr_db=sqnr_db(sums.signal, sums.noise),
                    max_rel_error=sums.relative,
                    num_groups=sums.groups,
                    num_off=sums.off,
                    problem=problem,
                    rounding=None if problem else check,
                )
            )
            progress.advance(a.entries[name].info.num_bytes)
        reshaped = [n for n in ours.forms if n in theirs.forms and n not in both]
        problems = [*_missing_tensors(ours, theirs, "the reference")]
        problems += [f"{code_list(reshaped)}: different shape in the reference"] if reshaped else []
        problems += _missing_tensors(theirs, ours, "it")
        num, checked = (sum(ours.forms[n].num_elements for n in names) for names in (ours.forms, both))
    odd = unusual({r.name: r.rounding for r in records if r.rounding})
    for i, r in enumerate(records):
        if r.rounding and r.name in odd:
            records[i] = replace(r, rounding=replace(r.rounding, unusual=odd[r.name]))
    records.sort(key=lambda r: r.sqnr_db)
    worst = next((r for r in records if r.sqnr_db < math.inf), None)
    result = VerifyResult(
        level="values",
        passed=True,  # unless there are problems or failed gates
        weights=WeightsCheck(
            max_rel_error=max((r.max_rel_error for r in records), default=0.0),
            min_sqnr_db=worst.sqnr_db if worst else math.inf,
            worst=worst.name if worst else None,
            num_tensors=len(records),
            num_elements_checked=checked,
            num_elements=num,
            mismatched=(*reshaped, *(r.name for r in records if r.problem)),
        ),
        problems=(*problems, *(f"`{r.name}`: {r.problem}" for r in records if r.problem)),
        warnings=(
            *(() if is_tuned else lost_signals([r for r in records if not r.problem])),
            *ours.warnings,
            *(f"`{name}` was rounded unlike its siblings: {why}" for name, why in odd.items()),
        ),
        tensors=tuple(records),
    )
    return with_gates(result, gates)


def _missing_tensors(one: StoredTensors, other: StoredTensors, who: str) -> Iterator[str]:
    """Tensors of one checkpoint that the other lacks, unless it ties them to another weight."""
    shapes = {n: (form.shape, "") for n, form in one.forms.items()}
    candidates = tie_candidates(shapes, other.checkpoint.config)
    lacking = {n: keep for n, keep in candidates.items() if n not in other.forms and keep in other.forms}
    tied = tied_by_model(other.checkpoint, {n: shape for n, (shape, _) in shapes.items()}, lacking)
    absent = [n for n in one.forms if n not in other.forms and n not in tied]
    if absent:
        yield f"{code_list(absent)}: missing in {who}"


def _compare(a: Source, b: Source, name: str) -> _WeightSums:
    info = b.entries[name].info
    cols = info.shape[-1] if info.shape else 1
    total = _WeightSums()
    for start, stop in block_ranges(info.num_elements, cols):
        y, x = (read_range(source, name, start, stop).float().view(-1, cols) for source in (a, b))
        total = total + _sums(x, y)
    return total


def _sums(x: Tensor, y: Tensor) -> _WeightSums:
    """Compare rows `y` with the reference's rows `x`; elements that are not finite in both are skipped."""
    known = torch.isfinite(x)
    lost = int((known != torch.isfinite(y)).sum())
    x, y = torch.where(known, x, 0.0), torch.where(known, y, 0.0).nan_to_num(0.0, 0.0, 0.0)
    error = (y - x).double()
    groups = [torch.nn.functional.pad(z, (0, -z.shape[1] % GROUP)).view(-1, GROUP) for z in (x, y)]
    energy, shared = (groups[0] * groups[0]).sum(1), (groups[0] * groups[1]).sum(1)
    is_compared = energy > _FAINT * energy.mean()
    factor = shared[is_compared] / energy[is_compared]
    return _WeightSums(
        signal=float(x.double().square().sum()),
        noise=math.inf if lost else float(error.square().sum()),
        relative=float((error.abs() / x.abs()).nan_to_num(0.0, math.inf).max()) if x.numel() else 0.0,
        lean=float(error.sum()),
        level=float(x.double().sum()),
        num=x.numel(),
        groups=int(is_compared.sum()),
        off=int((~((factor > _LOW) & (factor < _HIGH))).sum()),
        lost=lost,
    )


def _lost_bits(checkpoint: Checkpoint) -> dict[str, int]:
    """Bits of the numbers from which `restore` decoded weights that its source had in more."""
    marker = read_marker(checkpoint.directory)
    return from_json(dict[str, int], marker.get("bits", {})) if marker.get("kind") == "restore" else {}


def _problem(
    ours: Stored, theirs: Stored, sums: _WeightSums, check: RoundingCheck | None, decoded: int | None
) -> str | None:
    if sums.lost:
        return f"{plural(sums.lost, 'element')} with a number in only one checkpoint, and NaN or Inf in the other"
    bits, noise = min(ours.bits, theirs.bits, decoded or math.inf), sqnr_db(sums.signal, sums.noise)
    has_codes = ours.is_coded or theirs.is_coded or decoded is not None
    least = _LEAST_DB[max((b for b in _LEAST_DB if b <= bits), default=2)]
    problems = []
    if noise < least:
        why = "wrong packing, zero points or scales" if has_codes else "both are unquantised, but their values differ"
        problems.append(f"{noise:.1f} dB, but {bits} bits should give at least {least:g}: {why}")
    if has_codes and sums.one_sided > _ONE_SIDED > sums.off_centre and bits <= _WIDEST and sums.num >= _FEW:
        problems.append(f"{sums.one_sided:.0%} of the noise is a constant shift, so zero points are wrong")
    if sums.off and bits >= _NARROWEST and not (check and explains_factors(check)):
        problems.append(
            f"{sums.off} of {sums.groups} groups of {GROUP} are off by a factor that rounding cannot explain"
        )
    return "; ".join(problems) or None


def compare_files(model: Openable, reference: Openable, *, copied: Collection[str] | None = None) -> FilesCheck:
    """Compare the small files of a checkpoint with those of `reference`.

    A conversion of the reference has `copied` files from it; its config.json is not compared here. Raises the errors of
    reading a checkpoint.
    """
    pair = [Checkpoint.open(model), Checkpoint.open(reference)]
    other = next((c.kind for c in pair if c.kind not in ("safetensors", "torch")), None)
    if copied is None and other is not None:
        return FilesCheck(not_compared=(f"config and tokenizer, which {other.upper()} files store differently",))
    names = sorted({n for c in pair for n in model_side_files(c)})
    tokenizer = [n for n in names if _TOKENIZER.fullmatch(n)]
    check = _FileComparison()
    if copied is not None:
        check.compared.append("names of files")
        check.different += _other_files(pair[0], pair[1], copied)
    else:
        check.compare("config.json", [plain_config(c) for c in pair], lambda: [_config(c).to_dict() for c in pair])
        check.not_compared += ["quantization_config"] if any("quantization_config" in c.config for c in pair) else []
    if tokenizer:
        parts = [{n: _read(c, n) for n in tokenizer if n in c.side_files} for c in pair]
        has = [any(map(_VOCABULARY.fullmatch, part)) for part in parts]
        if all(has):
            check.compare("tokenizer", parts, lambda: _tokenizers(pair, parts))
        else:
            check.not_compared.append(f"tokenizer (only {'this one' if has[0] else 'the reference'} has one)")
    for name in (n for n in names if n not in tokenizer):
        if all(name in c.side_files for c in pair):
            read = [_read(c, name) for c in pair]
            is_json = all(isinstance(document, dict) for document in read)
            opened = functools.partial(map, _generation, read) if name == "generation_config.json" else None
            check.compare(name, read if is_json else [{"text": document} for document in read], opened)
        else:
            check.not_compared.append(f"{name} (only {'this one' if name in pair[0].side_files else 'the reference'})")
    check.not_compared += [n for n in (CARD, LOADER) if (pair[0].directory / n).is_file()]
    return FilesCheck(**{name: tuple(lines) for name, lines in vars(check).items()})


def _other_files(ours: Checkpoint, source: Checkpoint, copied: Collection[str]) -> Iterator[str]:
    """Files of the source that a conversion should have, and others that it should not have."""
    wanted, own = {*model_side_files(source)}, {*ours.weight_files, "config.json", LOADER, INDEX}
    for name in sorted(wanted - {*ours.side_files}):
        if name in copied or _LOADED.fullmatch(name):
            yield f"`{name}` of the source is missing"
    for name in sorted(summed_files(ours.directory).keys() - wanted - own):
        if _LOADED.fullmatch(name) and not name.startswith(RESIDUAL_FOLDER + "/"):
            yield f"`{name}` is not of the source, but readers would load it"


class _FileComparison:
    """Files compared so far, differences, and files or keys that were not compared."""

    def __init__(self) -> None:
        self.compared, self.different, self.not_compared = list[str](), list[str](), list[str]()

    def compare(self, name: str, pair: Sequence[Any], opened: Callable[[], Iterable[Any]] | None = None) -> None:
        """Compare two documents. `opened` opens both with transformers and is called if one lacks a key."""
        self.compared.append(name)
        differences = list(_differences(*pair))
        shown = [d for d in differences if _ABSENT not in d[1:]]
        if len(shown) < len(differences):
            try:
                effects = list(_differences(*opened())) if opened else differences
            except Exception:  # transformers and tokenizers raise arbitrary exceptions for unknown files
                effects = differences
            if not effects and name != "config.json":  # a config keeps every key when opened; a tokenizer may drop some
                self.not_compared += [
                    f"{name}: {d[0]} (only in one of them, without effect)" for d in differences if d not in shown
                ]
            shown += [d for d in effects if d[0] not in {key for key, *_ in shown}]
        self.not_compared += [f"{name}: {key}" for key, *_ in shown if _BOOKKEEPING.fullmatch(key)]
        shown = [d for d in shown if not _BOOKKEEPING.fullmatch(d[0])]
        self.different += [f"{name}: {_difference_text(*d)}" for d in shown[:_SHOWN]]
        if len(shown) > _SHOWN:
            self.different.append(f"{name}: {len(shown) - _SHOWN} more values differ")


def _differences(ours: Any, theirs: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The keys at which two documents differ, with both values; null counts as absent."""
    for key in sorted({*ours, *theirs}):
        a, b = (_ABSENT if d.get(key) is None else d[key] for d in (ours, theirs))
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _differences(a, b, f"{place}{key}.")
        elif a != b and not (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=_FP32)):
            yield f"{place}{key}", a, b


def _difference_text(key: str, ours: Any, theirs: Any) -> str:
    a, b = ("absent" if v is _ABSENT else f"{v!r:.{_WIDTH}}" for v in (ours, theirs))
    return f"`{key}` is {a}, but {b} in the reference"


def _read(checkpoint: Checkpoint, name: str) -> Any:
    """A file as parsed JSON if possible, else as text."""
    data = (checkpoint.directory / name).read_bytes()
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode(errors="surrogateescape").replace("\r\n", "\n")


def _config(checkpoint: Checkpoint) -> Any:
    import transformers  # slow to import (seconds)

    return transformers.CONFIG_MAPPING[checkpoint.config["model_type"]].from_dict(plain_config(checkpoint))


def _generation(settings: dict[str, Any]) -> Any:
    import transformers

    return transformers.GenerationConfig.from_dict(settings).to_dict()


def _tokenizers(pair: Sequence[Checkpoint], files: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The opened tokenizers as documents: parts, special tokens, template, and every setting that either has."""
    from lpconv.models.tokenizer import read_tokenizer

    keys = {k for both in files for k in both.get("tokenizer_config.json", {})} | {"chat_template"}
    documents = []
    for checkpoint in pair:
        opened = read_tokenizer(checkpoint.directory)
        settings = {k: getattr(opened, k, opened.init_kwargs.get(k)) for k in keys}
        engine = opened.backend_tokenizer.to_str() if hasattr(opened, "backend_tokenizer") else opened.get_vocab()
        parts = json.loads(engine) if isinstance(engine, str) else engine
        documents.append({"special tokens": opened.special_tokens_map, "parts": parts, **settings})
    return documents
