"""Checkpoints at a URL, from stores on the loopback: the bytes of a local one, whatever the network does."""

import dataclasses
import importlib.util
import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors import SafetensorError, safe_open
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.convert.run import convert, plan
from lpconv.data import demo_checkpoint
from lpconv.errors import InputError, LpconvError, UnreadError, UnsupportedError, UsageError
from lpconv.inspect.headers import inspect
from lpconv.models.load import load
from lpconv.plan.memory import _CLIENT_BYTES
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.results import VerifyResult
from lpconv.storage import remote, remote_view
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.partfile import check_writable
from lpconv.storage.resolve import directory_of, resolve
from lpconv.storage.source import open_source, read_tensor
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify_output
from tests.helpers.checkpoints import files_of, published, run_cli, write_checkpoint
from tests.helpers.hub_server import COMMIT, serving as serving_hub
from tests.helpers.object_store import BUCKET, ENVIRONMENT, Fault, Request, Store
from tests.helpers.stores import offered


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty store, with short waits before a request is repeated, and an empty cache."""
    monkeypatch.setattr(remote, "_RETRIES", remote._RETRIES | {"max_retries": 3})
    with offered(monkeypatch, tmp_path) as store:
        yield store


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of two shards, each of a few pieces."""
    torch.manual_seed(0)
    shards = [{f"{n}.weight": torch.randn(1000, 1500), f"{n}.bias": torch.randn(7)} for n in "ab"]
    folder = write_checkpoint(tmp_path / "source", shards)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "a file.json").write_text("{}")
    return folder


def converted(model: str, output: Path) -> dict[str, bytes]:
    """The summed files of a conversion."""
    convert(model, output, ConvertOptions(format="e4m3fn", verify="weights", workers=2))
    return {line[66:]: (output / line[66:]).read_bytes() for line in (output / "SHA256SUMS").read_text().splitlines()}


def verified(directory: Path, level: str, *, against: str | None = None) -> VerifyResult:
    return verify_output(directory, VerifyOptions(against=against, level=level), progress=Silent())


def weights(directory: Path) -> dict[str, torch.Tensor]:
    source = open_source(Checkpoint.open(directory))
    try:
        return {name: read_tensor(source, name) for name in source.entries}
    finally:
        source.close()


