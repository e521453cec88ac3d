"""What a manifest may say, in each of its three languages, and how its mistakes are reported."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from lpconv.batch.kinds import COMMON_FIELDS, KINDS
from lpconv.batch.manifest import load_manifest
from lpconv.batch.reading import manifest_schema
from lpconv.bench.options import Effort
from lpconv.cli.main import app
from lpconv.errors import InputError, UsageError
from lpconv.plan.options import ConvertOptions, FormatRule
from lpconv.train.options import FinetuneOptions
from lpconv.train.recipes import arithmetic

YAML = """
version: 1
defaults: {method: unit, format: e4m3fn, max-memory: 4GB, gates: ["sqnr>=25"]}
jobs:
  - {id: bert-fp8, model: google-bert/bert-large-uncased, revision: main, output: out/bert}
  - id: llama
    model: ./llama-7b
    format: bf16
    rules: [{match: "re:.*down_proj$", format: fp16}, {match: lm_head, keep: true}]
    force: yes
"""
TOML = """
version = 1
[defaults]
method = "unit"
format = "e4m3fn"
max_memory = "4GB"
gates = ["sqnr>=25"]
[[jobs]]
id = "bert-fp8"
model = "google-bert/bert-large-uncased"
revision = "main"
output = "out/bert"
[[jobs]]
id = "llama"
model = "./llama-7b"
format = "bf16"
rules = [{match = "re:.*down_proj$", format = "fp16"}, "lm_head=keep"]
force = true
"""
JSON = json.dumps(
    {
        "version": 1,
        "defaults": {"method": "unit", "format": "e4m3fn", "max-memory": 4_000_000_000, "gates": "sqnr>=25"},
        "jobs": [
            {"id": "bert-fp8", "model": "google-bert/bert-large-uncased", "revision": "main", "output": "out/bert"},
            {
                "id": "llama",
                "model": "./llama-7b",
                "format": "bf16",
                "rules": [{"match": "re:.*down_proj$", "format": "fp16"}, {"match": "lm_head", "keep": True}],
                "force": True,
            },
        ],
    }
)
_FP8 = {"format": "e4m3fn", "layout": "compressed-tensors"}


def write(folder: Path, text: str, suffix: str = ".yaml") -> Path:
    path = folder / f"jobs{suffix}"
    path.write_text(text, encoding="utf-8")
    return path


def one_job(folder: Path, **settings: Any) -> Path:
    job = {"id": "a", "model": "gpt2"} | settings
    return write(folder, json.dumps({"version": 1, "jobs": [job]}), ".json")


class TestLanguages:
    @pytest.mark.parametrize(("suffix", "text"), [(".yaml", YAML), (".yml", YAML), (".toml", TOML), (".json", JSON)])
    def test_all_say_the_same(self, tmp_path: Path, suffix: str, text: str) -> None:
        bert, llama = load_manifest(write(tmp_path, text, suffix)).jobs
        assert (bert.id, bert.model) == ("bert-fp8", "google-bert/bert-large-uncased")
        assert bert.output == tmp_path / "out/bert"
        assert bert.options == ConvertOptions(
            method="unit",
            format="e4m3fn",
            max_memory=4 * 10**9,
            gates=("sqnr>=25",),
            revision="main",
        )
        assert llama.model == str(tmp_path / "llama-7b")
        assert llama.output == tmp_path / "out/llama"
        assert llama.options.rules == (
            FormatRule(pattern="re:.*down_proj$", format="fp16"),
            FormatRule(pattern="lm_head", format="keep"),
        )
        assert llama.options.force

    @pytest.mark.parametrize(
        ("suffix", "text", "says"),
        [
            (".yaml", "version: 1\nversion: 1\njobs: []", "`version`"),
            (".yaml", "jobs: [", "YAML"),
            (".yaml", "a: &a [*a]", "recursive"),
            (".toml", "version = ", "TOML"),
            (".json", '{"version": 1, "version": 1}', "`version`"),
            (".json", "[" * 100_000, "JSON"),
            (".ini", "", "`.ini`"),
        ],
    )
    def test_what_does_not_parse(self, tmp_path: Path, suffix: str, text: str, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            load_manifest(write(tmp_path, text, suffix))

    def test_a_manifest_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"none\.yaml`"):
            load_manifest(tmp_path / "none.yaml")

    def test_a_small_file_that_unfolds_to_a_huge_one(self, tmp_path: Path) -> None:
        anchors = "".join(f"  - &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(30))
        with pytest.raises(UsageError, match=r"jobs\[0\]: .*mapping") as caught:
            load_manifest(write(tmp_path, f"version: 1\njobs:\n  - &a0 [x, x]\n{anchors}"))
        assert len(caught.value.message) < 1000

    def test_a_manifest_that_is_not_text(self, tmp_path: Path) -> None:
        (tmp_path / "jobs.yaml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(UsageError, match="utf-8"):
            load_manifest(tmp_path / "jobs.yaml")


class TestYamlTraps:
    """YAML 1.1 would read `on`, `no`, `010` and `1e3` as a boolean, a boolean, eight and text."""

    def job(self, tmp_path: Path, settings: str) -> Any:
        return load_manifest(write(tmp_path, f"version: 1\njobs:\n  - {{id: a, model: gpt2, {settings}}}")).jobs[0]

    @pytest.mark.parametrize(("word", "value"), [("on", True), ("Yes", True), ("no", False), ("false", False)])
    def test_flags(self, tmp_path: Path, word: str, value: bool) -> None:
        assert self.job(tmp_path, f"force: {word}").options.force is value

    def test_a_revision_of_digits_stays_as_written(self, tmp_path: Path) -> None:
        assert self.job(tmp_path, "revision: 0123456").options.revision == "0123456"
        assert self.job(tmp_path, "revision: 1e5").options.revision == "1e5"

    def test_a_model_called_no(self, tmp_path: Path) -> None:
        assert load_manifest(write(tmp_path, "version: 1\njobs: [{id: no, model: on}]")).jobs[0].model == "on"

    def test_null_takes_the_default_back(self, tmp_path: Path) -> None:
        text = "version: 1\ndefaults: {method: collage, residual: int8}\njobs: [{id: a, model: gpt2, residual: null}]"
        assert load_manifest(write(tmp_path, text)).jobs[0].options.residual is None


class TestMistakes:
    @pytest.mark.parametrize(
        ("settings", "says", "hint"),
        [
            ({"fromat": "fp16"}, r"^jobs.json: jobs\[0\].fromat: unknown", "`format`"),
            ({"max-shard-sice": 1}, r"jobs\[0\].max-shard-sice: unknown", "`max_shard_size`"),
            ({"bits": 3.7}, r"jobs\[0\].bits: unknown", "`budget_bits`"),
            ({"resume": True}, r"jobs\[0\].resume: unknown", "--resume"),
            ({"format": "fp61"}, r"jobs\[0\].format: .*`fp61`", "`fp16`"),
            ({"method": 3}, r"jobs\[0\].method: .* `3`", "quotes"),
            ({"force": "maybe"}, r"jobs\[0\].force: .* `maybe`", "true"),
            ({"workers": 0}, r"jobs\[0\].workers: .*`0`", "2"),
            ({"method": "multipoint", "budget_bits": "nan"}, r"jobs\[0\].budget_bits: .*`nan`", "4.5"),
            ({"method": "multipoint", "budget_bits": 3}, r"jobs\[0\] \(a\): .* 3 bits", " 4, "),
            ({"workers": True}, r"jobs\[0\].workers: .*`True`", "2"),
            ({"max_memory": "lots"}, r"jobs\[0\].max_memory: size `lots`", "4GB"),
            ({"max_memory": 1.5}, r"jobs\[0\].max_memory: .*size", "4GB"),
            ({"include": [1]}, r"jobs\[0\].include\[0\]: .*`1`", "quotes"),
            ({"gates": ["sqnr>>25"]}, r"jobs\[0\].gates\[0\]: gate `sqnr>>25`", "sqnr>=25"),
            ({"rules": [{"match": "a"}]}, r"jobs\[0\].rules\[0\]: .*rule", "keep: true"),
            ({"rules": [{"match": "a", "format": "fp16", "keep": True}]}, r"rules\[0\]: .*rule", "keep: true"),
            ({"rules": [{"match": "a", "frmat": "fp16"}]}, r"jobs\[0\].rules\[0\].frmat: unknown", "`format`"),
            ({"rules": "a=fp16"}, r"jobs\[0\].rules: .*list", "*lm_head*"),
            ({"include": "re:("}, r"jobs\[0\] \(a\): pattern `re:\(`", "escape"),
            ({"residual": "int8"}, r"jobs\[0\] \(a\): .*`unit` .*residual", "collage"),
            ({"method": "collage", "format": "e5m2"}, r"jobs\[0\] \(a\): .*`collage`", "bf16"),
            ({"max_memory": 1, "max-memory": 1}, r"jobs\[0\].max-memory: .*twice", ""),
            ({"id": "../a"}, r"jobs\[0\].id: `../a`", "letters"),
            ({"model": ""}, r"jobs\[0\].model: .*nothing", "quotes"),
            ({"output": 1}, r"jobs\[0\].output: .*`1`", "quotes"),
            ({"kind": "fintune"}, r"jobs\[0\].kind: .*`fintune`", "`finetune`"),
            ({"steps": 5}, r"jobs\[0\].steps: unknown", "kind: finetune"),
            ({"kind": "finetune", "stesp": 5}, r"jobs\[0\].stesp: unknown", "`steps`"),
            ({"kind": "finetune", "verify": "none"}, r"jobs\[0\].verify: unknown", "kind: convert"),
            ({"kind": "finetune", "recipe": "unit-fp9"}, r"recipe: .*`unit-fp9`", "`unit-fp8`"),
            ({"kind": "finetune", "gates": "sqnr>=3"}, r"gates: .*`sqnr`", "loss_gap"),
            ({"kind": "finetune", "lr": 0}, r"jobs\[0\].lr: .*above", ""),
            ({"kind": "finetune", "warmup": 2}, r"jobs\[0\].warmup: .* 1", "0.1"),
            ({"kind": "finetune", "recipe": "fp32", "optimizer": "collage-plus"}, r"jobs\[0\] \(a\): opti", "--prec"),
            (_FP8 | {"calibrate": "demo", "split": 2}, r"jobs\[0\] \(a\): .*--calibrate", "process"),
            ({"kind": "bench", "mode": ["infer", "trian"]}, r"jobs\[0\].mode\[1\]: .*`trian`", "`train`"),
            ({"kind": "bench", "batch": [1, 0]}, r"jobs\[0\].batch\[1\]: .*`0`", ""),
            ({"kind": "probe", "gates": "x"}, r"jobs\[0\].gates: unknown", "kind: "),
            ({"model": "job:b"}, r"jobs\[0\].model: .*`b`", ""),
            ({"needs": ["a"]}, r"jobs\[0\].needs: .*`a`", ""),
        ],
        ids=lambda v: str(v)[:40],
    )
    def test_a_bad_setting_is_named_by_its_place(
        self, tmp_path: Path, settings: dict[str, Any], says: str, hint: str
    ) -> None:
        with pytest.raises(UsageError, match=says) as caught:
            load_manifest(one_job(tmp_path, **settings))
        assert hint in str(caught.value.hint)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "jobs.yaml: manifest: .*mapping.* nothing"),
            ("[]", r"manifest: .*mapping.* `\[\]`"),
            ("jobs: [{id: a, model: b}]", "version: missing"),
            ("{version: 2, jobs: [{id: a, model: b}]}", "version: `2`"),
            ("version: 1", "jobs: .*list .*one"),
            ("{version: 1, jobs: {id: a}}", "jobs: .*list"),
            ("{version: 1, jobs: [a]}", r"jobs\[0\]: .*`a`"),
            ("{version: 1, jobs: [{model: a}]}", r"jobs\[0\]: `id`"),
            ("{version: 1, jobs: [{id: a}]}", r"jobs\[0\]: `model`"),
            ("{version: 1, job: []}", "job: unknown"),
            ("{version: 1, defaults: {output: x}, jobs: [{id: a, model: b}]}", "defaults.output: unknown"),
            ("{version: 1, jobs: [{id: a, model: b}, {id: a, model: c}]}", r"jobs\[1\].id: `a`.* jobs\[0\]"),
            ("{version: 1, jobs: [{id: a, model: b, output: x}, {id: c, model: d, output: ./y/../x}]}", "overlap"),
            ("{version: 1, jobs: [{id: a, model: b, output: x}, {id: c, model: d, output: x/y}]}", "overlap"),
            ("{version: 1, jobs: [{id: a, model: b, output: x/y}, {id: c, model: d, output: x}]}", "overlap"),
            ("{version: 1, jobs: [{id: a, model: b, output: x}, {id: c, model: d, output: x.failed}]}", "overlap"),
            ("{version: 1, jobs: [{id: a, model: b, output: x.partial/y}, {id: c, model: d, output: x}]}", "overlap"),
            ("{version: 1, jobs: [{id: a, model: ./x, output: x}]}", "itself"),
        ],
    )
    def test_a_bad_manifest_is_refused_as_a_whole(self, tmp_path: Path, text: str, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            load_manifest(write(tmp_path, text))

    def test_a_job_that_comes_later_is_not_yet_known(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="`b`") as caught:
            load_manifest(write(tmp_path, "{version: 1, jobs: [{id: a, model: 'job:b'}, {id: b, model: demo}]}"))
        assert caught.value.hint == "known: none"


class TestPaths:
    def test_models_are_paths_where_they_look_like_one_or_are_there(self, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "demo").mkdir()
        jobs = [{"id": f"j{i}", "model": model} for i, model in enumerate(["mine", "gpt2", "../x", "demo", "./demo"])]
        path = write(tmp_path, json.dumps({"version": 1, "jobs": jobs}), ".json")
        models = [job.model for job in load_manifest(path).jobs]
        assert models == [str(tmp_path / "mine"), "gpt2", str(tmp_path.parent / "x"), "demo", str(tmp_path / "demo")]

    def test_the_lock_lies_beside_the_manifest(self, tmp_path: Path) -> None:
        manifest = load_manifest(one_job(tmp_path))
        assert manifest.lock_path == tmp_path / "jobs.lock.json"

    def test_nothing_is_expanded_in_names(self, tmp_path: Path) -> None:
        assert load_manifest(one_job(tmp_path, output="${HOME}/x")).jobs[0].output == tmp_path / "${HOME}/x"

    def test_a_model_may_stand_in_the_defaults(self, tmp_path: Path) -> None:
        text = "{version: 1, defaults: {model: gpt2}, jobs: [{id: a}, {id: b, model: opt-125m}]}"
        assert [job.model for job in load_manifest(write(tmp_path, text)).jobs] == ["gpt2", "opt-125m"]


class TestKinds:
    def jobs(self, tmp_path: Path, *jobs: dict[str, Any], **defaults: Any) -> Any:
        document = {"version": 1, "defaults": defaults, "jobs": list(jobs)}
        return load_manifest(write(tmp_path, json.dumps(document), ".json")).jobs

    def test_options_are_the_records_of_the_commands(self, tmp_path: Path) -> None:
        tune = {"id": "t", "kind": "finetune", "model": "demo", "recipe": "unit-fp8", "steps": 5, "loss_scale": None}
        bench = {"id": "b", "kind": "bench", "model": "bert-base", "format": ["fp8", "bf16"], "seq": 64, "min_time": 0}
        probe = {"id": "p", "kind": "probe", "model": "demo", "steps": 1, "calibrate": True}
        tuned, benched, probed = (job.options for job in self.jobs(tmp_path, tune, bench, probe))
        assert tuned == FinetuneOptions(arithmetic=arithmetic(recipe="unit-fp8"), steps=5)
        assert (benched.formats, benched.seqs, benched.batches) == (("fp8", "bf16"), (64,), ())
        assert benched.effort == Effort(min_seconds=0)
        assert (probed.steps, probed.calibrate, probed.data) == (1, True, None)
        assert KINDS["probe"].words(probed) == "1 step"

    def test_defaults_of_conversions_stand_alone_and_of_other_kinds_under_their_name(self, tmp_path: Path) -> None:
        converted, tuned = self.jobs(
            tmp_path, {"id": "a"}, {"id": "b", "kind": "finetune", "steps": 7},
            model="gpt2", gates="sqnr>=25", format="bf16", finetune={"steps": 5, "gates": "loss_gap<=1"},
        )  # fmt: skip
        assert (converted.model, converted.options.gates, converted.options.format) == ("gpt2", ("sqnr>=25",), "bf16")
        assert (tuned.model, tuned.options.gates, tuned.options.steps) == ("gpt2", ("loss_gap<=1",), 7)

    def test_a_model_may_be_the_output_of_an_earlier_job(self, tmp_path: Path) -> None:
        first, second = self.jobs(
            tmp_path,
            {"id": "a", "model": "gpt2", "output": "x"},
            {"id": "b", "kind": "bench", "model": "job:a", "needs": "a"},
        )
        assert second.model == str(first.output) == str(tmp_path / "x")
        assert second.needs == ("a",)

    @pytest.mark.parametrize(("source", "resolved"), [("./model", "{}/model"), ("owner/model", "owner/model")])
    def test_a_source_lies_beside_the_manifest(self, tmp_path: Path, source: str, resolved: str) -> None:
        (job,) = load_manifest(one_job(tmp_path, kind="finetune", recover=True, source=source)).jobs
        assert isinstance(job.options, FinetuneOptions)
        assert job.options.source == resolved.format(tmp_path)

    def test_data_lie_beside_the_manifest_where_they_are_there(self, tmp_path: Path) -> None:
        (tmp_path / "corpus.txt").write_text("x")
        job = {"kind": "finetune", "model": "demo"}
        here, hub = self.jobs(
            tmp_path, {"id": "a", "data": "corpus.txt", **job}, {"id": "b", "data": "owner/set", **job}
        )
        assert (here.options.data, hub.options.data) == (str(tmp_path / "corpus.txt"), "owner/set")

    def test_a_wrong_default_is_named_by_its_place(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"defaults.finetune.stesp: unknown"):
            self.jobs(tmp_path, {"id": "a", "model": "b"}, finetune={"stesp": 3})


# A value of every setting that a manifest accepts, other than the default.
EXAMPLES: dict[str, dict[str, Any]] = {
    "convert": {
        "scheme": "W4A16",
        "method": "scalify", "format": "e5m2", "residual": "int8", "layout": "compressed-tensors", "scale": "exact",
        "granularity": "row", "calibrate": "demo", "rounding": "gptq", "calibration_tokens": 64, "calibration_seed": 1,
        "input_scales": True, "inputs": "dynamic",
        "include": ["a.*"], "exclude": "b.*",
        "rules": ["a=keep"], "revision": "v1", "max_memory": "1GB", "workers": 2, "max_shard_size": 1000,
        "verify": "none", "gates": ["sqnr>=1"], "force": True, "trust_remote_code": True, "budget_bits": 5.25,
        "points_max": 2, "cache": True, "allow_missing": True, "allow_mixed_groups": True, "kv_cache": "fp8",
    },
    "finetune": {
        "grad_accum": 2, "gradient_checkpointing": True,
        "recipe": "fp32", "precision": "fp8", "method": "unit", "optimizer": "bf16", "rounding": "stochastic",
        "loss_scale": 1024, "loss_scale_floor": "0:1", "task": "clm", "data": "x/y", "eval_data": "x/z",
        "text_column": "t", "label_column": "l", "seq_len": 8, "steps": 3, "batch_size": 2, "lr": "1e-3",
        "lr_rule": "unit", "schedule": "cosine", "warmup": 0.5, "weight_decay": 0, "beta2": 0.9, "clip": 0, "seed": 1,
        "seeds": 2, "twin": "none", "eval_every": 0, "eval_batches": 1, "save_every": 0, "lca": True,
        "calibrate": True, "check_gradients": False, "critical": "*.down_proj", "operand_scale": "tensor",
        "save": "plain", "log_to": ["wandb"], "compile": True, "max_memory": "1GB", "revision": "v1",
        "gates": "loss<=9", "force": True, "allow_missing": True, "recover": True, "lora": 4, "source": "x/s",
    },
    "bench": {
        "format": ["bf16"], "method": "mx", "mode": "train", "optimizer": "collage-plus", "layers": 2, "batch": 3,
        "seq": [1, 2], "baseline": "fp32", "compile": "off", "device": "cpu", "threads": 1, "min_iters": 1,
        "min_time": 0, "rounds": 1, "launches": 1, "processes": 2, "parallel": "fsdp2", "seed": 1,
        "compare": "old.json", "gates": "speedup>=1", "force": True, "allow_missing": True, "revision": "v1",
    },
    "probe": {
        "data": "x.txt", "steps": 1, "batch_size": 1, "seq_len": 8, "every": 2, "calibrate": True, "noise": True,
        "seed": 1, "revision": "v1", "force": True, "allow_missing": True,
    },
}  # fmt: skip
# Settings that need others beside them.
_INT4 = {"format": "int4", "granularity": "group:32", "calibrate": "demo"}
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("convert", "layout"): {"format": "e4m3fn"},
    ("convert", "residual"): {"method": "collage"},
    ("convert", "calibrate"): _FP8,
    ("convert", "rounding"): _FP8 | {"calibrate": "demo"},
    ("convert", "calibration_tokens"): _INT4 | {"rounding": "gptq"},
    ("convert", "calibration_seed"): _INT4 | {"rounding": "gptq"},
    ("convert", "input_scales"): _FP8 | {"rounding": "gptq", "calibrate": "demo"},
    ("convert", "inputs"): {"scheme": "MXFP4A16"},
    ("convert", "kv_cache"): {"scheme": "FP8_DYNAMIC"},
    ("finetune", "source"): {"recover": True},
    ("convert", "budget_bits"): {"method": "multipoint"},
    ("convert", "points_max"): {"method": "multipoint"},
    ("finetune", "rounding"): {"optimizer": "bf16", "precision": "bf16"},
    ("finetune", "loss_scale_floor"): {"precision": "fp16"},
    ("finetune", "eval_data"): {"data": "x/y"},
    ("finetune", "lr_rule"): {"recipe": "native-fp8"},
}
EVERY_FIELD = [(kind, name) for kind, known in KINDS.items() for name in known.fields]


class TestFields:
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_option_of_the_command_is_a_field(self, kind: str) -> None:
        """But for those of a run, and those that say what a manifest says in another way."""
        command: Any = typer.main.get_command(app)
        options = {p.name for p in command.commands[kind].params if p.name is not None}
        options -= {"model", "output", "json", "quiet", "verbose", "resume", "dry_run", "help"}
        options -= {"list_recipes", "list_schemes", "measure", "pack", "shard", "finish"}  # a manifest has `split`
        options -= {"rivals", "save", "html"} if kind == "bench" else set()
        options -= {"parallel"} if kind == "finetune" else set()  # jobs are not begun by torchrun
        names = {{"gate": "gates", "rule": "rules"}.get(name, name) for name in options}
        assert names | {"force"} == KINDS[kind].fields.keys()  # every job has an output to replace, a bench's too

    @pytest.mark.parametrize(("kind", "name"), EVERY_FIELD)
    @pytest.mark.parametrize("dash", [False, True])
    def test_every_field_is_read_in_both_spellings(self, tmp_path: Path, kind: str, name: str, dash: bool) -> None:
        key = name.replace("_", "-") if dash else name
        beside = BESIDE.get((kind, name), {})
        options = load_manifest(one_job(tmp_path, kind=kind, **{**beside, key: EXAMPLES[kind][name]})).jobs[0].options
        assert options != KINDS[kind].options(beside)

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_schema_knows_exactly_the_keys_that_are_read(self, kind: str) -> None:
        schema = manifest_schema()
        jobs = schema["properties"]["jobs"]["items"]["oneOf"]
        job = next(s for s in jobs if s["properties"]["kind"]["const"] == kind)
        keys = (*COMMON_FIELDS, *KINDS[kind].fields)
        assert set(job["properties"]) == {*keys, *(key.replace("_", "-") for key in keys)}
        assert not job["additionalProperties"]
        assert schema["properties"]["version"] == {"const": 1}
        assert json.loads(json.dumps(schema)) == schema

    def test_the_schema_knows_bits_of_rules(self, tmp_path: Path) -> None:
        rule = {"match": "*down_proj*", "format": 4.5}
        (read,) = load_manifest(one_job(tmp_path, budget_bits=3.7, rules=[rule])).jobs[0].options.rules
        assert read.bits == 4.5
        rules = manifest_schema()["properties"]["defaults"]["properties"]["rules"]
        assert {"type": "number"} in rules["items"]["anyOf"][1]["properties"]["format"]["anyOf"]
