"""Text and tables of a fine-tuning: results of run and twin, and their interpretation."""

import math
from collections.abc import Iterator

from lpconv.report.document import Row, Table
from lpconv.report.numbers import (
    MISSING,
    ROLE_WORDS,
    count_text,
    duration_text,
    plural,
    scale_text,
    share_text,
)
from lpconv.results import FinetuneResult, GapRecord, LossAllocation, RunRecord, TrackedRecord

_METRICS = {
    "eval_loss": "held-out loss",
    "eval_accuracy": "held-out accuracy",
    "eval_loss_fp32": "held-out loss of the weights in fp32",
    "eval_accuracy_fp32": "held-out accuracy of the weights in fp32",
    "eval_loss_published": "held-out loss of the published model",
    "eval_accuracy_published": "held-out accuracy of the published model",
}
_RECOVERED = {"held-out loss": "KL to the source", "held-out accuracy": "equal first choices"}
_SHARES = ("eval_accuracy", "eval_accuracy_fp32", "eval_accuracy_published")
# The three products of a linear layer, with the roles of their operands.
_PRODUCTS = {
    "output": ("input", "weight"),
    "input gradient": ("grad_output", "weight"),
    "weight gradient": ("grad_output", "input"),
}
_WORST = 5


def title(result: FinetuneResult) -> str:
    """Name of the model and of its training."""
    return f"{result.name} fine-tuned: {result.recipe}" + (f" next to {result.twin}" if result.twin else "")


def main_run(result: FinetuneResult) -> RunRecord:
    """The run of the first seed."""
    return next(r for r in result.runs if r.role == "run")


def twin_run(result: FinetuneResult) -> RunRecord | None:
    """The twin of the first seed's run, or None."""
    seed = main_run(result).seed
    return next((r for r in result.runs if r.role == "twin" and r.seed == seed), None)


def metric_name(metric: str, result: FinetuneResult | None = None) -> str:
    """Display name of a held-out metric."""
    name = _METRICS.get(metric, metric)
    for usual, recovered in _RECOVERED.items() if result is not None and result.source else ():
        name = name.replace(usual, recovered)
    return name


def metric_title(metric: str, result: FinetuneResult | None = None) -> str:
    """Display name of a held-out metric, with a capital letter."""
    name = metric_name(metric, result)
    return name[:1].upper() + name[1:]


def figure_text(metric: str, value: float | None) -> str:
    """A held-out metric as text: accuracy in per cent, loss with five digits."""
    if value is None:
        return MISSING
    return f"{100 * value:.2f} %" if metric in _SHARES else f"{value:#.5g}"


def _difference_text(metric: str, value: float) -> str:
    return f"{100 * value:+.2f} points" if metric in _SHARES else _two_digits(value, "+")


def _two_digits(value: float, sign: str = "") -> str:
    """A number with two significant digits, trailing zeros included: 0.010."""
    return f"{value:{sign}#.2g}".removesuffix(".") if value else f"{value:{sign}g}"


def noise_text(gap: GapRecord) -> str:
    """The gap as text, with its 95 % interval over seeds if there is one."""
    text = _difference_text(gap.metric, gap.gap)
    if gap.half_width is None:
        return text
    width = f"{100 * gap.half_width:.2f}" if gap.metric in _SHARES else _two_digits(gap.half_width)
    return f"{text} ± {width}"


def _error_text(metric: str, error: float | None) -> str:
    """A standard error as text; in percentage points for accuracy."""
    if error is None:
        return MISSING
    return f"{100 * error:.2g} points" if metric in _SHARES else _two_digits(error)


def gap_table(result: FinetuneResult) -> Table:
    """Every metric of run and twin after the last step, with the gap and whether it exceeds noise.

    Language models also get perplexity.
    """
    rows: list[Row] = []
    for g in result.gaps:
        says = {None: "unknown with one seed", True: "yes", False: "no"}[g.exceeds_noise]
        name, error = metric_name(g.metric), _error_text(g.metric, g.standard_error)
        rows.append((name, figure_text(g.metric, g.run), figure_text(g.metric, g.twin), noise_text(g), error, says))
        if g.metric == "eval_loss" and result.task != "classification" and max(g.run, g.twin) < 50:
            rows.append(("held-out perplexity", f"{math.exp(g.run):#.5g}", f"{math.exp(g.twin):#.5g}",
                         f"{100 * math.expm1(g.gap):+.2g} %", MISSING, says))  # fmt: skip
    return Table(
        columns=("Metric", result.recipe, result.twin or "", "Gap", "Std. error", "<Beyond noise?"),
        rows=tuple(rows),
        caption="After the last step, mean over seeds. The gap has a 95 % interval from paired seeds and a "
        "standard error over held-out batches.",
    )


