"""Whole runs of `lpconv finetune` on the embedded model."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import lpconv.hf
from lpconv.cli.main import app
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.errors import InputError, OutputExistsError, ResourceError, UnsupportedError, UsageError
from lpconv.kernels import buffers
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.results import FinetuneResult, from_json
from lpconv.storage.checkpoint import Checkpoint
from lpconv.train.folder import MARKER, asked_for, held_folder
from lpconv.train.job import first_batches, training_job
from lpconv.train.options import FinetuneOptions
from lpconv.train.recipes import RECIPES, arithmetic
from lpconv.train.run import finetune
from lpconv.train.trainer import DivergedError

assert lpconv.hf  # registers the format
pytestmark = pytest.mark.usefixtures("shallow")


class Stopped(Exception):
    """A run was cut."""


class StopAt(Silent):
    """Cuts a run after so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def advance(self, amount: int, figures: str = "") -> None:
        self.left -= amount
        if self.left == 0:
            raise Stopped


def options(recipe: str, **more: Any) -> FinetuneOptions:
    small: dict[str, Any] = {
        "steps": 6, "batch_size": 2, "seq_len": 32, "eval_batches": 2, "twin": "none",
    }  # fmt: skip
    return FinetuneOptions(arithmetic=arithmetic(recipe=recipe), **(small | more))


def test_the_command_leaves_a_report_rows_and_a_model(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ["finetune", "demo", "--recipe", "unit-fp8", "--steps", "10", "--batch-size", "2", "--seq-len", "32",
               "-o", str(out), "--json", "-q"]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads((out / "report.json").read_text())
    result = from_json(FinetuneResult, document)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(11))
    assert tuple(row["loss"] for row in rows[1:]) == result.runs[0].losses.values
    linear = [5e-5 * (10 - step) / 9 for step in range(1, 10)]
    assert [row["lr"] for row in rows[1:]] == pytest.approx([0, *linear]), "the rate of each step, after one of warm-up"
    held_out = next(h for h in result.held_out if h.role == "run")
    assert held_out.before == pytest.approx(rows[0]["eval_loss"])
    assert held_out.after == pytest.approx(rows[-1]["eval_loss"])
    assert held_out.standard_error is not None
    assert {r.role for r in result.runs} == {"run", "twin"}
    assert result.spent["steps"] == pytest.approx(sum(r.seconds["steps"] for r in result.runs))
    assert {"evaluations", "publishing", "reading data"} < result.spent.keys()
    assert "checkpoints" not in result.spent
    assert sum(result.spent.values()) < result.seconds
    page = (out / "report.html").read_text()
    assert page.count("<svg") >= 1
    assert "unit-fp8" in page
    model = AutoModelForCausalLM.from_pretrained(out)
    assert torch.isfinite(model(torch.arange(8).view(1, 8)).logits).all()
    for extra in ([], ["--json"]):
        assert CliRunner().invoke(app, ["report", str(out), *extra]).exit_code == 0
    verified = CliRunner().invoke(app, ["verify", str(out)])
    assert verified.exit_code == 0, verified.stdout + verified.stderr


