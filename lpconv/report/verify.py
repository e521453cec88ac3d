"""Documents of a verification: the checks, their results, the distance between two checkpoints, and scores in tasks."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from lpconv.report.document import (
    Cell,
    Check,
    Checks,
    Document,
    Outcome,
    Section,
    Table,
    Tile,
    Verdict,
    failed_gates,
    gate_check,
    section,
    sections_of,
)
from lpconv.report.numbers import (
    MISSING,
    count_text,
    error_text,
    kl_text,
    kl_words,
    name_list,
    number_text,
    plural,
    share_text,
    sqnr_text,
    usual_sqnr,
)
from lpconv.report.tensor_charts import sqnr_chart, turned_chart
from lpconv.report.tensors import SINGLE_ELEMENTS
from lpconv.results import (
    ComparedTensor,
    FeedbackCheck,
    FilesCheck,
    GapEstimate,
    HashCheck,
    LogitsCheck,
    OpenedCheck,
    RoundingCheck,
    TaskCheck,
    Verification,
    VerifyResult,
)
from lpconv.results.verify import LOST_DB

_WORST, _FAILURES = 10, 3  # most tensors shown on a terminal, and most failures in an error message
# What the kinds of `RoundingCheck` are consistent with.
_ROUNDINGS = {
    "nearest": "rounding to nearest",
    "tuned": "tuned rounding (AutoRound), at most one step away",
    "feedback": "error feedback (GPTQ)",
    "unknown": "no known way of rounding",
}
_SCALES = {"amax": "the largest weight of each group", "search": "a search", "unknown": "no known rule"}
_NO_TEXT = "which say nothing about quality, because they are no text"


def verify_document(result: Verification) -> Document:
    """The distance between two checkpoints, by their weights and by their models' outputs."""
    logits = result.logits if result.logits and not result.logits.skipped else None
    on_text = logits if logits and logits.is_text else None
    source = "its recorded source" if result.weights else "its own hashes"
    warned = f", with {plural(len(result.warnings), 'warning')}" if result.warnings else ""
    return Document(
        kind="verification",
        title=PurePath(result.path).name or result.path,
        subtitle=f"{result.path} against {result.against or source}",
        verdict=Verdict(outcome=outcome_of(result), text=verify_headline(result) + warned),
        tiles=_tiles(result, on_text),
        sections=sections_of(
            verification_section(result),
            section("Worst tensors", _worst_table(result.tensors), only="terminal"),
            _outputs_section(logits) if logits else None,
            _tasks_section(result.tasks),
            _codes_section(result.tensors),
            section("", sqnr_chart([(result.path, result.tensors)], noun="tensor"), turned_chart(result.tensors)),
            section("Every tensor, the worst first", _tensor_table(result), only="page"),
        ),
        warnings=result.warnings,
        command=result.command,
        versions={"lpconv": result.version},
    )


def verification_section(v: VerifyResult) -> Section | None:
    """The steps of a verification, and the problems found."""
    word = outcome_of(v)
    steps = checks(v)
    nothing = "No check was run, so only what was measured during the conversion is known about this output."
    notes = v.problems or doubts(v)
    blocks = (Checks(checks=steps), notes) if steps or notes else (nothing,)
    level = "" if v.level == "none" else f" (level {v.level})"
    title = f"Verification: {'doubtful' if doubts(v) and v.passed else word}{level}"
    return section(title, *blocks, outcome=word)


def _tiles(result: VerifyResult, logits: LogitsCheck | None) -> tuple[Tile, ...]:
    """Headline numbers of the comparisons that were made."""
    tiles: list[Tile] = []
    if result.weights:
        exact = sum(t.sqnr_db == math.inf for t in result.tensors)
        detail = f"{count_text(exact)} of them equal" if exact else "none of them equal"
        tiles.append(Tile(label="Tensors compared", figure=count_text(len(result.tensors)), detail=detail))
    if result.weights and result.tensors:
        figure = sqnr_text(result.weights.min_sqnr_db, " dB")
        tiles.append(Tile(label="Lowest SQNR of a tensor", figure=figure, detail=_worst_place(result)))
    if result.logits:
        tiles.append(outputs_tile(result))
    if logits and logits.perplexity is not None:
        detail = f"{number_text(logits.source_perplexity, 4)} for the other model"
        tiles.append(Tile(label="Perplexity", figure=number_text(logits.perplexity, 4), detail=detail))
    tiles += map(_task_tile, result.tasks)
    if not tiles and result.hash:
        detail = f"{count_text(len(result.hash.mismatched))} differ"
        tiles.append(Tile(label="Files", figure=count_text(result.hash.num_files), detail=detail))
    return tuple(tiles)


