"""Conversions write the bytes they always wrote: SHA-256 of every weight file, config and residual index.

`golden_sums.txt` holds them, for every method, format, residual, granularity and layout that go together;
`LPCONV_GOLDEN=write pytest tests/forms/test_same_bytes.py -n 0` writes it anew, for a change that is meant. lpconv's
version stands in every header and is left out; nothing else is. The GPT-2 is filled by whole-number arithmetic, so that
no release of torch or transformers draws other weights.
"""

import contextlib
import hashlib
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.errors import UsageError
from lpconv.formats.grains import GRAINS, TENSOR
from lpconv.formats.spec import FORMATS
from lpconv.gguf import GGUF
from lpconv.methods import METHODS
from lpconv.plan.options import LAYOUTS, ConvertOptions, FormatRule
from lpconv.plan.settings import fill_options
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.models import albert, minilm

GOLDEN = Path(__file__).with_name("golden_sums.txt")
WRITING = os.environ.get("LPCONV_GOLDEN") == "write"
Options = dict[str, Any]

_SCALED = [{"method": m, "format": f} for m in ("unit", "scalify") for f in ("fp32", "fp16", "bf16", "e4m3fn", "e5m2")]
_PAIRS = [{"method": "collage", "residual": r} for r in ("bf16", "exact16", "int8")]
_PAIRS.append({"method": "collage", "format": "fp16"})
_POINTS = [{"method": "multipoint", "format": f} for f in ("int4", "int8", "e4m3fn", "e2m1")]
_COMPRESSED: list[Options] = [
    {"method": m, "format": "e4m3fn", "layout": "compressed-tensors"} for m in ("unit", "scalify")
]
_COMPRESSED.append({**_COMPRESSED[0], "granularity": "row"})
_ROWS: list[Options] = [
    {"method": "unit", "format": f, "granularity": "row"} for f in ("fp32", "fp16", "bf16", "e4m3fn", "e5m2")
]
_TILES: list[Options] = [
    {"method": "unit", "format": f, "granularity": g, "layout": layout}
    for f, g in (("e4m3fn", "128x128"), ("e4m3fn", "mx"), ("e2m1", "mx"))
    for layout in ("lpconv", "compressed-tensors")
]
_FEW: list[Options] = [
    {"method": "unit", "format": "fp16"},
    {"method": "scalify", "format": "e4m3fn"},
    {"method": "collage", "residual": "exact16"},
]
_ODD: list[Options] = [
    {"method": "unit", "format": "e4m3fn", "max_shard_size": 300_000},
    {"method": "unit", "rules": (FormatRule(pattern="*mlp*", format="bf16"),), "exclude": ("*.1.*",)},
    {"method": "collage", "max_shard_size": 300_000},
    {"method": "multipoint", "format": "int8", "budget_bits": 20.0, "points_max": 2, "max_shard_size": 200_000},
    {"method": "unit", "budget_bits": 3.7, "max_shard_size": 300_000},
]  # fmt: skip
_CALIBRATED: list[Options] = [
    {"method": "unit", "format": f, "granularity": g, "layout": "compressed-tensors", "calibrate": "demo"}
    for f, g in (("e4m3fn", TENSOR), ("e2m1", "nvfp4"))
]
# Scales that are not the usual ones of their format.
_RESCALED: list[Options] = [
    {"method": "unit", "format": f, "granularity": g, "layout": layout, "scale": scale}
    for f, g, layout, scale in (
        ("fp16", TENSOR, "lpconv", "exact"), ("e4m3fn", "row", "compressed-tensors", "exact"),
        ("e4m3fn", "128x128", "transformers", "exact"), ("e2m1", "nvfp4", "compressed-tensors", "exact"),
        ("int4", "group:32", "lpconv", "pow2"), ("int8", "group:32", "compressed-tensors", "pow2"),
    )
]  # fmt: skip


_GGUF: list[Options] = [
    {"method": "unit", "format": f, "granularity": g, "layout": GGUF}
    for f, g in (("fp32", TENSOR), ("fp16", TENSOR), ("bf16", TENSOR), ("int8", "group:32"), ("int4", "group:32"),
                 ("e2m1", "mx"))
]  # fmt: skip


def _asked(options: Options) -> tuple[str | None, ...]:
    """What `options` come to, without those that scale or divide otherwise. Raises UsageError for what is refused."""
    o = fill_options(ConvertOptions(**options))
    return o.method, o.format, o.residual, o.granularity, o.layout


def _others(known: list[Options]) -> Iterator[Options]:
    """Every combination that is not refused and not among `known`."""
    seen = {_asked(options) for options in known}
    layouts = [n for n in LAYOUTS if n not in (GGUF, "mxfp4")]  # not for models like the demo's
    formats = [n for n in FORMATS if n not in ("int2", "int5", "int7")]  # other widths show what these would
    for method, layout, grain, fmt in itertools.product(METHODS, layouts, (TENSOR, *GRAINS, "group:32"), formats):
        for residual in METHODS[method].residuals or (None,):
            options = {"method": method, "format": fmt, "granularity": grain, "layout": layout, "residual": residual}
            with contextlib.suppress(UsageError):
                if (found := _asked(options)) not in seen:
                    seen.add(found)
                    yield {n: v for n, v in options.items() if v is not None}


