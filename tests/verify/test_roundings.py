"""Codes of files against their source: no suspicion of honest ones, and every plant of turned codes is found."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.results import RoundingCheck
from lpconv.verify.compare import compare
from lpconv.verify.roundings import unusual

PLANTED = "model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "FP8_BLOCK", "NVFP4A16", "MXFP8", "MLX_INT4", "TRANSFORMERS_FP8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_honest_files_raise_no_suspicion(tmp_path: Path, scheme: str, dtype: torch.dtype) -> None:
    """Also if scales were rounded to bf16 after the codes were chosen, as tools that save models in bf16 do.

    An outlier makes all other weights that share its scale zero.
    """
    source = tmp_path / "source"
    shutil.copytree(demo_checkpoint(), source)
    weights = load_file(source / "model.safetensors")
    weights[PLANTED][3, 5] = 100 * weights[PLANTED].abs().max()
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    options = ConvertOptions(scheme=scheme, scale=None if "MX" in scheme else "exact", verify="none")
    convert(str(source), tmp_path / "out", options)
    path = tmp_path / "out/model.safetensors"
    stored = load_file(path)
    rounded = {n: x.to(dtype).to(x.dtype) if "scale" in n and x.is_floating_point() else x for n, x in stored.items()}
    save_file(rounded, path, {"format": "pt"})
    result = compare(tmp_path / "out", source, gates=(), progress=Silent())
    checks = [t.rounding for t in result.tensors if t.rounding]
    assert result.passed, result.problems
    assert len(checks) >= 16
    assert {(c.kind, c.turned, c.unusual) for c in checks} == {("nearest", 0.0, "")}
    assert {c.scales for c in checks} == ({""} if "FP8" in scheme and scheme != "MXFP8" else {"amax"})


def packed(codes: Tensor) -> Tensor:
    words = ((codes + 8).view(len(codes), -1, 8) << 4 * torch.arange(8)).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).int()


@pytest.mark.parametrize(("scheme", "kind"), [("W4A16", "tuned"), ("FP8_DYNAMIC", "feedback")])
def test_tuning_and_error_feedback_are_told_apart(tmp_path: Path, scheme: str, kind: str) -> None:
    """AutoRound's shifts reach 0.55 steps in 10 steps. Feedback moves small numbers by many of their fine FP8 steps."""
    out, draws = tmp_path / "out", torch.Generator().manual_seed(0)
    convert("demo", out, ConvertOptions(scheme=scheme, verify="none"))
    stored, weights = load_file(out / "model.safetensors"), load_file(demo_checkpoint() / "model.safetensors")
    for name in [n.removesuffix("_scale") for n in stored if n.endswith("_scale")]:
        scales = stored[f"{name}_scale"].float()
        unit = weights[name] / scales.repeat_interleave(weights[name].shape[1] // scales.shape[1], 1)
        if kind == "tuned":
            shifts = (torch.rand(unit.shape, generator=draws) - 0.5) * 1.1
            stored[f"{name}_packed"] = packed((unit + shifts).round().long().clamp(-8, 7))
        else:
            errors = 0.04 * unit.std() * torch.randn(unit.shape, generator=draws)
            stored[name] = (unit + errors).clamp(-448, 448).to(torch.float8_e4m3fn)
    save_file(stored, out / "model.safetensors", {"format": "pt"})
    result = compare(out, demo_checkpoint(), gates=(), progress=Silent())
    assert result.passed, result.problems
    assert {(t.rounding.kind, t.rounding.unusual) for t in result.tensors if t.rounding} == {(kind, "")}


def test_turned_codes_are_counted_and_found(tmp_path: Path) -> None:
    """One in 1,000 codes is moved across its weight, in one of 28 weights."""
    out = tmp_path / "out"
    convert("demo", out, ConvertOptions(scheme="W4A16", scale="search", verify="none"))
    stored, weight = load_file(out / "model.safetensors"), load_file(demo_checkpoint() / "model.safetensors")[PLANTED]
    codes = ((stored[f"{PLANTED}_packed"].long().unsqueeze(2) >> 4 * torch.arange(8)) & 15).flatten(1) - 8
    offset = weight / stored[f"{PLANTED}_scale"].float().repeat_interleave(128, 1) - codes
    draws = torch.rand(codes.shape, generator=torch.Generator().manual_seed(0))
    moved = (draws < 1e-3) & (codes.abs() < 7) & (offset.abs() < 0.4)
    stored[f"{PLANTED}_packed"] = packed(codes + moved * offset.sign().long())
    save_file(stored, out / "model.safetensors", {"format": "pt"})
    command = ["verify", str(out), "--against", "demo", "--level", "values"]
    page = ["--html", str(tmp_path / "page.html"), "--gate", "nearest>=0.99"]
    said = CliRunner().invoke(app, [*command, *page, "--json"])
    assert said.exit_code == 0, said.stderr
    document = json.loads(said.stdout)
    checks = {t["name"]: t["rounding"] for t in document["tensors"] if t["rounding"]}
    assert [n for n, c in checks.items() if c["unusual"]] == [PLANTED]
    assert (checks[PLANTED]["num_second"], checks[PLANTED]["num_further"]) == (int(moved.sum()), 0)
    assert {c["scales"] for c in checks.values()} == {"search"}
    assert any(PLANTED in warning for warning in document["warnings"])
    assert "siblings" in (tmp_path / "page.html").read_text()
    assert CliRunner().invoke(app, [*command, "--strict"]).exit_code == 5
    assert CliRunner().invoke(app, [*command, "--gate", "nearest>=0.9999"]).exit_code == 5


def feedback(turned: float, least: float = 0.0, scales: str = "amax") -> RoundingCheck:
    """Of 10,000 codes."""
    num = round(10_000 * turned)
    return RoundingCheck(
        num_codes=10_000, num_second=num, num_further=0, kind="feedback", least_column=least, scales=scales
    )


@pytest.mark.parametrize(
    ("changed", "is_found"),
    [
        (feedback(0.35), False),
        (feedback(0.5), True),
        (feedback(0.25, least=0.05), True),
        (feedback(0.25, scales="unknown"), True),
    ],
)
def test_error_feedback_varies_but_never_turns_a_first_column(changed: RoundingCheck, is_found: bool) -> None:
    checks = {f"layers.{i}.up.weight": feedback(0.2 + i / 100) for i in range(10)} | {"layers.10.up.weight": changed}
    assert [*unusual(checks)] == ["layers.10.up.weight"] * is_found
