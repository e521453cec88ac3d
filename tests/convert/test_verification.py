"""Attacks on the verdict: what was damaged before a check, or between writing and checking, does not pass."""

import dataclasses
import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.convert.restore import restore
from lpconv.convert.run import convert
from lpconv.errors import InputError, VerificationError
from lpconv.forms import Kept
from lpconv.inspect.headers import inspect
from lpconv.plan.options import ConvertOptions
from lpconv.plan.plan import PlannedTensor
from lpconv.progress import Silent
from lpconv.results import VerifyResult
from lpconv.storage.header import TensorInfo
from lpconv.verify.options import VerifyOptions
from lpconv.verify.outputs import compare_outputs
from lpconv.verify.run import verify_output
from lpconv.verify.weights import whole_tensors
from lpconv.verify.written import output_problems
from tests.helpers.checkpoints import Run, published, rehash, write_checkpoint
from tests.helpers.models import tiny

FILE = "model.safetensors"


def rewritten(output: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(output / FILE)
    change(tensors)
    save_file(tensors, output / FILE, metadata={"format": "pt"})
    rehash(output, with_residual=True)


def verified(output: Path, source: Path, level: str | None = "weights") -> VerifyResult:
    return verify_output(output, VerifyOptions(against=str(source), level=level), progress=Silent())


def lpconv(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_a_source_that_moved(run: Run, source: Path, output: Path) -> None:
    run(method="unit", format="fp16")
    source.rename(source.with_name("elsewhere"))
    said = lpconv("verify", output, "--level", "weights")
    assert said.exit_code == 3
    assert "--against" in said.stderr


def test_a_tensor_that_the_source_does_not_have(run: Run, source: Path, output: Path) -> None:
    run(method="unit", format="fp16")
    rewritten(output, lambda tensors: tensors.update({"more.weight": torch.ones(2)}))
    found = verified(output, source)
    assert not found.passed
    assert [p for p in found.problems if "more.weight" in p]


def test_a_number_that_becomes_infinite_is_refused(tmp_path: Path) -> None:
    options = ConvertOptions(method="collage", format="fp16", verify="weights", workers=1)
    for largest, rounded in ((65519.0, 65504.0), (65520.0, math.inf)):
        source = write_checkpoint(tmp_path / f"{largest}", {"layer.weight": torch.tensor([[1.0, largest]])})
        output = tmp_path / f"output-{largest}"
        if math.isfinite(rounded):
            assert convert(str(source), output, options).verify.passed
            rewritten(output, lambda tensors: tensors["layer.weight"][0, 1].fill_(math.inf))
        else:
            with pytest.raises(VerificationError, match=r"`layer.weight`: 1 number .* fp16 became Inf"):
                convert(str(source), output, options)
            convert(str(source), output, dataclasses.replace(options, verify="none"))
        assert not verified(output, source).passed


def test_what_is_infinite_in_the_source_may_be_so(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", {"layer.weight": torch.tensor([[1.0, math.inf, -math.inf, 2.0]])})
    options = ConvertOptions(method="collage", format="fp16", verify="weights", workers=1)
    assert convert(str(source), tmp_path / "output", options).verify.passed


def test_damage_between_writing_and_checking(run: Run, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lpconv.verify import written as module

    check = module.verify_written

    def damaged(job: Any, directory: Path, *rest: Any) -> VerifyResult:
        tensors = load_file(directory / FILE)
        tensors["layer.weight"].fill_(math.nan)
        save_file(tensors, directory / FILE, metadata={"format": "pt"})
        return check(job, directory, *rest)

    monkeypatch.setattr(module, "verify_written", damaged)
    for method in ("collage", "unit"):
        with pytest.raises(VerificationError):
            run(method=method, force=True)
        assert not published(output)


def test_an_output_that_does_not_open_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are right, and the source opens."""

    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("size mismatch for experts")

    monkeypatch.setattr("lpconv.verify.outputs.open_as_served", refuse)
    with pytest.raises(VerificationError, match=r"RuntimeError: .*experts"):
        convert(str(tiny("llama", tmp_path / "source")), tmp_path / "out", ConvertOptions())
    assert not published(tmp_path / "out")


def test_a_disk_that_fails_while_it_is_read_back_judges_nothing(
    run: Run, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lpconv.verify import written as module

    def failing(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def check(*arguments: Any) -> VerifyResult:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing)
            return verify(*arguments)

    verify = module.verify_written
    with monkeypatch.context() as patch:
        patch.setattr(module, "verify_written", check)
        with pytest.raises(InputError, match="Input/output error"):
            run()
    assert not published(output)
    assert not output.with_name(output.name + ".failed").exists()
    assert run(resume=True).verify.passed


def test_the_check_says_how_much_it_compared(run: Run) -> None:
    weights = run().verify.weights
    assert weights is not None
    assert (weights.num_elements_checked, weights.num_elements, weights.miss_probability) == (60, 60, 0.0)


def test_a_sample_says_what_it_may_miss(source: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lpconv.verify.written._SECONDS", 0)
    size = 2**18
    write_checkpoint(source, {"layer.weight": torch.randn(64, size // 64)})
    weights = run().verify.weights
    assert weights is not None
    assert weights.num_elements_checked == 3 * 2**14
    assert weights.miss_probability == pytest.approx(1 - 3 * 2**14 / size)


def test_the_smallest_tensors_are_compared_whole() -> None:
    def planned(name: str, rows: int) -> PlannedTensor:
        info = TensorInfo(name=name, dtype="F32", shape=(rows,), begin=0, end=4 * rows)
        return PlannedTensor(info=info, form=Kept(name=name, shape=(rows,), dtype="F32"), reason="")

    sizes = {"a": 10**9, "b": 10**6, "c": 10**3}
    assert whole_tensors([planned(*it) for it in sizes.items()], 10) == {"b", "c"}


def test_sums_in_another_order_are_another_machine(run: Run, source: Path, output: Path) -> None:
    """Recorded figures and an exact scale that differ in their last bits, as those of other vector widths do."""
    run(method="scalify", scale="exact", format="e4m3fn", granularity="row")
    document = json.loads((output / "lpconv.json").read_text())
    record = next(t for t in document["tensors"] if t["name"] == "layer.weight")
    x = load_file(source / FILE)["layer.weight"]

    def other(tensors: dict[str, Tensor]) -> None:
        scale = tensors["layer.weight_scale"]
        scale[0] = torch.nextafter(scale[0], torch.tensor(math.inf))
        tensors["layer.weight"][0, 0] = (x[0] / scale[0]).to(torch.float8_e4m3fn)

    rewritten(output, other)
    assert not verified(output, source).passed, "the figures are this machine's to the last bit"
    record["rms"] = math.nextafter(record["rms"], 9)
    (output / "lpconv.json").write_text(json.dumps(document))
    rehash(output)
    assert verified(output, source).passed
    record["rms"] *= 1.01
    (output / "lpconv.json").write_text(json.dumps(document))
    rehash(output)
    assert not verified(output, source).passed


def test_outputs_that_are_no_numbers() -> None:
    wanted = torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 0.0]])
    for bad in (math.nan, math.inf):
        got = wanted.clone()
        got[0, 1] = bad
        (problem,) = output_problems(compare_outputs(wanted, got, "M", ""), ())
        assert "NaN" in problem
        assert compare_outputs(got, got, "M", "").skipped  # nothing could be seen in these
    same = compare_outputs(wanted, wanted, "M", "")
    assert (same.max_abs_diff, same.rel_error, output_problems(same, ())) == (0.0, 0.0, ())


class TestTheCommand:
    def test_against_implies_weights_and_outputs(self, tmp_path: Path) -> None:
        source, output = tiny("llama", tmp_path / "llama"), tmp_path / "output"
        convert(str(source), output, ConvertOptions(verify="none", workers=1))
        assert verified(output, source, None).level == "logits"
        assert json.loads(lpconv("verify", output, "--json").stdout)["level"] == "hash"
        assert "--level" not in lpconv("verify", output, "--against", source, "--gate", "sqnr>=999").stderr
        assert lpconv("verify", output, "--against", tmp_path / "nope").exit_code == 3
        assert lpconv("verify", output, "--against", "nope").exit_code == 3

    def test_the_first_of_three_is_not_the_source_and_the_hint_compares_with_it(self, tmp_path: Path) -> None:
        first, second, third = tiny("llama", tmp_path / "first"), tmp_path / "second", tmp_path / "third"
        convert(str(first), second, ConvertOptions(format="e4m3fn", verify="none", workers=1))
        convert(str(second), third, ConvertOptions(format="e5m2", verify="none", workers=1))
        done = lpconv("verify", third, "--against", first)
        assert done.exit_code == 5
        assert "--level values" in done.stderr
        assert lpconv("verify", third, "--against", first, "--level", "values").exit_code == 0

    def test_inspect_of_unsound_files(self, source: Path) -> None:
        assert lpconv("inspect", source).exit_code == 0
        (source / FILE).write_bytes((source / FILE).read_bytes()[:-3])
        assert inspect(source).problems
        assert lpconv("inspect", source).exit_code == 5
        done = lpconv("inspect", source, "--json")
        assert json.loads(done.stdout)["error"]["details"]["problems"]


class TestRestoring:
    def test_what_does_not_match_its_hash(self, run: Run, output: Path, tmp_path: Path) -> None:
        run(format="fp32")
        data = bytearray((output / FILE).read_bytes())
        data[-1] ^= 1
        (output / FILE).write_bytes(data)
        with pytest.raises(InputError, match=FILE):
            restore(output, tmp_path / "back", force=False, progress=Silent())
        assert not published(tmp_path / "back")

    @pytest.mark.parametrize("granularity", ["tensor", "row"])
    def test_a_scale_of_a_million_is_not_the_source(
        self, run: Run, output: Path, tmp_path: Path, granularity: str
    ) -> None:
        run(format="fp32", granularity=granularity)

        def grow(tensors: dict[str, Tensor]) -> None:
            tensors["layer.weight_scale"][0] = 1e6

        rewritten(output, grow)
        with pytest.raises(InputError, match=r"layer\.weight"):
            restore(output, tmp_path / "back", force=False, progress=Silent())
        assert not published(tmp_path / "back")
