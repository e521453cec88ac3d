"""`lpconv finetune --lca`: which layer lowered the loss, and what rounding took."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.errors import UnsupportedError
from lpconv.results import LossAllocation
from lpconv.train.callbacks import loss_allocation
from lpconv.train.options import FinetuneOptions
from lpconv.train.recipes import arithmetic
from lpconv.train.run import finetune
from tests.train.test_finetune import StopAt, Stopped

pytestmark = pytest.mark.usefixtures("shallow")


def options(recipe: str, **more: Any) -> FinetuneOptions:
    small: dict[str, Any] = {"steps": 6, "batch_size": 2, "seq_len": 32, "eval_batches": 2, "twin": "none"}
    return FinetuneOptions(arithmetic=arithmetic(recipe=recipe), lca=True, **(small | more))


def allotted(folder: Path, asked: FinetuneOptions, **more: Any) -> LossAllocation:
    found = finetune("demo", folder, asked, **more).runs[0].loss_allocation
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("recipe", "least", "most"),
    [("collage-bf16", -0.01, 0.01), ("bf16", 0.3, 1.5), ("unit-fp8", -0.001, 0.001), ("adaptive-fp16", -0.001, 0.001)],
)
def test_rounding_takes_of_bf16_what_collage_and_fp32_weights_keep(
    recipe: str, least: float, most: float, tmp_path: Path
) -> None:
    found = allotted(tmp_path / "run", options(recipe))
    assert (found.first_step, found.last_step) == (1, 6)
    assert found.closure_error < 0.01
    assert found.rounding_share is not None
    assert least < found.rounding_share < most
    assert sum(a.change for a in found.layers) == pytest.approx(found.change)
    assert sum(a.rounding for a in found.layers) == pytest.approx(found.rounding, abs=1e-12)


def test_a_resumed_run_allots_the_same_and_looking_changes_nothing(tmp_path: Path) -> None:
    asked = options("collage-bf16", save_every=2)
    whole = finetune("demo", tmp_path / "whole", asked).runs[0]
    with pytest.raises(Stopped):
        finetune("demo", tmp_path / "cut", asked, progress=StopAt(5))
    assert allotted(tmp_path / "cut", dataclasses.replace(asked, resume=True)) == whole.loss_allocation
    unseen = finetune("demo", tmp_path / "unseen", dataclasses.replace(asked, lca=False)).runs[0]
    assert unseen.losses == whole.losses
    assert unseen.loss_allocation is None


def test_the_command_shows_every_layer_on_terminal_and_page(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ["finetune", "demo", "--recipe", "bf16", "--steps", "3", "--batch-size", "2", "--seq-len", "32",
               "--twin", "none", "--lca", "-o", str(out)]  # fmt: skip
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    layers = json.loads((out / "report.json").read_text())["runs"][0]["loss_allocation"]["layers"]
    for text in (done.stdout, (out / "report.html").read_text()):
        assert "closure" in " ".join(text.split())
        assert all(a["layer"] in text.replace("<wbr>", "") for a in layers)


def test_only_the_last_unbroken_stretch_is_summed() -> None:
    one = {"name": "w", "change": -1.0, "rounding": 0.25, "num_moved": 4, "num_helped": 3}

    def row(step: int, before: float) -> dict[str, Any]:
        return {"lca": {"step": step, "loss_before": before, "loss_after": before - 1, "segments": 1,
                        "parameters": [one]}}  # fmt: skip

    found = loss_allocation([row(1, 9.0), row(2, 8.0), row(3, 7.5), row(4, 6.5), {}])
    assert found is not None
    assert (found.first_step, found.last_step, found.loss_before, found.loss_after) == (3, 4, 7.5, 5.5)
    assert found.rounding_share == pytest.approx(0.2)  # 2 x 0.25 of 2 x 1.25
    assert loss_allocation([{}]) is None


def test_what_cannot_be_followed_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="`unit-fp8-collage`"):
        finetune("demo", tmp_path / "run", options("unit-fp8-collage"))
    monkeypatch.setattr("lpconv.train.job.num_processes", lambda: 2)
    with pytest.raises(UnsupportedError, match="2 processes"):
        finetune("demo", tmp_path / "run", options("fp32"))
    assert not (tmp_path / "run").exists()
