"""Figures of docs/measured.md, and of the README, are those of the raw results."""

import re
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from lpconv.student import t_quantile
from tests.helpers.records import recorded

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "measured.md"


def _compiled() -> str:
    rows = recorded("scaled")["time"]
    found = [r for r in rows if r["mode"] == "compiled"]
    ratios = [r["ratio"] for r in found]
    low, high = min(r["ratio_low"] for r in found), max(r["ratio_high"] for r in found)
    return f"medians of {min(ratios):.3f} to {max(ratios):.3f} of the time (quartiles {low:.3f} to {high:.3f})"


def _advice() -> str:
    """Rows of the table: case, forecasts inside, left out, recommended, …, time."""
    lines = (ROOT / "benchmarks/quality/results/advise/table.md").read_text().splitlines()[2:]
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in lines]
    shares = [int(c[-1].rpartition(", ")[2].removesuffix(" %")) for c in cells]
    inside, forecasts = (sum(int(c[1].split(" of ")[i]) for c in cells) for i in (0, 1))
    assert inside == forecasts
    assert f"all {forecasts} forecasts" in PAGE.read_text(encoding="utf-8")
    return f"{min(shares)} to {max(shares)} % of their time"


def _saved() -> str:
    ratios = [m["ratio"] for m in recorded("scaled")["memory"]]
    return f"saved activations in fp8 {min(ratios):.2f} to {max(ratios):.2f} of bf16's"


def _optimizer() -> str:
    def ratio(name: str) -> float:
        ms = {t["case"]: t["median_ms"] for t in recorded(name)["timings"]}
        return float(ms["collage-plus"] / ms["torch-fp32-master"])

    ratios = [ratio(f"optimizer-{size}") for size in ("30M", "300M", "30M-many")]
    return f"{min(ratios):.2f} to {max(ratios):.2f} of step time"


def _fp8_step() -> str:
    ms = {t["name"]: t["median_ms"] for t in recorded("kernels-linear")["timings"]}
    tensor, row, peer = (
        ms[n] / ms["torch bfloat16"] for n in ("lpconv fp8, tensor", "lpconv fp8, row", "torchao rowwise, emulate")
    )
    return f"{tensor:.2f} of the time with a scale per tensor, {row:.2f} per row; torchao's emulation {peer:.1f}"


def _ray() -> str:
    killed = next(r for r in recorded("ray-batch")["runs"] if r["name"] == "killed")
    assert killed["placed_again"] > 0
    assert killed["differing"] == []
    return f"| {killed['done']} jobs on a Ray cluster, a node of it killed |"


def _damaged_files() -> str:
    runs = [recorded(name) for name in ("fuzz-layouts", "fuzz-layouts-more")]
    return f"{sum(r['rounds'] * len(r['outcomes']) for r in runs):,} damaged files"


def _damaged_inputs() -> str:
    runs = [recorded(name) for name in ("fuzz", "fuzz-rest")]
    assert sum(len(r["faults"]) for r in runs) == 5, "`five faults` in the README"
    return f"| {sum(r['inputs'] for r in runs):,} damaged inputs, odd options and bad places | five faults"


def _kills() -> str:
    workers = recorded("shards")["workers"]
    of_parts = sum(w["killed_parts"] + w["killed_finishes"] for w in workers)
    assert recorded("kills")["faults"] == []
    assert not any(w["faults"] for w in workers)
    return f"| {sum(recorded('kills')['kills'].values()) + of_parts} SIGKILLs"


def _resident() -> str:
    mb = [round(r["memory_bytes"] / 1e6) for r in recorded("resident")["rows"] if r["case"] != "fp32"]
    return f"{mb[0]}, {mb[1]} and {mb[2]} MB"


def _shared() -> str:
    found = recorded("opening-memory-4")
    of_each = next(r["by rows"] for r in found["rows"] if r["recipe"] == "fp32")
    size = found["model_bytes"] / 1e6
    return f"a model of {size:.0f} MB that four processes share | {max(of_each) / 1e6:.0f} MB in each"


def _architectures() -> str:
    records = [r for r in recorded("architectures")["records"] if r["runs"]]
    verdicts = [{run["verdict"] for run in r["runs"]} for r in records]
    assert not {"different", "failed"} & set().union(*verdicts)
    refused = sum("refused" in v for v in verdicts)
    bitwise = sum(v == {"bitwise"} for v in verdicts)
    close = len(records) - bitwise - refused
    return f"{bitwise:,} of {len(records):,} bit for bit, {close} within 1e-6, {refused} refused by name"


def _gaps(folder: str, recipe: str, metric: str = "eval_loss") -> list[float]:
    """Last held-out metric of three seeds, minus the loss of fp32 with the same seed."""

    runs = recorded("finetune")[folder]

    def last(name: str, metric: str) -> float:
        record = runs[name]["record"]
        return float(next(e["values"][-1] for e in record["evaluations"] if e["name"] == metric))

    return [last(f"{recipe}-seed{i}", metric) - last(f"fp32-seed{i}", "eval_loss") for i in range(3)]


def _feedback() -> str:
    rows = {r["case"]: r for r in recorded("own-text")["rows"] if r["model"] == "smollm2"}
    nearest, own = (
        [rows[f"int4 g32, {how}"][text]["kl"] for text in ("plays", "python")] for how in ("nearest", "self")
    )
    return f"KL {own[0]:.3f} instead of {nearest[0]:.3f} nats, {own[1]:.3f} instead of {nearest[1]:.3f}"


def _smollm2(recipe: str) -> str:
    own, exact = (
        [statistics.mean(_gaps(folder, recipe, metric)) for folder in ("smollm2", "smollm2-40")]
        for metric in ("eval_loss", "eval_loss_fp32")
    )
    return (
        f"{own[0]:+.3f} and {own[1]:+.3f} nats in its own arithmetic, "
        f"{exact[0]:+.4f} and {exact[1]:+.4f} with its weights in fp32"
    )


def _minilm() -> str:
    assert max(map(abs, _gaps("minilm", "amp-fp16"))) < 0.001
    found = _gaps("minilm", "collage-bf16")
    half_width = t_quantile(2) * statistics.stdev(found) / 3**0.5
    return f"fp16 within 0.001 nats; Collage {statistics.mean(found):+.4f} ± {half_width:.4f}"


FIGURES = [
    _compiled, _saved, _advice, _optimizer, _fp8_step, _ray, _damaged_files, _damaged_inputs, _kills, _resident,
    _shared, _architectures, partial(_smollm2, "unit-fp8"), partial(_smollm2, "unit-fp8-backward"), _minilm, _feedback,
]  # fmt: skip


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_is_that_of_its_results(figure: Callable[[], str]) -> None:
    assert figure() in PAGE.read_text(encoding="utf-8")


def test_the_readme_has_the_figures_of_a_gpu() -> None:
    times = {(r["group"], r["name"]): r["median_ms"] for r in recorded("gpu")["kernels"]["rows"]}
    layers = sorted({g for g, _ in times if g.startswith("layer")})
    low, high = sorted(times[g, "torch bf16"] / times[g, "fp8, static"] for g in layers)
    step = "step, large tensors"
    collage = times[step, "collage-plus"] / times[step, "torch-fp32-master"]
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("H200")[2].partition("\n\n")[0]
    assert re.findall(r"\d\.\d\d", text) == [f"{x:.2f}" for x in (low, high, collage)]


def test_the_readme_measures_what_the_whole_table_has() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Measured")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 5
    assert set(rows) <= set(PAGE.read_text(encoding="utf-8").splitlines())
