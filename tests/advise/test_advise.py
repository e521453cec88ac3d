"""Whole advices on the embedded model, with few candidates."""

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from lpconv.advise import candidates, infer, study, train
from lpconv.advise.candidates import judge_row
from lpconv.advise.infer import Trial
from lpconv.advise.options import AdviseOptions, Budget
from lpconv.advise.run import advise
from lpconv.batch.manifest import load_manifest
from lpconv.cli.main import app
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint, demo_text
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Deadline, Silent, TimeIsUp
from lpconv.results import AdviceResult, AdviceRow, GapEstimate, from_json
from lpconv.train.recipes import RECIPES
from tests.helpers.advice_examples import gap

FEW = ("unit e4m3fn", "unit fp16", "unit e5m2", "multipoint e2m1 6 bits", "multipoint int4 4.5 bits")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPCONV_COMPILE", "never")
    torch.set_num_threads(1)
    few = {name: settings for name, settings in candidates.conversions().items() if name in FEW}
    monkeypatch.setattr(infer, "conversions", lambda runtime: few)
    monkeypatch.setattr(study, "conversions", lambda runtime: few)
    monkeypatch.setattr(train, "RECIPES", {n: RECIPES[n] for n in ("fp32", "amp-bf16")})
    monkeypatch.setattr(train, "_MORE_SEEDS", 1)
    monkeypatch.setattr("lpconv.bench.worker._CPU_SIZE", 128)


def test_every_method_and_format_is_a_candidate_once() -> None:
    named = list(candidates.conversions())
    assert {"unit e4m3fn rows", "collage bf16 + exact16", "multipoint int4 4.5 bits"} <= set(named)
    assert {"unit e4m3fn 128x128", "unit e4m3fn MX", "unit coded 4.5 bits"} <= set(named)
    searched = {s.get("format") for s in candidates.conversions().values() if s.get("scale") == "search"}
    assert searched == {"e2m1", "int4"}
    assert "unit fp16 128x128" not in named
    assert not any(name.startswith("scalify") for name in named)  # it stores the bytes of unit
    assert not any("," in name for name in named)
    assert "e4m3fn" in named[0]


@pytest.mark.parametrize(
    ("runtime", "expected", "other"),
    [
        ("vllm", "FP8_DYNAMIC", "GGUF_Q8_0"),
        ("transformers", "TRANSFORMERS_FP8", "UNIT_FP8"),
        ("llama.cpp", "GGUF_Q8_0", "W8A16"),
        ("mlx", "MLX_INT8", "FP8_DYNAMIC"),
    ],
)
def test_a_runtime_gets_what_it_opens(tmp_path: Path, runtime: str, expected: str, other: str) -> None:
    named = candidates.conversions(runtime)
    assert expected in named
    assert other not in named
    done = CliRunner().invoke(app, ["advise", "demo", "--for", runtime, "--bits", "5", "-o", str(tmp_path / "out")])
    assert done.exit_code == 2, done.stderr


@pytest.mark.parametrize("bits", ["1", "12.5", "nan"])
def test_bits_out_of_range_are_refused_before_a_model_is_opened(bits: str) -> None:
    assert CliRunner().invoke(app, ["advise", "no-such-model", "--bits", bits]).exit_code == 2


def test_integers_of_every_width_are_opened_in_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer, "conversions", lambda runtime: {n: {"scheme": n} for n in ("MLX_INT4", "MLX_INT5")})
    command = ["advise", "demo", "--for", "mlx", "-o", str(tmp_path / "out"), "--json", "-q"]
    rows = json.loads(CliRunner().invoke(app, command).stdout)["rows"]
    memory = {row["name"]: row["memory_bytes"] for row in rows}
    assert memory["MLX_INT5"] == memory["MLX_INT4"] > 0  # mlx-lm opens a model in one dtype, whatever the codes