class TestReading:
    @pytest.mark.parametrize("scheme", ["s3", "http"])
    def test_gives_the_bytes_of_a_local_conversion(
        self, store: Store, source: Path, tmp_path: Path, scheme: str
    ) -> None:
        url = store.put_folder("some/source", source)
        if scheme == "http":
            url = f"{store.endpoint}/{BUCKET}/some/source"
            (source / "tokenizer" / "a file.json").unlink()  # which no server without a listing tells of
        assert converted(url, tmp_path / "ours") == converted(str(source), tmp_path / "theirs")

    def test_looks_at_headers_only(self, store: Store, source: Path) -> None:
        found = inspect(directory_of(store.put_folder("m", source)))
        assert [t.shape for t in found.tensors] == [t.shape for t in inspect(source).tensors]
        assert found.shards == inspect(source).shards
        assert store.read(suffix=".safetensors") < 1000

    def test_reads_weights_once_for_one_pass(self, store: Store, source: Path) -> None:
        directory = directory_of(store.put_folder("m", source))
        assert all(torch.equal(x, weights(source)[n]) for n, x in weights(directory).items())
        size = sum(p.stat().st_size for p in source.glob("*.safetensors"))
        assert size < store.read(suffix=".safetensors") < size + 2000

    def test_weights_of_a_module_after_the_model_are_copied(self, store: Store, source: Path) -> None:
        (source / "2_Dense").mkdir()
        (source / "2_Dense/model.safetensors").write_bytes(bytes(2**17))
        (source / "modules.json").write_text('[{"path": "2_Dense"}]')
        directory = directory_of(store.put_folder("m", source))
        assert Checkpoint.open(directory).side_files == Checkpoint.open(source).side_files
        assert (directory / "2_Dense/model.safetensors").read_bytes() == bytes(2**17)

    def test_a_model_opens(self, store: Store) -> None:
        url = store.put_folder("m", demo_checkpoint())
        here, there = load(demo_checkpoint()).state_dict(), load(url).state_dict()
        assert here.keys() == there.keys()
        assert all(torch.equal(x, there[n]) and x.dtype == there[n].dtype for n, x in here.items())

    def test_nobody_else_takes_a_pointer_for_weights(self, store: Store, source: Path) -> None:
        directory = directory_of(store.put_folder("m", source))
        name = next(p.name for p in source.glob("*.safetensors"))
        assert (directory / name).stat().st_size == (source / name).stat().st_size
        with pytest.raises(SafetensorError), safe_open(directory / name, "pt"):
            pass

    def test_a_checkpoint_cannot_point_elsewhere(self, store: Store, source: Path, tmp_path: Path) -> None:
        shutil.copytree(directory_of(store.put_folder("m", source)), tmp_path / "mine")
        store.requests.clear()
        with pytest.raises(InputError, match="dtype"):
            open_source(Checkpoint.open(tmp_path / "mine"))
        assert not store.requests

    def test_a_copy_is_used_where_there_is_one(self, store: Store, source: Path) -> None:
        url = store.put_folder("m", source)
        copy = resolve(url, whole=True).directory
        assert files_of(copy) == files_of(source)
        store.requests.clear()
        assert weights(directory_of(url)).keys() == weights(source).keys()
        assert [r.query.partition("&")[0] for r in store.requests] == ["list-type=2"]

    def test_pickles_are_copied(self, store: Store, tmp_path: Path) -> None:
        folder = tmp_path / "source"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        torch.save({"a": torch.arange(6.0)}, folder / "pytorch_model.bin")
        assert torch.equal(weights(directory_of(store.put_folder("m", folder)))["a"], torch.arange(6.0))

    def test_a_gguf_file_is_copied(self, store: Store, tmp_path: Path) -> None:
        pytest.importorskip("gguf")
        from tests.helpers.gguf_files import write_gguf

        file = write_gguf(tmp_path / "source")
        url = store.put_folder("m", file.parent)
        checkpoint = Checkpoint.open(f"{url}/{file.name}")
        (name,) = checkpoint.weight_files
        assert (checkpoint.directory / name).read_bytes() == file.read_bytes()
        with pytest.raises(InputError, match=r"other\.gguf"):
            resolve(f"{url}/other.gguf")

    def test_a_view_that_was_interrupted_is_completed(self, store: Store, source: Path) -> None:
        url = store.put_folder("m", source)
        directory = directory_of(url)
        for path in (directory / "config.json", directory / "tokenizer" / "a file.json"):
            path.unlink()
        assert directory_of(url) == directory
        assert (directory / "tokenizer" / "a file.json").exists()

    def test_what_a_kill_leaves_is_no_file_of_it(
        self, store: Store, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun: list[Path] = []
        copy = remote_view._copy_object

        def noted(url: str, o: remote.RemoteObject, path: Path) -> None:
            begun.append(path)
            copy(url, o, path)

        monkeypatch.setattr(remote_view, "_copy_object", noted)
        directory = directory_of(store.put_folder("m", source))
        assert begun
        assert not any(path.is_relative_to(directory) for path in begun)

    def test_names_that_are_no_files_are_refused(self, store: Store, source: Path) -> None:
        url = store.put_folder("m", source)
        store.objects["m/a\\b.json"] = b"{}"
        with pytest.raises(InputError, match="name"):
            resolve(url)


class TestNames:
    def test_folders_of_a_console_are_not_files(self, store: Store, source: Path) -> None:
        url = store.put_folder("m", source)
        before = directory_of(url)
        store.objects |= {"m/": b"", "m/tokenizer/": b""}
        assert directory_of(url) == before

    def test_a_missing_bucket_is_named(self, store: Store) -> None:
        with pytest.raises(InputError, match="bucket `s3://buckte`"):
            resolve("s3://buckte/m")


class TestWebServers:
    @pytest.fixture
    def url(self, store: Store, source: Path) -> str:
        (source / "tokenizer" / "a file.json").unlink()
        store.put_folder("m", source)
        return f"{store.endpoint}/{BUCKET}/m"

    @pytest.mark.parametrize("whole", [False, True])
    def test_without_ranges_nothing_is_read(self, store: Store, url: str, whole: bool) -> None:
        store.ranges = False
        with pytest.raises(UnsupportedError, match="ranges"):
            resolve(url, whole=whole)

    def test_without_tags_a_newer_file_is_noticed(self, store: Store, url: str) -> None:
        store.etags = False
        directory = directory_of(url)
        opened = open_source(Checkpoint.open(directory))
        store.date = "Sat, 02 Jan 2100 00:00:00 GMT"
        assert directory_of(url) != directory
        with pytest.raises(InputError, match="changed"):
            read_tensor(opened, "a.weight")
        opened.close()

    def test_without_tags_and_times_nothing_is_read(self, store: Store, url: str) -> None:
        store.etags, store.date = False, None
        with pytest.raises(UnsupportedError, match="ETag"):
            resolve(url)

    def test_without_head_requests(self, store: Store, source: Path, url: str) -> None:
        store.fault = lambda r: Fault(status=405) if r.method == "HEAD" else None
        assert weights(directory_of(url)).keys() == weights(source).keys()


class TestTrouble:
    @pytest.mark.parametrize(
        "fault",
        [Fault(cut=5000), Fault(status=500), Fault(status=503), Fault(pause_s=0.05)],
        ids=["cut", "500", "503", "slow"],
    )
    def test_is_overcome(self, store: Store, source: Path, tmp_path: Path, fault: Fault) -> None:
        seen: dict[tuple[str, int | None], int] = {}

        def twice_each(r: Request) -> Fault | None:
            key = r.key, r.last
            seen[key] = seen.get(key, 0) + 1
            return fault if seen[key] <= 2 else None

        url = store.put_folder("m", source)
        store.fault = twice_each
        ours = weights(directory_of(url))
        assert all(torch.equal(x, ours[n]) for n, x in weights(source).items())
        assert max(seen.values()) > 1 or fault.pause_s

    @pytest.mark.parametrize(("status", "word"), [(503, "503"), (403, "access")])
    def test_that_lasts_is_an_error_without_secrets(self, store: Store, source: Path, status: int, word: str) -> None:
        url = store.put_folder("m", source)
        store.fault = lambda _: Fault(status=status)
        with pytest.raises(InputError, match=word) as caught:
            resolve(url)
        assert ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in f"{caught.value} {caught.value.hint}"
        assert "AWS_ACCESS_KEY_ID" in (caught.value.hint or "")

    def test_in_the_middle_ends_the_conversion_and_resumes(self, store: Store, source: Path, tmp_path: Path) -> None:
        url, output = store.put_folder("m", source), tmp_path / "out"
        store.fault = lambda r: Fault(status=500) if "-00002-of" in r.key and (r.first or 0) > 10**5 else None
        with pytest.raises(InputError, match="500"):
            converted(url, output)
        assert not output.exists()
        store.fault = lambda _: None
        first = "model-00001-of-00002.safetensors"
        written = (tmp_path / "out.partial" / first).stat()
        convert(url, output, ConvertOptions(format="e4m3fn", verify="weights", workers=2, resume=True))
        assert os.path.samestat((output / first).stat(), written)

    def test_while_verifying_judges_nothing(self, store: Store, source: Path, tmp_path: Path) -> None:
        url = store.put_folder("m", source)
        converted(url, tmp_path / "out")
        store.fault = lambda r: Fault(status=503) if r.key.endswith(".safetensors") else None
        with pytest.raises(UnreadError, match="503"):
            verified(tmp_path / "out", "weights", against=url)
        store.fault = lambda _: None
        assert verified(tmp_path / "out", "weights", against=url).passed

    @pytest.mark.parametrize(
        ("command", "more"),
        {
            "inspect": (),
            "convert": ("--verify", "weights", "-o", "out"),
            "verify": (),
            "restore": ("-o", "out"),
            "probe": ("-o", "out"),
            "finetune": ("--steps", "1", "--twin", "none", "-o", "out"),
            "export onnx": ("-o", "out"),
            "advise": ("--budget", "minutes=0.1", "-o", "out"),
        }.items(),
    )
    def test_is_an_input_that_could_not_be_read(
        self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, more: tuple[str, ...]
    ) -> None:
        """In every command: not one that is damaged, or lacks something, or is not supported."""
        monkeypatch.chdir(tmp_path)
        convert("demo", tmp_path / "made", ConvertOptions(format="e4m3fn", verify="weights"))
        url = store.put_folder("m", tmp_path / "made")
        store.fault = lambda r: Fault(status=403) if r.key.endswith(".safetensors") and r.method == "GET" else None
        done = CliRunner().invoke(app, [*command.split(), url, *more])
        assert done.exit_code == 3, done.stderr
        assert "access" in done.stderr
        assert "AWS_ACCESS_KEY_ID" in done.stderr
        assert not published(tmp_path / "out")

    def test_a_source_that_changes_is_refused(self, store: Store, source: Path) -> None:
        url = store.put_folder("m", source)
        directory = directory_of(url)
        opened = open_source(Checkpoint.open(directory))
        for name in [k for k in store.objects if k.endswith(".safetensors")]:
            store.objects[name] = store.objects[name][:-1] + b"x"
        with pytest.raises(InputError, match="changed"):
            read_tensor(opened, "a.weight")
        opened.close()

    def test_a_shorter_one_without_tags_is_refused(self, store: Store, source: Path) -> None:
        store.put_folder("m", source)
        store.etags = False
        directory = directory_of(f"{store.endpoint}/{BUCKET}/m")
        opened = open_source(Checkpoint.open(directory))
        for name in [k for k in store.objects if k.endswith(".safetensors")]:
            store.objects[name] = store.objects[name][:-1000]
        with pytest.raises(InputError, match="shorter"):
            read_tensor(opened, "a.weight")
        opened.close()

    @pytest.mark.parametrize(
        ("url", "error", "words"),
        [
            ("s3://key:secret@bucket/m", UsageError, "credentials"),
            ("https://server/m?sig=secret", UsageError, "query"),
            ("ftp://server/m", UnsupportedError, "ftp://"),
            ("s3://bucket/none", InputError, "config.json"),
        ],
    )
    def test_urls_that_are_refused(self, store: Store, url: str, error: type[LpconvError], words: str) -> None:
        with pytest.raises(error, match=words) as caught:
            resolve(url)
        assert "secret" not in str(caught.value)

    def test_a_missing_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UnsupportedError, match="obstore") as caught:
            resolve("s3://bucket/m")
        assert "lpconv[remote]" in (caught.value.hint or "")

    @pytest.mark.parametrize("name", ["s3://bucket/out", "gs://bucket/out/page.html", "hf://owner/name"])
    def test_a_url_is_no_file(self, name: str) -> None:
        with pytest.raises(UnsupportedError, match=name.partition(":")[0]):
            check_writable(Path(name))


