"""A layout is recognised by what its config means: more keys, another order or version change nothing that is read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lpconv.convert.run import convert
from lpconv.forms.facts import ConvertedFacts
from lpconv.forms.planes import PlaneNames
from lpconv.inspect.headers import inspect
from lpconv.layouts import LAYOUTS, READ, Layout
from lpconv.layouts.reader import StoredTensors
from lpconv.layouts.transformers_fp8 import FineGrained
from lpconv.plan.options import ConvertOptions, FormatRule
from lpconv.storage.staging import MARKER

Config = dict[str, Any]

WRITTEN: dict[str, dict[str, Any]] = {
    "lpconv": {"format": "e4m3fn"},
    "lpconv rows": {"format": "e4m3fn", "granularity": "row"},
    "lpconv groups": {"format": "int4", "granularity": "group:32"},
    "multipoint": {"method": "multipoint", "format": "int4"},
    "ct FP8": {"format": "e4m3fn", "layout": "compressed-tensors"},
    "ct FP8_DYNAMIC": {"format": "e4m3fn", "granularity": "row", "layout": "compressed-tensors"},
    "ct FP8_BLOCK": {"format": "e4m3fn", "granularity": "128x128", "layout": "compressed-tensors"},
    "ct MXFP8": {"format": "e4m3fn", "granularity": "mx", "layout": "compressed-tensors"},
    "ct NVFP4A16": {"format": "e2m1", "granularity": "nvfp4", "layout": "compressed-tensors"},
    "ct NVFP4": {"format": "e2m1", "granularity": "nvfp4", "layout": "compressed-tensors", "calibrate": "demo"},
    "ct W4A16": {"format": "int4", "granularity": "group:32", "layout": "compressed-tensors"},
    "ct W4A16 and W8A16": {
        "format": "int4", "granularity": "group:32", "layout": "compressed-tensors", "kv_cache": "fp8",
        "rules": (FormatRule(pattern="*down_proj*", format="int8"),),
    },
    "fp8": {"format": "e4m3fn", "granularity": "128x128", "layout": "transformers"},
    "mxfp8": {"format": "e4m3fn", "granularity": "mx", "layout": "transformers"},
    "mlx": {"format": "int4", "granularity": "group:32", "layout": "mlx"},
}  # fmt: skip


def _with_more(config: Config) -> Config:
    """Keys that other versions write, in every group as well."""
    groups = {n: {**g, "format": g.get("format"), "note": 1} for n, g in config.get("config_groups", {}).items()}
    return {**config, "version": "99.0", "note": {"a": [1]}} | ({"config_groups": groups} if groups else {})


def _reversed(config: Config) -> Config:
    """The same settings in another order."""
    return {k: _reversed(v) if isinstance(v, dict) else v for k, v in reversed(config.items())}


def _as_dumped(config: Config) -> Config:
    """The settings of weights as compressed-tensors itself writes them out: every field, most of them null."""
    groups = {
        n: {**g, "weights": {"actorder": None, "block_structure": None, "observer": "mse", **g["weights"]}}
        for n, g in config.get("config_groups", {}).items()
    }
    return {**config, **({"config_groups": groups} if groups else {})}


CHANGES: dict[str, Callable[[Config], Config]] = {"more": _with_more, "order": _reversed, "dumped": _as_dumped}


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], object]:
    with StoredTensors.open(folder) as stored:
        forms = {n: (type(f).__name__, f.components) for n, f in stored.forms.items()}
        values = {n: stored.tensor(n) for n in stored.forms}
    record = inspect(folder)
    return forms, values, (record.tensors, record.problems, record.warnings, record.not_judged)


@pytest.mark.parametrize("layout", WRITTEN)
def test_what_a_config_means_decides_and_not_its_words(layout: str, tmp_path: Path) -> None:
    convert("demo", tmp_path / "out", ConvertOptions(verify="none", **WRITTEN[layout]))
    forms, values, found = _read(tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    for name, change in CHANGES.items():
        folder = tmp_path / name
        shutil.copytree(tmp_path / "out", folder)
        changed = {**config, "quantization_config": change(config["quantization_config"])}
        (folder / "config.json").write_text(json.dumps(changed))
        now = _read(folder)
        assert (now[0], now[2]) == (forms, found), name
        assert all(torch.equal(now[1][n], x) for n, x in values.items()), name
    (tmp_path / "out" / MARKER).unlink()  # nor does it matter who wrote it
    assert _read(tmp_path / "out")[0] == forms


class _Toy(FineGrained):
    """Tiles in blocks whose scales have another name."""

    kind = "toy"
    names = PlaneNames(scale="_toy")
    suffixes = names.suffixes
    quantised_by = "toy"

    @classmethod
    def config_entries(cls, converted: ConvertedFacts) -> Config:
        return {"quantization_config": {"quant_method": "toy", "weight_block_size": [128, 128]}}


def test_a_layout_is_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/adding.md: a file with a record, and a line in `LAYOUTS`; it is then read, and its card says what it is."""
    toy = Layout(name="toy", methods=("toy",), read=_Toy.recognise, form=_Toy, opening="A toy: {codes}.", tag="toys")
    monkeypatch.setitem(LAYOUTS, "toy", toy)
    monkeypatch.setitem(READ, "toy", toy)
    monkeypatch.setattr("lpconv.plan.settings.check", lambda options: None)  # choices are read on import

    asked = ConvertOptions(format="e4m3fn", granularity="128x128", layout="toy")
    convert("demo", tmp_path / "out", asked)
    with StoredTensors.open(tmp_path / "out") as stored:
        coded = [n for n, form in stored.forms.items() if not form.is_kept]
        assert coded
        assert all(f"{n}_toy" in stored.entries for n in coded)
    card = (tmp_path / "out/README.md").read_text()
    assert "A toy: e4m3fn codes" in card
    assert "- toys" in card