def test_the_list_of_recipes_names_them_all() -> None:
    done = CliRunner().invoke(app, ["finetune", "--list-recipes"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert all(name in done.stdout for name in RECIPES)


def test_an_fp32_run_and_its_twin_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    """Also if blocks are computed twice, with those of a run that computes them once."""
    run, twin = finetune("demo", tmp_path / "run", options("fp32", twin="fp32", steps=3)).runs
    again = options("fp32", twin="fp32", steps=3, gradient_checkpointing=True)
    for other in (twin, *finetune("demo", tmp_path / "again", again).runs):
        assert run.losses == other.losses
        assert run.evaluations == other.evaluations


def test_critical_modules_keep_16_bit_products(tmp_path: Path) -> None:
    def losses(name: str, recipe: str, **critical: tuple[str, ...]) -> tuple[float, ...]:
        asked = options(recipe, steps=6, lr=1e-9, twin="none", save_every=0, **critical)
        return finetune("demo", tmp_path / name, asked).runs[0].losses.values

    whole = losses("fp32", "fp32")
    found = [losses(f"fp8-{n}", "unit-fp8", critical=p) for n, p in enumerate(((), ("*.down_proj",), ("*_proj",)))]

    # A mean over many tokens may land close by chance: six batches of a model that hardly moves do not.
    distances = [math.dist(x, whole) for x in found]
    assert len(set(found)) == 3
    assert distances[2] < distances[0]


def test_the_gap_of_weights_in_fp32_is_told_from_that_of_the_arithmetic(tmp_path: Path) -> None:
    """A model that does not move ends where its twin does, but for what fp8 does to the evaluation."""
    asked = options("unit-fp8", steps=1, lr=1e-9, twin="fp32", save_every=0)
    result = finetune("demo", tmp_path / "run", asked)
    run, twin = ({s.name: s.values[-1] for s in r.evaluations} for r in result.runs)
    assert twin["eval_loss_fp32"] == twin["eval_loss"]
    assert run["eval_loss_fp32"] == pytest.approx(twin["eval_loss"], rel=1e-5)
    assert abs(run["eval_loss"] - twin["eval_loss"]) > 1e-4
    assert {g.metric for g in result.gaps} == {"eval_loss", "eval_loss_fp32", "eval_loss_published"}


@pytest.mark.parametrize("recipe", ["unit-fp8", "collage-bf16", "bf16"])
def test_the_published_model_is_evaluated_as_its_files_open_and_gated(recipe: str, tmp_path: Path) -> None:
    asked = options(recipe, steps=2, twin="fp32", gates=("loss<=9", "loss_gap<=9", "loss_gap_own<=9"))
    result = finetune("demo", tmp_path / "run", asked)
    run, twin = ({s.name: s.values[-1] for s in r.evaluations} for r in result.runs)
    model = lpconv.hf.load(tmp_path / "run", dtype=torch.float32)
    job = training_job(Checkpoint.open("demo"), asked)
    with torch.no_grad():
        losses = [float(model(**x).loss) for x in first_batches(job, job.stream(0, held_out=True), 2, model.device)]
    assert run["eval_loss_published"] == pytest.approx(sum(losses) / 2, rel=1e-6)
    assert (run["eval_loss_published"] == run["eval_loss_fp32"]) == (recipe != "unit-fp8")  # which rounds to e4m3fn
    assert [g.value for g in result.gates] == [
        run["eval_loss_published"],
        run["eval_loss_published"] - twin["eval_loss_fp32"],
        run["eval_loss"] - twin["eval_loss"],
    ]
    assert f"{run['eval_loss_published']:.4f}" in (tmp_path / "run/report.html").read_text()


def test_later_seeds_are_published_to_be_evaluated_and_do_not_stay(tmp_path: Path) -> None:
    result = finetune("demo", tmp_path / "run", options("unit-fp8", steps=1, seeds=2))
    ends = [{s.name: s.values[-1] for s in r.evaluations} for r in result.runs]
    assert len({e["eval_loss_published"] for e in ends}) == 2
    assert all(e["eval_loss_published"] != e["eval_loss_fp32"] for e in ends)
    assert not list((tmp_path / "run/runs").rglob("*.safetensors"))


def test_a_kind_of_scale_reaches_the_products(tmp_path: Path) -> None:
    arithmetics = [arithmetic(recipe="unit-fp8", operand_scale=kind) for kind in ("tensor", "row", "carrier")]
    assert [a.name for a in arithmetics] == ["unit-fp8 tensor", "unit-fp8", "unit-fp8 carrier"]
    losses = []
    for a in arithmetics:
        asked = dataclasses.replace(options("unit-fp8", steps=1), arithmetic=a)
        losses.append(finetune("demo", tmp_path / a.operand_scale, asked).runs[0].losses.values)
    assert len(set(losses)) == 3
    with pytest.raises(UsageError, match="`amp-bf16`"):
        arithmetic(recipe="amp-bf16", operand_scale="row")
    assert arithmetic(operand_scale="row") == arithmetics[1]


def test_calibrated_scales_change_what_fp8_rounds_and_nothing_in_fp32(tmp_path: Path) -> None:
    losses = {}
    for precision in ("fp32", "fp8"):
        for calibrate in (False, True):
            asked = options("unit-fp8", steps=2, calibrate=calibrate)
            asked = dataclasses.replace(asked, arithmetic=arithmetic(precision=precision, method="unit"))
            result = finetune("demo", tmp_path / f"{precision}-{calibrate}", asked)
            assert ("Scales" in result.facts) == calibrate
            losses[precision, calibrate] = result.runs[0].losses.values
    assert losses["fp32", True] == losses["fp32", False]
    assert losses["fp8", True] != losses["fp8", False]
    assert losses["fp8", True] == pytest.approx(losses["fp32", True], rel=0.02)


@pytest.mark.parametrize("recipe", ["amp-fp16", "unit-fp8-collage"])
def test_a_resumed_run_goes_on_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    asked = options(recipe, steps=4, save_every=2, calibrate="unit" in recipe)
    whole = finetune("demo", tmp_path / "whole", asked).runs[0]
    with pytest.raises(Stopped):
        finetune("demo", tmp_path / "cut", asked, progress=StopAt(3))
    assert not (tmp_path / "cut/report.json").exists()
    resumed = finetune("demo", tmp_path / "cut", dataclasses.replace(asked, resume=True)).runs[0]
    assert resumed.losses == whole.losses
    assert resumed.evaluations == whole.evaluations
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert weights[0] == weights[1]


def test_a_run_that_cannot_go_on_says_that_it_starts_anew(tmp_path: Path) -> None:
    """Under `torchrun --max-restarts` all attempts have --resume, the first one too."""
    (tmp_path / "short.txt").write_text("hi")
    told: list[str] = []

    class Told(Silent):
        def message(self, text: str) -> None:
            told.append(text)

    asked = options("fp32", resume=True, data=str(tmp_path / "short.txt"))
    with pytest.raises(InputError, match=r"short\.txt` has \d+ tokens"):
        finetune("demo", tmp_path / "nothere", asked, progress=Told())
    assert [str(tmp_path / "nothere") in message for message in told] == [True]


def test_a_folder_that_is_there_needs_resume_or_force_and_the_same_options(tmp_path: Path) -> None:
    asked = options("fp32", steps=2)
    finetune("demo", tmp_path / "run", asked)
    with pytest.raises(OutputExistsError, match="exists"):
        finetune("demo", tmp_path / "run", asked)
    with pytest.raises(OutputExistsError, match="lr"):
        finetune("demo", tmp_path / "run", dataclasses.replace(asked, lr=1e-3, resume=True))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").touch()
    with pytest.raises(OutputExistsError, match=f"`{tmp_path / 'mine'}`"):
        finetune("demo", tmp_path / "mine", dataclasses.replace(asked, force=True))
    assert (tmp_path / "mine/notes.txt").exists()


def test_two_runs_never_share_a_folder(tmp_path: Path) -> None:
    """Not even with --force or --resume, and afterwards the folder is free again."""
    asked = options("fp32", steps=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f"{MARKER}.part").write_text("{")  # as a kill at the first write leaves it
    with held_folder(tmp_path / "run", asked_for("demo", asked), resume=False, force=False):
        for again in ({"force": True}, {"resume": True}, {}):
            with pytest.raises(OutputExistsError, match="another"):
                finetune("demo", tmp_path / "run", dataclasses.replace(asked, **again))
        assert (tmp_path / "run" / MARKER).is_file()
    finetune("demo", tmp_path / "run", dataclasses.replace(asked, force=True))


def test_a_plain_model_holds_what_the_optimizer_kept(tmp_path: Path) -> None:
    """Of a Collage run the published pair and the plain fp32 model are the same numbers."""
    for save in ("plain", "converted"):
        finetune("demo", tmp_path / save, options("collage-bf16", steps=2, save=save))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    pair = lpconv.hf.load(tmp_path / "converted")
    for (name, x), y in zip(plain.named_parameters(), pair.parameters(), strict=True):
        assert torch.equal(x, y), name


def test_what_convert_wrote_is_trained_from_the_values_of_its_codes(tmp_path: Path) -> None:
    convert("demo", tmp_path / "fp8", ConvertOptions(format="e4m3fn", verify="none"))
    finetune(str(tmp_path / "fp8"), tmp_path / "run", options("fp32", steps=1, lr=1e-30, weight_decay=0.0))
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("fp8", "run"))
    for (name, x), y in zip(before.named_parameters(), after.parameters(), strict=True):
        assert torch.allclose(x.float(), y, rtol=0, atol=1e-20), name
    assert getattr(after.config, "quantization_config", None) is None


def test_divergence_says_where_and_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lpconv.train.trainer.MAX_SKIPPED", 3)
    asked = options("fp32", steps=20, lr=3e38, clip=0.0, warmup=0.8, save_every=1)
    with pytest.raises(DivergedError, match=r"first .*`") as caught:
        finetune("demo", tmp_path / "run", asked)
    assert caught.value.exit_code == 5
    kept = sorted(p.name for p in (tmp_path / "run/runs/run-seed0").glob("checkpoint-*"))
    first = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])["step"] - 1  # two were skipped
    assert kept == [f"checkpoint-{first - 2}"]  # the weights of the step after are what fails
    assert kept[0] in (caught.value.hint or "")
    assert not (tmp_path / "run/report.json").exists()