class TestMemory:
    def test_reading_takes_no_more_than_is_foretold(self, store: Store, tmp_path: Path) -> None:
        """In a process of its own: far more than the window is read, by two threads and front to back."""
        size = 3 * remote.WINDOW_BYTES
        store.objects["large"] = mmap.mmap(-1, size)
        code = (
            "import psutil, sys; from concurrent.futures import ThreadPoolExecutor; from lpconv.machine import *;"
            "from lpconv.storage import remote;"
            "remote.head('s3://bucket', 'large'); before = psutil.Process().memory_info().rss;"
            "size, step = int(sys.argv[1]), 2**20;"
            "file = remote.RemoteFile(store='s3://bucket', name='large', e_tag=None, size_bytes=size);"
            "read = lambda at: file.read_into(at, memoryview(bytearray(step)));"
            "list(ThreadPoolExecutor(2).map(read, range(0, size, step))); print(peak_rss_bytes() - before)"
        )
        done = subprocess.run([sys.executable, "-c", code, str(size)], capture_output=True, text=True, check=True)
        assert remote.WINDOW_BYTES / 3 < int(done.stdout) < remote.WINDOW_BYTES + _CLIENT_BYTES

    def test_is_foretold_and_bounded(self, store: Store, source: Path, tmp_path: Path) -> None:
        url = store.put_folder("m", source)
        environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": store.endpoint, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        asked = ("--verify", "weights", "--workers", "1", "--json", "-q")
        foretold = {}
        for model, output in ((source, tmp_path / "out"), (source, "s3://bucket/out"), (url, "s3://bucket/out")):
            done = run_cli("convert", model, "-o", output, *asked, "--dry-run", **environment)
            foretold[model, output] = json.loads(done.stdout)["memory_bytes"]
        here, there, both = foretold.values()
        assert here + remote.WINDOW_BYTES < there < both
        done = run_cli("convert", url, "-o", "s3://bucket/out", *asked, "--max-memory", str(there), **environment)
        assert done.returncode == 7
        assert not any(name.startswith("out/") for name in store.objects)
        done = run_cli(
            "convert", url, "-o", "s3://bucket/out", *asked, "--max-memory", str(both + 2**25), **environment
        )
        assert json.loads(done.stdout)["peak_rss_bytes"] < both

    def test_a_copy_is_read_like_any_file(self, store: Store, source: Path, tmp_path: Path) -> None:
        url, options = store.put_folder("m", source), ConvertOptions(verify="weights", workers=1)
        there = plan(url, tmp_path / "out", options).memory_bytes
        copied = plan(url, tmp_path / "out", dataclasses.replace(options, cache=True)).memory_bytes
        assert copied < there - remote.WINDOW_BYTES / 2


