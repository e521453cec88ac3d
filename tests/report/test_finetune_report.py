"""The report of a fine-tuning from records alone: verdict, tables, plots, card."""

import dataclasses
import math
import re
from typing import Any

import pytest

from lpconv.errors import InputError
from lpconv.report.cards import finetune_card
from lpconv.report.document import Code, Prose, Table, texts_of
from lpconv.report.finetune import (
    compare_finetunes,
    finetune_document,
    gap_table,
    nothing_learned,
    verdict,
)
from lpconv.report.markdown import markdown
from lpconv.results import (
    FinetuneResult,
    GapRecord,
    GateRecord,
    HeldOutRecord,
    NonfiniteRecord,
    RunRecord,
    Series,
    UpdateQuality,
    from_json,
    to_json,
)
from tests.helpers.report_examples import blocks_of, charts_of, section_of, verdict_of


def run(role: str, losses: tuple[float, ...] = (2.0, 1.5, 1.25)) -> RunRecord:
    steps = tuple(range(1, len(losses) + 1))
    return RunRecord(
        role=role,
        seed=0,
        losses=Series(name="loss", steps=steps, values=losses),
        evaluations=(Series(name="eval_loss", steps=(1, 3), values=(2.0, 1.5)),),
        loss_scales=Series(name="loss_scale", steps=steps, values=(8.0, 8.0, 4.0)),
        num_skipped=1,
        updates=(UpdateQuality(step=2, edq=0.75, edq_weights=0.5, lost=0.125),),
        first_nonfinite=NonfiniteRecord(step=2, layer="a.c", direction="backward", outcome="the step was skipped"),
    )


def result(**changes: object) -> FinetuneResult:
    made = FinetuneResult(
        name="some/model",
        output="out/tuned",
        recipe="unit-fp8",
        twin="fp32",
        task="clm",
        facts={"Data": "a | table"},
        runs=(run("run"), run("twin")),
        gaps=(GapRecord(metric="eval_loss", run=1.5, twin=1.25, gap=0.25, half_width=0.1, noise=0.01),),
        seconds=1.0,
        saved_as="unit e4m3fn",
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]  # any field


@pytest.mark.parametrize(("half_width", "words"), [(0.1, "beyond"), (0.3, "within"), (None, "cannot")])
def test_the_verdict_follows_the_interval(half_width: float | None, words: str) -> None:
    gap = GapRecord(metric="eval_loss", run=1.5, twin=1.25, gap=0.25, half_width=half_width, standard_error=0.01)
    published = dataclasses.replace(gap, metric="eval_loss_published", gap=0.5, standard_error=None)
    assert words in verdict(result(gaps=(gap,)))
    shown = finetune_document(result(gaps=(gap, published)))
    figures = re.findall(r"\+0\.\d+|0\.010|\+65", verdict_of(shown).text)
    assert figures == ["+0.50", *["0.010"] * (not half_width), "+65"]
    assert [t.figure[:5] for t in shown.tiles if "fp32" in t.label] == ["+0.50"]


def test_without_a_twin_nothing_is_claimed() -> None:
    assert "unknown" in verdict(result(gaps=(), twin=None, runs=(run("run"),)))


@pytest.mark.parametrize(("kept", "words"), [(0.9, "90 %"), (-0.2, "further"), (None, "not")])
def test_a_merge_that_moved_away_from_the_adapter_has_not_kept_0_percent(kept: float | None, words: str) -> None:
    merged = dataclasses.replace(run("run"), update_kept=kept, kept_by_layer=(0.5, -0.25, 0.75))
    found = result(source="codes with lora", gaps=(), twin=None, runs=(merged,))
    first = verdict(found).split(". ")[0]
    assert words in first
    assert ("%" in first) == (kept == 0.9)
    (chart,) = (c for title, c in charts_of(finetune_document(found)).items() if "kept" in title)
    assert chart.x.label == "layer"


def test_perplexity_is_that_of_the_losses() -> None:
    rows = {row[0]: row for row in texts_of(gap_table(result()))}
    assert rows["held-out perplexity"][1:4] == [f"{math.exp(1.5):.5g}", f"{math.exp(1.25):.5g}", "+28 %"]


def test_curves_losses_and_layers_are_described() -> None:
    document = finetune_document(result())
    assert {"Held-out loss", "Training loss", "The gap", "Loss scale, log2"} <= charts_of(document).keys()
    assert any("updates" in title for title in charts_of(document))
    assert document.tiles[0].figure == "+0.25 ± 0.10"
    assert ": a.c, backward, step 2" in str(section_of(document, "During training"))


