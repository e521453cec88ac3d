"""Outputs in an object store: the bytes of a local one, and nothing that looks like one before it is."""

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from obstore.store import LocalStore
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.convert.run import convert, finish
from lpconv.errors import (
    InputError,
    LpconvError,
    OutputExistsError,
    ResourceError,
    UnreadError,
    UnsupportedError,
    VerificationError,
)
from lpconv.plan.options import ConvertOptions
from lpconv.storage import remote
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.remote import UNFINISHED
from lpconv.storage.resolve import directory_of, resolve
from lpconv.verify.reader import read_output
from lpconv.verify.written import prepare_verification
from tests.helpers.checkpoints import REPORTS, files_of, write_checkpoint
from tests.helpers.object_store import ENVIRONMENT, Fault, Request, Store
from tests.helpers.stores import offered

URL = "s3://bucket/out"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(remote, "_RETRIES", remote._RETRIES | {"max_retries": 2})
    with offered(monkeypatch, tmp_path) as store:
        yield store


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three shards, the first of more blocks than there are buffers, with tensors that are kept."""
    torch.manual_seed(0)
    rows = {"a": 5000, "b": 300, "c": 300}
    shards = [{f"{n}.weight": torch.randn(rows[n], 400), f"{n}.bias": torch.randn(7)} for n in rows]
    return write_checkpoint(tmp_path / "source", shards)


def run(source: Path, **options: object) -> None:
    convert(str(source), URL, ConvertOptions(**{"format": "e4m3fn", "verify": "weights", "workers": 2, **options}))


def published(store: Store) -> dict[str, bytes]:
    """The files of the output in a store."""
    return {k.removeprefix("out/"): v for k, v in store.objects.items() if k.startswith("out/")}


def test_the_bytes_are_those_of_a_local_output(store: Store, source: Path, tmp_path: Path) -> None:
    run(source)
    convert(str(source), tmp_path / "local", ConvertOptions(format="e4m3fn", verify="weights"))
    ours, theirs = published(store), files_of(tmp_path / "local")
    assert {n: data for n, data in ours.items() if n not in REPORTS} == theirs
    assert json.loads(ours["report.json"])["output"] == URL
    assert not any(p.is_file() for p in (tmp_path / "cache").rglob("*"))


def test_what_makes_it_an_output_comes_last(store: Store, source: Path) -> None:
    run(source)
    written = [r.key.removeprefix("out/") for r in store.requests if r.method == "PUT"]
    assert written[0] == f"{UNFINISHED}run.json"
    assert written[-2:] == ["config.json", "lpconv.json"]
    weights = [n for n, name in enumerate(written) if name.endswith(".safetensors")]
    assert max(weights) < written.index("SHA256SUMS")


@pytest.mark.parametrize("moment", range(0, 30, 4))
def test_a_run_that_ends_anywhere_goes_on(store: Store, source: Path, tmp_path: Path, moment: int) -> None:
    left = [moment]

    def breaks(r: Request) -> Fault | None:
        left[0] -= r.method != "GET"
        return Fault(status=400) if left[0] < 0 else None

    store.fault = breaks
    with pytest.raises(LpconvError):
        run(source)
    is_there = "out/lpconv.json" in store.objects
    assert not is_there or moment > 20
    store.fault = lambda _: None
    if not is_there and any(k.startswith("out/") for k in store.objects):
        with pytest.raises(InputError, match=r"incomplete|config\.json"):
            resolve(URL)
    run(source, resume=True)
    sums = published(store)["SHA256SUMS"].decode().splitlines()
    directory = directory_of(URL)
    convert(str(source), tmp_path / "local", ConvertOptions(format="e4m3fn", verify="weights"))
    assert sums == (tmp_path / "local" / "SHA256SUMS").read_text().splitlines()
    assert (directory / "lpconv.json").read_bytes() == (tmp_path / "local" / "lpconv.json").read_bytes()
    assert not any(UNFINISHED in k for k in store.objects)


def test_shards_that_are_there_are_not_written_again(store: Store, source: Path, tmp_path: Path) -> None:
    store.fault = lambda r: Fault(status=400) if "-00003-of" in r.key and r.method == "PUT" else None
    with pytest.raises(ResourceError, match="-00003-of"):
        run(source)
    store.fault = lambda _: None
    store.requests.clear()
    os.rename(tmp_path / "cache", tmp_path / "of-another-machine")
    run(source, resume=True)
    written = {r.key for r in store.requests if r.method == "PUT" and r.key.endswith(".safetensors")}
    assert written == {"out/model-00003-of-00003.safetensors"}


def test_a_shard_that_was_replaced_is_written_again(store: Store, source: Path) -> None:
    store.fault = lambda r: Fault(status=400) if "-00003-of" in r.key and r.method == "PUT" else None
    with pytest.raises(ResourceError):
        run(source)
    store.fault = lambda _: None
    whole = store.objects["out/model-00001-of-00003.safetensors"]
    store.objects["out/model-00001-of-00003.safetensors"] = whole[:-1] + bytes([whole[-1] ^ 1])
    run(source, resume=True)
    assert store.objects["out/model-00001-of-00003.safetensors"] == whole


def test_what_is_there_is_refused(store: Store, source: Path) -> None:
    run(source)
    with pytest.raises(OutputExistsError, match="exists"):
        run(source)
    with pytest.raises(OutputExistsError, match="options"):
        run(source, resume=True, format="e5m2")
    before = published(store)
    run(source, resume=True)
    assert published(store) == before
    run(source, force=True, format="e5m2")
    assert json.loads(published(store)["lpconv.json"])["format"] == "e5m2"


def test_what_others_keep_there_is_not_deleted(store: Store, source: Path) -> None:
    store.objects["out/thesis.tex"] = b"years of work"
    with pytest.raises(OutputExistsError, match="s3://bucket/out"):
        run(source, force=True)
    assert published(store) == {"thesis.tex": b"years of work"}


@pytest.mark.parametrize("name", ["notes.txt", "fp8/lpconv.json", "fp8/model.safetensors"])
@pytest.mark.parametrize("is_finished", [True, False])
def test_files_of_others_in_an_output_are_not_deleted(store: Store, source: Path, name: str, is_finished: bool) -> None:
    if not is_finished:
        store.fault = lambda r: Fault(status=400) if r.method == "PUT" and r.key == "out/report.json" else None
    with nullcontext() if is_finished else pytest.raises(ResourceError):
        run(source)
    store.fault = lambda _: None
    store.objects[f"out/{name}"] = b"years of work"
    before = published(store)
    with pytest.raises(OutputExistsError, match=name):
        run(source, force=True, format="e5m2")
    assert published(store) == before
    del store.objects[f"out/{name}"]
    run(source, force=True, format="e5m2")
    assert json.loads(published(store)["lpconv.json"])["format"] == "e5m2"


@pytest.mark.parametrize("moment", range(0, 14, 3))
def test_a_killed_deletion_is_finished_with_force(store: Store, source: Path, moment: int) -> None:
    run(source)
    left = [moment]

    def breaks(r: Request) -> Fault | None:
        left[0] -= r.query == "delete"
        return Fault(status=400) if left[0] < 0 else None

    store.fault = breaks
    with pytest.raises(LpconvError):
        run(source, force=True, format="e5m2")
    store.fault = lambda _: None
    run(source, force=True, format="e5m2")
    assert json.loads(published(store)["lpconv.json"])["format"] == "e5m2"


@pytest.mark.parametrize("address", ["s3://bucket/out", "s3://bucket//out/", "{0}/bucket/out"])
def test_an_output_does_not_replace_its_own_source(store: Store, source: Path, address: str) -> None:
    run(source)
    before = published(store)
    for force in (False, True):
        with pytest.raises(OutputExistsError):
            convert(address.format(store.endpoint), URL, ConvertOptions(format="e5m2", verify="none", force=force))
        assert published(store) == before


def test_an_output_inside_its_source_is_refused(store: Store, source: Path) -> None:
    run(source)
    before = published(store)
    with pytest.raises(LpconvError, match="inside"):
        convert(URL, f"{URL}/fp16", ConvertOptions(format="fp16", verify="none"))
    assert published(store) == before


def test_a_folder_made_in_a_console_is_free(store: Store, source: Path) -> None:
    store.objects["out/"] = b""
    run(source)
    assert "out/lpconv.json" in store.objects


def test_a_run_of_another_command_is_not_resumed(store: Store, source: Path) -> None:
    store.fault = lambda r: Fault(status=400) if "-00003-of" in r.key and r.method == "PUT" else None
    with pytest.raises(ResourceError):
        run(source)
    store.fault = lambda _: None
    with pytest.raises(OutputExistsError, match="interrupted"):
        run(source)
    with pytest.raises(OutputExistsError, match=r"started .*options"):
        run(source, resume=True, format="e5m2")


def test_of_two_writers_one_loses(store: Store, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both take over the claim, as two machines that resume would; the manifest decides."""
    other: list[bytes] = []

    def published_meanwhile(r: Request) -> Fault | None:
        if r.method == "PUT" and r.key == "out/config.json" and not other:
            other.append(b"{}")
            threading.Thread(target=store.objects.__setitem__, args=("out/lpconv.json", b"{}")).start()
        return None

    store.fault = published_meanwhile
    with pytest.raises(OutputExistsError, match="finished"):
        run(source)
    assert store.objects["out/lpconv.json"] == b"{}"
    assert not any(UNFINISHED in name for name in store.objects)  # records that it wrote after the other tidied up


