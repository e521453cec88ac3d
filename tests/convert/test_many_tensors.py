"""Checkpoints of many small tensors: what a tensor costs must not grow, nor be handed from thread to thread."""

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lpconv.convert.run import convert
from lpconv.errors import VerificationError
from lpconv.forms.blocks import Workspace
from lpconv.forms.coded import CodedForm
from lpconv.forms.facts import EncodedBlock, Measurement
from lpconv.layouts.linears import LinearModules
from lpconv.plan.options import ConvertOptions
from lpconv.plan.policy import decide
from lpconv.plan.settings import fill_options
from lpconv.storage.header import TensorInfo
from lpconv.workers import ThreadPoolExecutor, Workers
from tests.helpers.checkpoints import write_checkpoint


def many(folder: Path, count: int) -> Path:
    torch.manual_seed(0)
    return write_checkpoint(folder, {f"layers.{i}.up_proj.weight": torch.randn(4, 8) for i in range(count)})


def test_small_tensors_are_not_handed_to_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handed = []

    class Watched(ThreadPoolExecutor):
        def submit(self, *args: object, **more: object):  # type: ignore[no-untyped-def,override]
            handed.append(args)
            return super().submit(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(f"{Workers.__module__}.ThreadPoolExecutor", Watched)
    convert(str(many(tmp_path / "in", 20)), tmp_path / "out", ConvertOptions(format="e4m3fn", verify="weights"))
    assert not handed


def test_the_page_of_many_tensors_lists_the_worst_and_a_sample(tmp_path: Path) -> None:
    options = ConvertOptions(format="e4m3fn", verify="weights")
    done = [convert(str(many(tmp_path / f"in{n}", n)), tmp_path / f"out{n}", options) for n in (20, 1500)]
    few, all_of_many = ((tmp_path / f"out{n}" / "report.html").read_text() for n in (20, 1500))
    assert few.count(' class="left name">layers') >= 20
    rows = all_of_many.count(' class="left name">layers')
    assert 500 <= rows <= 2100, "tensors and layers"
    assert "of 1,500 tensors" in all_of_many
    worst = min(done[1].tensors, key=lambda t: t.sqnr_db or 0.0)
    assert worst.name.replace(".", ".<wbr>") in all_of_many


def test_planning_a_tensor_does_not_go_through_the_names_of_all() -> None:
    """DeepSeek-V3 has 45,000 matrices, which took half an hour before."""
    linears = LinearModules(plain=tuple(f"layers.{i}.up_proj" for i in range(20_000)), others=())
    options = fill_options(ConvertOptions(scheme="FP8_DYNAMIC"))
    started = time.process_time()
    for name in linears.plain:
        info = TensorInfo(name=f"{name}.weight", dtype="BF16", shape=(8, 8), begin=0, end=128)
        assert decide(info, options, linears=linears)[0].components[1:]
    assert time.process_time() - started < 20


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_the_reference_names_the_tensor_that_the_encoder_got_wrong(
    granularity: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small tensors are compared with it together; the bytes of a wrong encoder are those that it gives again."""
    encode = CodedForm.encode

    def wrong(self: CodedForm, x: Tensor, start: int, found: Measurement, work: Workspace) -> EncodedBlock:
        encoded = encode(self, x, start, found, work)
        if self.name == "layers.7.up_proj.weight":
            encoded.data[0].view(torch.uint8)[5] ^= 1
        return encoded

    source = str(many(tmp_path / "in", 20))
    options = ConvertOptions(format="e4m3fn", granularity=granularity, verify="weights", workers=1)
    assert convert(source, tmp_path / "out", options).verify.passed
    monkeypatch.setattr(CodedForm, "encode", wrong)
    with pytest.raises(VerificationError) as refused:
        convert(source, tmp_path / "wrong", options)
    assert refused.value.details["weights"]["mismatched"] == ["layers.7.up_proj.weight"]
