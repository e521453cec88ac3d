"""The page of `lpconv verify`: how far a checkpoint is from another one, by its weights and by what its model says."""

from pathlib import PurePath

from lpconv.report.convert.plot import sqnr_plot
from lpconv.report.convert.words import OUTCOME, checks, percent, verdict, verify_sentence
from lpconv.report.numbers import MISSING, count_text, error_text, sqnr_text
from lpconv.report.page import Tile, breakable, page
from lpconv.report.printable import printable_record
from lpconv.results import LogitsCheck, Verification, VerifyResult


def html_verify(result: Verification) -> str:
    """The page of one verification."""
    result = printable_record(result)
    logits = result.logits if result.logits and not result.logits.skipped else None
    plot = sqnr_plot([(result.path, result.tensors)], of="tensor")
    return page(
        "verify",
        result=result,
        name=PurePath(result.path).name or result.path,
        beside=result.against,
        version=result.version,
        command=result.command,
        summary=verify_sentence(result),
        tiles=_tiles(result, logits),
        verdict=verdict(result),
        checks=checks(result),
        outcome=OUTCOME,
        plots=[plot] if plot else [],
        outputs=_outputs(logits) if logits else (),
        problems=any(t.problem for t in result.tensors),
        groups=any(t.num_groups for t in result.tensors),
    )


def _tiles(result: VerifyResult, logits: LogitsCheck | None) -> list[Tile]:
    """What was compared, and what decides: the fewer the checks, the fewer tiles."""
    tiles: list[Tile] = []
    if result.weights:
        exact = sum(t.sqnr_db == float("inf") for t in result.tensors)
        detail = f"{count_text(exact)} of them equal" if exact else "none of them equal"
        tiles.append(("Tensors compared", count_text(len(result.tensors)), detail))
        worst = result.weights.worst
        figure = sqnr_text(result.weights.min_sqnr_db, " dB")
        tiles.append(("Lowest SQNR of a tensor", figure, breakable(worst) if worst else "every tensor"))
    if logits and logits.mean_kl is not None:
        tiles.append(("KL divergence", error_text(logits.mean_kl), "nats per position"))
    if logits and logits.top1_agreement is not None:
        tiles.append(("Same first choice", percent(logits.top1_agreement), "of positions"))
    if logits and logits.perplexity is not None:
        other = _perplexity(logits.source_perplexity)
        tiles.append(("Perplexity", _perplexity(logits.perplexity), f"the other has {other}"))
    if not tiles and result.hash:
        tiles.append(("Files", count_text(result.hash.num_files), f"{count_text(len(result.hash.mismatched))} differ"))
    return tiles


def _outputs(logits: LogitsCheck) -> tuple[tuple[str, str, str], ...]:
    """What both models say: a figure, its value, and what it means; rows without a value are left out."""
    rows = (
        ("KL divergence", error_text(logits.mean_kl), "from the other model to this one, nats per position"),
        ("KL divergence, back", error_text(logits.reverse_kl), "from this model to the other one"),
        ("Same first choice", percent(logits.top1_agreement) if logits.top1_agreement is not None else MISSING,
         "positions at which the largest output has the same index"),
        ("Perplexity", _perplexity(logits.perplexity), "of the next token, this model"),
        ("Perplexity, other", _perplexity(logits.source_perplexity), "of the next token, the model compared with"),
        ("Relative error", error_text(logits.rel_error), "of all outputs, in the 2-norm"),
        ("Largest difference", error_text(logits.max_abs_diff), "of one output"),
    )  # fmt: skip
    return tuple(row for row in rows if row[1] != MISSING)


def _perplexity(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4g}"
