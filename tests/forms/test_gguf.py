"""GGUF files as sources: the values that transformers gives them, through every command; and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

import lpconv
from lpconv.cli.main import app
from lpconv.convert.run import convert
from lpconv.errors import LpconvError
from lpconv.layouts.reader import StoredTensors
from lpconv.plan.options import ConvertOptions
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.resolve import resolve

pytest.importorskip("gguf", reason="needs the package gguf (`lpconv[gguf]`)")
from tests.helpers.gguf_files import TYPES, write_gguf  # which needs it

runner = CliRunner()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2"])
def test_values_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    """llama's rows of q and k are put back into order, gemma's norms lose a one, qwen2 is as it lies."""
    types = TYPES if architecture == "llama" else TYPES | {"ffn_up": "BF16"}
    tied: dict[str, Any] = {"output": None} if architecture == "gemma2" else {}
    file = write_gguf(tmp_path / "file", architecture, types, **tied)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ours = lpconv.load(file, dtype=torch.float32)
    a, b = wanted.state_dict(), ours.state_dict()
    assert a.keys() == b.keys()
    assert [n for n in a if not torch.equal(a[n].view(torch.int32), b[n].view(torch.int32))] == []


def test_rows_are_decoded_as_they_are_asked_for(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "file")
    with StoredTensors.open(file) as stored:
        for name in stored.forms:
            whole = stored.tensor(name).reshape(-1)
            first, last = len(whole) // 3, len(whole) // 2
            assert torch.equal(stored.values(name, first, last), whole[first:last]), name


def test_every_command_takes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_gguf(tmp_path / "file")

    def run(*arguments: str) -> str:
        done = runner.invoke(app, list(arguments))
        assert done.exit_code == 0, done.stderr
        return done.stdout

    assert "Q4_K of GGUF" in run("inspect", str(file), "--strict", "--stats", "--all")
    run("convert", str(file.parent), "--method", "unit", "--format", "fp32", "-o", "out", "-q")
    run("verify", "out", "--against", str(file), "--level", "weights")
    run("verify", str(file), "--against", "out")
    alone = runner.invoke(app, ["verify", str(file)])
    assert (alone.exit_code, "--against" in alone.stderr) == (4, True)
    run("restore", str(file), "-o", "plain")
    values = load_file("plain/model.safetensors")
    loaded = lpconv.load("out", dtype=torch.float32).state_dict()
    assert all(torch.equal(x, loaded[n]) for n, x in values.items())


def test_blocks_stay_in_memory(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "file")
    ids = torch.arange(6).view(1, 6)
    decoded, resident = lpconv.load(file, dtype=torch.float32), lpconv.load(file, resident=True)
    with torch.inference_mode():
        wanted, got = decoded(ids).logits, resident(ids).logits
    assert (wanted - got).abs().max() <= 1e-4 * wanted.abs().max()
    resident.save_pretrained(tmp_path / "again")  # the blocks, in safetensors
    again = lpconv.load(tmp_path / "again", resident=True)
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, got)


def test_a_view_is_made_once_and_for_each_file(tmp_path: Path, cache: Path) -> None:
    first = Checkpoint.open(write_gguf(tmp_path / "a")).directory
    assert Checkpoint.open(tmp_path / "a" / "model.gguf").directory == first
    assert Checkpoint.open(write_gguf(tmp_path / "b")).directory != first
    assert len(list((cache / "lpconv" / "gguf").iterdir())) == 2


def cut(file: Path, size: int) -> Path:
    file.write_bytes(file.read_bytes()[:size])
    return file


@pytest.mark.parametrize(
    ("make", "code", "said"),
    [
        (lambda f: write_gguf(f, "llama", TYPES | {"output": "F64"}), 4, "F64"),
        (lambda f: write_gguf(f, "nosuch"), 4, "nosuch"),
        (lambda f: write_gguf(f, attn_v=None), 4, "self_attn.v_proj"),
        (lambda f: write_gguf(f, attn_v=32), 3, "shape"),
        (lambda f: cut(write_gguf(f), 20), 3, "GGUF file: "),
        (lambda f: cut(write_gguf(f), 100_000), 3, "GGUF file: "),
        (lambda f: cut(write_gguf(f), 0), 3, "GGUF file: "),
    ],
    ids=["type", "architecture", "missing", "shape", "header", "data", "empty"],
)
def test_what_is_refused(tmp_path: Path, make: Callable[[Path], Path], code: int, said: str) -> None:
    file = make(tmp_path / "file")
    with pytest.raises(LpconvError, match=said) as caught:
        Checkpoint.open(file)
    assert caught.value.exit_code == code
    assert caught.value.hint
    with pytest.raises(LpconvError):
        resolve(str(file))


TABLES: dict[str, Any] = {
    "list": [], "number": 3, "null": None, "entry of nothing": {"a": {}}, "entry of text": {"a": "x"},
    "type": {"type": "Q9"}, "type of types": {"type": ["F16"]}, "shape of text": {"shape": "x"},
    "shape": {"shape": [10**9, 10**9]}, "both shapes": {"shape": [10**9, 10**9], "stored": [10**9, 10**9]},
    "far": {"end": 4 * 10**18}, "all of it far": {"stored": [10**9, 10**9], "shape": [10**9, 10**9], "end": 10**18},
    "begin": {"begin": -5}, "negative": {"shape": [-64, -256], "stored": [-64, -256]}, "real": {"begin": 0.5},
    "true": {"shape": [True, True]}, "columns": {"stored": [256, 64]}, "no sizes": {"shape": [], "stored": []},
    "deep": {"shape": [1] * 60000 + [64, 256]}, "order": {"order": "rotary:0"}, "heads": {"order": "rotary:3"},
    "orders": {"order": ["transposed"]}, "transposed": {"order": "transposed"}, "other": {"order": "reversed"},
    "processed": {"processed": True}, "process": {"processed": "x"}, "name": {"name": 5},
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in layout gguf."""
    folder = tmp_path_factory.mktemp("layout")
    lpconv.load(write_gguf(folder / "file"), dtype=torch.float32).save_pretrained(folder / "plain")
    convert(
        str(folder / "plain"), folder / "written",
        ConvertOptions(layout="gguf", format="int8", granularity="group:32", verify="weights"),
    )  # fmt: skip
    return folder / "written"


