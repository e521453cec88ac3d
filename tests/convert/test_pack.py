"""`convert --pack` and `restore`: whole folders, what reads them, refusals, and runs that end early."""

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import lpconv
from lpconv.convert.pack import pack
from lpconv.convert.restore import restore
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.errors import InputError, LpconvError, OutputExistsError, UnsupportedError, UsageError
from lpconv.plan.options import ConvertOptions
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify
from tests.helpers.checkpoints import cli_environment, files_of, run_cli, write_checkpoint

packing = importlib.import_module("lpconv.convert.pack")  # whose function hides it
OPTIONS = ConvertOptions()
MADE = {"packed.json", "SHA256SUMS"}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "packed"
    pack("demo", folder, OPTIONS)
    return folder


def packed_and_restored(source: Path, folder: Path) -> dict[str, bytes]:
    pack(str(source), folder / "packed", OPTIONS)
    restore(folder / "packed", folder / "again")
    return files_of(folder / "again", without=set())


def test_all_files_come_back(tmp_path: Path) -> None:
    shards = [{"a.weight": torch.randn(64, 64, dtype=torch.bfloat16)}, {"b": torch.ones(3, 5)}]
    source = write_checkpoint(tmp_path / "source", shards)
    (source / "tokenizer.json").write_text("[]")
    (source / "more").mkdir()
    (source / "more" / "notes.txt").write_text("x")
    before, after = files_of(source), packed_and_restored(source, tmp_path)
    assert {n: b for n, b in after.items() if n not in MADE} == before
    assert files_of(tmp_path / "packed").keys() == before.keys() | MADE
    command = ["sha256sum", "-c", "--quiet", "SHA256SUMS"]
    assert all(subprocess.run(command, cwd=tmp_path / n, check=False).returncode == 0 for n in ("packed", "again"))
    restore(tmp_path / "packed", tmp_path / "again", force=True)
    pack(str(source), tmp_path / "packed", ConvertOptions(force=True))


@pytest.mark.parametrize("options", [{"method": "collage", "residual": "exact16"}, {"format": "e4m3fn"}])
def test_an_output_of_lpconv_stays_one(tmp_path: Path, options: dict[str, Any]) -> None:
    source = write_checkpoint(tmp_path / "source", {"a.weight": torch.randn(64, 64)})
    convert(str(source), tmp_path / "converted", ConvertOptions(verify="weights", **options))
    assert packed_and_restored(tmp_path / "converted", tmp_path) == files_of(tmp_path / "converted", without=set())
    assert verify(tmp_path / "packed", VerifyOptions(against=str(source), level="weights")).passed


def test_models_are_those_of_the_source(packed: Path) -> None:
    ours, theirs = lpconv.load(packed), transformers.AutoModelForCausalLM.from_pretrained(demo_checkpoint())
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
    with pytest.raises(Exception, match="lpconv restore"):
        transformers.AutoModelForCausalLM.from_pretrained(packed)


def test_other_commands_read_the_source(packed: Path, tmp_path: Path) -> None:
    assert verify(packed, VerifyOptions(against="demo")).passed
    assert [t.shape for t in lpconv.inspect(packed).tensors] == [t.shape for t in lpconv.inspect("demo").tensors]
    for name, source in {"a": "demo", "b": str(packed)}.items():
        convert(source, tmp_path / name, ConvertOptions(format="e4m3fn", verify="none"))
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in "ab"]
    assert weights[0] == weights[1]
    assert "packed.json" not in os.listdir(tmp_path / "b")


@pytest.mark.parametrize("threads", [1, 3])
def test_bytes_are_equal_with_any_number_of_threads(
    packed: Path, tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "usable_cores", lambda: set(range(threads)))
    pack("demo", tmp_path / "again", OPTIONS)
    assert files_of(tmp_path / "again") == files_of(packed)


def test_a_report_names_the_folder_that_others_open(tmp_path: Path) -> None:
    convert("demo", tmp_path / "fp8", ConvertOptions(scheme="FP8_DYNAMIC", verify="none"))
    pack(str(tmp_path / "fp8"), tmp_path / "packed", OPTIONS)
    shown = run_cli("report", str(tmp_path / "packed")).stdout.replace("\n", "")
    assert str(tmp_path / "fp8") in shown
    assert str(tmp_path / "packed") not in shown