def held_out_table(result: FinetuneResult) -> Table:
    """Each held-out metric of run and twin, before the first step and after the last."""
    rows = tuple(
        (
            metric_name(h.metric, result),
            arithmetic_of(result, h.role),
            figure_text(h.metric, h.before),
            figure_text(h.metric, h.after),
            _error_text(h.metric, h.standard_error),
            figure_text(h.metric, h.baseline),
        )
        for h in result.held_out
    )
    return Table(columns=("Metric", "<Arithmetic", "Before", "After", "Std. error", "Guess"), rows=rows)


def held_out_words(result: FinetuneResult) -> str:
    """Number of examples and the baseline of the held-out metrics; empty if the record has none."""
    if not result.held_out:
        return ""
    h = result.held_out[0]
    examples = "example" if h.num_available == 1 else "examples"
    of_all = "" if h.num_examples == h.num_available else f" of {count_text(h.num_available)}"
    text = f"On {count_text(h.num_examples)}{of_all} held-out {examples}; standard errors are over batches."
    if result.source:
        return text
    return f"{text} The baseline guess is {guess(result)}, with the frequencies of the training data."


def guess(result: FinetuneResult) -> str:
    """Description of the baseline of the held-out metrics."""
    return "the largest class" if result.task == "classification" else "the unigram distribution of tokens"


def arithmetic_of(result: FinetuneResult, role: str) -> str:
    """Name of the arithmetic of a run or of its twin."""
    return result.recipe if role == "run" else result.twin or ""


def nothing_learned(result: FinetuneResult) -> tuple[str, ...]:
    """Warnings for run and twin if the held-out metrics do not show that they learned anything."""
    return tuple(
        f"{arithmetic_of(result, role)} learned nothing measurable on the held-out examples: {_progress(result, role)}"
        for role in ("run", "twin")
        if result.learned(role) is False
    )


def _progress(result: FinetuneResult, role: str) -> str:
    parts = []
    for h in (h for h in result.held_out if h.role == role):
        before, after = (figure_text(h.metric, x) for x in (h.before, h.after))
        text = f"{metric_name(h.metric, result)} {before} before, {after} after"
        if h.standard_error is not None:
            text += f" ± {_error_text(h.metric, h.standard_error)}"
        if h.metric == "eval_accuracy" and h.baseline is not None:
            text += f", {figure_text(h.metric, h.baseline)} by {guess(result)}"
        parts.append(text)
    return "; ".join(parts)


def verdict(result: FinetuneResult) -> str:
    """Two or three sentences: what precision cost, and whether the data can show that."""
    run = main_run(result)
    if result.source:
        return _recovery_verdict(result)
    if not result.gaps:
        ends = [f"{metric_name(s.name, result)} {figure_text(s.name, s.values[-1])}" for s in run.evaluations]
        return f"No twin was trained, so the cost of low precision is unknown. The run ended at {' and '.join(ends)}."
    by_metric = {g.metric: g for g in result.gaps}
    g = by_metric.get("eval_accuracy", result.gaps[0])
    text = (
        f"After {plural(len(run.losses.steps), 'step')} the {metric_name(g.metric)} is {figure_text(g.metric, g.run)} "
        f"with {result.recipe} and {figure_text(g.metric, g.twin)} with {result.twin}: a gap of {noise_text(g)}."
    )
    if result.learned("twin") is False:
        return (
            f"{text} But the twin, {result.twin}, learned nothing measurable on the held-out examples "
            f"({_progress(result, 'twin')}), so the gap does not show what low precision costs."
        )
    if result.learned("run") is False:
        text += f" {result.recipe} learned nothing, while {result.twin} did ({_progress(result, 'run')})."
    if g.exceeds_noise is None:
        text += " One seed cannot separate this from noise; use --seeds 3."
    else:
        text += f" That is {'beyond' if g.exceeds_noise else 'within'} the noise between seeds (95 % interval)."
    exact = by_metric.get(f"{g.metric}_fp32")
    if exact is not None:
        text += f" With its trained weights in fp32 arithmetic, the gap is {noise_text(exact)}."
    published = by_metric.get(f"{g.metric}_published")
    if published is not None:
        text += f" For the published model ({result.saved_as}), which gates judge, it is {noise_text(published)}."
    return text


def _recovery_verdict(result: FinetuneResult) -> str:
    """Held-out metrics before and after a recovery, and the metrics of the published model."""
    run = main_run(result)
    changes = (
        f"{metric_name(h.metric, result)} from {figure_text(h.metric, h.before)} to {figure_text(h.metric, h.after)}"
        for h in result.held_out
    )
    published = (
        f"{metric_name(metric, result)} {figure_text(metric, s.values[-1])}"
        for s in run.evaluations
        if (metric := s.name.removesuffix("_published")) != s.name
    )
    return (
        f"{plural(len(run.losses.steps), 'step')} towards {result.source} changed {' and '.join(changes)} on "
        f"held-out examples. The published model in fp32: {' and '.join(published)}."
    )


