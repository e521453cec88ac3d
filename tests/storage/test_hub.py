"""Conversions from a hub on the loopback: whatever it does, the right bytes come out, or exit 3 and nothing."""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from lpconv.convert.run import convert
from lpconv.errors import InputError
from lpconv.plan.options import ConvertOptions
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.hub import why_unreachable
from lpconv.storage.resolve import STATE, resolve
from tests.helpers.checkpoints import files_of, published, run_cli, write_checkpoint
from tests.helpers.hub_server import COMMIT, Hub, serving

REPO = "me/model"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = write_checkpoint(tmp_path_factory.mktemp("hub") / "files", config={"model_type": "x"})
    (folder / "tokenizer.json").write_text('{"a": 1}' * 100)
    files: dict[str, bytes] = files_of(folder)
    return files


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache; short waits in the hub's client."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    real = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: real(min(seconds, 0.05)))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path / "hub"


@pytest.fixture
def serve(cache: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Any:
    @contextmanager
    def serve(**faults: str) -> Iterator[Hub]:
        named = {{"weights": WEIGHTS, "config": "config.json"}.get(k, k): v for k, v in faults.items()}
        with serving(REPO, files, **named) as hub:
            monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
            template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            yield hub

    return serve


def blob(cache: Path, name: str) -> Path:
    return (cache / "models--me--model" / "snapshots" / COMMIT / name).resolve()


class TestRight:
    @pytest.mark.parametrize("fault", ["ok", "cut-once", "slow", "redirect", "no-hash"])
    def test_the_bytes_are_those_of_the_local_directory(
        self, serve: Any, files: dict[str, bytes], tmp_path: Path, fault: str
    ) -> None:
        with serve(weights=fault):
            result = convert(REPO, tmp_path / "out", ConvertOptions(verify="weights", workers=1))
        local = write_checkpoint(tmp_path / "local", config={"model_type": "x"})
        convert(str(local), tmp_path / "same", ConvertOptions(verify="weights", workers=1))
        assert files_of(tmp_path / "out")[WEIGHTS] == files_of(tmp_path / "same")[WEIGHTS]
        assert (tmp_path / "out" / "tokenizer.json").read_bytes() == files["tokenizer.json"]
        (record,) = result.source.files
        assert result.source.revision == COMMIT
        expected = None if fault == "no-hash" else hashlib.sha256(files[WEIGHTS]).hexdigest()
        assert record.sha256 == expected  # no hash is recorded that nobody computed

    def test_a_second_run_asks_nobody_and_hashes_nothing(
        self, serve: Any, cache: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with serve() as hub:
            first = Checkpoint.open(REPO).check_promised()
            asked = len(hub.requests)
            monkeypatch.setattr(
                sys.modules["lpconv.storage.resolve"], "_check_blob", lambda *_: pytest.fail("hashed again")
            )
            assert Checkpoint.open(REPO).check_promised() == first
            assert len(hub.requests) == asked
        assert first == {WEIGHTS: hashlib.sha256(files[WEIGHTS]).hexdigest()}

    def test_a_file_that_changed_in_the_cache_is_hashed_again(self, serve: Any, cache: Path) -> None:
        with serve():
            resolve(REPO)
        data = bytearray(blob(cache, WEIGHTS).read_bytes())
        data[-1] ^= 1
        blob(cache, WEIGHTS).write_bytes(data)
        with pytest.raises(InputError, match="hash"):
            Checkpoint.open(REPO).check_promised()
        assert Checkpoint.open(REPO).origin == resolve(REPO)  # which headers are enough for

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"blobs": 3}', '{"blobs": {"x": 3}}'])
    def test_a_broken_memory_is_written_anew(self, serve: Any, cache: Path, text: str) -> None:
        with serve():
            first = Checkpoint.open(REPO).check_promised()
        state = cache / "models--me--model" / STATE
        good = json.loads(state.read_text())["blobs"]
        state.write_text(text)
        assert Checkpoint.open(REPO).check_promised() == first
        assert json.loads(state.read_text())["blobs"].items() >= good.items()

    def test_a_cache_that_cannot_be_written_is_checked_each_time(
        self, serve: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with serve():
            first = Checkpoint.open(REPO).check_promised()
        (cache / "models--me--model" / STATE).unlink()
        (cache / "models--me--model" / f"{STATE}.part").mkdir()  # in the way, for root too
        assert Checkpoint.open(REPO).check_promised() == first


class TestRefused:
    @pytest.mark.parametrize(
        ("where", "fault", "says"),
        [
            ("weights", "gated", "gated"),
            ("weights", "private", "refused"),
            ("weights", "missing", "refused"),
            ("weights", "cut", "downloading"),
            ("weights", "corrupt-header", "hash"),
            ("weights", "corrupt-body", "hash"),
            ("weights", "longer", "hash"),
            ("weights", "500", "downloading"),
            ("weights", "stall", "downloading"),
            ("weights", "redirect-loop", "downloading"),
            ("weights", "no-etag", "downloading"),
            ("config", "corrupt-body", "hash"),
            ("config", "missing", "refused"),
            ("config", "cut", "downloading"),
        ],
    )
    def test_by_the_name_of_the_file(self, serve: Any, tmp_path: Path, where: str, fault: str, says: str) -> None:
        file = {"weights": WEIGHTS, "config": "config.json"}[where]
        with serve(**{where: fault}) as hub:
            with pytest.raises(InputError, match=says) as caught:
                convert(REPO, tmp_path / "out", ConvertOptions(verify="weights", workers=1))
            assert f"`{file}` of `{REPO}`" in caught.value.message
            assert caught.value.hint
            assert not published(tmp_path / "out")
            assert len(hub.requests) < 60
            hub.faults.clear()
            if "hash" in says:
                Path(str(caught.value.details["blob"])).unlink()  # as the hint says
            assert convert(REPO, tmp_path / "out", ConvertOptions(verify="weights", workers=1)).verify.passed

    @pytest.mark.parametrize(("fault", "says"), [("gated", "gated"), ("private", "private"), ("500", "refused")])
    def test_the_whole_repository(self, serve: Any, tmp_path: Path, fault: str, says: str) -> None:
        with serve(api=fault) as hub, pytest.raises(InputError, match=says):
            convert(REPO, tmp_path / "out", ConvertOptions())
        assert len(hub.requests) == 1


class TestNoNetwork:
    def test_a_closed_port_and_an_address_where_nobody_answers(self) -> None:
        started = time.monotonic()
        assert "127.0.0.1" in str(why_unreachable("http://127.0.0.1:1"))
        assert why_unreachable("http://192.0.2.1") is not None  # reserved for documentation
        assert why_unreachable("https://no-such-host.invalid") is not None
        assert time.monotonic() - started < 6

    def test_what_stands_before_the_hub_is_what_must_answer(
        self, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]
    ) -> None:
        monkeypatch.setenv("no_proxy", "")
        with serving(REPO, files) as proxy:
            monkeypatch.setenv("https_proxy", proxy.endpoint)
            assert why_unreachable("https://no-such-host.invalid") is None

    def test_a_name_is_refused_within_three_seconds(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", "http://192.0.2.1")
        started = time.monotonic()
        with pytest.raises(InputError, match=f"`{REPO}`") as caught:
            resolve(REPO)
        assert time.monotonic() - started < 3
        assert "HF_HOME" in str(caught.value.hint)
        assert "`hf download me/model" in str(caught.value.hint)


def test_the_command_line_on_a_hub(files: dict[str, bytes], tmp_path: Path) -> None:
    with serving(REPO, files, **{WEIGHTS: "corrupt-body"}) as hub:
        env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        arguments = ("convert", REPO, "-o", tmp_path / "out", "--verify", "weights", "-q")
        refused = run_cli(*arguments, **env, NO_PROXY="127.0.0.1")
        assert refused.returncode == 3, refused.stderr
        assert WEIGHTS in refused.stderr
        assert not os.path.lexists(tmp_path / "out")
        assert not os.path.lexists(tmp_path / "out.partial")