def test_the_command_advises_and_its_gates_hold(tmp_path: Path) -> None:
    out = tmp_path / "advice"
    command = ["advise", "demo", "--for", "infer", "--seq-len", "32", "-o", str(out), "--json", "-q"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((out / "advice.json").read_text())
    result = from_json(AdviceResult, json.loads(done.stdout))
    rows = {r.name: r for r in result.rows}
    assert rows["unit e5m2"].status == "pruned"
    assert rows["unit e4m3fn"].meets
    assert rows["unit fp16"].status == "pruned"
    assert result.recommendations[0].row in rows
    assert result.parts_whole
    assert sum(p.divergence for p in result.parts) == pytest.approx(result.parts_whole, rel=0.2)
    assert "<svg" in (out / "advice.html").read_text()
    typed = shlex.split(result.recommendations[0].command or "")[1:]
    assert CliRunner().invoke(app, [*typed, "--dry-run"]).exit_code == 0
    job = load_manifest(out / "jobs.yaml").jobs[0]
    assert isinstance(job.options, ConvertOptions)
    converted = convert(job.model, tmp_path / "out", job.options)
    assert [g.passed for g in converted.verify.gates] == [True, True]
    assert converted.bytes.written == rows[result.recommendations[0].row].size_bytes
    assert CliRunner().invoke(app, ["report", str(out)]).exit_code == 0
    assert CliRunner().invoke(app, command).exit_code == 8


@pytest.mark.parametrize(("bits", "integers"), [(2.3, "int2 group:128"), (3, "int2 group:32"), (5, "int4 group:32")])
def test_bits_by_part_lose_less_than_as_many_in_every_tensor(tmp_path: Path, bits: float, integers: str) -> None:
    command = f"advise demo --for infer --bits {bits} --seq-len 64 --json -q -o".split()
    advised = json.loads(CliRunner().invoke(app, [*command, str(tmp_path / "advice")]).stdout)
    start = {"method": "unit", "budget_bits": bits}
    rules = next(r["settings"]["rules"] for r in advised["rows"] if r["settings"].keys() == {*start, "rules"})
    assert any("q_proj" in rule and "k_proj" in rule and "v_proj" in rule for rule in rules)  # readers fuse them
    fmt, grain = integers.split()
    options = [
        candidates.convert_options(start | {"rules": rules}, verify="none"),
        candidates.convert_options(start, verify="none"),
        ConvertOptions(format=fmt, granularity=grain, scale="search", verify="none"),
    ]
    outputs = [convert("demo", tmp_path / str(i), o).output for i, o in enumerate(options)]
    tokens = AutoTokenizer.from_pretrained(demo_checkpoint())(demo_text("train").read_text())["input_ids"][:2048]
    log_p = list[torch.Tensor]()
    for path in map(Path, (demo_checkpoint(), *outputs)):
        stored = load_file(path / "model.safetensors")
        assert sum(x.nbytes for n, x in stored.items() if "_proj" in n) * 8 / 786_432 <= (bits if log_p else 32)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.inference_mode():
            log_p.append(model(torch.tensor(tokens).view(-1, 64)).logits.log_softmax(-1))
    by_part, same, other = (kl_div(x, log_p[0], reduction="sum", log_target=True) for x in log_p[1:])
    assert 0 < by_part < same < other
    assert len(advised["recommendations"][0]["command"].split("--rule")) == len(rules) + 1


def asked(quality: float, **changed: Any) -> AdviseOptions:
    return AdviseOptions(budget=Budget(quality=quality), seq_len=32, **changed)


def pretend(monkeypatch: pytest.MonkeyPatch, gap_of: Callable[[str], GapEstimate]) -> None:
    """Give candidates these gaps, by name, instead of measuring them."""

    def measured(trial: Trial, row: AdviceRow, deadline: Deadline) -> AdviceRow:
        return judge_row(replace(row, status="measured", gap=gap_of(row.name)), trial.budget)

    monkeypatch.setattr(infer, "measure", measured)


def test_where_little_noise_is_too_much_what_has_more_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, lambda name: gap(0.0, 5e-5) if name == "unit fp16" else gap(0.002, 0.001))
    result = advise("demo", tmp_path, asked(1e-4, purpose="infer"))
    rows = {r.name: r for r in result.rows}
    assert rows["unit e4m3fn"].meets is False
    assert rows["unit fp16"].meets
    for name in ("multipoint e2m1 6 bits", "multipoint int4 4.5 bits"):
        assert re.match("noisier .*unit e4m3fn", rows[name].why)
    assert result.recommendations[0].row == "unit fp16"


