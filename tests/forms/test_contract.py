"""What every form must prove: `FORMS` is gone through, with every format and setting that a method asks of it."""

import importlib.util
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lpconv.errors import InputError
from lpconv.formats.grains import GRAINS, TENSOR, Grain, find_grain
from lpconv.formats.spec import FORMATS
from lpconv.forms import FORMS, Form, FormSettings
from lpconv.forms.blocks import Workspace, same_numbers
from lpconv.forms.facts import ConvertedFacts, Measurement
from lpconv.forms.pair import RESIDUAL_DTYPES
from lpconv.gguf import GGUF
from lpconv.layouts import LAYOUTS
from lpconv.layouts.reader import StoredTensors
from lpconv.mcf.split import RESIDUALS
from lpconv.methods import METHODS, Method
from lpconv.storage.checkpoint import residual_index
from lpconv.storage.dtypes import SAFETENSORS_DTYPES, TORCH_DTYPES
from lpconv.storage.staging import MARKER
from tests.helpers.checkpoints import bits_of, cli_environment

SHAPE = (2, 96, 160)  # more rows and columns than a tile has, and whole groups, of the transposes too
ROWS, COLS = 192, 160
NAME = "layer.weight"


@dataclass(frozen=True)
class Stored:
    """A tensor in a form: what the first pass found, and the data of the root and the residual file."""

    form: Form
    found: Measurement
    data: tuple[Tensor, ...]

    def decoded(self) -> Tensor:
        return self.form.decode(self.data, 0, self.form.num_elements, self.found.side)


def _forms() -> Iterator[Form]:
    """What every method makes of a tensor in each of its layouts, with every setting; and what keeps it."""
    yield FORMS["kept"].of(NAME, SHAPE, FORMATS["fp32"], FormSettings())
    for bits in (1.5, 3.7, 12):
        yield FORMS["tiles"].of(NAME, SHAPE, FORMATS["int16"], FormSettings(budget_bits=bits))
    for method in METHODS.values():
        grains = [None, *GRAINS.values(), find_grain("group:32")] if method.has_granularity else [None]
        layouts = [n for n in method.layouts if n != GGUF]  # another container: tests/convert/test_gguf_layout.py
        for layout, grain, scale in itertools.product(layouts, grains, ("pow2", "exact", "search")):
            for name, residual in itertools.product(_formats(method, grain), method.residuals or ("bf16",)):
                fmt, residual = FORMATS[name], "fp16" if name == "fp16" else residual
                settings = FormSettings(
                    scale=scale, grain=grain, residual=residual, budget_bits=fmt.storage_bits * 2.5, points_max=3
                )
                if method.form(layout).refusal(SHAPE, fmt, settings) is None:
                    yield method.form(layout).of(NAME, SHAPE, fmt, settings)


def _formats(method: Method, grain: Grain | None) -> Iterator[str]:
    """Those of a granularity, or else of the method."""
    yield from dict.fromkeys((grain.formats if grain else ()) or method.formats)


EXAMPLES = {
    f"{f.kind} {' '.join(str(v) for v in vars(f).values() if isinstance(v, (str, int)))} {f.words}": f for f in _forms()
}
LATE = {name: form for name, form in EXAMPLES.items() if form.late_side}
every_form = pytest.mark.parametrize("form", EXAMPLES.values(), ids=EXAMPLES)


