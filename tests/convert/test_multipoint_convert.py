"""Conversions with `--method multipoint`: what is stored, under which budget, and that everything opens it."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import lpconv.hf
from lpconv.convert.restore import restore
from lpconv.convert.run import convert, plan
from lpconv.data import demo_checkpoint
from lpconv.errors import InputError, UnsupportedError
from lpconv.formats.spec import FORMATS
from lpconv.inspect.headers import inspect
from lpconv.mcf.multipoint import Points, decode
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.results import ConvertResult
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify_output
from tests.helpers.checkpoints import Run
from tests.helpers.elsewhere import run_script
from tests.helpers.models import tiny

ELEMENTS = ["int4", "int8", "e4m3fn", "e2m1"]


def run(source: Path, out: Path, **options: object) -> ConvertResult:
    return convert(str(source), out, ConvertOptions(method="multipoint", **options))  # type: ignore[arg-type]


def stored(folder: Path) -> dict[str, Tensor]:
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def value(tensors: dict[str, Tensor], name: str, element: str) -> Tensor:
    """A tensor from its three parts, by the definition."""
    counts = tensors[name + "_points"]
    points = Points(counts_R=counts.view(-1), scales_P=tensors[name + "_scale"])
    rows = decode(tensors[name][0].view(torch.uint8), points, FORMATS[element])
    return rows.view(*counts.shape, -1)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model in each element."""
    folder = tmp_path_factory.mktemp("multipoint")
    for element in ELEMENTS:
        run(demo_checkpoint(), folder / element, format=element, verify="none")
    return {e: folder / e for e in ELEMENTS}


@pytest.mark.parametrize("element", ELEMENTS)
def test_what_is_stored_keeps_the_budget_and_is_what_was_planned(outputs: dict[str, Path], element: str) -> None:
    source, tensors = stored(demo_checkpoint()), stored(outputs[element])
    budget = FORMATS[element].storage_bits + 0.5
    documented = json.loads((outputs[element] / "lpconv.json").read_text())
    records = {t["name"]: t for t in documented["tensors"] if t["points"]}
    assert len(records) == 28
    for name, record in records.items():
        parts = [tensors[name], tensors[name + "_scale"], tensors[name + "_points"]]
        num_bytes = sum(p.numel() * p.itemsize for p in parts)
        row_bits = source[name].shape[1] * FORMATS[element].storage_bits + 32
        assert budget * source[name].numel() - row_bits < 8 * num_bytes <= budget * source[name].numel()
        assert record["bytes_out"] == num_bytes
        assert int(tensors[name + "_points"].sum()) == record["points"] == len(tensors[name + "_scale"])
    planned = plan("demo", Path("unused"), ConvertOptions(method="multipoint", format=element))
    assert planned.bytes.written == (outputs[element] / "model.safetensors").stat().st_size


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_way_of_reading_gives_the_same_values(outputs: dict[str, Path], element: str, tmp_path: Path) -> None:
    restored = restore(outputs[element], tmp_path / "back", force=False, progress=Silent())
    assert not restored.exact
    plain, tensors = stored(tmp_path / "back"), stored(outputs[element])
    source = stored(demo_checkpoint())
    assert {k: (v.shape, v.dtype) for k, v in plain.items()} == {k: (v.shape, v.dtype) for k, v in source.items()}
    opened = AutoModelForCausalLM.from_pretrained(outputs[element]).state_dict()
    for name in plain:
        assert torch.equal(plain[name], opened[name]), name
        if name + "_points" in tensors:
            assert torch.equal(plain[name], value(tensors, name, element)), name
    verified = verify_output(outputs[element], VerifyOptions(against="demo", level="weights"), progress=Silent())
    assert verified.passed


def test_inspect_shows_codes_scales_and_counts_as_one_tensor(outputs: dict[str, Path]) -> None:
    found = inspect(outputs["e2m1"])
    assert (found.method, found.format, found.problems) == ("multipoint", "e2m1", ())
    name = "model.layers.0.mlp.down_proj.weight"
    parts = stored(outputs["e2m1"])
    [shown] = [t for t in found.tensors if t.name.startswith(name)]
    assert (shown.name, shown.dtype, shown.shape) == (name, "U8", tuple(stored(demo_checkpoint())[name].shape))
    assert shown.size_bytes == sum(parts[name + s].nbytes for s in ("", "_scale", "_points"))