def failure_text(result: VerifyResult) -> str:
    """A sentence for an error: the first problems and failed gates, and the number of further ones."""
    failures = (*result.problems, *failed_gates(result.gates))
    rest = len(failures) - _FAILURES
    return "; ".join(failures[:_FAILURES]) + (f"; and {rest} more" if rest > 0 else "")


def outputs_tile(v: VerifyResult) -> Tile:
    """The distance of the outputs on text, because outputs of random inputs say nothing about quality."""
    check, label = v.logits, "Model outputs"
    if check is None or check.skipped:
        return Tile(label=label, figure=MISSING, detail=(check.skipped if check else None) or "not compared")
    if _is_exact(v):
        return Tile(label=label, figure="bit-equal", detail="to the source's")
    if not check.is_text:
        return Tile(label=label, figure=MISSING, detail="not compared on text")
    if check.mean_kl is None:
        return Tile(label=label, figure=error_text(check.rel_error), detail="relative error on text")
    return Tile(label=label, figure=f"KL {check.mean_kl:.2g} nats", detail=f"on text: {kl_words(check.mean_kl)}")


def _outputs_section(logits: LogitsCheck) -> Section | None:
    """Outputs of both models: metric, value, meaning; rows without a value are left out."""
    kl = logits.mean_kl
    rows = (
        ("KL divergence", number_text(kl, 2), f"nats per position: {kl_words(kl or 0)}"),
        ("KL divergence, back", number_text(logits.reverse_kl, 2), "from this model to the other one"),
        ("Same top prediction", share_text(logits.top1_agreement, 1), "of positions"),
        ("Perplexity", number_text(logits.perplexity, 4), "of the next token, this model"),
        ("Perplexity, other", number_text(logits.source_perplexity, 4), "of the next token, the model compared with"),
        *(_loss_rows(logits.loss_gap) if logits.loss_gap else ()),
        ("Relative error", error_text(logits.rel_error), "of all outputs, in the 2-norm"),
        ("Largest difference", error_text(logits.max_abs_diff), "of one output"),
    )
    table = Table(columns=("Figure", "Value", "<Meaning"), rows=tuple(row for row in rows if row[1] != MISSING))
    return section("What both models say", _inputs_words(logits, is_exact=False), table)


def _loss_rows(gap: GapEstimate) -> Iterator[tuple[str, str, str]]:
    """The rise of the loss, the one that the text could have shown, and the windows that the wanted one needs."""
    width = f" ± {gap.high - gap.value:.2g}" if gap.count > 1 else ""
    yield "Rise of the loss", f"{gap.value:+.2g}{width}", f"nats per next token, over {plural(gap.count, 'window')}"
    if gap.detectable is not None and gap.detectable < math.inf:
        yield "Rise seen from", number_text(gap.detectable, 2), "nats, with 80 % power"
    if gap.num_needed is not None:
        yield "Windows needed", count_text(gap.num_needed), f"to see {number_text(gap.wanted)} with 80 % power"


def _inputs_words(logits: LogitsCheck, *, is_exact: bool) -> str:
    """The class of the models, their inputs, and how inputs of layers were rounded."""
    no_text = "" if logits.is_text or is_exact else _NO_TEXT
    return ", ".join(filter(None, (logits.model_class, logits.inputs, no_text, _rounding_words(logits))))


def _rounding_words(check: LogitsCheck | TaskCheck) -> str:
    """How inputs of layers were rounded, empty if they were not."""
    return f"inputs of layers rounded to {check.rounded_inputs}, as in vLLM" if check.rounded_inputs else ""