def test_an_overflow_skips_the_step_lowers_the_scale_and_is_located(tmp_path: Path) -> None:
    asked = options("amp-fp16", steps=4)
    asked = dataclasses.replace(asked, arithmetic=dataclasses.replace(asked.arithmetic, loss_scale_floor="0:1e12"))
    run = finetune("demo", tmp_path / "run", asked).runs[0]
    assert run.num_skipped == 4
    assert run.first_nonfinite is not None
    assert run.first_nonfinite.direction == "backward"
    assert run.first_nonfinite.layer == "lm_head"


def test_too_little_memory_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    model = str(demo_checkpoint())  # with all of its layers
    with pytest.raises(ResourceError, match=r"optimizer 13\.2 MB") as caught:
        finetune(model, tmp_path / "run", options("fp32", max_memory=10**6))
    assert caught.value.exit_code == 7
    assert "--batch-size" in (caught.value.hint or "")
    needed = []
    for checkpointing in (False, True):
        asked = options("fp32", max_memory=14 * 10**6, batch_size=64, gradient_checkpointing=checkpointing)
        with pytest.raises(ResourceError, match="activations") as caught:
            finetune(model, tmp_path / "more", asked)
        needed.append(caught.value.details["estimate"]["activations"])
    assert needed[1] < needed[0] / 2


