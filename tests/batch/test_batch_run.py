"""Batches with a made-up converter: failures, resuming, the lock, and what CI reads."""

import hashlib
import json
import os
import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from lpconv.batch.kinds import BatchJob
from lpconv.batch.lock import Lock, read_lock
from lpconv.batch.manifest import Manifest, load_manifest
from lpconv.batch.options import BatchOptions
from lpconv.batch.run import JobsFailedError, run_batch
from lpconv.batch.runners import JobRunner
from lpconv.bench.options import BenchOptions
from lpconv.bench.outcome import final_error
from lpconv.errors import (
    InputError,
    InterruptedRunError,
    OutputExistsError,
    ResourceError,
    UsageError,
    VerificationError,
)
from lpconv.gates import BENCH_GATES, check_rows
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Progress, Silent
from lpconv.report.batch import batch_document, junit_xml
from lpconv.report.document import Table
from lpconv.results import (
    BenchResult,
    BenchRow,
    ByteCounts,
    ConvertResult,
    FileRecord,
    JobEstimate,
    PlanResult,
    RatioRecord,
    SourceRecord,
    VerifyResult,
    WeightsCheck,
    from_json,
    json_text,
    to_json,
)
from lpconv.results.batch import NOT_RUN, UP_TO_DATE, BatchResult, JobOutcome
from lpconv.results.documents import fields_from
from tests.helpers.report_examples import blocks_of, section_of, verdict_of