def _gpt2(folder: Path) -> Path:
    """A tied GPT-2 with a head of its own name in the file, 2 layers."""
    width, vocabulary, positions = 32, 96, 64
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocabulary, width), "wpe.weight": (positions, width)}
    for layer in ("h.0", "h.1"):
        shapes |= {f"{layer}.{norm}.{part}": (width,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")}
        for name, rows, cols in (
            ("attn.c_attn", width, 3 * width), ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width), ("mlp.c_proj", 4 * width, width),
        ):  # fmt: skip
            shapes |= {f"{layer}.{name}.weight": (rows, cols), f"{layer}.{name}.bias": (cols,)}
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    tensors = {f"transformer.{n}": _numbers(shape, seed) for seed, (n, shape) in enumerate(shapes.items())}
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 2, "n_embd": width, "n_head": 2,
              "vocab_size": vocabulary, "n_positions": positions, "tie_word_embeddings": True}  # fmt: skip
    return write_checkpoint(folder, tensors, config=config)


def _numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers of many sizes by a linear congruence: the same on every machine."""
    count = int(torch.tensor(shape).prod())
    bits = ((torch.arange(count) + 7919 * seed) * 2654435761) % 2**32
    return ((bits.double() / 2**31 - 1) ** 3 / 8).float().view(shape)


def _demo(folder: Path) -> Path:
    return demo_checkpoint()


def _cases() -> Iterator[tuple[str, Callable[[Path], Path], Options]]:
    of_demo = [*_SCALED, *_PAIRS, *_POINTS, *_COMPRESSED, *_ROWS, *_TILES, *_ODD]
    cases: tuple[tuple[str, Callable[[Path], Path], list[Options]], ...] = (
        ("demo", _demo, [*of_demo, *_others(of_demo), *_CALIBRATED, *_RESCALED]),
        ("gpt2", _gpt2, [*_SCALED, *_PAIRS, *_GGUF, {"method": "multipoint", "format": "int8", "budget_bits": 12.0}]),
        ("minilm", lambda _: minilm(), _FEW),
        ("albert", lambda _: albert(), _FEW),
    )
    for model, opened, many in cases:
        for options in many:
            words = [str(v) if isinstance(v, str | int | float) else k for k, v in options.items()]
            yield " ".join([model, *words]), opened, options


CASES = {name: (opened, options) for name, opened, options in _cases()}


def _sums(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file that must not change, by name."""
    weights = (p for end in ("safetensors", "gguf") for p in sorted(folder.rglob(f"*.{end}")))
    paths = (*weights, *sorted(folder.rglob("*.index.json")), folder / "config.json")
    sums = {p.relative_to(folder).as_posix(): hashlib.sha256(_bytes_of(p)).hexdigest() for p in paths}
    index = folder / "collage/residual.json"
    if index.exists():
        document = json.loads(index.read_text())
        for entry in document["files"].values():
            assert entry["root_sha256"] == hashlib.sha256((folder / entry["root"]).read_bytes()).hexdigest()
            entry["root_sha256"] = sums[entry["root"]]
        sums["collage/residual.json"] = hashlib.sha256(json.dumps(document, indent=2).encode()).hexdigest()
    return sums


def _bytes_of(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        return data
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert header["__metadata__"].pop("lpconv")
    return json.dumps(header).encode() + data[8 + length :]


def _golden() -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = {}
    for line in GOLDEN.read_text().splitlines() if GOLDEN.exists() else ():
        digest, name = line.split("  ")
        case, _, file = name.partition(": ")
        table.setdefault(case, {})[file] = digest
    return table


# The RMS of a whole tensor is a dot product in fp32, whose last bit differs between processors.
BY_PROCESSOR = [c for c in CASES if c.split() == ["demo", "unit", "fp16", "tensor", "lpconv", "exact"]]


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_the_golden_ones(case: str, tmp_path: Path) -> None:
    opened, options = CASES[case]
    out = tmp_path / "out"
    asked = ConvertOptions(verify="none", allow_mixed_groups=True, **options)  # every part that the form can hold
    convert(str(opened(tmp_path / "source")), out, asked)
    found = _sums(out)
    if case in BY_PROCESSOR and found.keys() == _golden()[case].keys():
        return
    if WRITING:
        table = {**_golden(), case: found}
        lines = [f"{table[c][f]}  {c}: {f}\n" for c in CASES if c in table for f in sorted(table[c])]
        GOLDEN.write_text("".join(lines))
    assert found == _golden()[case]


def test_every_golden_line_has_its_case() -> None:
    assert _golden().keys() == CASES.keys()