def test_a_dry_run_estimates_the_size(packed: Path, tmp_path: Path) -> None:
    estimate = pack("demo", tmp_path / "none", OPTIONS, dry_run=True).bytes.written
    assert estimate == pytest.approx((packed / "model.safetensors").stat().st_size, rel=0.1)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options", [{"format": "fp16"}, {"scheme": "W4A16"}, {"resume": True}, {"rounding": "gptq"}, {"exclude": ("x",)}]
)
def test_options_of_other_conversions_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        pack("demo", tmp_path / "out", ConvertOptions(**options))


def test_a_packed_source_has_no_record_to_verify_but_hashes(packed: Path) -> None:
    with pytest.raises(UnsupportedError) as refused:
        verify(packed, VerifyOptions())
    assert "sha256sum" in str(refused.value.hint)


def test_packed_and_pickled_sources_are_refused(packed: Path, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    for source, code in ((packed, 2), (tmp_path, 4)):
        with pytest.raises(LpconvError) as caught:
            pack(str(source), tmp_path.parent / "out", OPTIONS)
        assert (caught.value.exit_code, bool(caught.value.hint)) == (code, True)


def test_an_output_with_other_files_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    for force in (False, True):
        with pytest.raises(OutputExistsError):
            pack("demo", tmp_path / "out", ConvertOptions(force=force))


def test_a_change_of_the_source_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, real = write_checkpoint(tmp_path / "source"), packing.write_sums

    def changing(*args: Any) -> None:
        (source / "config.json").write_text('{"x": 1}')
        real(*args)

    monkeypatch.setattr(packing, "write_sums", changing)
    with pytest.raises(InputError):
        pack(str(source), tmp_path / "out", OPTIONS)
    assert os.listdir(tmp_path) == ["source"]


def test_damage_is_found_before_anything_is_restored(tmp_path: Path) -> None:
    pack(str(write_checkpoint(tmp_path / "source")), tmp_path / "packed", OPTIONS)
    path = tmp_path / "packed" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[200] ^= 4
    path.write_bytes(data)
    with pytest.raises(InputError):
        restore(tmp_path / "packed", tmp_path / "again")
    assert not (tmp_path / "again").exists()


_DIES = """
import importlib, os, signal, sys
packing = importlib.import_module("lpconv.convert.pack")
packing.write_sums = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
packing.pack("demo", sys.argv[1], packing.ConvertOptions())
"""


def test_a_killed_run_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _DIES, str(tmp_path / "out")]
    assert subprocess.run(command, env=cli_environment(), check=False).returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["out.partial"]
    with pytest.raises(OutputExistsError):
        pack("demo", tmp_path / "out", OPTIONS)
    pack("demo", tmp_path / "out", ConvertOptions(force=True))
    assert os.listdir(tmp_path) == ["out"]


def test_files_that_are_left_out_are_named(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", [{"a.weight": torch.ones(4, 4)}])
    for name in (".env", "optimizer.pt", "notes.txt"):
        (source / name).write_text("x")
    done = run_cli("convert", str(source), "--pack", "-o", str(tmp_path / "packed"))
    kept = {n: n in done.stderr for n in (".env", "optimizer.pt", "notes.txt")}
    assert kept == {".env": True, "optimizer.pt": True, "notes.txt": False}
    assert {p.name for p in source.iterdir()} - {p.name for p in (tmp_path / "packed").iterdir()} == {
        ".env",
        "optimizer.pt",
    }


def test_the_command_prints_a_result(tmp_path: Path) -> None:
    done = run_cli("convert", "demo", "--pack", "-o", tmp_path / "out", "--json", "--quiet")
    result = json.loads(done.stdout)
    assert (done.returncode, result["kind"], result["bytes"]["read"] > result["bytes"]["written"]) == (0, "pack", True)
    assert run_cli("convert", "demo", "--pack", "--shard", "1/2").returncode == 2
