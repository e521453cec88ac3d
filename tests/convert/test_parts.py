"""One conversion by many workers: the same bytes as alone, and no part that is missing, doubled, stale or broken."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import lpconv.plan.job
from lpconv.cli.main import app
from lpconv.convert.apply import Engine
from lpconv.convert.parts import Part, convert_part, share_of
from lpconv.convert.run import convert, finish
from lpconv.data import demo_checkpoint
from lpconv.errors import InputError, LpconvError, OutputExistsError, UsageError, VerificationError
from lpconv.plan.job import open_model, prepare
from lpconv.plan.options import ConvertOptions
from lpconv.plan.plan import Plan, PlannedShard
from lpconv.plan.settings import fill_options
from lpconv.storage.checkpoint import Checkpoint
from lpconv.storage.resolve import Resolved
from lpconv.storage.staging import Staging
from tests.helpers.checkpoints import files_of, write_checkpoint

COUNTS = (1, 2, 5, 13)
COLLAGE = ConvertOptions(method="collage", residual="int8", verify="weights", workers=1)  # two files for a shard
UNIT = ConvertOptions(format="fp16", verify="weights", workers=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven shards of unequal sizes; the head in the last is tied to the embedding in the first."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(40, 16, generator=generator)
    shards = [{"model.embed_tokens.weight": embedding}]
    shards += [
        {f"model.layers.{i}.{n}.weight": torch.randn(8 + 8 * i, 16, generator=generator) for n in ("q", "k", "v")}
        | {f"model.layers.{i}.norm.weight": torch.ones(16)}
        for i in range(5)
    ]
    shards.append({"lm_head.weight": embedding.clone(), "model.norm.weight": torch.ones(16)})
    config = {"tie_word_embeddings": True}
    return write_checkpoint(tmp_path_factory.mktemp("parts") / "source", shards, config=config)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


def write_parts(source: Path, output: Path, count: int, options: ConvertOptions = UNIT) -> list[Path]:
    """Every part, the last one first; their folders in order."""
    parts = [Part(number=n, count=count) for n in range(1, count + 1)]
    for part in reversed(parts):
        convert_part(str(source), output, options, part)
    return [part.folder(output) for part in parts]


def left(output: Path) -> list[str]:
    return sorted(p.name for p in output.parent.iterdir())


@pytest.mark.parametrize("options", [UNIT, COLLAGE], ids=lambda o: o.method)
def test_any_number_of_workers_writes_the_bytes_of_one(source: Path, tmp_path: Path, options: ConvertOptions) -> None:
    alone = convert(str(source), tmp_path / "alone", options)
    for count in COUNTS:
        output = tmp_path / str(count) / "output"
        write_parts(source, output, count, options)
        assert finish(str(source), output, options).tensors == alone.tensors
        assert files_of(output) == files_of(tmp_path / "alone")
        assert left(output) == ["output"]


def test_weights_in_files_of_other_parts_share_their_scale(tmp_path: Path) -> None:
    """NVFP4's second scale is that of all weights that readers fuse: whoever writes one reads the others."""
    demo, place = str(demo_checkpoint()), tmp_path / "output"
    nvfp4 = dataclasses.replace(
        UNIT, format="e2m1", granularity="nvfp4", layout="compressed-tensors", max_shard_size=20000
    )
    convert(demo, tmp_path / "alone", nvfp4)
    shares = [share_of(_plan(demo, place, nvfp4), Part(number=n, count=5)) for n in range(1, 6)]
    homes = {t.name: n for n, share in enumerate(shares) for s in share for t in s.tensors}
    assert any(homes[t.name] != homes[f.name] for share in shares for s in share for t in s.tensors for f in t.fused)
    for number in range(1, 6):
        convert_part(demo, place, nvfp4, Part(number=number, count=5))
    finish(demo, place, nvfp4)
    assert files_of(place) == files_of(tmp_path / "alone")


def _plan(model: str, output: Path, options: ConvertOptions) -> Plan:
    options = fill_options(options)
    job = prepare(open_model(model, output, options), output, options)
    job.source.close()
    return job.plan