class TestHub:
    def test_streams_a_commit(self, store: Store, source: Path, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        with serving_hub("owner/name", files_of(source)) as hub:
            monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
            monkeypatch.setenv("HF_TOKEN", "hf_secret")
            found = resolve("hf://owner/name@main")
            assert (found.resolved, found.revision) == ("owner/name", COMMIT)
            ours = weights(found.directory)
        assert all(torch.equal(x, ours[n]) for n, x in weights(source).items())
        assert not (tmp_path / "hub").exists()
        assert all(b"hf_secret" not in data[:500] for data in files_of(found.directory).values())


class TestCommands:
    def test_verify_takes_a_url(self, store: Store, source: Path, tmp_path: Path) -> None:
        converted(str(source), tmp_path / "out")
        url = store.put_folder("out", tmp_path / "out")
        environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": store.endpoint, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = run_cli("verify", url, "--json", **environment)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["passed"]
        store.objects["out/" + next(p.name for p in source.glob("*.safetensors"))] = b"damaged"
        assert not verified(directory_of(url), "hash").passed

    def test_a_local_path_asks_nobody(self, source: Path) -> None:
        code = (
            "import sys, pathlib; from lpconv.inspect.headers import inspect; "
            "inspect(pathlib.Path(sys.argv[1])); print(*sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code, source], capture_output=True, text=True, check=True)
        assert not {"obstore", "torch"} & {*done.stdout.split()}


def test_a_host_that_takes_no_connection_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore.store

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/model"
        monkeypatch.delattr(obstore.store, "HTTPStore")
        with pytest.raises(InputError, match=r"127\.0\.0\.1"):
            remote.store_at(url)
