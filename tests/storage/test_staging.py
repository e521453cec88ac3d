"""The folder an output grows in: what resuming trusts, what forcing deletes, and how two runs keep apart."""

import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lpconv.errors import InputError, LpconvError, OutputExistsError, ResourceError, UsageError
from lpconv.storage.staging import JOURNAL, MARKER, SUMS, Staging, check_apart, check_is_output, folder_next_to

Begin = Callable[..., Staging]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


@pytest.fixture
def begin(output: Path) -> Begin:
    def begin(identity: str = "same", *, resume: bool = False, force: bool = False) -> Staging:
        return Staging(output, {"identity": identity}, resume=resume, force=force)

    return begin


def write_shard(run: Staging, name: str, data: bytes = b"weights") -> None:
    """Finish one file as a conversion does: the bytes, then a line in the journal."""
    (run.directory / name).parent.mkdir(exist_ok=True)
    (run.directory / name).write_bytes(data)
    record = {"name": name, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    run.append({"shard": name, "files": [record]})


def finish(run: Staging, *listed: str) -> None:
    (run.directory / MARKER).write_text("{}")
    (run.directory / "SHA256SUMS").write_text("".join(f"{0:064}  {name}\n" for name in listed))
    run.publish()


def shards(run: Staging) -> list[str]:
    return [line["shard"] for line in run.done]


def names(directory: Path) -> set[str]:
    return {p.relative_to(directory).as_posix() for p in directory.rglob("*")}


class TestPublish:
    def test_the_output_appears_whole_and_alone(self, begin: Begin, output: Path) -> None:
        with begin() as run:
            write_shard(run, "a")
            assert not output.exists()
            finish(run)
        assert names(output) == {"a", MARKER, "SHA256SUMS"}
        assert {name.partition("/")[0] for name in names(output.parent)} == {"output"}

    def test_a_run_that_fails_leaves_nothing_with_the_outputs_name(self, begin: Begin, output: Path) -> None:
        with begin() as run:
            write_shard(run, "a")
        assert not output.exists()
        assert names(output.parent) == {"output.partial", f"output.partial/{JOURNAL}", "output.partial/a"}

    def test_a_rejected_output_is_kept_aside(self, begin: Begin, output: Path) -> None:
        for data in (b"first", b"second"):
            with begin() as run:
                write_shard(run, "a", data)
                (run.directory / MARKER).write_text("{}")
                kept = run.set_aside()
        assert kept == output.with_name("output.failed")
        assert (kept / "a").read_bytes() == b"second"
        assert names(kept) == {"a", MARKER}
        assert not output.exists()

    @pytest.mark.parametrize("name", ["x" * 300, "file/output"], ids=["too long", "below a file"])
    def test_folders_that_cannot_be_made(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ResourceError, match=name.partition("/")[0]):
            Staging(tmp_path / name, {}, resume=False, force=False)


class TestResume:
    def test_nothing_to_resume_is_a_new_run(self, begin: Begin, output: Path) -> None:
        with begin(resume=True) as run:
            assert run.done == []
            finish(run)
        assert output.exists()

    def test_a_shard_that_changed_or_went_is_done_again(self, begin: Begin) -> None:
        with begin() as run:
            for name in "abcd":
                write_shard(run, name)
            (run.directory / "a").unlink()
            (run.directory / "b").write_bytes(b"Weights")
            (run.directory / "c").write_bytes(b"weights+")
        with begin(resume=True) as run:
            assert shards(run) == ["d"]

    def test_half_written_and_stale_files_are_gone(self, begin: Begin) -> None:
        with begin() as run:
            write_shard(run, "a")
            write_shard(run, "collage/a")
            (run.directory / "b.part").write_bytes(b"half")
            (run.directory / "tokenizer").mkdir()
            (run.directory / "tokenizer" / "vocab.txt").touch()
            (run.directory / "link").symlink_to("/")
        with begin(resume=True) as run:
            assert names(run.directory) == {JOURNAL, "a", "collage", "collage/a"}

    @pytest.mark.parametrize("cut", range(1, 40))
    def test_a_journal_line_cut_short_does_not_swallow_the_next(self, begin: Begin, cut: int) -> None:
        with begin() as run:
            write_shard(run, "a")
            write_shard(run, "b")
            journal = run.directory / JOURNAL
        journal.write_bytes(journal.read_bytes()[:-cut])
        with begin(resume=True) as run:
            assert shards(run) == ["a"]
            write_shard(run, "b")
        with begin(resume=True) as run:
            assert shards(run) == ["a", "b"]

    @pytest.mark.parametrize("text", [b"", b'{"ident', b"5\n", b"\xff\0\n", b"null\n[]\n"])
    def test_a_journal_without_a_first_line_starts_anew(self, begin: Begin, text: bytes) -> None:
        with begin() as run:
            write_shard(run, "a")
            (run.directory / JOURNAL).write_bytes(text)
        with begin(resume=True) as run:
            assert run.done == []
            assert names(run.directory) == {JOURNAL}

    def test_another_source_or_other_options_are_refused_by_name(self, begin: Begin) -> None:
        with begin("one") as run:
            write_shard(run, "a")
        with pytest.raises(OutputExistsError, match="identity") as caught:
            begin("two", resume=True)
        assert caught.value.details == {"changed": ["identity"]}
        with begin("one", resume=True) as run:
            assert shards(run) == ["a"], "the refusal destroyed nothing"

    def test_without_resume_or_force_the_choice_is_the_users(self, begin: Begin) -> None:
        with begin():
            pass
        with pytest.raises(OutputExistsError) as caught:
            begin()
        assert "--resume" in str(caught.value.hint)
        assert "--force" in str(caught.value.hint)

    def test_force_starts_anew(self, begin: Begin) -> None:
        with begin() as run:
            write_shard(run, "a")
        with begin("other", force=True) as run:
            assert run.done == []
            assert names(run.directory) == {JOURNAL}


def test_a_disk_that_fails_at_the_first_write_is_a_lack_of_resources(
    begin: Begin, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("lpconv.storage.staging.os.ftruncate", fail)
    with pytest.raises(ResourceError, match=re.escape(str(output))):
        begin()
    monkeypatch.undo()
    assert not list(output.parent.iterdir())
    folder_next_to(output, ".partial").mkdir()  # the disk was full before the journal
    with begin():
        pass


class TestForce:
    def test_an_output_is_replaced_when_the_new_one_is_ready(self, begin: Begin, output: Path) -> None:
        with begin() as run:
            write_shard(run, "a", b"old")
            finish(run, "a")
        with begin(force=True) as run:
            write_shard(run, "a", b"new")
            assert (output / "a").read_bytes() == b"old"
            finish(run, "a")
        assert (output / "a").read_bytes() == b"new"
        assert set(os.listdir(output.parent)) == {"output"}

    @pytest.mark.parametrize("name", ["notes.txt", "fp8/lpconv.json", "link"])
    def test_an_output_with_files_of_others_is_kept(self, begin: Begin, output: Path, name: str) -> None:
        with begin() as run:
            write_shard(run, "a")
            finish(run, "a")
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).symlink_to("a") if name == "link" else (output / name).touch()
        before = names(output)
        with pytest.raises(OutputExistsError, match=name):
            begin(force=True)
        assert names(output.parent) == {"output", *(f"output/{n}" for n in before)}

    def test_a_deletion_that_was_killed_leaves_a_folder_of_ours(
        self, begin: Begin, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Killed(BaseException):
            pass

        def kill(directory: Path) -> None:
            raise Killed

        with begin() as run:
            write_shard(run, "a")
            monkeypatch.setattr("lpconv.storage.staging.shutil.rmtree", kill)
            with pytest.raises(Killed):
                run.discard()
        monkeypatch.undo()
        with begin(force=True) as run:
            finish(run)

    @pytest.mark.parametrize("kind", ["directory", "file", "link", "dangling"])
    @pytest.mark.parametrize("suffix", ["", ".partial", ".failed", ".replaced"])
    @pytest.mark.parametrize("how", ["force", "resume"])
    def test_what_is_not_ours_is_never_deleted(
        self, begin: Begin, output: Path, kind: str, suffix: str, how: str
    ) -> None:
        theirs = folder_next_to(output, suffix)
        if kind == "directory":
            theirs.mkdir()
            (theirs / "thesis.tex").touch()
        elif kind == "file":
            theirs.touch()
        else:
            theirs.symlink_to("." if kind == "link" else "nowhere")
        before = names(output.parent)
        with pytest.raises(OutputExistsError) as caught:
            begin(**{how: True})
        assert caught.value.hint
        assert names(output.parent) == before

    def test_a_killed_deletion_of_the_old_output_is_finished_later(self, begin: Begin, output: Path) -> None:
        half = folder_next_to(output, ".replaced")
        half.mkdir()
        (half / MARKER).touch()
        with begin() as run:
            finish(run)
        assert not half.exists()


class TestTwoRuns:
    @pytest.mark.parametrize("how", [{}, {"resume": True}, {"force": True}])
    def test_the_second_run_is_refused(self, begin: Begin, how: dict[str, bool]) -> None:
        with begin() as first:
            write_shard(first, "a")
            with pytest.raises(OutputExistsError, match="another"):
                begin(**how)
            assert (first.directory / "a").exists()

    def test_a_run_that_waits_at_the_lock_does_not_take_over_what_was_published(
        self, begin: Begin, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with begin() as first:
            write_shard(first, "a")

        def finish_first(_: object, how: int) -> None:
            """The other process publishes between our opening of the journal and our lock."""
            if how & fcntl.LOCK_EX:  # we have looked with a shared one before
                os.rename(folder_next_to(output, ".partial"), output)

        monkeypatch.setattr(fcntl, "flock", finish_first)
        with pytest.raises(OutputExistsError, match="finished"):
            begin(resume=True)
        assert (output / "a").exists()

    def test_an_output_that_appeared_meanwhile_is_not_replaced(self, begin: Begin, output: Path) -> None:
        with begin() as run:
            (run.directory / MARKER).touch()
            output.mkdir()
            (output / "theirs").touch()
            with pytest.raises(OutputExistsError):
                run.publish()
        assert names(output) == {"theirs"}

    def test_the_journal_goes_last(self, begin: Begin, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without it, a run that comes in between would take the folder for an abandoned one and empty it."""
        seen: list[bool] = []
        rename = os.rename

        def watch(old: Path, new: Path) -> None:
            seen.append((Path(old) / JOURNAL).exists())
            rename(old, new)

        monkeypatch.setattr(os, "rename", watch)
        with begin() as run:
            finish(run)
        assert seen == [True]


class TestApart:
    @pytest.mark.parametrize(
        ("source", "output", "error"),
        [
            ("a", "a", OutputExistsError),
            ("a", "b/../a", OutputExistsError),
            ("a", "link", OutputExistsError),
            ("a.partial", "a", OutputExistsError),
            ("a.failed", "a", OutputExistsError),
            ("a/b", "a", OutputExistsError),
            ("a", "a/b", UsageError),
            ("a", "link/b/c", UsageError),
            ("a", ".", OutputExistsError),
            ("a", "/", OutputExistsError),
            ("s3://b/a", "s3://b/a", OutputExistsError),
            ("s3://b/a", "s3://b//a/", OutputExistsError),
            ("s3://b/a/c", "s3://b/a", OutputExistsError),
            ("s3://b/a", "s3://b", OutputExistsError),
            ("s3://b/a", "s3://b/a/c", UsageError),
            ("s3://b/a/model.gguf", "s3://b/a", OutputExistsError),
        ],
    )
    def test_source_and_output_that_overlap(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, output: str, error: type[LpconvError]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        if not source.startswith("s3://"):
            Path(source).mkdir(parents=True)
        Path("b").mkdir()
        Path("link").symlink_to("a")
        with pytest.raises(error) as caught:
            check_apart(source, output)
        assert caught.value.hint

    @pytest.mark.parametrize(
        ("source", "output"),
        [
            ("a", "ab"),
            ("ab", "a"),
            ("a", "b/a"),
            ("a", "s3://b/a"),
            ("s3://b/a", "s3://b/ab"),
            ("s3://b/ab", "s3://b/a"),
            ("s3://b/a", "gs://b/a"),
        ],
    )
    def test_neighbours(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, output: str) -> None:
        monkeypatch.chdir(tmp_path)
        check_apart(source, output)

    @pytest.mark.parametrize("output", [".", "..", "/", "a/.."])
    def test_directories_that_have_no_name_exist(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
    ) -> None:
        (tmp_path / "a").mkdir()
        monkeypatch.chdir(tmp_path / "a")
        Path("a").mkdir()
        with pytest.raises(OutputExistsError):
            Staging(Path(output), {}, resume=False, force=True)


@pytest.mark.parametrize("how", [{"resume": True}, {"force": True}])
def test_a_link_in_place_of_the_journal_is_not_followed(begin: Begin, output: Path, how: dict[str, bool]) -> None:
    victim = output.with_name("victim")
    victim.write_text("mine")
    partial = folder_next_to(output, ".partial")
    partial.mkdir()
    (partial / JOURNAL).symlink_to(victim)
    with pytest.raises(ResourceError, match="symbolic"):
        begin(**how)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", [MARKER, SUMS])
def test_an_output_whose_records_are_pipes_is_refused(output: Path, name: str) -> None:
    output.mkdir()
    os.mkfifo(output / name)
    with pytest.raises(InputError, match="regular"):
        check_is_output(output)