def test_the_rest_of_a_part_is_written_by_the_next_worker(
    source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = Engine.write_shard

    def until_the_third(self: Engine, shard: PlannedShard) -> object:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(shard.root.name)
        return write(self, shard)

    part = Part(number=1, count=2)
    convert_part(str(source), output, UNIT, Part(number=2, count=2))
    monkeypatch.setattr(Engine, "write_shard", until_the_third)
    with pytest.raises(KeyboardInterrupt):
        convert_part(str(source), output, UNIT, part)
    with pytest.raises(InputError, match=r"`.*output\.parts`.* 1/2; .*: 1/2"):
        finish(str(source), output, UNIT)
    with pytest.raises(OutputExistsError, match="interrupted"):
        convert_part(str(source), output, UNIT, part)

    monkeypatch.setattr(Engine, "write_shard", write)
    resumed = dataclasses.replace(UNIT, resume=True)
    result = convert_part(str(source), output, resumed, part)
    assert [s.shard for s in result.shards][:2] == written
    assert convert_part(str(source), output, resumed, part).shards == result.shards  # there is nothing left to do


def test_one_of_two_workers_on_a_part_loses(source: Path, output: Path) -> None:
    part = Part(number=2, count=2)
    with Staging(part.folder(output), {}, resume=False, force=False):
        for resume in (False, True):
            with pytest.raises(OutputExistsError):
                convert_part(str(source), output, dataclasses.replace(UNIT, resume=resume), part)
    shutil.rmtree(output.with_name("output.parts"))
    convert_part(str(source), output, UNIT, part)
    with pytest.raises(OutputExistsError, match="2-of-2`"):
        convert_part(str(source), output, UNIT, part)


def refused(source: Path, output: Path, exit_code: int, *named: str) -> LpconvError:
    """The error of `finish`, which names these parts and files; nothing was written."""
    before = files_of(output.parent)
    with pytest.raises(LpconvError) as caught:
        finish(str(source), output, UNIT)
    assert files_of(output.parent) == before
    assert caught.value.exit_code == exit_code
    assert all(name in caught.value.message for name in named)
    return caught.value


def test_missing_parts(source: Path, output: Path) -> None:
    assert "missing" not in refused(source, output, 3, "output.parts").details
    folders = write_parts(source, output, 5)
    shutil.rmtree(folders[1])
    shutil.rmtree(folders[3])
    assert refused(source, output, 3).details == {"missing": ["2/5", "4/5"]}


def test_doubled_parts(source: Path, output: Path) -> None:
    write_parts(source, output, 2)
    convert_part(str(source), output, UNIT, Part(number=3, count=5))
    assert refused(source, output, 8).details == {"parts": ["1-of-2", "2-of-2", "3-of-5"]}


def test_a_part_under_the_name_of_another(source: Path, output: Path) -> None:
    folders = write_parts(source, output, 2)
    shutil.rmtree(folders[1])
    shutil.copytree(folders[0], folders[1])
    refused(source, output, 8, "2-of-2`", "1/2")


def test_parts_of_other_options_sources_and_versions(
    source: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parts(source, output, 2)
    part, anew = Part(number=2, count=2), dataclasses.replace(UNIT, force=True)
    convert_part(str(source), output, dataclasses.replace(anew, format="bf16"), part)
    assert refused(source, output, 8).details == {"part": "2/2", "changed": ["options"]}

    copy = tmp_path / "copy"
    shutil.copytree(source, copy)  # the same tensors, at another time
    (copy / "model-00003-of-00007.safetensors").touch()
    convert_part(str(copy), output, anew, part)
    details = refused(source, output, 8).details
    assert details["part"] == "2/2"
    assert "files" in str(details["changed"])

    with monkeypatch.context() as patch:
        patch.setattr(lpconv.plan.job, "__version__", "0.0.0")
        convert_part(str(source), output, anew, part)
    assert "version" in refused(source, output, 8).details["changed"][0]

    convert_part(str(source), output, anew, part)
    finish(str(source), output, UNIT)


def test_machines_that_fetched_the_same_commit_agree(
    source: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        shutil.copytree(source, tmp_path / name)
    (tmp_path / "there" / "model-00002-of-00007.safetensors").touch()
    for number, (folder, commit) in enumerate([("here", "a" * 40), ("there", "a" * 40)], 1):
        origin = Resolved(name="org/name", directory=tmp_path / folder, resolved="org/name", revision=commit)
        fetched = dataclasses.replace(Checkpoint.open(tmp_path / folder), origin=origin)
        convert_part(fetched, output, UNIT, Part(number=number, count=2))
    elsewhere = dataclasses.replace(fetched, origin=dataclasses.replace(origin, revision="b" * 40))
    with pytest.raises(OutputExistsError) as caught:
        finish(elsewhere, output, UNIT)
    assert caught.value.details["part"] == "1/2"
    assert "commit" in str(caught.value.details["changed"])
    finish(fetched, output, UNIT)


def test_a_part_that_was_damaged(source: Path, output: Path) -> None:
    folder = write_parts(source, output, 2)[0]
    file = next(iter(sorted(folder.glob("*.safetensors"))))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    refused(source, output, 8, f"1-of-2/{file.name}`")
    file.unlink()
    refused(source, output, 3, f"1-of-2/{file.name}`")


def test_parts_stay_where_a_gate_fails(source: Path, output: Path) -> None:
    write_parts(source, output, 2)
    with pytest.raises(VerificationError):
        finish(str(source), output, dataclasses.replace(UNIT, gates=("sqnr>=200",)))
    assert left(output) == ["output.failed", "output.parts"]
    finish(str(source), output, UNIT)
    assert left(output) == ["output", "output.failed"]


def test_finishing_again(source: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after a part was taken over, and after publishing."""
    resumed = dataclasses.replace(UNIT, resume=True)
    write_parts(source, output, 2)
    with monkeypatch.context() as patch:
        append = Staging.append
        lines: list[object] = []

        def until_the_third(self: Staging, line: dict[str, object]) -> None:
            if len(lines) == 3:
                raise KeyboardInterrupt
            lines.append(line)
            append(self, line)

        patch.setattr(Staging, "append", until_the_third)
        with pytest.raises(KeyboardInterrupt):
            finish(str(source), output, UNIT)
    with monkeypatch.context() as patch:
        patch.setattr("lpconv.convert.run.remove_parts", lambda output: None)
        result = finish(str(source), output, resumed)
    assert left(output) == ["output", "output.parts"]
    assert finish(str(source), output, resumed) == result
    assert left(output) == ["output"]


def test_the_output_is_there(source: Path, output: Path) -> None:
    convert(str(source), output, UNIT)
    with pytest.raises(OutputExistsError, match="output`"):
        convert_part(str(source), output, UNIT, Part(number=1, count=1))
    forced = dataclasses.replace(UNIT, format="bf16", force=True)
    write_parts(source, output, 2, forced)
    assert finish(str(source), output, forced).format == "bf16"


def test_links_to_parts_are_refused_before_anything_is_published(source: Path, output: Path) -> None:
    first, second = write_parts(source, output, 2)
    first.rename(output.with_name("elsewhere"))
    first.symlink_to(output.with_name("elsewhere"))
    refused(source, output, 8, "1-of-2`", "link")
    first.unlink()
    output.with_name("elsewhere").rename(first)
    file = next(second.glob("*.safetensors"))
    file.rename(output.with_name("file"))
    file.symlink_to(output.with_name("file"))
    refused(source, output, 3, file.name)


def test_a_part_that_is_written_while_another_batch_publishes_does_not_stay(
    source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = Staging.publish

    def after_the_other(self: Staging) -> None:
        monkeypatch.undo()
        convert(str(source), output, UNIT)
        publish(self)

    monkeypatch.setattr(Staging, "publish", after_the_other)
    with pytest.raises(OutputExistsError, match="output`"):
        convert_part(str(source), output, UNIT, Part(number=1, count=2))
    assert left(output) == ["output"]


@pytest.mark.parametrize("text", ["", "3", "0/2", "3/2", "1/0", "-1/2", "1/2/3", "a/b"])
def test_what_is_no_part(text: str) -> None:
    with pytest.raises(UsageError):
        Part.parse(text)


def test_on_the_command_line(source: Path, output: Path) -> None:
    runner = CliRunner()
    command = ["convert", str(source), "-o", str(output), "-f", "fp16", "--verify", "weights", "-q"]
    assert runner.invoke(app, [*command, "--shard", "1/2", "--finish"]).exit_code == 2
    shown = [
        runner.invoke(app, [*command, "--shard", f"{n}/2", *more]).stdout for n, more in ((1, ["--json"]), (2, []))
    ]
    assert json.loads(shown[0])["kind"] == "part"
    assert "2/2" in shown[1]
    assert runner.invoke(app, ["verify", str(Part(number=1, count=2).folder(output))]).exit_code == 4
    assert runner.invoke(app, [*command, "--finish"]).exit_code == 0
    assert runner.invoke(app, ["verify", str(output)]).exit_code == 0