def test_one_point_a_row_is_plain_rounding(tmp_path: Path) -> None:
    result = run(demo_checkpoint(), tmp_path / "out", format="e4m3fn", points_max=1, verify="weights")
    assert result.verify.passed
    source, tensors = stored(demo_checkpoint()), stored(tmp_path / "out")
    name = "model.layers.1.self_attn.q_proj.weight"
    scale = tensors[name + "_scale"][:, None]
    assert torch.equal(
        tensors[name][0].view(torch.uint8), (source[name] / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    )
    assert tensors[name + "_points"].unique(sorted=True).tolist() == [1]  # type: ignore[no-untyped-call]


def test_more_bits_mean_less_error_in_every_tensor(tmp_path: Path) -> None:
    ratios = []
    for i, budget in enumerate((4.4, 5.0, 6.5, 8.7, 14.0)):
        result = run(demo_checkpoint(), tmp_path / str(i), budget_bits=budget, verify="none")
        ratios.append([t.sqnr_db for t in result.tensors if t.points])
    for fewer, more in itertools.pairwise(ratios):
        assert all(a is not None and b is not None and a < b for a, b in zip(fewer, more, strict=True))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral", "t5", "vit"])
def test_families_convert_and_open(tmp_path: Path, kind: str) -> None:
    source = tiny(kind, tmp_path / "source", dtype=torch.bfloat16 if kind == "llama" else torch.float32)
    result = run(source, tmp_path / "out", format="e2m1", budget_bits=8, verify="logits")
    assert result.verify.passed
    assert result.verify.logits is not None
    assert result.verify.logits.skipped is None
    assert any(t.points for t in result.tensors)
    if kind == "mixtral":
        tensors = stored(tmp_path / "out")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
        assert torch.equal(model.model.layers[1].mlp.experts.down_proj[2], value(tensors, name, "e2m1"))


def test_saving_is_refused_with_the_way_out(outputs: dict[str, Path], tmp_path: Path) -> None:
    model = lpconv.hf.load(outputs["int4"])
    with pytest.raises(ValueError, match=r"`lpconv convert`.*`model\.dequantize\(\)`"):
        model.save_pretrained(tmp_path / "codes")
    model.dequantize()
    model.save_pretrained(tmp_path / "plain")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
    assert all(torch.equal(v, again[k]) for k, v in model.state_dict().items())


SCRIPT = """
import sys
from transformers import AutoModelForCausalLM
source, target = sys.argv[1:]
sys.modules["lpconv"] = None  # as on a machine without it
try:
    AutoModelForCausalLM.from_pretrained(source)
except RuntimeError as e:
    assert "mismatched_sizes" in str(e), e
else:
    raise AssertionError("codes were taken for weights")
model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
model.dequantize()
model.save_pretrained(target)
"""


def test_without_lpconv_the_loader_opens_it_and_plain_transformers_refuses(
    outputs: dict[str, Path], tmp_path: Path
) -> None:
    done = run_script(SCRIPT, outputs["e2m1"], tmp_path / "plain")
    assert done.returncode == 0, done.stderr
    tensors, plain = stored(outputs["e2m1"]), stored(tmp_path / "plain")
    name = "model.layers.2.mlp.up_proj.weight"
    assert torch.equal(plain[name], value(tensors, name, "e2m1"))


def _poison(source: Path, number: float) -> str:
    tensors = load_file(source / "model.safetensors")
    name = next(n for n, t in tensors.items() if t.ndim == 2 and "embed" not in n)
    tensors[name].view(-1)[7] = number
    save_file(tensors, source / "model.safetensors")
    return name


@pytest.mark.parametrize("number", [math.nan, -math.inf])
def test_what_is_not_finite_is_refused_by_name(run: Run, source: Path, output: Path, number: float) -> None:
    name = _poison(source, number)
    with pytest.raises(InputError, match=name) as e:
        run(method="multipoint", budget_bits=12.0)
    assert "--exclude" in (e.value.hint or "")
    assert not output.exists()
    assert run(method="multipoint", budget_bits=12.0, exclude=(name,), force=True).verify.passed


def test_rows_that_are_too_short_are_kept_and_say_so(tmp_path: Path) -> None:
    source = tiny("llama", tmp_path / "source")
    result = run(source, tmp_path / "out", verify="weights")
    reasons = {t.reason for t in result.tensors if len(t.shape) == 2 and t.shape[1] == 32 and "proj" in t.name}
    (reason,) = reasons
    assert "4.5 bits" in reason
    assert "32 elements" in reason


def test_names_that_points_would_take_are_refused(run: Run, source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    name = next(n for n, t in tensors.items() if t.ndim == 2)
    save_file({**tensors, f"{name}_points": torch.ones(2)}, source / "model.safetensors")
    with pytest.raises(UnsupportedError, match="_points"):
        run(method="multipoint", budget_bits=12.0)
