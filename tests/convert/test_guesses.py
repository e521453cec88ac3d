"""Scales guessed by a sample: fewer reads, the same bytes, and another go where a guess was wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from lpconv.convert.apply import Engine
from lpconv.convert.run import convert
from lpconv.forms.facts import Measurement
from lpconv.plan.options import ConvertOptions
from lpconv.results import ConvertResult
from lpconv.storage.source import SafetensorsSource
from lpconv.workers import Workers
from tests.helpers.checkpoints import files_of, write_checkpoint

SIZE = 768  # squared, it is large enough to be guessed
USUAL = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * 0.02


def run(source: Path, output: Path, **options: Any) -> ConvertResult:
    return convert(str(source), output, ConvertOptions(verify="weights", workers=2, **options))


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What was guessed, each time that a shard was begun."""
    begun: list[list[str]] = []
    write = Engine._try_shard

    def counted(self: Engine, shard: Any, measured: dict[str, Measurement]) -> Any:
        begun.append([n for n, m in measured.items() if m.is_guess])
        return write(self, shard, measured)

    monkeypatch.setattr(Engine, "_try_shard", counted)
    return begun


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", ["fp32", "fp16", "e4m3fn"])
@pytest.mark.parametrize("unseen", [0.02, 9.0, float("nan"), float("inf")])
def test_a_guess_changes_no_byte(
    unseen: float,
    dtype: torch.dtype,
    format: str,
    tmp_path: Path,
    attempts: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a number that no sample sees; the format may be too narrow for it at the scale that was guessed."""
    weight = USUAL.clone()
    weight[1, 7] = unseen
    source = write_checkpoint(tmp_path / "source", {"v": USUAL.to(dtype), "w": weight.to(dtype)})
    run(source, tmp_path / "guessed", format=format)
    is_wrong = not abs(unseen) < (7 if format == "e4m3fn" else 1000)
    assert attempts == ([["v", "w"], []] if is_wrong else [["v", "w"]])
    monkeypatch.setattr(Workers, "guess", lambda *_: None)
    run(source, tmp_path / "measured", format=format)
    assert attempts[-1] == []
    assert files_of(tmp_path / "guessed") == files_of(tmp_path / "measured")


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each piece that is read of a source."""
    sizes: list[int] = []
    read_bytes = SafetensorsSource.read_bytes

    def counted(self: SafetensorsSource, name: str, start: int, out: memoryview) -> None:
        sizes.append(len(out))
        read_bytes(self, name, start, out)

    monkeypatch.setattr(SafetensorsSource, "read_bytes", counted)
    return sizes


def test_what_is_guessed_is_read_once(tmp_path: Path, sizes: list[int]) -> None:
    source = write_checkpoint(tmp_path / "source", {"w": USUAL})
    convert(str(source), tmp_path / "out", ConvertOptions(format="fp16", verify="none"))
    assert USUAL.nbytes < sum(sizes) < 1.1 * USUAL.nbytes


@pytest.mark.parametrize("granularity", ["row", "mx"])
def test_scales_of_rows_need_no_pass_of_their_own(granularity: str, tmp_path: Path, sizes: list[int]) -> None:
    source = write_checkpoint(tmp_path / "source", {"w": USUAL})
    options = ConvertOptions(format="e4m3fn", granularity=granularity, verify="none")
    convert(str(source), tmp_path / "out", options)
    assert sum(sizes) == USUAL.nbytes
    with safe_open(tmp_path / "out/model.safetensors", "pt") as f:
        assert f.offset_keys() == ["w", "w_scale"]


@pytest.mark.parametrize("lies", [True, False])
def test_a_weight_on_a_grid_of_rows_is_written_again_with_its_own_scales(
    lies: bool, tmp_path: Path, attempts: list[list[str]]
) -> None:
    """One whose first row alone lies on it is not."""
    codes = torch.randint(-7, 8, (SIZE, SIZE), generator=torch.Generator().manual_seed(1)).float()
    weight = codes * torch.linspace(0.01, 0.02, SIZE).view(-1, 1)
    if not lies:
        weight[1:] = USUAL[1:]
    source = write_checkpoint(tmp_path / "source", {"w": weight, "v": USUAL})
    options: dict[str, Any] = {"format": "int8", "granularity": f"group:{SIZE}", "layout": "lpconv", "scale": "exact"}
    result = run(source, tmp_path / "out", **options)
    assert attempts == ([["v", "w"], []] if lies else [["v", "w"]])
    (record,) = (t for t in result.tensors if t.name == "w")
    assert (record.sqnr_db is None or record.sqnr_db > 100) == lies


def test_a_root_mean_square_near_a_power_of_two_is_measured(tmp_path: Path, attempts: list[list[str]]) -> None:
    one = USUAL / USUAL.square().mean().sqrt()
    source = write_checkpoint(tmp_path / "source", {"above": one * 1.002, "below": one * 0.998, "far": one * 1.4})
    run(source, tmp_path / "out", format="fp16")
    assert attempts == [["far"]]


def test_exact_scales_are_measured(tmp_path: Path, attempts: list[list[str]]) -> None:
    source = write_checkpoint(tmp_path / "source", {"w": USUAL})
    run(source, tmp_path / "out", format="fp16", scale="exact")
    assert attempts == [[]]
