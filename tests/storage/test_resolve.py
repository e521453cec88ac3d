"""Names become directories: local ones, aliases, hub ids in the cache or downloaded. Never over the network."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from lpconv.data import demo_checkpoint
from lpconv.errors import InputError, LpconvError, ResourceError, UsageError
from lpconv.storage.aliases import ALIASES
from lpconv.storage.hub import has_weights, wanted_files
from lpconv.storage.resolve import Resolved, looks_like_path, resolve

COMMIT = "a" * 40
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}


def add_snapshot(
    cache: Path, repo_id: str, files: dict[str, bytes], *, commit: str = COMMIT, ref: str = "main"
) -> Path:
    """A repository in the hub's cache layout: blobs, a snapshot of links into them, and a ref that names it."""
    repo = cache / ("models--" + repo_id.replace("/", "--"))
    snapshot = repo / "snapshots" / commit
    for folder in (repo / "blobs", repo / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    for number, (name, data) in enumerate(files.items()):
        blob = repo / "blobs" / f"{commit[:8]}{number:04}"
        blob.write_bytes(data)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    (repo / "refs" / ref).write_text(commit)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, an empty working directory, and a hub client that fails the test when it is called."""

    def reached(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", reached)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", reached)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return tmp_path / "hub"


@pytest.fixture
def online(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("lpconv.storage.hub.why_unreachable", lambda _: None)
    return cache


def listing(files: list[str] | Exception) -> Callable[..., SimpleNamespace]:
    """A hub that answers with the names of a repository's files, or with an error."""

    def model_info(*_: object, **__: object) -> SimpleNamespace:
        if isinstance(files, Exception):
            raise files
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in files])

    return model_info