def test_what_has_far_more_noise_than_a_gap_allows_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, lambda name: gap(0.009, 0.0005))
    rows = advise("demo", tmp_path, asked(0.01, purpose="infer")).rows
    assert [r.name for r in rows if r.status == "measured"] == ["unit e4m3fn"]
    assert re.search("noisier .*unit e4m3fn", next(r for r in rows if r.name == "multipoint e2m1 6 bits").why)


def test_an_undecided_candidate_rules_out_no_smaller_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = {"unit e4m3fn": 0.0005, "multipoint int4 4.5 bits": 0.0005}  # others may or may not keep 0.01

    pretend(monkeypatch, lambda name: gap(0.008, widths.get(name, 0.007)))
    monkeypatch.setattr(infer, "_DOUBT", 100.0)
    result = advise("demo", tmp_path, asked(0.01, purpose="infer"))
    undecided = [r.name for r in result.rows if r.status == "measured" and not r.meets]
    assert undecided == ["multipoint e2m1 6 bits"]
    assert result.recommendations[0].row == "multipoint int4 4.5 bits"


def test_windows_are_run_until_the_quality_is_decided(tmp_path: Path) -> None:
    gaps = {r.name: r.gap for r in advise("demo", tmp_path, asked(0.03, purpose="infer")).rows if r.gap is not None}
    assert all(gap.high <= 0.03 for gap in gaps.values())
    counts = {gap.count for gap in gaps.values()}
    assert min(counts) == 8
    assert counts <= {16, 8, 32, 64}
    assert gaps["unit e4m3fn"].count < gaps["multipoint int4 4.5 bits"].count < 64


def test_the_first_recipe_that_keeps_the_quality_ends_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "RECIPES", {n: RECIPES[n] for n in ("fp32", "amp-bf16", "collage-bf16", "bf16-sr")})
    result = advise("demo", tmp_path, asked(2, purpose="train", steps=4, batch_size=2))
    rows = {r.name: r for r in result.rows}
    assert (rows["bf16-sr"].status, rows["bf16-sr"].meets) == ("measured", True)
    for name in ("collage-bf16", "amp-bf16"):
        assert rows[name].status == "pruned"
        assert "bf16-sr" in rows[name].why
        assert rows[name].memory_bytes


def test_a_recipe_without_hope_after_one_seed_gets_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "least_high", lambda found, *, steps, horizon: 2.5)
    result = advise("demo", tmp_path, asked(2, purpose="train", steps=4, batch_size=2))
    (row,) = result.rows
    assert row.gap is not None
    assert (row.status, row.gap.count, row.meets) == ("measured", 1, False)


def test_a_recipe_is_tried_from_several_seeds_beside_its_twin(tmp_path: Path) -> None:
    options = AdviseOptions(purpose="train", steps=4, batch_size=2, seq_len=16, budget=Budget(quality=2))
    result = advise("demo", tmp_path, options)
    (row,) = result.rows
    assert (row.name, row.status) == ("amp-bf16", "measured")
    assert row.gap is not None
    assert row.gap.count == 2
    assert row.gap.low < row.gap.value < row.gap.high < 2
    assert "torch.profiler" in row.memory_from
    assert result.steps_tried == 4
    assert result.recommendations[0].row == "amp-bf16"
    assert "--gate 'loss_gap_own<=" in str(result.recommendations[0].command)


class Stop(Silent):
    """Presses Ctrl-C when the second candidate is tried."""

    seen = 0

    def start(self, phase: str, total: int, *, unit: str = "bytes", done: int = 0) -> None:
        self.seen += phase.startswith("encoding")
        if self.seen == 2:
            raise KeyboardInterrupt


