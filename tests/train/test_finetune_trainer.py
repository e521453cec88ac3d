"""What the trainer adds to a step, on models small enough to see through."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from lpconv.errors import ResourceError
from lpconv.results import RunRecord, Series
from lpconv.scaled import AdamW
from lpconv.train.folder import Metrics, median_step_time
from lpconv.train.memory import check_room, explain_oom
from lpconv.train.nonfinite import first_nonfinite
from lpconv.train.options import FinetuneOptions
from lpconv.train.outcome import gap_records
from lpconv.train.prepare import prepare
from lpconv.train.recipes import arithmetic
from lpconv.train.trainer import seed_step


class Log(nn.Module):
    """The logarithm, which is not finite at 0, and whose gradient is not either."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()


class Root(nn.Module):
    """Its gradient at 0 is not finite, its value is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


@pytest.mark.parametrize(("bad", "place"), [(Log(), ("1", "forward")), (Root(), ("0", "backward"))])
def test_the_first_value_that_is_not_finite_is_found(bad: nn.Module, place: tuple[str, str]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), bad, nn.Linear(2, 2))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    found = first_nonfinite(model, lambda: model(torch.ones(1, 2)).nan_to_num().sum())
    assert found == place
    assert all(p.grad is None for p in model.parameters())


def test_broken_weights_are_named_themselves_and_sound_steps_give_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert first_nonfinite(model, lambda: model(torch.ones(1, 2)).sum()) is None
    with torch.no_grad():
        model[0].bias[1] = math.inf
    assert first_nonfinite(model, lambda: model(torch.ones(1, 2)).sum()) == ("0.bias", "weights")


def test_steps_have_seeds_of_their_own() -> None:
    drawn = set()
    for seed, step, rank in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (0, 0, 0)):
        seed_step(seed, step, rank)
        drawn.add(float(torch.rand(())))
    assert len(drawn) == 4


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, "stochastic"), (torch.float32, "nearest")])
def test_weights_that_were_16_bits_from_the_first_are_rounded_stochastically(dtype: torch.dtype, rounding: str) -> None:
    """On the grid of bf16 to begin with, they would not move in the forward pass for many small steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(dtype).float()
    chosen = arithmetic(recipe="unit-fp8")
    optimizer = prepare(model, chosen, FinetuneOptions(arithmetic=chosen), seed=0).make_optimizer()
    assert isinstance(optimizer, AdamW)
    assert optimizer.rounding == rounding


def test_rows_go_on_where_a_checkpoint_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Metrics(path)
    for step in (1, 2, 3):
        first.begin({"step": step, "loss": float(step), "time_s": 10.0 * step})
        if step == 2:
            first.add({"eval_loss": 0.5})
    first.flush()
    with path.open("a") as f:
        f.write('{"step": 4, "lo')  # cut short
    resumed = Metrics(path, step=2)
    resumed.begin({"step": 3, "loss": math.inf, "time_s": 30.0})
    resumed.flush()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in rows] == [(1, 1.0), (2, 2.0), (3, "inf")]
    assert resumed.series("eval_loss") == Series(name="eval_loss", steps=(2,), values=(0.5,))
    assert median_step_time(resumed.rows) == 25.0


def test_an_interval_needs_seeds_and_pairs_them() -> None:
    def run(role: str, seed: int, loss: float) -> RunRecord:
        series = Series(name="eval_loss", steps=(1,), values=(loss,))
        return RunRecord(role=role, seed=seed, losses=series, evaluations=(series,), loss_scales=series)

    pairs = [(1.1, 1.0), (3.1, 3.0), (2.1, 2.0)]
    runs = [run(role, s, x) for s, pair in enumerate(pairs) for role, x in zip(("run", "twin"), pair, strict=True)]
    (gap,) = gap_records(runs)
    assert gap.gap == pytest.approx(0.1)
    assert gap.noise == pytest.approx(1.0)
    assert gap.exceeds_noise  # the seeds differ by 1, the pairs always by 0.1
    (alone,) = gap_records(runs[:2])
    assert alone.exceeds_noise is None
    assert gap_records(runs[:1]) == ()


def test_running_out_of_memory_names_the_estimate() -> None:
    with pytest.raises(ResourceError, match=r"activations 2\.00 MB"), explain_oom({"activations": 2_000_000}):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
    with pytest.raises(RuntimeError, match="else"), explain_oom({}):
        raise RuntimeError("else")
    check_room({"weights": 10}, 10)
    with pytest.raises(ResourceError, match="about 11 B"):
        check_room({"weights": 11}, 10)