_RECORD = f"out/{UNFINISHED}model-00001-of-00003.safetensors.json"


@pytest.mark.parametrize("moment", [_RECORD, "out/README.md", "out/report.json"])
def test_who_loses_writes_nothing_more(store: Store, source: Path, moment: str) -> None:
    """The other one publishes when this one has written a file of weights, or is at its first small file, or report."""
    run(source)
    winner = {name: b"of the winner: " + name.encode() for name in published(store)}
    store.objects.clear()

    def published_meanwhile(r: Request) -> Fault | None:
        if r.method in ("PUT", "POST") and r.key == moment and "out/lpconv.json" not in store.objects:
            store.objects.update({f"out/{name}": data for name, data in winner.items()})
        return None

    store.fault = published_meanwhile
    with pytest.raises(OutputExistsError, match="finished"):
        run(source)
    assert published(store) == winner


def test_who_is_replaced_writes_nothing_more(store: Store, source: Path) -> None:
    """Another run with --force begins while this one writes."""
    forced = {f"out/{UNFINISHED}run.json": b"{}"}

    def forced_meanwhile(r: Request) -> Fault | None:
        if r.key == _RECORD and r.method == "PUT":
            store.objects.clear()
            store.objects.update(forced)
        return None

    store.fault = forced_meanwhile
    with pytest.raises(OutputExistsError, match="started"):
        run(source)
    assert store.objects.keys() == {*forced, _RECORD}