def _values(dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of many sizes, one of zeros, with both zeros and tiny numbers in others; 1-D."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 2, ROWS).view(2, 96, 1)
    x[0, 3] = 0
    x[1, 1, :3] = torch.tensor([-0.0, 1e-40, -3e-39])
    return x.to(dtype).view(-1)


def _store(form: Form, x: Tensor, rows: int) -> Stored:
    """`x` in a form, by blocks of so many rows or at least the form's own, as a conversion writes it."""
    work, size = Workspace(), max(rows * SHAPE[-1], form.cols)
    ranges = [(a, min(a + size, x.numel())) for a in range(0, x.numel(), size)]
    found = form.measure(lambda job: [job(x[a:b], a, work) for a, b in ranges])
    data = tuple(torch.zeros(math.prod(c.shape), dtype=TORCH_DTYPES[c.dtype]) for c in form.data)
    for a, b in ranges:
        first, last = form.place(a, b, found.side)
        for whole, part in zip(data, form.encode(x[a:b], a, found, work).data, strict=True):
            whole[first:last] = part.view(whole.dtype)
    return Stored(form, found, data)


def _write(folder: Path, stored: Stored) -> Path:
    """A checkpoint of the one tensor, and its residual."""
    form = stored.form
    tensors = dict(stored.found.side)
    data = {c: x.view(c.shape) for c, x in zip(form.data, stored.data, strict=True)}
    tensors |= {c.name: x for c, x in data.items() if not c.in_residual}
    settings = {"method": "test", "format": form.format.name if form.format else "fp32", "scale": "pow2"}
    grain = vars(form).get("grain")
    settings["granularity"] = grain.name if grain else TENSOR
    formats = {NAME: form.format.name} if form.format else {}
    made = ConvertedFacts(config={}, settings=settings, formats=formats, ignored=())
    config = form.config_entries(made) if form.quantised_by or len(form.data) > 1 else {}
    (folder / "collage").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    lows = {c.name: x for c, x in data.items() if c.in_residual}
    if lows:
        save_file(lows, folder / "collage/residual.safetensors")
        index = residual_index(str(vars(form)["residual"]), [("collage/residual.safetensors", "model.safetensors", "")])
        (folder / "collage/residual.json").write_text(json.dumps(index))
    return folder


def _open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> StoredTensors:
    monkeypatch.setattr("lpconv.storage.checkpoint.sha256_of", lambda path, stored: "")
    return StoredTensors.open(folder)


def test_kinds_are_the_keys() -> None:
    assert all(form.kind == kind for kind, form in FORMS.items())
    written = {x.form.kind for x in LAYOUTS.values() if x.form is not None and x.name not in (GGUF, "mxfp4")}
    assert {form.kind for form in _forms()} == {*FORMS, *written, "compressed"}


def test_the_residuals_of_pairs_are_those_that_there_are() -> None:
    assert {n: SAFETENSORS_DTYPES[r.dtype] for n, r in RESIDUALS.items()} == RESIDUAL_DTYPES


@every_form
def test_what_is_stored_is_what_was_planned(form: Form) -> None:
    stored = _store(form, _values(), ROWS)
    assert [(c.dtype, math.prod(c.shape)) for c in form.data] == [
        (SAFETENSORS_DTYPES[x.dtype], x.numel()) for x in stored.data
    ]
    assert {c.name: (c.dtype, c.shape) for c in form.side} == {
        n: (SAFETENSORS_DTYPES[x.dtype], tuple(x.shape)) for n, x in stored.found.side.items()
    }
    sizes = sum(x.numel() * x.itemsize for x in (*stored.data, *stored.found.side.values()))
    assert form.num_bytes == sizes
    module = NAME.removesuffix(".weight")
    assert all(c.name.removeprefix(NAME).removeprefix(module) in form.suffixes for c in form.side)
    assert form.needs_first_pass == bool(form.side)


@pytest.mark.parametrize("form", LATE.values(), ids=LATE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_that_say_their_scales_are_those_of_two_passes(form: Form, dtype: torch.dtype) -> None:
    x, work, size = _values(dtype), Workspace(), 7 * SHAPE[-1]
    wanted = _store(form, x, ROWS)
    begun = form.begin(float(x.abs().max()))
    assert begun.side.keys() == {c.name for c in form.side} - {c.name for c in form.late_side}
    looked = []
    for start in range(0, x.numel(), size):
        block = x[start : start + size]
        seen, encoded = form.look_and_encode(block, start, begun, work)
        first, last = form.place(start, start + len(block), begun.side)
        assert bits_of(encoded.data[0]) == bits_of(wanted.data[0][first:last])
        looked.append(seen)
    found = form.combine(looked, _unread, [_unread])
    assert found.side.keys() == wanted.found.side.keys()
    assert all(bits_of(found.side[n]) == bits_of(side) for n, side in wanted.found.side.items())
    assert not found.is_other


def _unread(job: object) -> list[Any]:
    raise AssertionError("blocks have said all")


@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_values_come_back_within_what_the_error_says(form: Form, dtype: torch.dtype) -> None:
    if form.format is None and dtype != torch.float32:
        pytest.skip("what is kept has the dtype that it is planned with")
    x = _values(dtype)
    stored = _store(form, x, ROWS)
    got = stored.decoded()
    assert got.dtype == torch.float32
    assert form.is_right(x.float(), got, 0, stored.found.side)
    encoded = form.encode(x, 0, stored.found, Workspace())
    if encoded.error is None:
        assert bits_of(got) == bits_of(x)
        return
    error = (got.double() - x.float().double()).square().sum().item()
    assert encoded.error.sum_squares == pytest.approx(error, rel=1e-3, abs=1e-30)
    assert (encoded.error.max_relative == 0) == torch.equal(got, x.float())


@every_form
def test_blocks_make_the_same_bytes_as_the_whole(form: Form) -> None:
    whole, blocks = _store(form, _values(), ROWS), _store(form, _values(), 33)
    if getattr(form, "has_pow2_scale", True):
        assert [bits_of(x) for x in whole.data] == [bits_of(x) for x in blocks.data]
        assert all(bits_of(x) == bits_of(blocks.found.side[n]) for n, x in whole.found.side.items())
    else:  # the last bits of a sum of squares depend on the order, which a processor's BLAS chooses
        for name, side in whole.found.side.items():
            torch.testing.assert_close(blocks.found.side[name].float(), side.float(), rtol=2**-18, atol=0.0)
    cols = SHAPE[-1]
    for start, stop in ((0, cols), (3 * cols, ROWS * COLS), (127 * cols, 129 * cols)):
        start, stop = form.widened(start, stop)
        first, last = form.place(start, stop, whole.found.side)
        part = form.decode([x[first:last] for x in whole.data], start, stop, whole.found.side)
        assert bits_of(part) == bits_of(whole.decoded()[start:stop])
        assert form.is_right(_values()[start:stop], part, start, whole.found.side)


@every_form
def test_the_reference_sees_every_changed_number(form: Form) -> None:
    stored, x = _store(form, _values(), ROWS), _values()
    for at in (0, 100, ROWS * COLS - 1):
        got = stored.decoded()
        got[at] = got[at] * 1.5 + 1
        assert not form.is_right(x, got, 0, stored.found.side), at


@every_form
def test_the_reader_knows_it_and_reads_it(form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = _store(form, _values(), ROWS)
    whole = stored.decoded()
    written = _write(tmp_path / "c", stored)
    (written / MARKER).write_text("{}")  # weights of any size, which would be suspicious in a third-party file
    with _open(written, monkeypatch) as reader:
        (found,) = reader.forms.values()
        assert reader.holds(form)
        assert found.shape == form.shape
        assert (type(found), found.components) == (type(form), form.components)
        assert bits_of(reader.tensor(NAME)) == bits_of(whole)
        assert tuple(reader.tensor(NAME).shape) == SHAPE
        assert bits_of(reader.values(NAME, 50, 599)) == bits_of(whole[50:599])
        summed = sum((codes.float() * factor for codes, factor in reader.summands(NAME)), torch.zeros(SHAPE))
        assert torch.equal(summed, whole.view(SHAPE))


@every_form
def test_scales_that_are_none_are_refused(form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not form.side:
        return
    stored = _store(form, _values(), ROWS)
    name = next(n for n in stored.found.side if n.endswith(("_scale", "_scale_inv", ".scales")))
    scales = stored.found.side[name]
    for bad in (255,) if scales.dtype == torch.uint8 else (math.nan, 0.0, -1.0, math.inf):  # a byte is an exponent
        if math.isinf(bad) and scales.dtype == torch.float8_e4m3fn:
            continue  # it has none
        scales = torch.full_like(scales, bad)
        side = {**stored.found.side, name: scales}
        folder = _write(tmp_path / str(bad), Stored(form, Measurement(side=side), stored.data))
        may_be = bad == -1.0 and form.kind == "compressed tiles" and form.format.twos_complement  # AutoRound's
        with nullcontext() if may_be else pytest.raises(InputError, match=r"fit|scale"):
            _open(folder, monkeypatch)


@pytest.fixture(scope="module")
def loader() -> ModuleType:
    """The loader module that travels with outputs, from its source alone."""
    source = importlib.util.find_spec("lpconv.models.plugin")
    assert source is not None
    spec = importlib.util.spec_from_file_location("lpconv_loader", str(source.origin))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Model:
    """As much of a model as the loader asks for."""

    def get_parameter_or_buffer(self, name: str) -> Tensor:
        return torch.empty(SHAPE)


@every_form
def test_the_loader_module_decodes_as_the_form_does(form: Form, loader: ModuleType) -> None:
    if form.quantised_by != "lpconv":
        pytest.skip("not opened by the loader module")
    assert form.format is not None
    stored = _store(form, _values(), ROWS)
    method = next((m.name for m in METHODS.values() if form.kind == m.own), "unit")
    grain = vars(form).get("grain")
    told = {"granularity": grain.name} if grain else {}
    quantizer = loader.LpconvQuantizer(loader.LpconvConfig(method=method, format=form.format.name, **told))
    (data,) = (x.view(c.shape) for c, x in zip(form.data, stored.data, strict=True))
    pairs: list[tuple[str, Any]] = [(NAME, data), *stored.found.side.items()]
    read = loader.DecodeScaled(quantizer).convert(
        {"weight": pairs}, ["weight"], ["weight"], full_layer_name=NAME, model=_Model()
    )
    (got,) = read["weight"]
    assert tuple(got.shape) == SHAPE
    assert same_numbers(got.view(-1), stored.decoded())
    if method == "multipoint" or form.kind == "entropy":
        return
    saved = quantizer._encode(NAME, got, *quantizer.scales[NAME], {})
    assert saved.shape == data.shape
    assert bits_of(saved) == bits_of(data)


def test_planning_needs_no_torch() -> None:
    script = "import sys, lpconv.plan.plan, lpconv.methods; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], env=cli_environment(), check=False).returncode == 0
