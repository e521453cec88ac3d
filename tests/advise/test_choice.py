"""What is concluded from measurements: intervals, outlooks on a whole training, the choice, the manifest of it."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lpconv.advise import infer
from lpconv.advise.candidates import best, describe_conversion, judge_row, rank_rows, with_feedback
from lpconv.advise.infer import Trial, least_gap, measure_conversions, prune_rows
from lpconv.advise.options import AdviseOptions, Budget, parse_budget
from lpconv.advise.parts import choose_bits
from lpconv.advise.record import gates_of, manifest_text
from lpconv.advise.train import Ends, least_high, outlook
from lpconv.batch.manifest import load_manifest
from lpconv.errors import UsageError
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Deadline, Silent
from lpconv.results import AdviceRow, RunRecord, Series
from lpconv.student import estimate_mean
from lpconv.train.options import FinetuneOptions
from tests.helpers.advice_examples import a_row, gap


def test_a_budget_of_any_parts() -> None:
    assert parse_budget("quality=0.02, memory=8GB,minutes=3") == Budget(quality=0.02, memory_bytes=8 * 10**9, minutes=3)
    assert parse_budget("minutes=1") == Budget(minutes=1)


@pytest.mark.parametrize("text", ["quality=-1", "minutes=soon", "speed=2", "memory=much", "quality=nan"])
def test_a_budget_that_is_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_budget(text)


def test_an_interval_is_students() -> None:
    found = estimate_mean([1.0, 2.0, 3.0])
    assert found.value == 2
    assert found.high - found.value == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)  # t of two degrees of freedom
    assert estimate_mean([0.1]).high == math.inf  # one window says nothing about another


def ends(last: float, *, half: float | None = None, kept: float = 1.0) -> Ends:
    return Ends(half=last if half is None else half, last=last, learnt=0.5, kept=kept)


def test_a_new_run_varies_as_those_of_other_seeds_did() -> None:
    found = outlook([ends(0.0), ends(0.1), ends(0.2)], steps=8, horizon=8)
    assert found.value == pytest.approx(0.1)
    assert found.high - 0.1 == pytest.approx(4.303 * 0.1 * math.sqrt(1 + 1 / 3), rel=1e-3)  # a new run beside three
    assert outlook([ends(0.1)], steps=8, horizon=8).high == math.inf  # nothing is certain from one seed


def test_the_drift_is_that_of_the_second_half() -> None:
    """Runs are also evaluated before the first step, where a low precision has a gap of its own."""
    records = []
    for role, losses in (("run", (5.0, 3.1, 2.2)), ("twin", (4.0, 3.0, 2.0))):
        series = Series(name="eval_loss", steps=(0, 4, 8), values=losses)
        records.append(RunRecord(role=role, seed=0, losses=series, evaluations=(series,), loss_scales=series))
    found = Ends.of(*records)
    assert (found.half, found.last, found.learnt) == pytest.approx((0.1, 0.2, 1.0))


def test_the_least_that_an_upper_end_can_be_has_no_spread_of_seeds() -> None:
    seeds = [replace(ends(x, kept=0.8), half=x - 0.01) for x in (0.0, 0.1, 0.2)]
    assert least_high(seeds, steps=8, horizon=8) == pytest.approx(0.1)
    assert least_high(seeds, steps=8, horizon=32) == pytest.approx(0.1 + 2 * 0.01 + 2 * 0.2 * 0.5)


def test_a_longer_training_widens_by_drift_and_by_updates_that_were_lost() -> None:
    seeds = [ends(0.0), ends(0.1), ends(0.2)]
    here = outlook(seeds, steps=8, horizon=8)
    drifting = [replace(e, half=e.last - 0.01) for e in seeds]
    assert outlook(drifting, steps=8, horizon=32).high == pytest.approx(here.high + 2 * 0.01)
    lossy = [replace(e, kept=0.8) for e in seeds]
    found = outlook(lossy, steps=8, horizon=32)
    assert found.high == pytest.approx(here.high + 2 * 0.2 * 0.5)
    assert found.low == pytest.approx(here.low)


def test_the_smallest_within_the_budget_is_best() -> None:
    small, large = a_row("small", size_bytes=10, gap=gap(0.02, 0.01)), a_row("large", size_bytes=30, gap=gap(0, 0.001))
    middle = a_row("middle", size_bytes=20, gap=gap(0.005, 0.004))
    rows = rank_rows(judge_row(r, Budget(quality=0.01)) for r in (large, small, middle))
    assert [r.name for r in rows] == ["middle", "large", "small"]
    chosen = best(rows, "infer")
    assert chosen is not None
    assert chosen.name == "middle"
    assert best(rows, "train") is None


def test_bits_of_parts_are_chosen_by_divergence() -> None:
    settings = {"rules": ["a=4.5"]}
    lucky = a_row("lucky", settings=settings, gap=gap(0.001, 0.004), figures={"kl": 0.02})
    closer = a_row("closer", settings=settings, gap=gap(0.003, 0.004), figures={"kl": 0.01})
    for rows in ((lucky, closer), (closer, lucky)):
        chosen = best(rows, "infer")
        assert chosen is not None
        assert chosen.name == "closer" == rank_rows(rows)[0].name


def test_what_does_not_fit_the_memory_is_not_advised() -> None:
    assert judge_row(a_row(memory_bytes=100), Budget(memory_bytes=99)).meets is False
    assert judge_row(a_row(memory_bytes=100), Budget()).meets is True


def test_gates_are_the_figures_with_room_for_another_machine() -> None:
    assert gates_of(a_row(sqnr_db=30.24, figures={"kl": 0.002})) == ["sqnr>=29.7", "kl<=0.0022"]
    assert gates_of(a_row(sqnr_db=math.inf, figures={"kl": 0.0})) == ["kl<=1.1e-09"]
    assert gates_of(a_row(purpose="train", gap=gap(0.01, 0.00234))) == ["loss_gap_own<=0.013"]


def test_the_manifest_is_one_that_batch_takes(tmp_path: Path) -> None:
    trained = a_row("unit-fp8", purpose="train", settings={"recipe": "unit-fp8"})
    mixed = a_row(settings={"method": "unit", "format": "e4m3fn", "rules": ["*.down_proj.weight=fp16"]})
    options = AdviseOptions(data=__file__, seq_len=32, task="clm")
    path = tmp_path / "jobs.yaml"
    path.write_text(manifest_text("demo", [mixed, trained], options))
    convert, finetune = (job.options for job in load_manifest(path).jobs)
    assert isinstance(convert, ConvertOptions)
    assert convert.rules[0].format == "fp16"
    assert convert.gates == ("sqnr>=29.7", "kl<=0.0022")
    assert isinstance(finetune, FinetuneOptions)
    assert finetune.arithmetic.name == "unit-fp8"
    assert (finetune.steps, finetune.lr, finetune.seq_len, finetune.data) == (options.steps, options.lr, 32, __file__)


def test_the_manifest_names_what_the_command_line_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("demo", "tuned", "advice"):
        (tmp_path / name).mkdir()
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    row, path = a_row(settings={"format": "int4", "rounding": "gptq", "calibrate": "demo"}), Path("advice/jobs.yaml")
    for typed, meant in {"demo": "demo", "tuned": tmp_path / "tuned", "model.gguf": tmp_path / "model.gguf"}.items():
        path.write_text(manifest_text(typed, [row], AdviseOptions()))
        (job,) = load_manifest(path).jobs
        assert isinstance(job.options, ConvertOptions)
        assert (job.model, job.options.calibrate) == (str(meant), "demo")


def test_what_is_no_better_is_pruned_and_of_equals_the_first_stays() -> None:
    def sampled(name: str, size: int, noise: float, rounded: str | None = "int8 per token") -> AdviceRow:
        row = a_row(name, size_bytes=size, status="unmeasured", gap=None)
        return replace(row, noise=noise, rounded_inputs=rounded)

    rows = prune_rows(
        [
            sampled("plain", 1000, 1e-3),
            sampled("blocks", 1004, 0.95e-3),
            sampled("larger", 1100, 1.1e-3),
            sampled("noisier, but with exact inputs", 1000, 1.3e-3, None),
            sampled("finer", 1100, 0.5e-3),
            sampled("smaller", 500, 1e-2),
        ]
    )
    pruned = {r.name: r.why for r in rows if r.status == "pruned"}
    assert pruned.keys() == {"blocks", "larger"}
    assert all(" plain " in why for why in pruned.values())
    assert "beaten" in pruned["larger"]


def test_a_gap_grows_with_the_noise_of_weights_and_that_of_outputs_with_its_root() -> None:
    known = replace(a_row("known"), noise=1e-4, gap=gap(0.02, 0.01))
    noisy = replace(a_row("noisy"), noise=1e-2)
    assert known.gap is not None
    assert least_gap(noisy, known, "loss") == pytest.approx(100 * known.gap.low)
    assert least_gap(noisy, known, "output") == pytest.approx(10 * known.gap.low)
    assert least_gap(noisy, replace(known, noise=0.0), "loss") == 0.0


@pytest.mark.parametrize(
    ("settings", "added"),
    [
        ({"method": "unit", "format": "int4", "granularity": "group:32"}, ["gptaq", "search"]),
        ({"method": "unit", "format": "e4m3fn"}, ["gptaq"]),
        ({"method": "unit", "format": "fp16"}, None),
        ({"method": "multipoint", "format": "int4", "budget_bits": 4.5}, None),
    ],
)
def test_candidates_with_error_feedback(settings: dict[str, object], added: list[str] | None) -> None:
    found = with_feedback(settings, "demo")
    assert (None if found is None else re.findall("gptaq|search", describe_conversion(found))) == added


@pytest.mark.parametrize(
    ("high", "measured", "left"),
    [
        (0.009, ["int4", "e2m1"], []),  # int4 is good enough, so the smaller e2m1 is tried
        (0.05, ["int4"], ["e2m1"]),
    ],
)
def test_error_feedback_is_tried_on_what_is_smaller_than_the_answer(
    high: float, measured: list[str], left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded to nearest, e4m3fn is good enough and int4 is not."""

    def screened(fmt: str, size: int, noise: float) -> AdviceRow:
        settings = {"method": "unit", "format": fmt, "granularity": "mx" if fmt == "e2m1" else "group:32"}
        if fmt == "e4m3fn":
            settings["granularity"] = "row"
        return replace(a_row(fmt, size_bytes=size, settings=settings, status="unmeasured", gap=None), noise=noise)

    def measure(trial: Trial, row: AdviceRow, deadline: Deadline) -> AdviceRow:
        tried.append(row)
        good = row.settings["format"] == "e4m3fn"
        width = 0.001
        value = 0.001 if good else high - width if "rounding" in row.settings else 0.2
        return replace(row, status="measured", gap=gap(value, width))

    tried: list[AdviceRow] = []
    rows = [screened("e2m1", 400, 2e-2), screened("int4", 500, 1e-2), screened("e4m3fn", 1000, 1e-4)]
    monkeypatch.setattr(infer, "_screen", lambda trial, deadline: rows)
    monkeypatch.setattr(infer, "measure", measure)
    subject = type("Subject", (), {"metric": "loss"})()
    trial = Trial(subject=subject, text="demo", budget=Budget(), forecasts={}, progress=Silent())
    known = {r.name: r for update in measure_conversions(trial, Deadline(60, Silent())) for r in update}
    feedback = {r.settings["format"]: r.status for r in known.values() if "rounding" in r.settings}
    assert [r.settings["format"] for r in tried if "rounding" in r.settings] == measured
    assert {f for f, status in feedback.items() if status == "pruned"} == set(left)


def test_bits_of_parts_have_the_least_cost_of_all_with_the_same_average() -> None:
    parts = {"a": (4e-3, 1000), "b": (1e-3, 3000), "c": (1e9, 10), "d": (0.0, 500)}
    chosen = choose_bits(parts, 3.0)
    assert chosen["c"] == 12
    used = {part: num * chosen[part] for part, (_, num) in parts.items()}
    assert 3 * 4510 - 0.01 * 4510 <= sum(used.values()) <= 3 * 4510
    left = used["a"] + used["b"]
    costs = {a: 4e-3 / 4 ** (a / 100) + 1e-3 / 4 ** ((left - 10 * a) / 3000) for a in range(150, 1200)}
    assert 100 * chosen["a"] == pytest.approx(min(costs, key=lambda a: costs[a]), abs=2)


@pytest.mark.parametrize("others", [0.0, 1e-3, math.inf])
def test_parts_of_infinite_cost_stay_within_the_bits(others: float) -> None:
    chosen = choose_bits({"a": (math.inf, 1000), "b": (others, 3000)}, 3.0)
    assert 2.98 <= (chosen["a"] + 3 * chosen["b"]) / 4 <= 3
    assert chosen["a"] > chosen["b"] >= 1.5
