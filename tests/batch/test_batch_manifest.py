"""What a manifest may say, in each of its three languages, and how its mistakes are reported."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from lpconv.batch.fields import FIELDS
from lpconv.batch.manifest import JOB_KEYS, load_manifest
from lpconv.batch.schema import manifest_schema
from lpconv.convert.options import ConvertOptions, FormatRule, with_defaults
from lpconv.errors import InputError, UsageError

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
            method="unit", format="e4m3fn", max_memory=4 * 10**9, gates=("sqnr>=25",), revision="main"
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
            (".yaml", "version: 1\nversion: 1\njobs: []", "`version` is there twice"),
            (".yaml", "jobs: [", "not valid YAML"),
            (".yaml", "a: &a [*a]", "recursive"),
            (".toml", "version = ", "not valid TOML"),
            (".json", '{"version": 1, "version": 1}', "`version` is there twice"),
            (".json", "[" * 100_000, "not valid JSON"),
            (".ini", "", "unknown kind of manifest `.ini`"),
        ],
    )
    def test_what_does_not_parse(self, tmp_path: Path, suffix: str, text: str, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            load_manifest(write(tmp_path, text, suffix))

    def test_a_manifest_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="cannot read"):
            load_manifest(tmp_path / "none.yaml")

    def test_a_small_file_that_unfolds_to_a_huge_one(self, tmp_path: Path) -> None:
        anchors = "".join(f"  - &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(30))
        with pytest.raises(UsageError, match=r"jobs\[0\]: expected a mapping") as caught:
            load_manifest(write(tmp_path, f"version: 1\njobs:\n  - &a0 [x, x]\n{anchors}"))
        assert len(caught.value.message) < 1000

    def test_a_manifest_that_is_not_text(self, tmp_path: Path) -> None:
        (tmp_path / "jobs.yaml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(UsageError, match="not UTF-8"):
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

    def test_numbers(self, tmp_path: Path) -> None:
        options = self.job(tmp_path, "workers: 2, max_memory: 512MiB").options
        assert (options.workers, options.max_memory) == (2, 512 * 2**20)

    def test_a_date_is_no_date(self, tmp_path: Path) -> None:
        assert self.job(tmp_path, "revision: 2024-01-02").options.revision == "2024-01-02"

    def test_null_takes_the_default_back(self, tmp_path: Path) -> None:
        text = "version: 1\ndefaults: {method: collage, residual: int8}\njobs: [{id: a, model: gpt2, residual: null}]"
        assert load_manifest(write(tmp_path, text)).jobs[0].options.residual == "bf16"


class TestMistakes:
    @pytest.mark.parametrize(
        ("settings", "says", "hint"),
        [
            ({"fromat": "fp16"}, r"^jobs.json: jobs\[0\].fromat: unknown key", "did you mean `format`?"),
            ({"max-shard-sice": 1}, r"jobs\[0\].max-shard-sice: unknown key", "did you mean `max_shard_size`?"),
            ({"resume": True}, r"jobs\[0\].resume: unknown key", "--resume"),
            ({"format": "fp61"}, r"jobs\[0\].format: unknown format `fp61`", "did you mean `fp16`?"),
            ({"method": 3}, r"jobs\[0\].method: expected text, not `3`", "quotes"),
            ({"force": "maybe"}, r"jobs\[0\].force: expected true or false, not `maybe`", "true or false"),
            ({"workers": 0}, r"jobs\[0\].workers: expected a whole number", "2"),
            ({"method": "multipoint", "budget_bits": "nan"}, r"jobs\[0\].budget_bits: expected a number", "4.5"),
            ({"method": "multipoint", "budget_bits": 3}, r"jobs\[0\] \(a\): a budget of 3 bits", "more than 4"),
            ({"workers": True}, r"jobs\[0\].workers: expected a whole number", "2"),
            ({"max_memory": "lots"}, r"jobs\[0\].max_memory: size `lots`", "4GB"),
            ({"max_memory": 1.5}, r"jobs\[0\].max_memory: expected a size", "4GB"),
            ({"include": [1]}, r"jobs\[0\].include: expected text", "quotes"),
            ({"gates": ["sqnr>>25"]}, r"jobs\[0\].gates: gate `sqnr>>25`", "sqnr>=25"),
            ({"rules": [{"match": "a"}]}, r"jobs\[0\].rules\[0\]: a rule has", "keep: true"),
            ({"rules": [{"match": "a", "format": "fp16", "keep": True}]}, r"rules\[0\]: a rule has", "keep: true"),
            ({"rules": [{"match": "a", "frmat": "fp16"}]}, r"jobs\[0\].rules\[0\].frmat: unknown key", "`format`"),
            ({"rules": "a=fp16"}, r"jobs\[0\].rules: expected a list", "match"),
            ({"include": "re:("}, r"jobs\[0\] \(a\): pattern `re:\(` is no regular expression", "escape"),
            ({"residual": "int8"}, r"jobs\[0\] \(a\): method `unit` has no residual", "collage"),
            ({"method": "collage", "format": "e5m2"}, r"jobs\[0\] \(a\): method `collage` does not write", "bf16"),
            ({"max_memory": 1, "max-memory": 1}, r"jobs\[0\].max-memory: given twice", "keep one"),
            ({"id": "../a"}, r"jobs\[0\].id: `../a` is no id", "letters"),
            ({"model": ""}, r"jobs\[0\].model: expected text, not nothing", "quotes"),
            ({"output": 1}, r"jobs\[0\].output: expected text", "quotes"),
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
            ("", "jobs.yaml: manifest: expected a mapping, not nothing"),
            ("[]", r"manifest: expected a mapping, not `\[\]`"),
            ("jobs: [{id: a, model: b}]", "version: missing"),
            ("{version: 2, jobs: [{id: a, model: b}]}", "version: `2` is unknown"),
            ("version: 1", "jobs: expected a list with at least one job"),
            ("{version: 1, jobs: {id: a}}", "jobs: expected a list"),
            ("{version: 1, jobs: [a]}", r"jobs\[0\]: expected a mapping, not `a`"),
            ("{version: 1, jobs: [{model: a}]}", r"jobs\[0\]: `id` is missing"),
            ("{version: 1, jobs: [{id: a}]}", r"jobs\[0\]: `model` is missing"),
            ("{version: 1, job: []}", "job: unknown key"),
            ("{version: 1, defaults: {output: x}, jobs: [{id: a, model: b}]}", "defaults.output: unknown key"),
            ("{version: 1, jobs: [{id: a, model: b}, {id: a, model: c}]}", r"jobs\[1\].id: `a` is the id of jobs\[0\]"),
            ("{version: 1, jobs: [{id: a, model: b, output: x}, {id: c, model: d, output: ./y/../x}]}", "overlap"),
            ("{version: 1, jobs: [{id: a, model: b, output: x}, {id: c, model: d, output: x/y}]}", "overlap"),
            ("{version: 1, jobs: [{id: a, model: ./x, output: x}]}", "is the model itself"),
        ],
    )
    def test_a_bad_manifest_is_refused_as_a_whole(self, tmp_path: Path, text: str, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            load_manifest(write(tmp_path, text))


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


# A value of every setting that a manifest accepts, other than the default.
EXAMPLES: dict[str, Any] = {
    "method": "scalify", "format": "e5m2", "residual": "int8", "layout": "compressed-tensors", "scale": "exact",
    "include": ["a.*"], "exclude": "b.*",
    "rules": ["a=keep"], "revision": "v1", "max_memory": "1GB", "workers": 2, "max_shard_size": 1000, "verify": "none",
    "gates": ["sqnr>=1"], "force": True, "trust_remote_code": True, "budget_bits": 5.25, "points_max": 2,
}  # fmt: skip
# Settings that only one method has.
METHOD_OF = {"residual": "collage", "budget_bits": "multipoint", "points_max": "multipoint"}


class TestFields:
    def test_every_option_of_a_conversion_is_a_field(self) -> None:
        assert {f.name for f in dataclasses.fields(ConvertOptions)} == FIELDS.keys() | {"resume"}

    @pytest.mark.parametrize("name", sorted(FIELDS))
    @pytest.mark.parametrize("dash", [False, True])
    def test_every_field_is_read_in_both_spellings(self, tmp_path: Path, name: str, dash: bool) -> None:
        key = name.replace("_", "-") if dash else name
        method: dict[str, Any] = {"layout": {"format": "e4m3fn"}}.get(name, {})
        if name in METHOD_OF:
            method = {"method": METHOD_OF[name]}
        options = load_manifest(one_job(tmp_path, **method, **{key: EXAMPLES[name]})).jobs[0].options
        assert getattr(options, name) != getattr(with_defaults(ConvertOptions(**method))[0], name)

    def test_the_schema_knows_exactly_the_keys_that_are_read(self) -> None:
        schema = manifest_schema()
        job = schema["properties"]["jobs"]["items"]
        assert set(job["properties"]) == {*JOB_KEYS, *(key.replace("_", "-") for key in JOB_KEYS)}
        assert not job["additionalProperties"]
        assert schema["properties"]["version"] == {"const": 1}
        assert json.loads(json.dumps(schema)) == schema
