"""`benchmarks/speed/convert.py` on checkpoints small enough for a test."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.speed.convert import CASES, Measurement, table
from benchmarks.speed.synthetic import make_checkpoint, shape_for

ROOT = Path(__file__).parents[2]
SMALL = 40 * 10**6


def measurement(case: str, *, wall_s: float, index: int = 0) -> Measurement:
    return Measurement(
        size="1GB",
        dtype="float32",
        case=case,
        round=index,
        bytes_in=10**9,
        bytes_out=10**9,
        wall_s=wall_s,
        cpu_s=wall_s,
        peak_rss_bytes=10**8,
        reported_s=None,
    )


def column(markdown: str, case: str, name: str) -> str:
    header, _, *rows = [[c.strip() for c in line.split("|")] for line in markdown.splitlines()]
    return next(r for r in rows if r[2] == case)[header.index(name)]


@pytest.mark.parametrize("num_parameters", [5 * 10**8, 10**9, 4 * 10**9])
def test_shapes_meet_the_wanted_number_of_parameters(num_parameters: int) -> None:
    shape = shape_for(num_parameters)
    made = sum(torch.Size(dims).numel() for _, dims in shape.tensors)
    assert made == pytest.approx(num_parameters, rel=0.05)


def test_transformers_opens_a_synthetic_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make_checkpoint(tmp_path / "llama", SMALL, torch.bfloat16)
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    assert float(model.model.embed_tokens.weight.detach().float().std()) == pytest.approx(0.02, rel=0.01)


def test_a_case_is_compared_with_cp_of_its_own_round() -> None:
    slow, fast = (measurement("cp", wall_s=s, index=i) for i, s in enumerate((4.0, 1.0)))
    ours = [measurement("unit fp32", wall_s=s, index=i) for i, s in enumerate((8.0, 2.0))]
    assert column(table([slow, fast, *ours]), "unit fp32", "of cp") == "0.50"


def test_without_a_baseline_the_ratio_stays_empty() -> None:
    assert column(table([measurement("unit fp32", wall_s=1.0)]), "unit fp32", "of cp") == ""


def test_every_method_and_format_of_the_aim_is_a_case() -> None:
    formats = {f"unit {f}" for f in ("fp32", "fp16", "bf16", "e4m3fn", "e5m2")}
    pairs = {f"collage {r}" for r in ("bf16", "exact16", "int8")}
    assert set(CASES) == {"cp", "transformers", "scalify fp16"} | formats | pairs


def test_the_command_writes_results_and_leaves_only_the_checkpoint(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "convert.json"
    command = [sys.executable, "-m", "benchmarks.speed.convert", "--work", str(work), "--out", str(out)]
    command += ["--sizes", "40MB", "--dtypes", "bfloat16", "--cases", "cp,unit e4m3fn", "--rounds", "1", "--rest", "0"]
    command += ["--verify", "--before", str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": "."})
    document = json.loads(out.read_text())
    copied, before, _, converted, verified = document["measurements"]
    assert before["case"] == "unit e4m3fn, before"
    assert re.match("verify .*e4m3fn", verified["case"])
    # Reports hold times, whose digits differ in number.
    assert before["bytes_out"] == pytest.approx(converted["bytes_out"], rel=1e-4)
    assert verified["bytes_out"] == converted["bytes_out"]
    assert 0 < converted["sha256_s"] < converted["wall_s"]
    assert copied["bytes_out"] == copied["bytes_in"]
    assert converted["bytes_in"] * 0.4 < converted["bytes_out"] < converted["bytes_in"] * 1.1
    assert 0 < converted["reported_s"] < converted["wall_s"]
    assert converted["peak_rss_bytes"] > 10**8
    assert str(work) not in out.read_text()
    assert [p.name for p in work.iterdir()] == ["llama-40MB-bfloat16"]