def test_of_an_output_of_ours_what_was_measured_before_an_interrupt_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert("demo", tmp_path / "fp16", ConvertOptions(format="fp16", verify="none"))
    monkeypatch.setattr("lpconv.cli.progress.Silent", Stop)
    out = tmp_path / "a"
    command = ["advise", str(tmp_path / "fp16"), "--for", "infer", "--seq-len", "16", "-o", str(out), "-q"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 130, done.stderr
    result = from_json(AdviceResult, json.loads((out / "advice.json").read_text()))
    assert result.interrupted
    assert {r.name: r.status for r in result.rows} == {
        "unit e4m3fn": "measured", "unit fp16": "pruned", "unit e5m2": "pruned",
        "multipoint e2m1 6 bits": "unmeasured", "multipoint int4 4.5 bits": "unmeasured",
    }  # fmt: skip
    assert "Recommended" in done.stdout


def test_a_model_that_is_smaller_than_every_candidate_is_kept(tmp_path: Path) -> None:
    convert("demo", tmp_path / "low", ConvertOptions(budget_bits=4.0, verify="none"))
    result = advise(tmp_path / "low", tmp_path / "a", AdviseOptions(purpose="infer", seq_len=16, force=True))
    assert {r.status for r in result.rows} == {"pruned"}
    (advised,) = result.recommendations
    assert (advised.row, advised.nearest, advised.command) == (None, None, None)
    assert "Keep" in advised.words


class Ticking(Silent):
    """A clock that goes on by a second with every report of progress."""

    def __init__(self) -> None:
        self.now_s, self.phases = 0.0, list[str]()

    def perf_counter(self) -> float:
        return self.now_s

    def start(self, phase: str, total: int, *, unit: str = "bytes", done: int = 0) -> None:
        self.now_s += 1
        self.phases.append(phase)

    def advance(self, amount: int, figures: str = "") -> None:
        self.now_s += 1


@pytest.mark.parametrize(
    ("purpose", "seconds", "last"),
    [
        ("infer", 4, "sampling"),
        ("infer", 30, "encoding"),
        ("infer", 340, "rounding"),
        ("train", 1, "opening"),
        ("train", 6, "fp32"),
        ("train", 150, "amp-bf16"),
    ],
)
def test_the_time_is_kept_in_every_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, purpose: str, seconds: int, last: str
) -> None:
    clock = Ticking()
    monkeypatch.setattr("lpconv.progress.time", clock)
    monkeypatch.setattr(Deadline, "enforced", lambda self: nullcontext())  # it uses the real time
    budget = Budget(quality=1e-3 if purpose == "infer" else 1e-9, minutes=seconds / 60)
    options = AdviseOptions(purpose=purpose, budget=budget, seq_len=16, steps=8, batch_size=2)
    result = advise("demo", tmp_path, options, progress=clock)
    assert clock.now_s <= 1.1 * seconds + 3
    assert any(phase.startswith(last) for phase in clock.phases), clock.phases
    left = [r.name for r in result.rows if r.status == "unmeasured"]
    assert left or result.recommendations[0].row is None or clock.now_s >= seconds
    assert all(name in " ".join(result.unknowns) for name in left)


def test_a_phase_that_reports_nothing_ends_in_time() -> None:
    started_s = time.monotonic()
    with pytest.raises(TimeIsUp), Deadline(0.05, Silent()).enforced():
        time.sleep(10)
    assert time.monotonic() - started_s < 5
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_a_phase_that_would_not_fit_ends_at_its_first_step() -> None:
    deadline = Deadline(1, Silent())
    deadline.fits = True
    deadline.start("rounding", 1000, unit="steps")
    time.sleep(0.01)
    with pytest.raises(TimeIsUp):
        deadline.advance(1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_measurement_prints_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    class Signalled(Silent):
        def start(self, phase: str, total: int, *, unit: str = "bytes", done: int = 0) -> None:
            if phase.startswith("encoding"):
                os.kill(os.getpid(), number)

    monkeypatch.setattr("lpconv.cli.progress.Silent", Signalled)
    command = ["advise", "demo", "--for", "infer", "--seq-len", "16", "-o", str(tmp_path / "out"), "-q"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 128 + number, done.stderr
    assert "unit e4m3fn" in done.stdout
    assert json.loads((tmp_path / "out" / "advice.json").read_text())["interrupted"]