def _worst_table(tensors: Sequence[ComparedTensor]) -> Table:
    """The worst tensors, without exact ones; by the outputs of their layers if these were compared."""
    inexact = [t for t in tensors if t.sqnr_db < math.inf or t.problem]
    worst = sorted(inexact, key=lambda t: math.inf if t.output_sqnr_db is None else t.output_sqnr_db)[:_WORST]
    errors: dict[str, list[float | None]] = {"SQNR": [t.sqnr_db for t in worst], **_of_layers(worst)}
    columns = zip(*([sqnr_text(x, " dB") for x in column] for column in errors.values()), strict=True)
    rows = tuple((t.name, *row, t.stored_as, t.reference) for t, row in zip(worst, columns, strict=True))
    return Table(columns=("Tensor", *errors, "<Stored", "<Reference"), rows=rows, has_names=True)


def _of_layers(tensors: Sequence[ComparedTensor]) -> dict[str, list[float | None]]:
    """SQNR of the inputs and outputs of layers, in dB, by a heading; empty if they were not measured."""
    columns = {"Inputs": [t.input_sqnr_db for t in tensors], "Output": [t.output_sqnr_db for t in tensors]}
    return {heading: column for heading, column in columns.items() if any(x is not None for x in column)}


def _tensor_table(result: VerifyResult) -> Table:
    """Every tensor, without empty columns."""
    has_groups = any(t.num_groups for t in result.tensors)
    has_problems = any(t.problem for t in result.tensors)
    layers = _of_layers(result.tensors)
    columns = ["Tensor", "SQNR, dB", *layers, "Max rel. error", *(["Groups off"] if has_groups else []), "<Stored as"]
    rows = []
    for i, t in enumerate(result.tensors):
        row: list[str | Cell] = [t.name, Cell(text=sqnr_text(t.sqnr_db), sort=t.sqnr_db)]
        row += [Cell(text=sqnr_text(column[i]), sort=column[i]) for column in layers.values()]
        row.append(Cell(text=error_text(t.max_rel_error), sort=t.max_rel_error))
        if has_groups:
            row.append(Cell(text=f"{count_text(t.num_off)} of {count_text(t.num_groups)}", sort=t.num_off))
        rows.append((*row, t.stored_as, t.reference, *([t.problem or ""] if has_problems else [])))
    return Table(
        columns=(*columns, "<Compared with", *(["<Problem"] if has_problems else [])),
        rows=tuple(rows),
        has_names=True,
        sortable=True,
        filter="attention e4m3fn",
        caption=SINGLE_ELEMENTS,
    )


def outcome_of(v: VerifyResult) -> Outcome:
    """The outcome of a verification; "not run" if nothing was checked, or if there are `doubts`."""
    if not v.passed:
        return "failed"
    return "not run" if v.level == "none" or doubts(v) else "passed"


def doubts(v: VerifyResult) -> tuple[str, ...]:
    """Reasons why an output that is stored as planned may not be the model any more."""
    found, weights, logits = [], v.weights, v.logits
    if weights and -math.inf < weights.min_sqnr_db <= LOST_DB:  # a tensor of zeros has no signal to lose
        found.append(f"`{weights.worst}` lost its signal (SQNR {sqnr_text(weights.min_sqnr_db, ' dB')})")
    if logits and logits.rel_error is not None and logits.rel_error >= 1:
        found.append(f"outputs differ as much as another model's (relative error {error_text(logits.rel_error)})")
    if logits and (logits.skipped or "").startswith("not measurable"):
        found.append(f"outputs are {logits.skipped}")
    return tuple(found)


def verify_headline(v: VerifyResult) -> str:
    """The outcome and the strongest evidence for it, in one line."""
    word = outcome_of(v)
    if word == "failed":
        return f"Verification failed: {name_list(_reasons(v))}"
    if word == "not run":
        return f"Stored as planned, but {name_list(doubts(v))}" if doubts(v) else "Not verified"
    if v.logits and not v.logits.skipped and (v.logits.is_text or _is_exact(v)):
        return f"Verified: {_outputs_text(v.logits, is_exact=_is_exact(v))}"
    if v.weights:
        opened = ", as transformers opens them" if v.opened and v.opened.result else ""
        return f"Verified by its weights{opened}: {_tensors_text(v)}"
    return f"Verified by its hashes: {_hash_words(v.hash)}" if v.hash else f"Verified at level {v.level}"


def _reasons(v: VerifyResult) -> list[str]:
    """The reasons of a failure: recorded problems, or else failed checks; and failed gates."""
    failed = [f"{c.name}, {c.text}" for c in checks(v) if c.outcome == "failed"]
    return [*v.problems, *(text for text in failed if not v.problems or text.startswith("gate "))]


