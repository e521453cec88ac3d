"""What a model gains or loses in tasks, in words and as a table."""

from collections.abc import Sequence

from lpconv.report.document import Section, Table, Tile, section
from lpconv.report.numbers import MISSING, count_text, number_text, plural, share_text
from lpconv.results import TaskCheck


def task_text(check: TaskCheck) -> str:
    """The result for one score: "loses 1.2 ± 0.8 points on arc_easy (acc, 400 questions)"."""
    questions = plural(check.num_questions, "question")
    if check.drop is None:
        scores = f"{_score_text(check, check.score)}, and {_score_text(check, check.source_score)} for the source"
        return f"{check.metric} on {check.task} is {scores} ({questions}; not a mean, so without an interval)"
    if check.drop.low <= 0 <= check.drop.high:
        gain = _gain_text(check, 0.0 - check.drop.value)
        return f"no difference on {check.task} that {questions} could show ({check.metric}: {gain})"
    word = "loses" if check.drop.value > 0 else "gains"
    gain = _gain_text(check, abs(check.drop.value)).removeprefix("+")
    return f"{word} {gain} on {check.task} ({check.metric}, {questions})"


def task_tile(check: TaskCheck) -> Tile:
    """The gain in one score as a headline number, or the score if there is no gain to give."""
    figure = _gain_text(check, 0.0 - check.drop.value) if check.drop else _score_text(check, check.score)
    detail = f"{plural(check.num_questions, 'question')}, answered by both models"
    return Tile(label=f"{check.task}, {check.metric}", figure=figure, detail=detail)


def tasks_section(checks: Sequence[TaskCheck]) -> Section | None:
    """The scores of both models, and the difference with its interval."""
    flips = ("Right → wrong", "Wrong → right") if any(c.num_lost is not None for c in checks) else ()
    columns = ("Task", "<Score", "Questions", "Compared with", "This model", "Gain", *flips)
    about = (
        "Both models answered the same questions. ± is the 95 % interval of the gain, from the differences question by "
        "question."
    )
    rows = tuple(_row(c)[: len(columns)] for c in checks)
    return section("Answers to tasks", Table(columns=columns, rows=rows), about) if checks else None


def _row(check: TaskCheck) -> tuple[str, ...]:
    scores = (_score_text(check, score) for score in (check.source_score, check.score))
    gain = _gain_text(check, 0.0 - check.drop.value) if check.drop else MISSING
    flips = (MISSING if n is None else count_text(n) for n in (check.num_lost, check.num_won))
    return (check.task, check.metric, count_text(check.num_questions), *scores, gain, *flips)


def _score_text(check: TaskCheck, score: float) -> str:
    return number_text(score) if check.num_lost is None else share_text(score, 1)


def _gain_text(check: TaskCheck, gain: float) -> str:
    """A gain with its interval, in percentage points for scores that are shares: "-1.2 ± 0.8 points"."""
    assert check.drop is not None
    half = check.drop.high - check.drop.value
    if check.num_lost is None:
        return f"{gain:+.3g} ± {half:.2g}"
    return f"{100 * gain:+.1f} ± {100 * half:.1f} points"
