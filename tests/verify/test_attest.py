"""Statements of `lpconv attest`, and outputs that do not match them. The hashes to expect are those of hashlib."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.plan.files import write_sums
from lpconv.plan.options import ConvertOptions
from lpconv.storage.place import sha256_of
from tests.helpers.gguf_files import demo_with_merges


def _run(*words: str | Path) -> Any:
    return CliRunner().invoke(app, list(map(str, words)))


def _digest(path: Path) -> dict[str, str]:
    return {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def test_a_statement_has_all_hashes_and_shows_changed_missing_and_added_files(tmp_path: Path) -> None:
    for folder in ("out", "again"):  # the same conversion has the same statement
        convert("demo", tmp_path / folder, ConvertOptions(format="e4m3fn", verify="weights"))
        assert _run("attest", tmp_path / folder, "--against", "demo").exit_code == 0
    out, path = tmp_path / "out", tmp_path / "out.intoto.json"
    assert path.read_bytes() == (tmp_path / "again.intoto.json").read_bytes()
    document = json.loads(path.read_text())
    files = sorted(p for p in out.iterdir() if not p.name.startswith("report."))
    assert document["subject"] == [{"name": p.name, "digest": _digest(p)} for p in files]
    definition = document["predicate"]["buildDefinition"]
    assert definition["externalParameters"]["options"]["format"] == "e4m3fn"
    assert definition["resolvedDependencies"][0]["digest"] == _digest(demo_checkpoint() / "model.safetensors")
    assert _run("verify", out, "--attestation", path).exit_code == 0
    (out / "config.json").write_text((out / "config.json").read_text() + " ")
    (out / "tokenizer.json").unlink()
    (out / "notes.txt").touch()
    write_sums(out, ())  # so that only the statement shows it
    done = _run("verify", out, "--attestation", path, "--json")
    found = json.loads(done.stdout)["error"]["details"]["attestation"]["mismatched"]
    assert (done.exit_code, set(found)) == (5, {"SHA256SUMS", "config.json", "tokenizer.json", "notes.txt"})


@pytest.mark.parametrize(("name", "code"), [("config.json", 3), ("finetune.json", 4)])
def test_a_changed_or_trained_output_is_not_attested(tmp_path: Path, name: str, code: int) -> None:
    convert("demo", tmp_path / "out", ConvertOptions(verify="none"))
    (tmp_path / "out" / name).write_text("{}")
    assert _run("attest", tmp_path / "out").exit_code == code


FORMS: dict[str, dict[str, Any]] = {
    "gguf": {"layout": "gguf", "format": "int8", "granularity": "group:32"},
    "bits": {"budget_bits": 4.0},
    "shards": {"format": "e4m3fn", "max_shard_size": 500_000},
}


@pytest.mark.parametrize("form", FORMS)
def test_outputs_of_every_form_are_attested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Every file is read once, and a changed bit of the weights is noticed."""
    source, out, path = demo_with_merges(tmp_path / "source"), tmp_path / "out", tmp_path / "out.intoto.json"
    convert(str(source), out, ConvertOptions(**FORMS[form], verify="none"))
    assert _run("attest", out, "--against", source).exit_code == 0
    document = json.loads(path.read_text())
    files = sorted(p for p in out.iterdir() if not p.name.startswith("report."))
    assert document["subject"] == [{"name": p.name, "digest": _digest(p)} for p in files]
    weights = [p for p in files if p.suffix in (".safetensors", ".gguf")]
    assert len(weights) == (2 if form == "shards" else 1)
    read: list[Path] = []

    def hash_of(file: Path) -> str:
        read.append(file)
        return sha256_of(file)

    monkeypatch.setattr("lpconv.verify.run.sha256_of", hash_of)
    assert _run("verify", out, "--attestation", path).exit_code == 0
    assert sorted(read) == files
    data = bytearray(weights[0].read_bytes())
    data[-1] ^= 1
    weights[0].write_bytes(data)
    assert _run("verify", out, "--attestation", path).exit_code == 5
    assert _run("verify", out.with_name("absent"), "--attestation", path).exit_code == 3