def checks(v: VerifyResult) -> tuple[Check, ...]:
    """Every step of the verification in order: hashes, files, weights, output errors, outputs, gates."""
    steps = []
    for name, words, hashed in (("attestation", "the attestation", v.attestation), ("hashes", "SHA256SUMS", v.hash)):
        if hashed:
            text = _hash_words(hashed, words)
            steps.append(Check(name=name, outcome=_outcome(not hashed.mismatched), text=text))
    if v.files:
        outcome = _outcome(not v.files.different) if v.files.compared else "not run"
        steps.append(Check(name="files", outcome=outcome, text=_files_words(v.files)))
    if v.weights:
        steps.append(Check(name="weights", outcome=_outcome(not v.weights.mismatched), text=_weights_words(v)))
    if judged := [t.rounding for t in v.tensors if t.rounding]:
        steps.append(Check(name="rounding", outcome="passed", text=_codes_words(judged)))
    if v.feedback:
        outcome = "not run" if v.feedback.skipped and not v.feedback.wrong else _outcome(not v.feedback.wrong)
        steps.append(Check(name="calibration", outcome=outcome, text=_feedback_words(v.feedback)))
    if v.opened:
        asked = [m for m in (v.opened.source, v.opened.result) if m]
        outcome = "not run" if not asked else _outcome(not any(m.different or m.error for m in asked))
        steps.append(Check(name="transformers", outcome=outcome, text=_opened_words(v.opened)))
    if v.logits:
        outcome = "not run" if v.logits.skipped else _outcome(v.logits.problem is None)
        steps.append(Check(name="outputs", outcome=outcome, text=_logits_words(v.logits, is_exact=_is_exact(v))))
    elif v.files:
        text = "not compared; use --data FILE or --level logits to do so"
        steps.append(Check(name="outputs", outcome="not run", text=text))
    steps += [Check(name="task", outcome="passed", text=task_text(t)) for t in v.tasks]
    steps += map(gate_check, v.gates)
    return tuple(steps)


def _outcome(passed: bool) -> Outcome:
    return "passed" if passed else "failed"


def _hash_words(check: HashCheck, reference: str = "SHA256SUMS") -> str:
    if check.mismatched:
        bad = len(check.mismatched)
        return f"{count_text(bad)} of {plural(check.num_files, 'file')} differ: {name_list(check.mismatched)}"
    return f"{plural(check.num_files, 'file')} match{'es' if check.num_files == 1 else ''} {reference}"


def _files_words(check: FilesCheck) -> str:
    different = f"{plural(len(check.different), 'difference')} among {', '.join(check.compared)}"
    equal = f"{', '.join(check.compared)} are equivalent" if check.compared else ""
    rest = f"not compared: {name_list(check.not_compared)}" if check.not_compared else ""
    return "; ".join(filter(None, (different if check.different else equal, rest)))


def _tensors_text(v: VerifyResult) -> str:
    """The number of tensors compared, and the error of the worst one."""
    assert v.weights is not None
    compared = plural(v.weights.num_tensors, "tensor")
    if not v.weights.num_tensors:
        return "no tensors to compare"
    if v.weights.min_sqnr_db == math.inf:
        return f"{compared}, all equal"
    return f"{compared}, lowest SQNR {sqnr_text(v.weights.min_sqnr_db, ' dB')} in {_worst_place(v)}"


def _worst_place(v: VerifyResult) -> str:
    """The worst tensor and the usual SQNR of its format."""
    worst = v.weights.worst if v.weights else None
    return (worst or "every compared tensor") + next(
        (usual_sqnr(t.stored_as) for t in v.tensors if t.name == worst), ""
    )


def _weights_words(v: VerifyResult) -> str:
    """The result in words. Elements are right if they equal the reference rounding, or what error feedback chose."""
    check = v.weights
    assert check is not None
    if check.mismatched and v.level != "values":
        bad = f"{count_text(len(check.mismatched))} of {plural(check.num_tensors, 'tensor')}"
        return f"{bad} are wrong: {name_list(check.mismatched)}"
    checked, total = check.num_elements_checked, check.num_elements
    if not checked or v.level == "values":
        wrong = f"; {count_text(len(check.mismatched))} with problems" if check.mismatched else ""
        return _tensors_text(v) + wrong
    which = f"all {count_text(checked)}" if checked == total else f"{count_text(checked)} checked"
    share = f" ({share_text(checked, total)} of all" if total and checked < total else ""
    if share:
        missed = check.miss_probability
        share += f"; one bad block elsewhere would be missed with probability {missed:.2g})" if missed else ")"
    return f"no wrong element among {which}{share}; {_tensors_text(v)}"


