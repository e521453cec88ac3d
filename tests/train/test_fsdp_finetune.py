"""`finetune --parallel fsdp2`: what one process trains, also by other ranks than those that began."""

from pathlib import Path

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException

from lpconv.errors import UnsupportedError, UsageError
from lpconv.init.options import InitOptions
from lpconv.init.run import init
from lpconv.results import RunRecord, from_json
from lpconv.storage.contents import read_json
from lpconv.train.memory import parameter_bytes
from lpconv.train.recipes import arithmetic
from lpconv.train.run import finetune
from tests.helpers.ranks import on_ranks
from tests.train import fsdp_finetune_worker as worker
from tests.train.fsdp_finetune_worker import COLLAGE, NATIVE, UNIT, model_of, options

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what 2 ranks trained, and what 3 went on with after one of 2 had been killed."""
    folder = tmp_path_factory.mktemp("fsdp")
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        on_ranks(2, worker.train_until_killed, folder, "unit", UNIT)
    assert (folder / "unit/runs/run-seed0/checkpoint-2").is_dir()
    assert not (folder / "unit/report.json").exists()
    init("demo", folder / "fresh", InitOptions(reinit=True))
    on_ranks(2, worker.train, folder, {"collage": COLLAGE, "native": NATIVE})
    on_ranks(3, worker.train, folder, {"unit": UNIT})
    return folder


@pytest.mark.parametrize(
    ("case", "how", "tolerance"), [("unit", UNIT, 2e-6), ("collage", COLLAGE, 2e-2), ("native", NATIVE, 1e-2)]
)
def test_ranks_train_what_one_process_does(
    case: str, how: dict[str, str], tolerance: float, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in another order are rounded to fp32; under fp8 each rank casts its own batch at scales of its own."""
    monkeypatch.chdir(folder)
    one = finetune(model_of(how), tmp_path / "one", options(how))
    run = from_json(RunRecord, read_json(folder / case / "report.json")["runs"][0])
    assert run.losses.values == pytest.approx(one.runs[0].losses.values, rel=tolerance)
    expected = [pytest.approx(s.values, rel=tolerance) for s in one.runs[0].evaluations]
    assert [s.values for s in run.evaluations] == expected
    assert {p.name for p in (folder / case).iterdir()} == {p.name for p in (tmp_path / "one").iterdir()}
    assert len((folder / case / "metrics.jsonl").read_text().splitlines()) == worker.STEPS + 1


@pytest.mark.parametrize(("is_first", "num_whole"), [(True, 1), (False, 0)])
def test_a_rank_needs_its_share_and_the_first_one_the_model_to_save(
    is_first: bool, num_whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lpconv.train.memory.is_main_process", lambda: is_first)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    needed = parameter_bytes(8000, 500, arithmetic(recipe="fp32"), num_ranks=4)
    assert sum(needed.values()) == 16 * 8000 // 4 + 4 * 500 + num_whole * 4 * 8000


def test_what_cannot_be_sharded_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="fsdp2"):
        finetune("demo", tmp_path / "run", options(UNIT, parallel="fsdp2"))
    monkeypatch.setattr("lpconv.train.job.num_processes", lambda: 2)
    with pytest.raises(UnsupportedError, match="--compile with --parallel fsdp2"):
        finetune("demo", tmp_path / "run", options(UNIT, parallel="fsdp2", compile=True))
