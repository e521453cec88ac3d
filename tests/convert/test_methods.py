"""What every method must prove in every format, layout and residual that it has: `METHODS` is gone through."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lpconv.convert.restore import restore
from lpconv.convert.run import convert, plan
from lpconv.errors import UsageError
from lpconv.formats.grains import GRAINS, TENSOR, find_grain
from lpconv.layouts.reader import StoredTensors
from lpconv.methods import METHODS
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify_output
from tests.helpers.checkpoints import files_of, write_checkpoint


def _asked() -> Iterator[dict[str, Any]]:
    """Options that no model is needed for; the layout of compressed-tensors has tests with models."""
    yield {"method": "unit", "budget_bits": 4.5}
    for method in METHODS.values():
        own = [grain for grain in (*GRAINS.values(), find_grain("group:32")) if grain and not grain.has_factor]
        for grain in (None, *own) if method.has_granularity else (None,):
            formats = (grain.formats if grain else ()) or method.formats
            for fmt, residual in itertools.product(formats, method.residuals or (None,)):
                asked = {"method": method.name, "format": fmt, "granularity": grain.name if grain else TENSOR}
                if residual is None or fmt != "fp16":
                    yield {**asked, "residual": residual}
                elif residual == method.residuals[0]:
                    yield {"method": method.name, "format": fmt}


CASES = {" ".join(str(v) for v in asked.values() if v): asked for asked in _asked()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A matrix that every method converts, with rows of many sizes, one of which is zero; a vector; integers."""
    x = torch.randn(48, 160, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 1, 48)[:, None]
    x[7] = 0
    tensors = {"layer.weight": x, "layer.bias": x[:, 0].clone(), "position_ids": torch.arange(6)}
    return write_checkpoint(tmp_path_factory.mktemp("methods") / "source", tensors)


@pytest.mark.parametrize("asked", CASES.values(), ids=CASES)
def test_a_method_keeps_what_it_promises(asked: dict[str, Any], source: Path, tmp_path: Path) -> None:
    options = ConvertOptions(verify="weights", **asked)
    result = convert(str(source), tmp_path / "out", options)

    assert result.verify.passed
    (converted,) = (t for t in result.tensors if t.name == "layer.weight")
    assert converted.action == "convert"
    assert plan(str(source), Path("unused"), options).bytes.written == result.bytes.written
    with StoredTensors.open(tmp_path / "out") as stored:
        read = {name: stored.tensor(name) for name in stored.forms}
    restored = restore(tmp_path / "out", tmp_path / "back", force=False, progress=Silent())
    back, wanted = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", source))
    assert read.keys() == back.keys() == wanted.keys()
    assert all(torch.equal(read[name].to(x.dtype), x) for name, x in back.items())
    assert restored.exact == all(torch.equal(back[name], x) for name, x in wanted.items())
    error = (back["layer.weight"].double() - wanted["layer.weight"].double()).square().sum().sqrt()
    most = 0.5 if asked.get("format") == "int2" else 0.2
    assert float(error) <= most * float(wanted["layer.weight"].double().square().sum().sqrt())
    verified = verify_output(tmp_path / "out", VerifyOptions(against=str(source), level="weights"), progress=Silent())
    assert verified.passed
    assert verify_output(tmp_path / "back", VerifyOptions(against=str(source)), progress=Silent()).passed


@pytest.mark.parametrize("asked", [{"budget_bits": 4.0}, {"scheme": "W4A16"}], ids=str)
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_restored_checkpoint_is_judged_by_the_bits_it_was_stored_in(
    asked: dict[str, Any], is_ours: bool, tmp_path: Path
) -> None:
    convert("demo", tmp_path / "out", ConvertOptions(verify="none", **asked))
    if not is_ours:
        for name in ("lpconv.json", "SHA256SUMS"):
            (tmp_path / "out" / name).unlink()
    restore(tmp_path / "out", tmp_path / "back")
    file, against = tmp_path / "back" / "model.safetensors", VerifyOptions(against="demo")
    assert verify_output(tmp_path / "back", against, progress=Silent()).passed
    tensors, name = load_file(file), "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name] * 1.5}, file, metadata={"format": "pt"})
    assert not verify_output(tmp_path / "back", against, progress=Silent()).passed


@pytest.mark.parametrize("asked", CASES.values(), ids=CASES)
def test_two_runs_write_the_same_bytes_whatever_the_workers(
    asked: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    for workers in (1, 3):
        convert(str(source), tmp_path / str(workers), ConvertOptions(verify="none", workers=workers, **asked))
    assert files_of(tmp_path / "1") == files_of(tmp_path / "3")


@pytest.mark.parametrize(
    ("fmt", "residual", "says", "hint"),
    [
        (None, "fp16", "`fp16` .* fp16, .* bf16", "--format fp16, or --residual bf16 or"),
        ("fp16", "int8", "`int8` .* bf16, .* fp16", "--format bf16, or --residual fp16"),
        ("fp16", "bf17", "residual `bf17`", "bf16"),
    ],
)
def test_a_residual_that_does_not_go_with_the_format_is_refused_with_what_does(
    fmt: str | None, residual: str, says: str, hint: str, source: Path
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        plan(str(source), Path("unused"), ConvertOptions(method="collage", format=fmt, residual=residual))
    assert hint in str(caught.value.hint)


def test_fp16_may_name_its_residual(source: Path) -> None:
    named, usual = (
        plan(str(source), Path("unused"), ConvertOptions(method="collage", format="fp16", residual=residual))
        for residual in ("fp16", None)
    )
    assert (named.bytes, named.tensors) == (usual.bytes, usual.tensors)