def _codes_words(checks: Sequence[RoundingCheck]) -> str:
    """What the codes of a file are consistent with, in a sentence."""
    parts = []
    for kind, num in Counter(c.kind for c in checks).most_common():
        shares = [c.turned for c in checks if c.kind == kind]
        ends = " to ".join(dict.fromkeys(share_text(x, 1) for x in (min(shares), max(shares))))
        turned = "" if kind == "nearest" else f" ({ends} of codes are not the nearest)"
        parts.append(f"{count_text(num)} with {_ROUNDINGS[kind]}{turned}")
    rules = Counter(_SCALES[c.scales] for c in checks if c.scales).most_common()
    scales = "; scales for " * bool(rules) + name_list([f"{count_text(num)} with {rule}" for rule, num in rules])
    odd = sum(bool(c.unusual) for c in checks)
    unlike = f"; {plural(odd, 'weight')} unlike {'its' if odd == 1 else 'their'} siblings" if odd else ""
    return f"of {plural(len(checks), 'weight')}, codes are consistent for {name_list(parts)}{scales}{unlike}"


def _codes_section(tensors: Sequence[ComparedTensor]) -> Section | None:
    """The weights whose codes stand out, and on a page the share of turned codes of all."""
    odd = [(t.name, t.rounding) for t in tensors if t.rounding and t.rounding.unusual]
    rows = tuple(
        (n, *(share_text(x / c.num_codes, 1) for x in (c.num_second, c.num_further)), _ROUNDINGS[c.kind], c.unusual)
        for n, c in odd
    )
    columns = ("Tensor", "Second neighbour", "Further", "<Consistent with", "<Unlike its siblings")
    return section("Weights rounded unlike their siblings", Table(columns=columns, rows=rows, has_names=True))


def _feedback_words(check: FeedbackCheck) -> str:
    words = f"{plural(check.num_scales, 'scale')}: as recorded, on the calibration text" if check.num_scales else ""
    if check.wrong:
        words = f"{plural(len(check.wrong), 'figure')} differ{'s' * (len(check.wrong) == 1)} from the record"
    return "; ".join(filter(None, (words, check.skipped)))


def _opened_words(check: OpenedCheck) -> str:
    """What transformers holds of source and result, and what it was not asked."""
    words = []
    for role, model in (("source", check.source), ("result", check.result)):
        if model is not None and model.error is None:
            share = f"{count_text(model.num_tensors - len(model.different))} of {count_text(model.num_tensors)}"
            share = share if model.different else f"all {count_text(model.num_tensors)}"
            words.append(f"it opens the {role} ({model.model_class}) with {share} tensors as lpconv reads them")
        elif model is not None:
            words.append(f"it cannot open the {role}")
    return "; ".join((*words, *(f"not asked about {why}" for why in check.not_asked)))


def _is_exact(v: VerifyResult) -> bool:
    """Whether all weights are equal to the source's, so that equal outputs follow from them."""
    return v.weights is not None and v.weights.min_sqnr_db == math.inf and bool(v.logits and v.logits.bit_equal)


def _logits_words(check: LogitsCheck, *, is_exact: bool) -> str:
    if check.skipped:
        return check.skipped
    inputs = _inputs_words(check, is_exact=is_exact)
    return _outputs_text(check, is_exact=is_exact) + (f" ({inputs})" if inputs else "")


def _outputs_text(check: LogitsCheck, *, is_exact: bool) -> str:
    """The distance of the outputs, on text by what a reader of it would notice."""
    if check.problem:
        return check.problem
    if is_exact:
        return "outputs are bit-equal to the source's"
    if not check.is_text:
        return "the model runs, with finite outputs where the source has them"
    parts = [] if check.mean_kl is None else [f"KL {kl_text(check.mean_kl)} per position on text"]
    if check.rel_error is not None and not parts:
        parts.append(f"outputs on text are within a relative error of {error_text(check.rel_error)} of the source's")
    if check.perplexity is not None and check.source_perplexity is not None:
        shown = check.loss_gap.detectable if check.loss_gap else None
        seen = f" (a rise above {100 * math.expm1(shown):.2g} % would have been seen)" if shown and shown < 1 else ""
        parts.append(f"perplexity {number_text(check.source_perplexity, 4)} → {number_text(check.perplexity, 4)}{seen}")
    if check.top1_agreement is not None:
        parts.append(f"the same top prediction at {share_text(check.top1_agreement, 1)} of positions")
    return ", ".join(parts) or "outputs were compared with the source's"