def file_record(path: Path) -> FileRecord:
    data = path.read_bytes()
    return FileRecord(name=path.name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


@dataclass
class Engine:
    """A converter that writes the source's bytes and the format's name. `failures` maps outputs to what they raise."""

    failures: dict[str, BaseException] = field(default_factory=dict)
    calls: list[tuple[str, ConvertOptions]] = field(default_factory=list)
    planned: list[str] = field(default_factory=list)
    version: str = "1"
    noise: str = ""
    hashes_sources: bool = True

    def source(self, model: str, options: ConvertOptions) -> SourceRecord:
        if not Path(model).is_absolute():
            return SourceRecord(name=model, resolved=f"owner/{model}", revision=options.revision or "c" * 40)
        weights = file_record(Path(model) / "model.safetensors")
        return SourceRecord(name=model, resolved=model, files=(replace(weights, sha256=self.source_hash(weights)),))

    def source_hash(self, weights: FileRecord) -> str | None:
        return weights.sha256 if self.hashes_sources else None

    def convert(self, model: str, output: Path, options: ConvertOptions) -> ConvertResult:
        self.calls.append((output.name, options))
        if output.name in self.failures:
            raise self.failures[output.name]
        source = self.source(model, options)
        output.mkdir(parents=True, exist_ok=options.force)
        weights = output / "model.safetensors"
        data = (Path(model) / "model.safetensors").read_text() if source.files else source.revision
        weights.write_text(f"{data} as {options.format}{self.noise}")
        record = file_record(weights)
        (output / "SHA256SUMS").write_text(f"{record.sha256}  {record.name}\n")
        return ConvertResult(
            method=options.method, format=str(options.format), output=str(output), source=source, tensors=(),
            files=(record,), bytes=ByteCounts(read=100, written=50), seconds=0.1, peak_rss_bytes=1,
            verify=VerifyResult(level="weights", passed=True, weights=WeightsCheck(
                max_rel_error=0.1, min_sqnr_db=71.25, worst="w", num_tensors=1, num_elements_checked=1)),
            versions={"torch": self.version},
        )  # fmt: skip

    def plan(self, model: str, output: Path, options: ConvertOptions) -> PlanResult:
        self.planned.append(output.name)
        return PlanResult(
            method=options.method, format=str(options.format), output=str(output),
            source=self.source(model, options), tensors=(), bytes=ByteCounts(read=100, written=50), shards=(),
            side_files=(), memory_bytes=7, disk_bytes=8, disk_free_bytes=9, seconds=1.5, workers=1,
        )  # fmt: skip

    @property
    def runners(self) -> dict[str, JobRunner]:
        def run(job: BatchJob, progress: Progress) -> JobOutcome:
            return JobOutcome(**fields_from(JobOutcome, self.convert(job.model, job.output, options_of(job))))

        def look(job: BatchJob) -> JobOutcome:
            planned = self.plan(job.model, job.output, options_of(job))
            estimate = JobEstimate(**fields_from(JobEstimate, planned))
            return JobOutcome(**fields_from(JobOutcome, planned), estimate=estimate)

        return {"convert": JobRunner(run=run, plan=look)}

    @property
    def ran(self) -> list[str]:
        return [name for name, _ in self.calls]


def options_of(job: BatchJob) -> ConvertOptions:
    assert isinstance(job.options, ConvertOptions)
    return job.options


@dataclass
class Recorder(Silent):
    log: list[str] = field(default_factory=list)
    result: BatchResult | None = None

    def message(self, text: str) -> None:
        self.log.append(text)

    def keep(self, result: BatchResult) -> None:
        self.result = result


def write_manifest(
    folder: Path, *, format: str = "fp16", jobs: tuple[str, ...] = ("a", "b", "c"), **more: object
) -> Manifest:
    local = folder / "local"
    local.mkdir(exist_ok=True)
    if not (local / "model.safetensors").exists():
        (local / "model.safetensors").write_text("weights")
        os.utime(local / "model.safetensors", (1e9, 1e9))
    models = {"a": "gpt2", "b": "./local", "c": "opt-125m"}
    document = {
        "version": 1,
        "defaults": {"format": format, **more},
        "jobs": [{"id": job, "model": models[job], "output": f"out/{job}"} for job in jobs],
    }
    path = folder / "jobs.json"
    path.write_text(json.dumps(document))
    return load_manifest(path)


def statuses(result: BatchResult) -> list[str]:
    return [job.status for job in result.jobs]


class TestRunning:
    def test_all_jobs_run_in_order(self, tmp_path: Path) -> None:
        engine, events = Engine(), Recorder()
        result = run_batch(write_manifest(tmp_path), engine.runners, progress=events, on_result=events.keep)
        assert engine.ran == ["a", "b", "c"]
        assert statuses(result) == ["converted"] * 3
        assert events.log == [f"[{i}/3] {job}{end}" for i, job in enumerate("abc", 1) for end in ("", ": converted")]
        assert events.result == result
        assert from_json(BatchResult, json.loads(json.dumps(to_json(result)))) == result

    def test_only_some(self, tmp_path: Path) -> None:
        engine = Engine()
        result = run_batch(write_manifest(tmp_path), engine.runners, BatchOptions(only=("c", "a")))
        assert engine.ran == ["a", "c"]
        assert [job.id for job in result.jobs] == ["a", "c"]

    def test_only_a_job_that_is_not_there(self, tmp_path: Path) -> None:
        engine = Engine()
        with pytest.raises(UsageError, match="`z`"):
            run_batch(write_manifest(tmp_path), engine.runners, BatchOptions(only=("a", "z")))
        assert engine.ran == []

    def test_a_dry_run_plans_and_writes_nothing(self, tmp_path: Path) -> None:
        engine, manifest = Engine(), write_manifest(tmp_path)
        before = sorted(tmp_path.rglob("*"))
        result = run_batch(manifest, engine.runners, BatchOptions(dry_run=True))
        assert (engine.ran, engine.planned) == ([], ["a", "b", "c"])
        assert statuses(result) == ["planned"] * 3
        assert result.dry_run
        estimate = result.jobs[0].estimate
        assert estimate is not None
        assert (estimate.memory_bytes, estimate.disk_bytes, estimate.seconds) == (7, 8, 1.5)
        assert sorted(tmp_path.rglob("*")) == before


class Terminated(BaseException):
    """What the command line's handler of SIGTERM raises."""


class TestFailures:
    def test_the_first_failure_stops_the_batch_with_its_own_error(self, tmp_path: Path) -> None:
        error = ResourceError("no room", hint="buy some")
        engine, events = Engine(failures={"b": error}), Recorder()
        with pytest.raises(ResourceError) as caught:
            run_batch(write_manifest(tmp_path), engine.runners, progress=events, on_result=events.keep)
        assert caught.value is error
        assert engine.ran == ["a", "b"]
        assert events.result is not None
        assert statuses(events.result) == ["converted", "failed", NOT_RUN]

    def test_keep_going_runs_the_rest_and_fails_in_the_end(self, tmp_path: Path) -> None:
        engine = Engine(failures={"a": VerificationError("gate", hint="h"), "b": KeyError("oops")})
        with pytest.raises(JobsFailedError, match=r"2 of 3 .*: a, ?b") as caught:
            run_batch(write_manifest(tmp_path), engine.runners, BatchOptions(keep_going=True))
        assert caught.value.exit_code == 6
        gate, bug, fine = caught.value.result.jobs
        assert gate.error is not None
        assert (gate.error.code, gate.error.kind, gate.error.hint) == (5, "verification", "h")
        assert bug.error is not None
        assert (bug.error.code, bug.error.kind) == (1, "bug")
        assert "KeyError" in "".join(bug.error.details["traceback"])
        assert fine.status == "converted"
        json.dumps(caught.value.to_dict(), allow_nan=False)

    @pytest.mark.parametrize(
        ("error", "code"), [(InterruptedRunError(15), 143), (KeyboardInterrupt(), 130), (Terminated(), 143)]
    )
    def test_an_interruption_stops_even_a_batch_that_keeps_going(
        self, tmp_path: Path, error: BaseException, code: int
    ) -> None:
        engine, events = Engine(failures={"a": error}), Recorder()
        with pytest.raises(type(error)):
            run_batch(
                write_manifest(tmp_path),
                engine.runners,
                BatchOptions(keep_going=True),
                progress=events,
                on_result=events.keep,
            )
        assert engine.ran == ["a"]
        assert events.result is not None
        assert statuses(events.result) == ["failed", NOT_RUN, NOT_RUN]
        assert events.result.jobs[0].error is not None
        assert (events.result.jobs[0].error.kind, events.result.jobs[0].error.code) == ("interrupted", code)

    def test_jobs_done_before_a_failure_are_in_the_lock(self, tmp_path: Path) -> None:
        engine, manifest = Engine(failures={"b": InputError("gone")}), write_manifest(tmp_path)
        with pytest.raises(InputError):
            run_batch(manifest, engine.runners)
        assert [e.id for e in lock_of(manifest).entries] == ["a"]


def lock_of(manifest: Manifest) -> Lock:
    lock = read_lock(manifest.lock_path)
    assert lock is not None
    return lock


class TestResume:
    def run(self, tmp_path: Path, hashes: bool = True, **settings: object) -> tuple[BatchResult, Engine]:
        engine = Engine(hashes_sources=hashes)
        manifest = write_manifest(tmp_path, **settings)  # type: ignore[arg-type]  # settings of write_manifest
        return run_batch(manifest, engine.runners, BatchOptions(resume=True)), engine

    def test_what_is_done_is_up_to_date(self, tmp_path: Path) -> None:
        self.run(tmp_path)
        result, engine = self.run(tmp_path)
        assert statuses(result) == [UP_TO_DATE] * 3
        assert engine.ran == []

    def test_jobs_not_done_are_continued(self, tmp_path: Path) -> None:
        self.run(tmp_path, jobs=("a",))
        result, engine = self.run(tmp_path)
        assert statuses(result) == [UP_TO_DATE, "converted", "converted"]
        assert all(options.resume for _, options in engine.calls)

    def test_a_dry_run_tells_what_is_left_to_do(self, tmp_path: Path) -> None:
        self.run(tmp_path, jobs=("a",))
        engine = Engine()
        result = run_batch(write_manifest(tmp_path), engine.runners, BatchOptions(dry_run=True, resume=True))
        assert statuses(result) == [UP_TO_DATE, "planned", "planned"]

    def test_force_does_not_start_a_cut_off_job_anew(self, tmp_path: Path) -> None:
        _, engine = self.run(tmp_path, jobs=("a",), force=True)
        assert (engine.calls[0][1].resume, engine.calls[0][1].force) == (True, False)

    def test_other_settings_are_refused_and_named(self, tmp_path: Path) -> None:
        self.run(tmp_path)
        with pytest.raises(OutputExistsError, match=r'format .*"bf16" .*"fp16"'):
            self.run(tmp_path, format="bf16")

    def test_a_new_gate_is_not_skipped(self, tmp_path: Path) -> None:
        self.run(tmp_path)
        with pytest.raises(OutputExistsError, match="gates"):
            self.run(tmp_path, gates="sqnr>=99")

    def test_force_makes_stale_outputs_anew_and_leaves_the_others(self, tmp_path: Path) -> None:
        self.run(tmp_path)
        (tmp_path / "local/model.safetensors").write_text("WEIGHTS")
        result, engine = self.run(tmp_path, force=True)
        assert statuses(result) == [UP_TO_DATE, "converted", UP_TO_DATE]
        assert (engine.calls[0][1].resume, engine.calls[0][1].force) == (False, True)

    @pytest.mark.parametrize(
        ("path", "text", "says"),
        [
            ("local/model.safetensors", "retrained", "source .*model.safetensors"),
            ("local/model.safetensors", "WEIGHTS", "source .*model.safetensors"),
            ("out/b/model.safetensors", "cut", "model.safetensors"),
            ("out/b/SHA256SUMS", "other", "SHA256SUMS"),
        ],
    )
    def test_changed_files_are_noticed(self, tmp_path: Path, path: str, text: str, says: str) -> None:
        self.run(tmp_path, jobs=("b",))
        (tmp_path / path).write_text(text)
        with pytest.raises(OutputExistsError, match=says):
            self.run(tmp_path, jobs=("b",))

    def test_a_source_touched_but_not_changed_is_up_to_date(self, tmp_path: Path) -> None:
        self.run(tmp_path, jobs=("b",))
        (tmp_path / "local/model.safetensors").touch()
        assert statuses(self.run(tmp_path, jobs=("b",))[0]) == [UP_TO_DATE]

    def test_a_touched_source_counts_as_changed_where_its_hash_is_not_known(self, tmp_path: Path) -> None:
        self.run(tmp_path, hashes=False, jobs=("b",))
        assert statuses(self.run(tmp_path, jobs=("b",))[0]) == [UP_TO_DATE]
        (tmp_path / "local/model.safetensors").touch()
        with pytest.raises(OutputExistsError, match=r"source .*model\.safetensors"):
            self.run(tmp_path, jobs=("b",))

    def test_a_source_that_is_gone_leaves_its_output_up_to_date(self, tmp_path: Path) -> None:
        self.run(tmp_path, jobs=("a", "b"))
        manifest = load_manifest(tmp_path / "jobs.json")
        (tmp_path / "local").rename(tmp_path / "elsewhere")
        engine = Engine()
        assert statuses(run_batch(manifest, engine.runners, BatchOptions(resume=True))) == [UP_TO_DATE] * 2


@dataclass
class Bench:
    """A bench that finds one speed-up, and keeps it in its output as the real one does."""

    speedup: float = 2.0
    resumed: list[bool] = field(default_factory=list)

    def run(self, job: BatchJob, progress: Progress) -> JobOutcome:
        assert isinstance(job.options, BenchOptions)
        self.resumed.append(job.options.resume)
        ratio = RatioRecord(value=self.speedup, low=1.0, high=3.0)
        row = BenchRow(
            model="m", weights="", layers=1, format="fp8", method="unit", optimizer=None, compiled="off", mode="infer",
            batch=1, seq=8, device="cpu", emulated=True, baseline="bf16", is_baseline=False, status="ok", ratio=ratio,
        )  # fmt: skip
        gates = check_rows([BENCH_GATES.parse(text) for text in job.options.gates], [row])
        result = BenchResult(rows=(row,), gates=gates)
        job.output.mkdir(parents=True, exist_ok=True)
        (job.output / "bench.json").write_text(json_text(result))
        error = final_error(result)
        if error is not None:
            raise error
        source = SourceRecord(name=job.model, resolved=job.model)
        return JobOutcome(source=source, figures={"speedup": self.speedup})

    def runners(self, engine: Engine) -> dict[str, JobRunner]:
        return engine.runners | {"bench": JobRunner(run=self.run, plan=lambda job: JobOutcome())}


def write_mixed(folder: Path, *, gate: str = "speedup>=1", **settings: object) -> Manifest:
    """A conversion, and a bench of what it wrote."""
    bench = {"id": "speed", "kind": "bench", "model": "job:a", "gates": gate, **settings}
    path = folder / "jobs.json"
    path.write_text(json.dumps({"version": 1, "jobs": [{"id": "a", "model": "gpt2"}, bench]}))
    return load_manifest(path)


class TestKinds:
    def test_a_bench_measures_what_a_conversion_wrote(self, tmp_path: Path) -> None:
        result = run_batch(write_mixed(tmp_path), Bench().runners(Engine()))
        assert statuses(result) == ["converted", "measured"]
        assert result.jobs[1].model == str(tmp_path / "out/a")
        assert result.jobs[1].figures == {"speedup": 2.0}
        assert "speedup: 2" in rows_of(result)[1]["result"]
        assert "speedup: 2" in junit_xml(result)

    def test_a_gate_that_fails_ends_with_its_own_code_and_is_judged_again(self, tmp_path: Path) -> None:
        bench, events = Bench(speedup=0.5), Recorder()
        with pytest.raises(VerificationError, match="speedup") as caught:
            run_batch(write_mixed(tmp_path), bench.runners(Engine()), progress=events, on_result=events.keep)
        assert caught.value.exit_code == 5
        assert events.result is not None
        assert "<failure" in junit_xml(events.result)
        again = run_batch(
            write_mixed(tmp_path, gate="speedup>=0.1"), bench.runners(Engine()), BatchOptions(resume=True)
        )
        assert statuses(again) == [UP_TO_DATE, "measured"]
        assert bench.resumed == [False, True]

    def test_a_measurement_that_is_done_is_not_repeated(self, tmp_path: Path) -> None:
        bench = Bench()
        run_batch(write_mixed(tmp_path), bench.runners(Engine()))
        result = run_batch(write_mixed(tmp_path), bench.runners(Engine()), BatchOptions(resume=True))
        assert statuses(result) == [UP_TO_DATE] * 2
        with pytest.raises(OutputExistsError, match=r"seed .*1 .*0"):
            run_batch(write_mixed(tmp_path, seed=1), bench.runners(Engine()), BatchOptions(resume=True))
        forced = run_batch(
            write_mixed(tmp_path, seed=1, force=True), bench.runners(Engine()), BatchOptions(resume=True)
        )
        assert statuses(forced) == [UP_TO_DATE, "measured"]

    def test_the_lock_pins_what_is_measured_and_not_what_was_found(self, tmp_path: Path) -> None:
        manifest = write_mixed(tmp_path)
        run_batch(manifest, Bench().runners(Engine()))
        entry = lock_of(manifest).entries[1]
        assert (entry.kind, entry.model, entry.files, entry.checksums_sha256) == ("bench", "./out/a", (), None)
        assert str(tmp_path) not in manifest.lock_path.read_text()
        (tmp_path / "out").rename(tmp_path / "kept")
        other = run_batch(manifest, Bench(speedup=1.5).runners(Engine()), BatchOptions(locked=True))
        assert statuses(other) == ["converted", "measured"]
        with pytest.raises(VerificationError, match=r"speed: seed .*1 .*0"):
            run_batch(write_mixed(tmp_path, seed=1), Bench().runners(Engine()), BatchOptions(locked=True))

    def test_a_job_is_not_run_where_one_that_it_needs_failed(self, tmp_path: Path) -> None:
        engine, bench = Engine(failures={"a": InputError("gone")}), Bench()
        with pytest.raises(JobsFailedError) as caught:
            run_batch(write_mixed(tmp_path), bench.runners(engine), BatchOptions(keep_going=True))
        assert statuses(caught.value.result) == ["failed", NOT_RUN]
        (waits,) = caught.value.result.jobs[1].warnings
        assert waits.endswith(" a")
        assert bench.resumed == []

    def test_a_job_alone_wants_what_it_needs_to_be_there(self, tmp_path: Path) -> None:
        manifest = write_mixed(tmp_path)
        with pytest.raises(InputError, match=r"speed .* a, .*`"):
            run_batch(manifest, Bench().runners(Engine()), BatchOptions(only=("speed",)))


class TestLock:
    def test_it_says_what_was_resolved_and_written(self, tmp_path: Path) -> None:
        engine, manifest = Engine(), write_manifest(tmp_path)
        run_batch(manifest, engine.runners)
        hub, local, _ = lock_of(manifest).entries
        assert (hub.model, hub.resolved, hub.revision) == ("gpt2", "owner/gpt2", "c" * 40)
        assert (local.model, local.resolved, local.revision) == ("./local", "./local", None)
        assert hub.settings["format"] == "fp16"
        checksums = (tmp_path / "out/a/SHA256SUMS").read_bytes()
        assert hub.checksums_sha256 == hashlib.sha256(checksums).hexdigest()
        assert str(tmp_path) not in manifest.lock_path.read_text()

    def test_jobs_that_left_the_manifest_leave_the_lock(self, tmp_path: Path) -> None:
        engine = Engine()
        run_batch(write_manifest(tmp_path), engine.runners)
        manifest = write_manifest(tmp_path, jobs=("c", "b"), force=True)
        run_batch(manifest, engine.runners, BatchOptions(only=("b",)))
        assert [e.id for e in lock_of(manifest).entries] == ["c", "b"]

    def test_a_lock_that_cannot_be_written_is_found_out_before_the_work(self, tmp_path: Path) -> None:
        engine, manifest = Engine(), write_manifest(tmp_path)
        manifest.lock_path.with_name("jobs.lock.json.part").mkdir()
        with pytest.raises(ResourceError, match=r"jobs\.lock\.json"):
            run_batch(manifest, engine.runners)
        assert engine.ran == []

    def test_a_broken_lock_is_an_input_error(self, tmp_path: Path) -> None:
        engine, manifest = Engine(), write_manifest(tmp_path)
        manifest.lock_path.write_text("{")
        with pytest.raises(InputError, match=r"jobs\.lock\.json"):
            run_batch(manifest, engine.runners)
        assert engine.ran == []


class TestLocked:
    @pytest.fixture
    def manifest(self, tmp_path: Path) -> Manifest:
        """A manifest with its lock; the outputs are gone, as in a fresh checkout."""
        engine, manifest = Engine(), write_manifest(tmp_path)
        run_batch(manifest, engine.runners)
        (tmp_path / "out").rename(tmp_path / "kept")
        return manifest

    def test_the_same_again_passes_with_the_locked_revision(self, manifest: Manifest) -> None:
        engine, lock = Engine(), manifest.lock_path.read_bytes()
        result = run_batch(manifest, engine.runners, BatchOptions(locked=True))
        assert statuses(result) == ["converted"] * 3
        assert [options.revision for _, options in engine.calls] == ["c" * 40, None, "c" * 40]
        assert manifest.lock_path.read_bytes() == lock

    def test_another_output_fails_and_is_moved_aside(self, manifest: Manifest) -> None:
        engine = Engine(noise="!", version="2")
        with pytest.raises(VerificationError, match=r"a: files .*: model") as caught:
            run_batch(manifest, engine.runners, BatchOptions(locked=True))
        assert caught.value.exit_code == 5
        assert "torch 1 → 2" in str(caught.value.hint)
        assert not (manifest.folder / "out/a").exists()
        assert (manifest.folder / "out/a.failed/model.safetensors").exists()

    def test_changed_settings_fail_before_any_work(self, manifest: Manifest) -> None:
        engine, changed = Engine(), write_manifest(manifest.folder, format="bf16")
        with pytest.raises(VerificationError, match=r'a: format .*"bf16" .*"fp16"; b: format'):
            run_batch(changed, engine.runners, BatchOptions(locked=True))
        assert engine.ran == []

    def test_a_changed_local_source_fails_before_any_work(self, manifest: Manifest) -> None:
        (manifest.folder / "local/model.safetensors").write_text("WEIGHTS")
        engine = Engine()
        with pytest.raises(VerificationError, match=r"b: source .*model"):
            run_batch(manifest, engine.runners, BatchOptions(locked=True))
        assert engine.ran == []

    def test_a_new_job_is_not_in_the_lock(self, tmp_path: Path) -> None:
        engine = Engine()
        run_batch(write_manifest(tmp_path, jobs=("a",)), engine.runners)
        with pytest.raises(VerificationError, match=r"b: .*lock"):
            run_batch(write_manifest(tmp_path), engine.runners, BatchOptions(locked=True))

    def test_no_lock_file(self, tmp_path: Path) -> None:
        engine = Engine()
        with pytest.raises(InputError, match=r"`.*jobs\.lock\.json`"):
            run_batch(write_manifest(tmp_path), engine.runners, BatchOptions(locked=True))


@pytest.fixture
def mixed(tmp_path: Path) -> BatchResult:
    """A batch with one job of each kind: up to date, failed verification, failed otherwise, not run."""
    engine = Engine(failures={"b": VerificationError('gate "sqnr" <20> \x00\x1b[31m & more', hint="loosen it")})
    manifest = write_manifest(tmp_path)
    run_batch(manifest, engine.runners, BatchOptions(only=("a",)))
    events = Recorder()
    with pytest.raises(VerificationError):
        run_batch(manifest, engine.runners, BatchOptions(resume=True), progress=events, on_result=events.keep)
    assert events.result is not None
    return events.result


class TestReports:
    def test_junit_counts_and_escapes(self, mixed: BatchResult) -> None:
        text = junit_xml(mixed)
        assert text.startswith("<?xml version='1.0' encoding='utf-8'?>")
        suite = ET.fromstring(text).find("testsuite")
        assert suite is not None
        assert {k: suite.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
            "tests": "3", "failures": "1", "errors": "0", "skipped": "2",
        }  # fmt: skip
        failure = suite.find("testcase[@name='b']/failure")
        assert failure is not None
        assert failure.get("message") == 'gate "sqnr" <20> \ufffd\ufffd[31m & more'
        assert "hint: loosen" in str(failure.text)
        skipped = [element.get("message") for element in suite.iter("skipped")]
        assert skipped == [UP_TO_DATE, NOT_RUN]

    def test_junit_counts_other_errors_as_errors(self, tmp_path: Path) -> None:
        engine = Engine(failures={"a": InputError("gone"), "b": RuntimeError("bug")})
        with pytest.raises(JobsFailedError) as caught:
            run_batch(write_manifest(tmp_path), engine.runners, BatchOptions(keep_going=True))
        root = ET.fromstring(junit_xml(caught.value.result))
        assert (root.get("errors"), root.get("failures"), root.get("skipped")) == ("2", "0", "0")

    def test_the_table_has_a_line_per_job_and_the_hints(self, mixed: BatchResult, tmp_path: Path) -> None:
        rows = rows_of(mixed)
        assert [row["job"] for row in rows] == ["a", "b", "c"]
        assert rows[0]["status"] == UP_TO_DATE
        assert rows[1]["note"] == "verification (exit 5)"
        document = batch_document(mixed)
        assert "hint: loosen" in str(section_of(document, "Errors"))
        assert verdict_of(document).outcome == "failed"
        assert re.search(r"1 .*, 1 failed, 1 .*$", verdict_of(document).text)


def rows_of(result: BatchResult) -> list[dict[str, str]]:
    """The rows of the table of jobs, by heading."""
    (table,) = blocks_of(batch_document(result), Table)
    headings = [column.removeprefix("<") for column in table.columns]
    texts = [[cell if isinstance(cell, str) else cell.text for cell in row] for row in table.rows]
    return [dict(zip(headings, row, strict=True)) for row in texts]