@pytest.mark.parametrize("table", TABLES)
def test_broken_tables_in_config_json_end_in_errors(
    table: str, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(written, "written")
    path = tmp_path / "written/config.json"
    config = json.loads(path.read_text())
    tensors, wrong = config["quantization_config"]["tensors"], TABLES[table]
    if isinstance(wrong, dict) and "a" not in wrong:
        first = next(n for n, t in tensors.items() if t["stored"] == [64, 256])
        wrong = {**tensors, first: tensors[first] | wrong}
    config["quantization_config"]["tensors"] = wrong
    path.write_text(json.dumps(config))
    against = ["verify", "--against", str(written.with_name("plain"))]
    for more in (["inspect"], ["convert", "-o", "out"], ["restore", "-o", "back"], against):
        done = runner.invoke(app, [more[0], "written", *more[1:]])
        reads_values = more[0] != "inspect"
        assert done.exit_code in ((3, 4, 5) if reads_values or table != "processed" else (0,)), (more, done.exception)
        assert "`" in done.stderr or done.exit_code == 0
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "back").exists()


def test_what_transformers_decoded_and_saved_is_plain(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "file")
    decoded = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    plain = type(decoded)(decoded.config)
    plain.load_state_dict(decoded.state_dict())
    plain.save_pretrained(tmp_path / "saved")
    assert "gguf" in (tmp_path / "saved" / "config.json").read_text()

    convert(str(tmp_path / "saved"), tmp_path / "out", ConvertOptions(method="unit", format="e4m3fn", verify="weights"))

    assert '"gguf"' not in (tmp_path / "out" / "config.json").read_text()
    assert torch.equal(lpconv.load(tmp_path / "saved").lm_head.weight, decoded.lm_head.weight)