def diagnostics(result: FinetuneResult) -> tuple[str, ...]:
    """Diagnostics of the run, one sentence each."""
    run = main_run(result)
    twin = twin_run(result)
    of_twin = f" (twin {duration_text(twin.step_time_s)})" if twin is not None else ""
    sentences = [f"time per step: {duration_text(run.step_time_s)}{of_twin}", *_time_spent(result)]
    for watched in (r for r in result.runs if r.tracked):
        steps, whose = len({t.step for t in watched.tracked}), "" if watched is run else " of the twin"
        cost = share_text(watched.overhead, 1)
        sentences.append(f"recording {plural(steps, 'step')}{whose} added {cost} to the step time")
    skipped = f"{plural(run.num_skipped, 'step')} skipped because of non-finite gradients"
    sentences.append(skipped if run.num_skipped else "no step was skipped")
    first = run.first_nonfinite
    if first is not None:
        sentences.append(
            f"first non-finite value: {first.layer}, {first.direction}, step {first.step}; {first.outcome}"
        )
    scales = run.loss_scales.values
    if len(set(scales)) > 1 or (scales and scales[0] != 1):
        sentences.append(f"loss scale from {scale_text(scales[0])} to {scale_text(scales[-1])}")
    if run.updates:
        last = run.updates[-1]
        sentences.append(
            f"of the intended update at step {last.step}, {share_text(last.edq, 1)} reached all stored state and "
            f"{share_text(last.edq_weights, 1)} the 16-bit weights (EDQ); {share_text(last.lost, 1)} of its changes "
            f"were lost"
        )
    if run.loss_allocation is not None:
        sentences.append(_allocation_text(run.loss_allocation))
    return tuple(sentences)


def _allocation_text(a: LossAllocation) -> str:
    share = MISSING if a.rounding_share is None else f"{round(100 * a.rounding_share, 1) + 0.0:.1f} %"  # avoids -0.0
    return (
        f"steps {a.first_step} to {a.last_step} changed the loss on the first held-out batches ({a.num_batches}) "
        f"by {a.loss_after - a.loss_before:+.3g} to {a.loss_after:.5g}; rounding took {share} of the intended change; "
        f"the layers' changes differ from the true one by {share_text(a.closure_error, 1)} (closure error)"
    )


def _time_spent(result: FinetuneResult) -> tuple[str, ...]:
    """How the command's time was spent, largest first; parts below one per cent are left out."""
    spent = {what: s for what, s in result.spent.items() if s >= 0.01 * result.seconds}
    if not spent:
        return ()
    parts = (f"{duration_text(s)} {what}" for what, s in sorted(spent.items(), key=lambda part: -part[1]))
    return (f"of the command's {duration_text(result.seconds)}: {', '.join(parts)}",)


def worst_tracked(result: FinetuneResult) -> tuple[str, ...]:
    """The products with the lowest SQNR if operands were cast, else the tensors that lost most elements."""
    products = sorted({p for run in result.runs for p in _products(run)})
    if products:
        worst: dict[str, str] = {}
        for _, name, text in products:
            worst.setdefault(name, text)
        return tuple(worst.values())[:_WORST]
    return _worst_tensors(result)


def _products(run: RunRecord) -> Iterator[tuple[float, str, str]]:
    """(SQNR in dB, name, text) of each product whose operands were recorded: errors of both operands add up."""
    recorded = {(t.step, t.layer, t.role): t for t in run.tracked if t.format not in ("fp16", "bf16")}
    for step, layer in sorted({key[:2] for key in recorded}):
        for words, roles in _PRODUCTS.items():
            operands = [t for role in roles if (t := recorded.get((step, layer, role))) and t.sqnr_db is not None]
            if len(operands) == len(roles):
                sqnr_db = -10 * math.log10(sum(10 ** (-(t.sqnr_db or 0.0) / 10) for t in operands))
                clipped, flushed = (sum(x or 0.0 for x in part) for part in zip(
                    *((t.clipped_energy, t.flushed_energy) for t in operands), strict=True))  # fmt: skip
                name = f"{words} of {layer}"
                lost = f"{share_text(clipped, 1)} clipped, {share_text(flushed, 1)} flushed to zero (step {step})"
                yield sqnr_db, name, f"{name}: SQNR {sqnr_db:.1f} dB; of its operands' energy {lost}"


def _worst_tensors(result: FinetuneResult) -> tuple[str, ...]:
    worst: dict[tuple[str, str], tuple[float, str]] = {}
    for t in (t for run in result.runs for t in run.tracked):
        lost = t.underflow + t.overflow
        if lost > worst.get((t.layer, t.role), (0.0, ""))[0]:
            worst[t.layer, t.role] = lost, lost_text(t)
    return tuple(text for _, text in sorted(worst.values(), reverse=True)[:_WORST])


def lost_text(t: TrackedRecord) -> str:
    """Losses of a tensor in a format: "weight of a: 0 % underflow, 50 % overflow in e4m3fn (step 1)"."""
    shares = f"{share_text(t.underflow, 1)} underflow, {share_text(t.overflow, 1)} overflow"
    return f"{ROLE_WORDS.get(t.role, t.role)} of {t.layer}: {shares} in {t.format} (step {t.step})"