def refusal(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    response: Any = SimpleNamespace(headers={}, request=None, status_code=status)
    return kind("refused\n\nmore", response=response)


class ConnectError(Exception):
    """Stands for the HTTP library's own error, which has another module in each version of the hub client."""


class TestLocal:
    def test_a_directory_wins_over_an_alias(self, cache: Path) -> None:
        Path("gpt2").mkdir()
        found = resolve("gpt2")
        assert found == Resolved(name="gpt2", resolved=str(Path("gpt2").absolute()), directory=Path("gpt2").absolute())

    def test_directories_and_the_demo_have_no_revision(self, tmp_path: Path) -> None:
        for name in (str(tmp_path), "demo"):
            with pytest.raises(UsageError, match="`main`"):
                resolve(name, revision="main")

    def test_a_file_is_refused_and_its_directory_named(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").touch()
        with pytest.raises(InputError, match=r"model\.safetensors`") as caught:
            resolve(str(tmp_path / "model.safetensors"))
        assert caught.value.hint is not None
        assert str(tmp_path) in caught.value.hint

    @pytest.mark.parametrize(
        "name", ["", "./llama", "../x", "/no/where", "a/b/c", "~/nothing-here", "~nobody/x", "owner/", "./" + "x" * 300]
    )
    def test_a_path_that_does_not_exist_is_never_asked_of_the_hub(self, cache: Path, name: str) -> None:
        with pytest.raises(InputError, match="directory"):
            resolve(name)


class TestDemo:
    def test_demo_is_the_embedded_checkpoint(self, cache: Path) -> None:
        found = resolve("demo")
        assert (found.resolved, found.revision, found.directory) == ("demo", None, demo_checkpoint())
        assert has_weights(found.directory)


class TestCache:
    def test_an_alias_in_any_case_finds_its_hub_id_in_the_cache(self, cache: Path) -> None:
        snapshot = add_snapshot(cache, "google-bert/bert-large-uncased", FILES)
        for name in ("bert-large", "BERT-large"):
            assert resolve(name) == Resolved(
                name=name, resolved="google-bert/bert-large-uncased", revision=COMMIT, directory=snapshot
            )

    def test_a_model_cached_under_its_old_bare_name(self, cache: Path) -> None:
        snapshot = add_snapshot(cache, "gpt2", FILES)
        assert resolve("gpt2").directory == snapshot

    def test_a_revision_is_a_ref_or_a_commit(self, cache: Path) -> None:
        add_snapshot(cache, "me/model", FILES)
        other = add_snapshot(cache, "me/model", FILES, commit="b" * 40, ref="v2")
        assert resolve("me/model", revision="v2").directory == other
        assert resolve("me/model", revision="b" * 40).revision == "b" * 40
        assert resolve("me/model").revision == COMMIT

    def test_an_unknown_revision_offline(self, cache: Path) -> None:
        add_snapshot(cache, "me/model", FILES)
        with pytest.raises(InputError, match="revision `v9`") as caught:
            resolve("me/model", revision="v9")
        assert "`hf download me/model --revision v9" in str(caught.value.hint)

    @pytest.mark.parametrize(
        "files",
        [
            {"config.json": b"{}"},
            {"config.json": b"{}", "tf_model.h5": b"x"},
            {
                "config.json": b"{}",
                "model-00001-of-00002.safetensors": b"x",
                "model.safetensors.index.json": json.dumps(
                    {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
                ).encode(),
            },
        ],
        ids=["config only", "foreign weights", "one of two shards"],
    )
    def test_a_partial_snapshot_is_not_used(self, cache: Path, files: dict[str, bytes]) -> None:
        add_snapshot(cache, "me/model", files)
        with pytest.raises(InputError, match="`me/model`"):
            resolve("me/model")

    def test_the_index_of_weights_left_behind_does_no_harm(self, cache: Path) -> None:
        index = json.dumps({"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}).encode()
        snapshot = add_snapshot(cache, "me/model", FILES | {"pytorch_model.bin.index.json": index})
        assert resolve("me/model").directory == snapshot

    def test_no_network_and_no_cache_says_what_to_do(self, cache: Path) -> None:
        with pytest.raises(InputError, match="HF_HUB_OFFLINE") as caught:
            resolve("bert-large")
        hint = str(caught.value.hint)
        assert caught.value.exit_code == 3
        assert "`hf download google-bert/bert-large-uncased" in hint
        assert "HF_HOME" in hint
        assert "directory" in hint

    def test_a_misspelt_name_gets_the_nearest_alias(self, cache: Path) -> None:
        with pytest.raises(InputError) as caught:
            resolve("bert-lrge")
        assert "`bert-large` (google-bert/bert-large-uncased)" in str(caught.value.hint)

    @pytest.mark.parametrize("name", ["zzzz", "z" * 300])
    def test_a_name_like_nothing_known(self, cache: Path, name: str) -> None:
        with pytest.raises(InputError, match="zzzz") as caught:
            resolve(name)
        assert "mean" not in str(caught.value.hint)
        assert "OWNER/NAME" in str(caught.value.hint)


class TestDownload:
    def test_a_cached_model_is_used_without_asking_the_hub(self, online: Path) -> None:
        snapshot = add_snapshot(online, "me/model", FILES)
        assert resolve("me/model").directory == snapshot

    def test_only_what_is_needed_is_fetched(self, online: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[str, str | None, list[str]]] = []

        def fetch(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
            asked.append((repo_id, revision, allow_patterns))
            return str(add_snapshot(online, repo_id, FILES))

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", listing([*FILES, "pytorch_model.bin", "tf_model.h5"]))
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
        found = resolve("me/model", revision="v1")
        assert asked == [("me/model", "v1", ["model.safetensors", "config.json", "tokenizer.json"])]
        assert found.revision == COMMIT

    @pytest.mark.parametrize(
        ("error", "kind", "says", "hint"),
        [
            (refusal(errors.GatedRepoError, 403), InputError, "gated", "https://huggingface.co/me/model"),
            (refusal(errors.RepositoryNotFoundError, 401), InputError, "`me/model`", "`hf auth login`"),
            (refusal(errors.RevisionNotFoundError, 404), InputError, "revision", "/commits"),
            (refusal(errors.HfHubHTTPError, 503), InputError, "`me/model`: refused$", "later"),
            (errors.HFValidationError("too long"), InputError, "hub", "OWNER/NAME"),
            (ConnectError("down"), InputError, "reached", "`hf download me/model"),
            (OSError(28, "No space left on device"), ResourceError, "disk", "HF_HOME"),
        ],
        ids=["gated", "not found", "revision", "server error", "validation", "no network", "disk"],
    )
    def test_what_the_hub_says_is_explained(
        self,
        online: Path,
        monkeypatch: pytest.MonkeyPatch,
        error: Exception,
        kind: type[LpconvError],
        says: str,
        hint: str,
    ) -> None:
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", listing(error))
        with pytest.raises(kind, match=says) as caught:
            resolve("me/model")
        assert hint in str(caught.value.hint)

    def test_a_misspelt_hub_id_gets_the_nearest_known(self, online: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        missing = refusal(errors.RepositoryNotFoundError, 404)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", listing(missing))
        with pytest.raises(InputError) as caught:
            resolve("google-bert/bert-lrge-uncased")
        assert "`google-bert/bert-large-uncased`" in str(caught.value.hint)

    def test_a_repository_without_weights_we_read(self, online: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", listing(["config.json", "model.Q4_K.gguf"]))
        with pytest.raises(InputError, match=r"`me/model`.*weights"):
            resolve("me/model")


_SIDE = ["README.md", "1_Pooling/config.json", "merges.txt", "modeling_x.py", "spiece.model"]
_SHARD, _INDEX = "pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        (["config.json", "pytorch_model.bin", _INDEX], ["config.json"]),
        (["consolidated.safetensors", "original/consolidated.00.pth", "model.fp16.safetensors", "onnx/model.onnx"], []),
        (_SIDE, _SIDE),
        (["modules.json", "2_Dense/model.safetensors"], ["modules.json", "2_Dense/model.safetensors"]),
        (["2_Dense/model.safetensors"], []),
        (["collage/residual.safetensors"], ["collage/residual.safetensors"]),
    ],
    ids=["no pickles", "no second copies", "side files", "modules", "not a module", "residual"],
)
def test_files_that_are_wanted_beside_safetensors(more: list[str], wanted: list[str]) -> None:
    assert set(wanted_files(["model.safetensors", *more])) == {"model.safetensors", *wanted}


def test_pickles_serve_where_there_is_nothing_else() -> None:
    assert wanted_files(["config.json", _SHARD, _INDEX, "training_args.bin"]) == [_SHARD, "config.json", _INDEX]


def test_aliases_are_hub_ids_under_folded_names() -> None:
    for name, alias in ALIASES.items():
        assert name == alias.name == name.casefold()
        owner, _, repository = alias.repo_id.partition("/")
        assert owner
        assert repository
        assert not looks_like_path(alias.repo_id)
        assert ALIASES[repository.casefold()].repo_id == alias.repo_id


def test_importing_resolve_loads_no_heavy_library() -> None:
    code = "import lpconv.storage.resolve, sys; print({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