@pytest.mark.parametrize("recipe", ["fp32", "unit-fp8"])
def test_the_parts_of_memory_make_up_the_measured_peak(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "_OPERANDS", buffers._Operands())  # one instrument counts what others kept
    memory, two = (finetune("demo", tmp_path / str(n), options(recipe, steps=n)).runs[0].memory for n in (3, 2))
    assert memory is not None
    assert two is not None
    assert two.measured_bytes == pytest.approx(memory.measured_bytes, rel=0.01), "two steps are enough"
    assert sum(memory.parts.values()) == pytest.approx(memory.measured_bytes, rel=0.1)
    assert memory.parts["activations"] > 0


def test_a_gate_that_fails_leaves_the_run_and_ends_with_its_code(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ["finetune", "demo", "--recipe", "fp32", "--steps", "1", "--batch-size", "2", "--seq-len", "32",
               "--eval-batches", "1", "--twin", "none", "--gate", "skipped==0", "--gate", "loss<=0",
               "-o", str(out)]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 5
    assert "loss<=0" in done.stderr
    assert "loss<=0 failed" in done.stdout
    assert "skipped==0 passed" in (out / "report.html").read_text()
    resumed = CliRunner().invoke(app, [*command[:-4], "--gate", "loss<=9", "-o", str(out), "--resume", "--json"])
    assert resumed.exit_code == 0  # judged again, and not trained again
    assert json.loads(resumed.stdout)["gates"][1]["passed"]


@pytest.mark.parametrize(
    ("recipe", "more", "says"),
    [
        ("fp32", {"gates": ("loss_gap<=1",)}, "twin"),
        ("fp32", {"gates": ("loss_gap_low<=0",), "twin": "fp32"}, "interval"),
        ("fp32", {"gates": ("sqnr>=3",)}, "`sqnr`"),
        ("fp32", {"gates": ("accuracy>=0.5",)}, "classification"),
        ("fp32", {"log_to": ("tensorbord",)}, "`tensorbord`"),
        ("fp32", {"log_to": ("comet_ml",)}, "comet_ml"),
        ("unit-fp8", {"critical": ("nothing*",)}, r"nothing\*"),
        ("collage-bf16", {"critical": ("*.down_proj",)}, "--critical .*`collage-bf16`"),
        ("amp-bf16", {"calibrate": True}, "--calibrate .*`amp-bf16`"),
        ("scalify-fp8", {"calibrate": True}, "--calibrate .*`scalify-fp8`"),
    ],
)
def test_what_a_run_cannot_do_is_found_before_it(recipe: str, more: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises((UsageError, UnsupportedError), match=says):
        finetune("demo", tmp_path / "run", options(recipe, **more))
    assert not (tmp_path / "run").exists()


def test_seeds_give_the_gap_an_interval(tmp_path: Path) -> None:
    asked = options("bf16", steps=2, seeds=2, twin="fp32", gates=("loss_gap<=9", "loss_gap_low<=9"))
    result = finetune("demo", tmp_path / "run", asked)
    assert all(gate.passed for gate in result.gates)
    assert len(result.runs) == 4
    gap = next(g for g in result.gaps if g.metric == "eval_loss_published")
    differences = [
        a.evaluations[-1].values[-1] - b.evaluations[-1].values[-1]
        for a, b in zip(result.runs[::2], result.runs[1::2], strict=True)
    ]
    assert gap.gap == pytest.approx(sum(differences) / 2)
    assert [gate.value for gate in result.gates] == [gap.gap, gap.gap - (gap.half_width or 0)]
    assert gap.detectable == pytest.approx((12.706 + 1.3764) * abs(differences[0] - differences[1]) / 2, rel=1e-3)
    assert gap.half_width == pytest.approx(12.706 * abs(differences[0] - differences[1]) / 2, rel=1e-3)
