"""Memory is planned before the work: within --max-memory, within the process's limit, or refused with exit 7."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from lpconv.convert.run import convert, plan
from lpconv.errors import ResourceError
from lpconv.plan.options import ConvertOptions
from tests.helpers.checkpoints import cli_environment, published, run_cli
from tests.helpers.models import minilm

MB = 10**6
_ROUNDED = "--format int4 --granularity group:32 --calibrate demo --rounding gptaq"
_MOST = 1.5 if torch.version.cuda else 1.2  # builds for CUDA differ by 170 MB


def here() -> int:
    return int(psutil.Process().memory_info().rss)


def test_auto_leaves_out_models_that_do_not_fit_and_says_so(tmp_path: Path) -> None:
    limit = here() + 100 * MB  # room for the blocks, not for transformers and two models
    options = ConvertOptions(max_memory=limit, workers=1)
    planned = plan("demo", tmp_path / "out", options)
    assert planned.memory_bytes <= limit
    result = convert("demo", tmp_path / "out", options)
    assert result.verify.level == "weights"
    assert result.verify.logits is not None
    assert "memory" in str(result.verify.logits.skipped)


@pytest.mark.parametrize("options", [{"verify": "logits"}, {"verify": "weights", "gates": ("kl<=1",)}], ids=str)
def test_outputs_that_were_asked_for_are_refused_before_the_work(tmp_path: Path, options: dict[str, object]) -> None:
    limit = here() + 100 * MB
    with pytest.raises(ResourceError, match=r"models .* needs .* MB") as caught:
        convert("demo", tmp_path / "out", ConvertOptions(max_memory=limit, workers=1, **options))  # type: ignore[arg-type]
    assert "--max-memory" in str(caught.value.hint)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("model", "level", "method"),
    [("demo", "logits", "unit"), ("minilm", "logits", "unit"),
     *(("demo", "weights", m) for m in ("unit", "collage", "multipoint", f"unit {_ROUNDED}"))],
)  # fmt: skip
def test_the_plan_is_what_a_run_takes(tmp_path: Path, model: str, level: str, method: str) -> None:
    name = "demo" if model == "demo" else str(minilm())
    options = f"--verify {level} --workers 2 --method {method}".split()
    arguments = ("convert", name, "-o", tmp_path / "out", *options)
    dry, done = (json.loads(run_cli(*arguments, "--json", "-q", *more).stdout) for more in (("--dry-run",), ()))
    assert done["verify"]["level"] == level
    assert done["peak_rss_bytes"] <= dry["memory_bytes"] <= _MOST * done["peak_rss_bytes"]


@pytest.mark.parametrize("kib", [100_000, 600_000, 700_000])
def test_a_limit_of_the_process_is_no_bug(tmp_path: Path, kib: int) -> None:
    command = f"ulimit -v {kib}; exec {sys.executable} -m lpconv convert demo -o out -q"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=cli_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 7, done.stderr
    assert "bug" not in done.stderr
    assert "hint:" in done.stderr
    assert not published(tmp_path / "out")