def task_text(check: TaskCheck) -> str:
    """The result for one score: "loses 1.2 (0.4 to 2.0) points on arc_easy (acc, 400 questions)"."""
    questions = plural(check.num_questions, "question")
    if check.drop is None:
        scores = f"{_score_text(check, check.score)}, and {_score_text(check, check.source_score)} for the source"
        return f"{check.metric} on {check.task} is {scores} ({questions}; not a mean, so without an interval)"
    known = _drop_text(check, check.drop.detectable) != MISSING
    shown = f"; a drop above {_drop_text(check, check.drop.detectable)} would have been seen" if known else ""
    if check.drop.num_needed:
        needed = plural(check.drop.num_needed, "question")
        shown += f", and {_drop_text(check, check.drop.wanted)} by {needed}"
    if check.drop.low <= 0 <= check.drop.high:
        gain = _gain_text(check)
        return f"no difference on {check.task} that {questions} could show ({check.metric}: {gain}{shown})"
    word, direction = ("loses", 1) if check.drop.value > 0 else ("gains", -1)
    return f"{word} {_gain_text(check, direction, sign='')} on {check.task} ({check.metric}, {questions}{shown})"


def _task_tile(check: TaskCheck) -> Tile:
    """The gain in one score as a headline number, or the score if there is no gain to give."""
    figure = _gain_text(check) if check.drop else _score_text(check, check.score)
    detail = f"{plural(check.num_questions, 'question')}, answered by both models"
    return Tile(label=f"{check.task}, {check.metric}", figure=figure, detail=detail)


def _tasks_section(checks: Sequence[TaskCheck]) -> Section | None:
    """The scores of both models, and the difference with its interval."""
    flips = ("Right → wrong", "Wrong → right") if any(c.num_lost is not None for c in checks) else ()
    columns = ("Task", "<Score", "Questions", "Compared with", "This model", "Gain", "Seen from", *flips)
    about = (
        "Both models answered the same questions. A gain has its 95 % interval, from the differences question by "
        "question; a true drop of Seen from would be outside of it in 80 % of cases."
    )
    rows = tuple(_row(c)[: len(columns)] for c in checks)
    rounded = next((f"This model ran with {w}." for w in map(_rounding_words, checks) if w), "")
    return section("Answers to tasks", Table(columns=columns, rows=rows), about, rounded) if checks else None


def _row(check: TaskCheck) -> tuple[str, ...]:
    scores = (_score_text(check, score) for score in (check.source_score, check.score))
    gain = _gain_text(check) if check.drop else MISSING
    shown = _drop_text(check, check.drop.detectable) if check.drop else MISSING
    flips = map(count_text, (check.num_lost, check.num_won))
    return (check.task, check.metric, count_text(check.num_questions), *scores, gain, shown, *flips)


def _score_text(check: TaskCheck, score: float) -> str:
    return number_text(score) if check.num_lost is None else share_text(score, 1)


def _drop_text(check: TaskCheck, drop: float | None) -> str:
    """A drop without a sign, in percentage points for scores that are shares."""
    if drop is None or drop == math.inf:
        return MISSING
    return f"{drop:.2g}" if check.num_lost is None else f"{100 * drop:.1f} points"


def _gain_text(check: TaskCheck, direction: int = -1, sign: str = "+") -> str:
    """The gain, or with `direction` 1 the drop, and its interval: "-1.2 (-2.0 to -0.4) points" for scores of shares."""
    assert check.drop is not None
    is_share, low, high = check.num_lost is not None, direction * check.drop.low, direction * check.drop.high
    figures = (direction * check.drop.value, min(low, high), max(low, high))
    value, low_text, high_text = (f"{100 * x:{sign}z.1f}" if is_share else f"{x:{sign}z.3g}" for x in figures)
    return f"{value} ({low_text} to {high_text})" + " points" * is_share