@pytest.mark.parametrize(("passed", "outcome"), [(True, "passed"), (False, "failed")])
def test_a_gate_decides_the_outcome(passed: bool, outcome: str) -> None:
    gate = GateRecord(expression="loss_gap<=0.1", value=0.25, passed=passed)
    found = verdict_of(finetune_document(result(gates=(gate,))))
    assert found.outcome == outcome
    alone = verdict_of(finetune_document(result(gaps=(), twin=None, runs=(run("run"),))))
    assert alone.outcome == "not run"


def held_out(role: str, metric: str, before: float, after: float, error: float = 0.01) -> HeldOutRecord:
    return HeldOutRecord(
        role=role, metric=metric, num_examples=64, num_available=97, baseline=0.6, before=before, after=after,
        standard_error=error, change_error=error,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("run_after", "twin_after", "words"),
    [(0.8, 0.8, " 3 steps "), (0.6, 0.6, "gap"), (0.6, 0.8, "unit-fp8 "), (0.8, 0.61, "gap")],
)
def test_a_gap_is_no_verdict_where_nothing_was_learned(run_after: float, twin_after: float, words: str) -> None:
    records = (held_out("run", "eval_accuracy", 0.5, run_after), held_out("twin", "eval_accuracy", 0.5, twin_after))
    gap = GapRecord(metric="eval_accuracy", run=run_after, twin=twin_after, gap=run_after - twin_after)
    found = result(task="classification", held_out=records, gaps=(gap,))
    assert words in verdict(found)
    assert verdict(found).count(" before,") == (1 if twin_after < 0.7 else 2 * (run_after < 0.7))  # whose figures
    assert len(nothing_learned(found)) == sum(x < 0.7 for x in (run_after, twin_after))
    assert "On 64 of 97 held-out examples" in str(finetune_document(found))


def test_a_loss_that_fell_within_its_error_taught_nothing() -> None:
    assert not result(held_out=(held_out("run", "eval_loss", 2.0, 1.99),)).learned("run")
    assert result(held_out=(held_out("run", "eval_loss", 2.0, 1.9),)).learned("run")
    assert result().learned("run") is None


def test_the_card_says_how_to_open_what_was_saved() -> None:
    (code,) = blocks_of(finetune_card(result()), Code)
    assert code.lines[0].startswith("import lpconv.hf")
    pair = finetune_card(result(saved_as="collage bf16"))
    (code,) = blocks_of(pair, Code)
    assert "AutoModelForCausalLM" in code.lines[0]
    (prose,) = blocks_of(pair, Prose)
    assert "`collage/`" in prose.text


def test_the_card_names_base_model_and_licence_and_no_folder_of_this_machine() -> None:
    found = result(
        name="/home/me/models/bert",
        facts={"Model": "/home/me/models/bert"},
        card={"license": "mit", "base_model": "a/b"},
    )
    card = finetune_card(found)
    assert card.front_matter == {
        "library_name": "transformers", "license": "mit", "base_model": "a/b", "base_model_relation": "finetune",
        "tags": ["lpconv", "fine-tuned", "unit-fp8", "low-precision"],
    }  # fmt: skip
    assert "/home/me" not in markdown(card)
    assert finetune_card(result(card={"base_model": "some/model"})).title.startswith("some/model fine-tuned")


@pytest.mark.parametrize(
    ("series", "harm", "words"),
    [
        ("losses", {"values": []}, "^.*\\b0 .*`loss` .* 3 "),
        ("losses", {"values": [], "steps": []}, "`loss`"),
        ("loss_scales", {"steps": [1]}, "\\b3 .*`loss_scale` .* 1 "),
        ("losses", {"steps": None}, "steps"),
        ("losses", {"values": None}, "values"),
    ],
)
def test_a_series_without_its_figures_is_refused(series: str, harm: dict[str, Any], words: str) -> None:
    document = to_json(result())
    found = document["runs"][0][series] | harm
    document["runs"][0][series] = {name: value for name, value in found.items() if value is not None}
    with pytest.raises(InputError, match=words):
        from_json(FinetuneResult, document)


def test_fine_tunings_are_compared() -> None:
    document = compare_finetunes([result(), result(recipe="bf16")], ["a", "b"])
    (figures,) = (t for t in blocks_of(document, Table))
    rows = {first: rest for first, *rest in texts_of(figures)}
    assert rows["recipe"] == ["unit-fp8", "bf16"]
    assert rows["held-out loss, gap"] == ["+0.25 ± 0.10"] * 2
    gap = charts_of(document)["What precision cost: gap of held-out loss"]
    assert [name for name, _ in gap.rows] == ["a", "b"]
    assert [m.title for m in charts_of(document)["Training loss"].legend] == ["a", "b"]
