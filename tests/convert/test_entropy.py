"""Entropy-coded integers: their bytes by an independent decoder, the budget, damage, and numbers of every kind."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import lpconv.hf
from lpconv.convert.run import convert, plan
from lpconv.errors import InputError, UsageError
from lpconv.formats.spec import CODED
from lpconv.forms import FormSettings
from lpconv.forms.blocks import Workspace
from lpconv.forms.entropy import EntropyCoded
from lpconv.forms.facts import Measurement, block_ranges
from lpconv.models import plugin
from lpconv.plan.options import ConvertOptions, parse_rule
from lpconv.plan.settings import command_line, fill_options
from lpconv.progress import Silent
from lpconv.verify.compare import compare
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify_output
from tests.helpers.checkpoints import write_checkpoint

NAME = "layer.weight"


def pco_numbers(data: bytes) -> NDArray[np.int64]:
    """The 16-bit integers of a file in Pco's format, in chunks without deltas (github.com/pcodec/pcodec, format.md)."""
    at, numbers = 0, list[int]()

    def take(bits: int) -> int:
        nonlocal at
        value = int.from_bytes(data[at // 8 : at // 8 + 5], "little") >> at % 8 & ((1 << bits) - 1)
        at += bits
        return value

    assert data[:4] == b"pco!"
    at = 48  # also past the version, and a type for all chunks
    take(take(6) + 1)  # a hint at the count
    at = -(-at // 8) * 8 + 16  # past the version of chunks
    while kind := take(8):  # or the end
        assert kind == 8  # 16-bit integers
        last, mode = len(numbers) + take(24) + 1, take(8)
        assert mode == 0
        log = take(4)
        bins = [(take(log) + 1, take(16), take(5)) for _ in range(take(15))]  # weight, lowest number, bits of an offset
        size = 1 << log
        which, place = [0] * size, 0
        for index, (weight, _, _) in enumerate(bins):
            for _ in range(weight):
                which[place % size] = index
                place += (3 * size // 5) | 1
        seen, nodes = [weight for weight, _, _ in bins], []
        for index in which:
            bits = log + 1 - seen[index].bit_length()
            nodes.append((index, (seen[index] << bits) - size, bits))
            seen[index] += 1
        at = -(-at // 8) * 8
        states = [take(log) for _ in range(4)]
        at = -(-at // 8) * 8
        while len(numbers) < last:
            batch = []
            for i in range(min(256, last - len(numbers))):
                index, base, bits = nodes[states[i % 4]]
                states[i % 4] = base + take(bits)
                batch.append(bins[index])
            numbers += [low + take(offset_bits) for _, low, offset_bits in batch]
        at = -(-at // 8) * 8
    return np.array(numbers) - 2**15


def codes_of(stored: dict[str, Tensor], name: str) -> NDArray[np.int64]:
    """The integers of a weight, in rows."""
    ends, shape = stored[name + "_blocks"].cumsum(0).tolist(), stored[name + "_shape"].shape[1:]
    raw, factors = stored[name][0].numpy().tobytes(), stored.get(name + "_columns")
    blocks = [pco_numbers(raw[a:b]) for a, b in zip((0, *ends), ends, strict=False)]
    first = 0
    for block in blocks if factors is not None else ():
        columns = factors.float().numpy().reshape(-1, shape[-1])[first // shape[-2]]
        by_column, rows = block.reshape(shape[-1], -1).copy(), block.reshape(-1, shape[-1])
        rows[:, np.argsort(columns, kind="stable")] = by_column.T
        first += len(rows)
    return np.concatenate(blocks)


def entropy(codes: NDArray[np.int64]) -> float:
    share = np.unique(codes, return_counts=True)[1] / codes.size
    return float(-(share * np.log2(share)).sum())


def form_of(shape: tuple[int, ...], bits: float, *, has_feedback: bool = False) -> EntropyCoded:
    return EntropyCoded.of(NAME, shape, CODED, FormSettings(budget_bits=bits, has_feedback=has_feedback))


def encoded(form: EntropyCoded, x: Tensor) -> tuple[Measurement, Tensor]:
    work, ranges = Workspace(), list(block_ranges(x.numel(), form.cols))
    found = form.measure(lambda job: [job(x.view(-1)[a:b], a, work) for a, b in ranges])
    data = [form.encode(x.view(-1)[a:b], a, found, work).data[0].clone() for a, b in ranges]
    return found, torch.cat(data)


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [(2.5, torch.bfloat16), (3.7, torch.bfloat16), (6, torch.bfloat16), (9, torch.float32), (11, torch.float32)],
)
def test_the_file_has_integers_of_one_step_in_the_budget_near_their_entropy(
    bits: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The weight has several blocks; numpy decodes them."""
    x = torch.randn(700, 300, generator=torch.Generator().manual_seed(1)).div(50).to(dtype)
    source = write_checkpoint(tmp_path / "source", {NAME: x})
    options = ConvertOptions(budget_bits=bits, verify="weights")
    assert convert(str(source), tmp_path / "out", options).verify.passed
    assert not compare(tmp_path / "out", source, gates=(), progress=Silent()).problems
    stored = load_file(tmp_path / "out" / "model.safetensors")
    size = sum(t.numel() * t.itemsize for t in stored.values())
    assert size == int(bits * x.numel() / 8)
    file = tmp_path / "out" / "model.safetensors"
    assert plan(str(source), Path("unused"), options).bytes.written == file.stat().st_size
    codes, step = codes_of(stored, NAME), float(stored[NAME + "_scale"])
    assert len(stored[NAME + "_blocks"]) == 4
    assert np.array_equal(codes, np.rint(x.double().numpy().ravel() / step))
    assert entropy(codes) * x.numel() / 8 <= size <= 1.01 * entropy(codes) * x.numel() / 8
    loaded = plugin.decode_blocks(stored[NAME][0], stored[NAME + "_scale"], stored[NAME + "_blocks"], x.shape)
    assert np.array_equal(loaded.double().numpy().ravel(), codes * step)


def test_rules_give_tensors_other_budgets(tmp_path: Path) -> None:
    rules = tuple(map(parse_rule, ("*down_proj*=4.5", "*o_proj*=fp16", "*embed*=6", "*.0.*=keep")))
    options = ConvertOptions(budget_bits=3.0, rules=rules, verify="weights")
    result = convert("demo", tmp_path / "out", options)
    assert result.verify.passed
    command = command_line("demo", fill_options(options))
    assert "--bits 3.0 --rule '*down_proj*=4.5'" in command
    assert "--format" not in command
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["format"], {*config["exceptions"].values()}) == (CODED.name, {"fp16"})
    assert verify_output(tmp_path / "out", VerifyOptions(against="demo", level="weights"), progress=Silent()).passed
    bits = {t.name: 8 * t.bytes_out / math.prod(t.shape) for t in result.tensors if t.format == CODED.name}
    wanted = {"down_proj": 4.5, "embed_tokens": 6, "q_proj": 3}
    for name, size in bits.items():
        assert size == pytest.approx(wanted.get(name.split(".")[-2], 3.0), rel=1e-3), name
    assert {n.split(".")[-2] for n in bits} >= wanted.keys()
    for refused in (ConvertOptions(rules=rules), ConvertOptions(budget_bits=3.0, rules=(parse_rule("*=14"),))):
        with pytest.raises(UsageError):
            fill_options(refused)


def test_error_feedback_keeps_outputs_in_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lpconv.forms.entropy._LEAST_PART", 2**12)  # the demo's matrices are small
    feedback = {"rounding": "gptq", "calibrate": "demo", "calibration_tokens": 1024}
    for name, options in {"nearest": {}, "gptq": feedback}.items():
        asked = ConvertOptions(budget_bits=3.0, verify="weights", **options)
        result = convert("demo", tmp_path / name, asked)
        assert result.verify.passed
    records = [t.rounding for t in result.tensors if t.rounding is not None]
    assert len(records) == 28
    assert all(r.output_error < 0.9 * r.nearest_error for r in records)
    nearest, rounded = (load_file(tmp_path / name / "model.safetensors") for name in ("nearest", "gptq"))
    assert sum(x.nbytes for x in nearest.values()) == sum(x.nbytes for x in rounded.values())
    for name in [n.removesuffix("_blocks") for n in rounded if n.endswith("q_proj.weight_blocks")]:
        assert 0.98 * rounded[name].numel() <= int(rounded[name + "_blocks"].sum()) <= rounded[name].numel()
        factors, shape = rounded[name + "_columns"].double().numpy(), rounded[name + "_shape"].shape[1:]
        assert len(np.unique(factors)) > 5
        steps = float(rounded[name + "_scale"]) * factors
        got, usual = codes_of(rounded, name).reshape(shape) * steps, codes_of(nearest, name).reshape(shape)
        assert 0 < np.abs(got / steps - usual * float(nearest[name + "_scale"]) / steps).mean() < 2
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "gptq", dtype=torch.float32).get_parameter(name)
    assert np.allclose(opened.detach().numpy(), got, rtol=1e-6)
    for resident in (False, True):
        read = lpconv.hf.load(tmp_path / "gptq", dtype=torch.float32, resident=resident).get_parameter(name)
        assert torch.equal(opened, read.detach() * 1.0)
    rounded[name] = rounded[name] ^ 85
    save_file(rounded, tmp_path / "gptq" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError):
        lpconv.hf.load(tmp_path / "gptq")


@pytest.mark.parametrize(("shape", "bits"), [((600, 900), 12), ((3, 192, 512), 4), ((901, 301), 4)], ids=str)
def test_factors_of_columns_are_in_every_reader_and_in_the_order_of_coding(shape: tuple[int, ...], bits: int) -> None:
    """numpy's codes, the form and the loader agree. Columns of one frequency take fewer bytes together."""
    generator = torch.Generator().manual_seed(3)
    form, x = form_of(shape, bits, has_feedback=True), torch.randn(shape, generator=generator)
    measured, errors = encoded(form, x)[0], torch.empty(0)
    for index in range(math.prod(shape[:-2])):
        errors = torch.randn(shape[-1], generator=generator).mul(2).exp()
        measured = form.with_column_errors(measured, index, errors)
    side = measured.side
    factors = side[NAME + "_columns"].float().view(-1, shape[-1])
    weighted = (factors[-1] * errors)[(factors[-1] > factors.min()) & (factors[-1] < 256)]
    assert torch.allclose(weighted, weighted.median(), rtol=1 / 8)
    assert abs(float(factors[-1].log2().mean())) < 0.02, "or codes take more or fewer bits"
    assert (factors.min() > 0.1) == (bits == 12), "or codes are larger than 16 bits"
    steps = (factors.view(*shape[:-2], 1, -1) * side[NAME + "_scale"]).expand(shape)
    assert x.div(steps).abs().max() < 2**15 - 1
    codes = torch.randn(shape, generator=generator).div(steps).round().clamp(-(2**15) + 1, 2**15 - 1)
    again = {**side}
    while NAME not in (stored := form.from_plain({**again, NAME: codes * steps / steps})):
        again = dict(stored)
        codes = (codes / 2).round()
    wanted = codes * steps / side[NAME + "_scale"] * again[NAME + "_scale"]
    assert len(stored[NAME + "_blocks"]) > 1
    assert np.array_equal(codes_of(stored, NAME), codes.numpy().ravel())
    got = form.decode((stored[NAME][0],), 0, form.num_elements, stored)
    assert torch.allclose(got, wanted.view(-1), rtol=1e-6)
    assert torch.equal(got, codes.view(-1) * form.scale_of_each(stored, 0, form.num_elements))
    step, sizes, columns = (stored[NAME + end] for end in ("_scale", "_blocks", "_columns"))
    assert torch.equal(plugin.decode_blocks(stored[NAME][0], step, sizes, shape, columns).view(-1), got)
    second = form.cols, min(2 * form.cols, form.num_elements)
    part = form.decode((stored[NAME][0, slice(*form.place(*second, stored))],), *second, stored)
    assert torch.equal(part, got[slice(*second)])
    equal = torch.ones_like(stored[NAME + "_columns"].float()).to(torch.float8_e4m3fn)
    other = form.from_plain({**stored, NAME + "_columns": equal, NAME: codes})
    assert NAME not in other or other[NAME + "_blocks"].sum() > sizes.sum()


def test_factors_do_not_enlarge_steps_that_an_outlier_bounds_nor_take_the_bytes_of_few_rows() -> None:
    form, x = form_of((256, 256), 12, has_feedback=True), torch.randn(256, 256)
    x[0, 0] = 300.0
    measured = form.with_column_errors(encoded(form, x)[0], 0, torch.randn(256).exp())
    assert (measured.side[NAME + "_columns"].float() == 1).all()
    assert form_of((4, 2**16), 3, has_feedback=True) == form_of((4, 2**16), 3)


def test_shapes_of_a_damaged_header_have_a_form_at_once() -> None:
    hostile = EntropyCoded(name=NAME, shape=(1, 2**61 - 1, 2), format=CODED, payload=100, has_columns=True)
    assert hostile.cols > 0
    assert form_of((0, 5), 3, has_feedback=True).num_elements == 0


@pytest.mark.parametrize(
    "options",
    [{"budget_bits": 1.4}, {"budget_bits": 12.5}]
    + [
        {"budget_bits": 4.0, **other}
        for other in (
            {"format": "int4"}, {"scale": "pow2"}, {"granularity": "row"}, {"layout": "compressed-tensors"},
            {"points_max": 2}, {"method": "scalify"},
        )
    ],
    ids=str,
)  # fmt: skip
def test_options_that_contradict_the_budget_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        fill_options(ConvertOptions(**options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("bits", [1.5, 4, 12])
@pytest.mark.parametrize("kind", ["normal", "zeros", "constant", "outlier", "tiny", "sparse", "cauchy"])
def test_numbers_of_every_kind_fit(kind: str, bits: float, dtype: torch.dtype) -> None:
    x = torch.randn(300, 301, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    changed = {
        "normal": x, "zeros": x * 0, "constant": x * 0 - 0.37, "tiny": x * 1e-7, "sparse": x * (x > 2),
        "outlier": torch.where(x == x.max(), 6e4, x), "cauchy": (x / x.flip(0)).clamp(-6e4, 6e4),
    }  # fmt: skip
    values = changed[kind].to(dtype)
    form = form_of((300, 301), bits)
    found, data = encoded(form, values)
    assert data.numel() == form.payload
    assert form.is_valid_side(found.side)
    got = form.decode((data,), 0, form.num_elements, found.side)
    assert form.is_right(values.float().view(-1), got, 0, found.side)
    step = form.scale(found.side)
    assert float((got - values.float().view(-1)).abs().max()) <= step * (0.5 + 2**-9)
    if kind == "constant":
        assert torch.allclose(got, torch.tensor(-0.37), rtol=1e-2)


def test_numbers_that_are_not_finite_and_matrices_that_are_too_small(tmp_path: Path) -> None:
    signs = torch.randn(64, 64).sign()
    for x in (signs * torch.nan, signs * torch.finfo(torch.float32).max, signs.bfloat16() * 3.3e38):
        with pytest.raises(InputError):
            encoded(form_of((64, 64), 1.5), x)
    assert encoded(form_of((64, 64), 1.5), signs * 2.0**124)[0].side[NAME + "_scale"].isfinite()
    source = write_checkpoint(tmp_path / "source", {NAME: torch.randn(64, 64), "small.weight": torch.randn(8, 8)})
    result = convert(str(source), tmp_path / "out", ConvertOptions(budget_bits=2.0, verify="weights"))
    assert {t.name: t.action for t in result.tensors} == {NAME: "convert", "small.weight": "keep"}


def test_every_changed_bit_of_a_block_is_an_error_or_another_number() -> None:
    """Every bit of the table, and 1,000 others; but the first bytes also have what no decoding needs, such as hints."""
    x = torch.randn(256, 257, generator=torch.Generator().manual_seed(2))
    form = form_of((256, 257), 3.0)
    found, data = encoded(form, x)
    whole, used = form.decode((data,), 0, form.num_elements, found.side), int(found.side[NAME + "_blocks"].sum())
    others = torch.randint(8 * used, (1000,), generator=torch.Generator().manual_seed(3)).tolist()
    sides, silent = (found.side[NAME + "_scale"], found.side[NAME + "_blocks"]), []
    for bit in {*range(8 * 100), *others}:
        damaged = data.clone()
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            got = form.decode((damaged,), 0, form.num_elements, found.side)
        except InputError:
            with pytest.raises(ValueError):
                plugin.decode_blocks(damaged, *sides, form.shape)
            continue
        assert torch.equal(plugin.decode_blocks(damaged, *sides, form.shape).view(-1), got)
        if torch.equal(got, whole):
            silent.append(bit // 8)
    assert max(silent) < 16