def test_what_another_writer_deleted_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 says nothing of an object that is not there; other stores do, as a folder does."""
    (tmp_path / "b").touch()
    monkeypatch.setattr(remote, "store_at", lambda _: LocalStore(tmp_path))
    remote.delete("s3://bucket", ["a", "b"])
    assert not (tmp_path / "b").exists()


def test_two_new_writers(store: Store, source: Path) -> None:
    """The one that comes second meets the claim of the first."""
    store.objects[f"out/{UNFINISHED}run.json"] = b"{}"
    with pytest.raises(OutputExistsError, match="another"):
        run(source)


def test_a_network_that_fails_judges_nothing(store: Store, source: Path, tmp_path: Path) -> None:
    """The verification reads back what was written, and cannot: the work goes on with --resume."""
    is_written: list[str] = []

    def fails_reading_back(r: Request) -> Fault | None:
        is_written.extend(["yes"] if r.key == "out/model-00003-of-00003.safetensors" and r.method == "HEAD" else [])
        return Fault(status=503) if is_written and r.method == "GET" and r.key.endswith(".safetensors") else None

    store.fault = fails_reading_back
    with pytest.raises(UnreadError, match="503"):
        run(source)
    store.fault = lambda _: None
    run(source, resume=True)
    convert(str(source), tmp_path / "local", ConvertOptions(format="e4m3fn", verify="weights"))
    assert published(store)["SHA256SUMS"] == (tmp_path / "local" / "SHA256SUMS").read_bytes()


def test_a_gate_that_fails_publishes_nothing(store: Store, source: Path) -> None:
    with pytest.raises(VerificationError) as caught:
        run(source, gates=("sqnr>=90",))
    assert URL in (caught.value.hint or "")
    assert "out/lpconv.json" not in store.objects
    assert "out/config.json" not in store.objects


def test_collage_and_its_residual(store: Store, source: Path, tmp_path: Path) -> None:
    options = ConvertOptions(method="collage", residual="exact16", verify="weights")
    convert(str(source), URL, options)
    convert(str(source), tmp_path / "local", options)
    assert published(store)["SHA256SUMS"] == (tmp_path / "local" / "SHA256SUMS").read_bytes()


def test_secrets_are_written_nowhere(store: Store, source: Path) -> None:
    run(source)
    assert not any(ENVIRONMENT["AWS_SECRET_ACCESS_KEY"].encode() in v for v in store.objects.values())


@pytest.mark.parametrize("url", ["hf://owner/name", "https://server/folder"])
def test_places_that_are_not_written(store: Store, source: Path, url: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(url)):
        convert(str(source), url, ConvertOptions())


def test_parts_are_put_together_in_folders(store: Store, source: Path) -> None:
    with pytest.raises(UnsupportedError, match="parts"):
        finish(str(source), URL, ConvertOptions())
    assert not store.objects


def test_its_report_is_shown(store: Store, source: Path) -> None:
    run(source)
    said = CliRunner().invoke(app, ["report", URL, "--json"])
    assert said.exit_code == 0, said.stderr
    assert [r["output"] for r in json.loads(said.stdout)["runs"]] == [URL]
    del store.objects["out/report.json"]
    assert CliRunner().invoke(app, ["report", URL]).exit_code == 3


def test_verifying_counts_what_it_reads_of_a_store(store: Store, source: Path, tmp_path: Path) -> None:
    """The source lies here, so that it is the output that takes the window."""
    run(source)
    convert(str(source), tmp_path / "local", ConvertOptions(format="e4m3fn", verify="none"))
    needed = {}
    for output in (tmp_path / "local", resolve(URL).directory):
        job = prepare_verification(
            read_output(output), Checkpoint.open(source), verify="weights", trust_remote_code=False
        )
        job.source.close()
        needed[output] = job.memory.needed_bytes
    here, there = needed.values()
    assert remote.WINDOW_BYTES <= there - here < 2 * remote.WINDOW_BYTES
