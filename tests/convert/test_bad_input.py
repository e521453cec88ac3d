"""Checkpoints and requests that are wrong: each ends in one error of ours with its exit code, and nothing published."""

import errno
import itertools
import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import DEMO_TENSORS, bits_of, files_of, published, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.convert.options import ConvertOptions, FormatRule, parse_rule, parse_size
from lpconv.convert.reader import OutputReader
from lpconv.convert.restore import restore
from lpconv.convert.run import convert
from lpconv.convert.verify_output import verify_output
from lpconv.errors import (
    InputError,
    LpconvError,
    OutputExistsError,
    ResourceError,
    UnsupportedError,
    UsageError,
    VerificationError,
)
from lpconv.progress import Silent
from lpconv.results import ConvertResult, VerifyResult

Run = Callable[..., ConvertResult]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A sound checkpoint to break."""
    return write_checkpoint(tmp_path / "source")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


@pytest.fixture
def run(source: Path, output: Path) -> Run:
    """Convert the source into the output, with options by name."""

    def run(**options: Any) -> ConvertResult:
        return convert(str(source), output, ConvertOptions(**{"verify": "weights", "workers": 1, **options}))

    return run


def refusal(run: Run, output: Path, **options: Any) -> LpconvError:
    """The error that a run ends in; it has a hint, and nothing was published."""
    with pytest.raises(LpconvError) as caught:
        run(**options)
    assert caught.value.hint
    assert not published(output)
    return caught.value


class Exploit:
    """Unpickling this writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class TestPickles:
    """`pytorch_model.bin` is a pickle that anybody may have made."""

    @pytest.fixture
    def bin_file(self, source: Path) -> Path:
        (source / "model.safetensors").unlink()
        return source / "pytorch_model.bin"

    @pytest.mark.parametrize("legacy", [False, True])
    def test_code_in_a_pickle_never_runs(
        self, run: Run, output: Path, bin_file: Path, tmp_path: Path, legacy: bool
    ) -> None:
        proof = tmp_path / "the exploit ran"
        torch.save(
            {"layer.weight": torch.ones(4, 4), "x": Exploit(proof)},
            bin_file,
            _use_new_zipfile_serialization=not legacy,
        )
        error = refusal(run, output)
        assert isinstance(error, InputError)
        assert "weights_only" in str(error.hint)
        assert not proof.exists()
        torch.load(bin_file, weights_only=False)
        assert proof.exists(), "the exploit would not have worked at all"

    @pytest.mark.parametrize("legacy", [False, True])
    def test_both_formats_of_torch_are_read(self, run: Run, output: Path, bin_file: Path, legacy: bool) -> None:
        torch.save(DEMO_TENSORS, bin_file, _use_new_zipfile_serialization=not legacy)
        run(format="fp32")
        stored = load_file(output / "model.safetensors")
        assert torch.equal(stored["layer.bias"], DEMO_TENSORS["layer.bias"])
        assert torch.equal(stored["layer.weight"][0] * stored["layer.weight_scale"], DEMO_TENSORS["layer.weight"])

    @pytest.mark.parametrize("legacy", [False, True])
    @pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
    def test_cut_short(self, run: Run, output: Path, bin_file: Path, legacy: bool, share: float) -> None:
        torch.save(DEMO_TENSORS, bin_file, _use_new_zipfile_serialization=not legacy)
        data = bin_file.read_bytes()
        bin_file.write_bytes(data[: int(len(data) * share)])
        assert refusal(run, output).exit_code == 3

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ([torch.ones(2, 2)], "no table"),
            (torch.ones(2, 2), "no table"),
            ({"state_dict": {"a": torch.ones(2)}}, "no tensor"),
            ({"epoch": 3}, "no tensor"),
            ({0: torch.ones(2)}, "no name"),
            ({"__metadata__": torch.ones(2)}, "no name"),
            ({"a\nb": torch.ones(2)}, "unprintable"),
            ({"\udcff": torch.ones(2)}, "unprintable"),
            ({"a": torch.zeros(1).expand(2**50)}, "claims"),
        ],
        ids=["list", "tensor", "nested", "number", "numbered", "metadata", "newline", "surrogate", "bomb"],
    )
    def test_not_a_table_of_tensors(self, run: Run, output: Path, bin_file: Path, content: Any, says: str) -> None:
        torch.save(content, bin_file)
        error = refusal(run, output)
        assert isinstance(error, InputError)
        assert says in error.message
        assert error.message.isprintable()

    @pytest.mark.parametrize(
        "x",
        [torch.eye(3).to_sparse(), torch.zeros(2, 2, device="meta"), torch.zeros(2, 2, dtype=torch.complex128)],
        ids=["sparse", "meta", "complex128"],
    )
    def test_tensors_no_checkpoint_holds(self, run: Run, output: Path, bin_file: Path, x: Tensor) -> None:
        torch.save({"a": x}, bin_file)
        assert isinstance(refusal(run, output), UnsupportedError)

    def test_views_are_read_as_their_values(self, run: Run, output: Path, bin_file: Path) -> None:
        x = torch.complex(torch.arange(6.0), torch.ones(6)).view(2, 3)
        views = {"conj": x.conj(), "transposed": torch.arange(6.0).view(2, 3).t(), "negative": x.clone().conj().imag}
        torch.save(views, bin_file)
        run(exclude=("*",))
        stored = load_file(output / "model.safetensors")
        for name, view in views.items():
            assert torch.equal(stored[name], view), name


class TestConfig:
    @pytest.mark.parametrize(
        "text",
        ["", "{", "[]", "3", '"x"', "null", '{"architectures": 5}', '{"architectures": [1]}', '{"architectures": "A"}',
         '{"model_type": 5}', '{"x": "\\ud800"}', "[" * 100_000, '{"x": %s}' % ("9" * 5000)],
        ids=lambda text: text[:24] or "empty",
    )  # fmt: skip
    def test_not_a_config(self, run: Run, source: Path, output: Path, text: str) -> None:
        (source / "config.json").write_text(text)
        assert isinstance(refusal(run, output), InputError)

    def test_not_utf8(self, run: Run, source: Path, output: Path) -> None:
        (source / "config.json").write_bytes(b'{"x": "\xff"}')
        assert "not JSON" in refusal(run, output).message

    def test_missing(self, run: Run, source: Path, output: Path) -> None:
        (source / "config.json").unlink()
        assert "no config.json" in refusal(run, output).message

    @pytest.mark.parametrize("method", ["lpconv", "gptq"])
    def test_already_quantised(self, run: Run, source: Path, output: Path, method: str) -> None:
        (source / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
        error = refusal(run, output)
        assert isinstance(error, UnsupportedError)
        assert f"`{method}`" in error.message
        assert ("lpconv restore" in str(error.hint)) == (method == "lpconv")

    def test_an_output_of_collage_is_not_converted_without_its_residual(
        self, run: Run, source: Path, output: Path, tmp_path: Path
    ) -> None:
        run(method="collage")
        again = tmp_path / "again"
        with pytest.raises(UnsupportedError, match=r"collage/residual\.json"):
            convert(str(output), again, ConvertOptions())
        assert not published(again)


class TestFiles:
    """Names, links and kinds of files in a checkpoint directory."""

    def test_no_weights(self, run: Run, source: Path, output: Path) -> None:
        (source / "model.safetensors").unlink()
        assert "no weights" in refusal(run, output).message

    def test_several_weight_files_and_no_index(self, run: Run, source: Path, output: Path) -> None:
        for name in ("one", "two"):
            (source / "model.safetensors").rename(source / f"{name}.safetensors")
            write_checkpoint(source)
        (source / "model.safetensors").unlink()
        assert "no index" in refusal(run, output).message

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
    def test_a_link_out_of_the_directory(self, run: Run, source: Path, output: Path, tmp_path: Path, name: str) -> None:
        secret = tmp_path / "secret"
        (source / name).touch()
        (source / name).rename(secret)
        (source / name).symlink_to(secret)
        error = refusal(run, output)
        assert isinstance(error, InputError)
        assert "leads out" in error.message

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
    @pytest.mark.parametrize("kind", ["link to itself", "pipe", "directory link"])
    def test_not_a_file(self, run: Run, source: Path, output: Path, name: str, kind: str) -> None:
        (source / name).unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(source / name)
        else:
            (source / name).symlink_to(name if kind == "link to itself" else ".")
        assert isinstance(refusal(run, output), InputError)

    def test_an_index_that_is_a_pipe_is_not_waited_for(self, run: Run, source: Path, output: Path) -> None:
        os.mkfifo(source / "model.safetensors.index.json")
        assert "not a regular file" in refusal(run, output).message

    def test_links_inside_the_directory_are_followed(self, run: Run, source: Path, output: Path) -> None:
        (source / "tokenizer.json").write_text("[]")
        (source / "other.json").symlink_to("tokenizer.json")
        run()
        assert (output / "other.json").read_text() == "[]"
        assert not (output / "other.json").is_symlink()

    def test_the_hub_cache_whose_snapshots_link_to_blobs(self, source: Path, output: Path, tmp_path: Path) -> None:
        repo = tmp_path / "models--me--model"
        snapshot = repo / "snapshots" / ("a" * 40)
        (source / "1_Pooling").mkdir()
        (source / "1_Pooling" / "config.json").write_text("{}")
        (repo / "blobs").mkdir(parents=True)
        for i, path in enumerate(sorted(p for p in source.rglob("*") if p.is_file())):
            link = snapshot / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            path.rename(repo / "blobs" / str(i))
            link.symlink_to(os.path.relpath(repo / "blobs" / str(i), link.parent))
        convert(str(snapshot), output, ConvertOptions(verify="weights"))
        assert (output / "1_Pooling" / "config.json").read_text() == "{}"
        assert load_file(output / "model.safetensors").keys() > DEMO_TENSORS.keys()

    @pytest.mark.parametrize("name", [b"a\nb.txt", b"caf\xe9.txt", b"\x1b[31m.txt"])
    def test_side_files_no_list_of_checksums_can_hold(self, run: Run, source: Path, output: Path, name: bytes) -> None:
        Path(os.fsdecode(os.fsencode(source) + b"/" + name)).touch()
        error = refusal(run, output)
        assert isinstance(error, InputError)
        assert error.message.isprintable()

    def test_a_stale_loader_or_journal_of_the_source_is_not_copied(self, run: Run, source: Path, output: Path) -> None:
        (source / "config.json").write_text('{"model_type": "bert"}')
        for name in ("lpconv_loader.py", "journal.jsonl"):
            (source / name).write_text("stale")
        run()
        assert "stale" not in (output / "lpconv_loader.py").read_text()
        assert not (output / "journal.jsonl").exists()

    def test_directory_names_that_are_not_utf8(self, source: Path, tmp_path: Path) -> None:
        odd, output = (Path(os.fsdecode(os.fsencode(tmp_path) + name)) for name in (b"/mod\xff", b"/out\xff"))
        source.rename(odd)
        convert(str(odd), output, ConvertOptions(verify="weights"))
        assert (output / "report.html").exists()


class TestIndex:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        return write_checkpoint(tmp_path / "source", [{"a": torch.ones(2, 2)}, {"b": torch.ones(2, 2)}])

    @pytest.fixture
    def set_index(self, source: Path) -> Callable[[Any], None]:
        def write(weight_map: Any) -> None:
            (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

        return write

    @pytest.mark.parametrize(
        ("weight_map", "says"),
        [
            ({"a": "{1}", "b": "model-00003-of-00003.safetensors"}, "not there"),
            ({"a": "{1}", "b": "{1}"}, "no file holds"),
            ({"a": "{2}", "b": "{1}"}, "lies in"),
            ({"a": "{1}", "b": "{2}", "c": "{2}"}, "no file holds"),
            ({"a": "{1}", "b": "../source/{2}"}, "not a file of this directory"),
            ({"a": "{1}", "b": "/etc/passwd"}, "not a file of this directory"),
            ({"a": "{1}", "b": ""}, "not a file of this directory"),
            ({"a": "{1}", "b": "."}, "not a regular file"),
            ({"a": "{1}", "b": "x\0y"}, "not a file of this directory"),
            ({"a": "{1}", "b": "..\\x"}, "not a file of this directory"),
            ({"a": "{1}", "b": 2}, "not a file of this directory"),
            ({"a": "{1}", "b": "config.json"}, "not a sound safetensors file"),
            ({}, "no weight_map"),
            (None, "no weight_map"),
            ([], "no weight_map"),
        ],
        ids=str,
    )
    def test_an_index_that_is_wrong(
        self, run: Run, output: Path, set_index: Callable[[Any], None], weight_map: Any, says: str
    ) -> None:
        shards = {f"{{{i}}}": f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)}
        if isinstance(weight_map, dict):
            for short, name in shards.items():
                weight_map = {k: v.replace(short, name) if isinstance(v, str) else v for k, v in weight_map.items()}
        set_index(weight_map)
        error = refusal(run, output)
        assert isinstance(error, InputError)
        assert says in error.message

    def test_not_json(self, run: Run, source: Path, output: Path) -> None:
        (source / "model.safetensors.index.json").write_text("{")
        assert "not JSON" in refusal(run, output).message

    def test_one_name_in_two_shards(self, run: Run, source: Path, output: Path) -> None:
        shutil.copy(source / "model-00001-of-00002.safetensors", source / "model-00002-of-00002.safetensors")
        assert "`a` is in" in refusal(run, output).message

    def test_a_shard_that_is_missing(self, run: Run, source: Path, output: Path) -> None:
        (source / "model-00002-of-00002.safetensors").unlink()
        error = refusal(run, output)
        assert error.details == {"missing": ["model-00002-of-00002.safetensors"]}

    def test_a_stale_index_beside_a_whole_file_is_ignored_and_not_copied(
        self, run: Run, source: Path, output: Path
    ) -> None:
        (source / "model-00002-of-00002.safetensors").unlink()
        save_file({"whole": torch.ones(2, 2)}, source / "model.safetensors")
        result = run()
        assert [t.name for t in result.tensors] == ["whole"]
        assert not (output / "model.safetensors.index.json").exists()


NAN, INF = float("nan"), float("inf")


class TestValues:
    """Weights that no training run should have left behind: counted, kept, reported."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        weight = torch.linspace(-1, 1, 48).view(6, 8)
        weight[0, :4] = torch.tensor([NAN, INF, -INF, -NAN])
        return write_checkpoint(tmp_path / "source", {"w": weight, "good": torch.linspace(0, 1, 16).view(4, 4)})

    @pytest.mark.parametrize(
        ("method", "format"),
        [("unit", "fp32"), ("unit", "fp16"), ("unit", "bf16"), ("unit", "e5m2"), ("scalify", "fp16"),
         ("collage", "bf16"), ("collage", "fp16")],
    )  # fmt: skip
    def test_nan_and_inf_are_counted_kept_and_reported(
        self, run: Run, source: Path, output: Path, method: str, format: str
    ) -> None:
        result = run(method=method, format=format)
        records = {t.name: t for t in result.tensors}
        assert (records["w"].num_nan, records["w"].num_inf) == (2, 2)
        assert (records["good"].num_nan, records["good"].num_inf) == (0, 0)
        assert any("`w` has 2 NaN and 2 Inf" in w and "kept" in w for w in result.warnings)
        with OutputReader.from_directory(output) as reader:
            kept = reader.values("w", 0, 4)
        assert kept.isnan().tolist() == [True, False, False, True]
        assert kept[1:3].tolist() == [INF, -INF]

    def test_inf_becomes_nan_where_the_format_has_no_inf(self, run: Run, output: Path) -> None:
        result = run(format="e4m3fn")
        assert any("Inf becomes NaN" in w for w in result.warnings)
        with OutputReader.from_directory(output) as reader:
            assert reader.values("w", 0, 4).isnan().all()

    def test_what_is_not_finite_does_not_count_in_the_figures(self, run: Run, source: Path) -> None:
        record = next(t for t in run().tensors if t.name == "w")
        values = load_file(source / "model.safetensors")["w"]
        finite = values[values.isfinite()].double()
        assert record.absmax == finite.abs().max().item()
        assert record.rms == pytest.approx(finite.square().mean().sqrt().item())
        assert record.sqnr_db is not None
        assert record.sqnr_db > 60

    def test_the_model_card_and_the_report_name_them(self, run: Run, output: Path) -> None:
        run()
        for name in ("README.md", "report.html", "report.json", "lpconv.json"):
            assert "2 NaN and 2 Inf" in (output / name).read_text(), name

    @pytest.mark.parametrize("format", ["fp16", "bf16", "e4m3fn", "e5m2"])
    @pytest.mark.parametrize("size", [3e38, 1e20, 1e-25, 1e-35])
    def test_errors_whose_squares_leave_fp32(
        self, run: Run, source: Path, output: Path, format: str, size: float
    ) -> None:
        x = torch.linspace(0.3, 1, 64).view(8, 8) * size
        write_checkpoint(source, {"w": x})
        record = run(format=format).tensors[0]
        with OutputReader.from_directory(output) as reader:
            error = reader.values("w", 0, 64).double() - x.view(-1).double()
        wanted = 10 * math.log10(x.double().square().sum().item() / error.square().sum().item())
        assert record.sqnr_db == pytest.approx(wanted, abs=0.01)

    @pytest.mark.parametrize("value", [0.0, 1e-45, NAN, INF])
    @pytest.mark.parametrize("method", ["unit", "scalify", "collage"])
    def test_tensors_of_one_extreme_value(self, run: Run, source: Path, value: float, method: str) -> None:
        write_checkpoint(source, {"w": torch.full((4, 4), value)})
        assert run(method=method).verify.passed


# Every dtype torch can hold, and shapes without elements or without axes.
ODD_TENSORS = {
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 4),
    "empty vector": torch.zeros(0),
    "bool": torch.tensor([[True, False], [False, True]]),
    "int64": torch.tensor([[-(2**62), 5], [0, 1]]),
    "uint16": torch.tensor([[1, 65535]], dtype=torch.uint16),
    "e4m3fn": torch.linspace(-9, 9, 16).view(4, 4).to(torch.float8_e4m3fn),
    "e5m2": torch.linspace(-9, 9, 16).view(4, 4).to(torch.float8_e5m2),
    "complex64": torch.complex(torch.ones(2, 2), torch.zeros(2, 2)),
}


class TestTensors:
    @pytest.mark.parametrize("method", ["unit", "scalify", "collage"])
    def test_what_is_no_matrix_of_floats_is_kept_bit_for_bit(
        self, run: Run, source: Path, output: Path, method: str
    ) -> None:
        odd = {n: x for n, x in ODD_TENSORS.items() if n != "scalar" or method != "collage"}
        write_checkpoint(source, odd)
        result = run(method=method)
        assert {t.action for t in result.tensors} == {"keep"}
        assert any("no tensor is converted" in w for w in result.warnings)
        stored = load_file(output / "model.safetensors")
        for name, x in odd.items():
            assert (stored[name].dtype, stored[name].shape) == (x.dtype, x.shape)
            assert bits_of(stored[name]) == bits_of(x), name

    @pytest.mark.parametrize("method", ["unit", "collage"])
    def test_restore_gives_them_all_back(
        self, run: Run, source: Path, output: Path, tmp_path: Path, method: str
    ) -> None:
        write_checkpoint(source, ODD_TENSORS)
        run(method=method, **({"residual": "exact16"} if method == "collage" else {"format": "fp32"}))
        restore(output, tmp_path / "back", force=False, progress=Silent())
        back = load_file(tmp_path / "back" / "model.safetensors")
        assert {n: bits_of(x) for n, x in back.items()} == {n: bits_of(x) for n, x in ODD_TENSORS.items()}

    def test_a_rule_converts_a_scalar(self, run: Run, source: Path, output: Path) -> None:
        write_checkpoint(source, {"scalar": torch.tensor(1.5)})
        run(rules=(FormatRule(pattern="*", format="fp16"),))
        stored = load_file(output / "model.safetensors")
        assert stored["scalar"].shape == (1,)
        assert (stored["scalar"] * stored["scalar_scale"]).item() == 1.5

    @pytest.mark.parametrize(("method", "format"), [("unit", "fp32"), ("collage", "bf16")])
    def test_64_bit_weights_are_not_said_to_come_back_exactly(
        self, run: Run, source: Path, output: Path, tmp_path: Path, method: str, format: str
    ) -> None:
        write_checkpoint(source, {"w": torch.full((4, 4), 1 / 3, dtype=torch.float64)})
        result = run(method=method, format=format, **({"residual": "exact16"} if method == "collage" else {}))
        assert any("rounded to fp32" in w for w in result.warnings)
        assert not restore(output, tmp_path / "back", force=False, progress=Silent()).exact

    def test_names_that_are_only_odd(self, run: Run, source: Path, output: Path, tmp_path: Path) -> None:
        names = ("../../x", "/abs", "q\"uo'te", "back\\slash", "émoji😀", "a b", "", "<b>", "|`*", "x" * 500)
        tensors = {n: torch.randn(4, 4, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(names)}
        write_checkpoint(source, tensors)
        run(format="fp32")
        assert "<b>" not in (output / "report.html").read_text()
        restore(output, tmp_path / "back", force=False, progress=Silent())
        back = load_file(tmp_path / "back" / "model.safetensors")
        assert {n: bits_of(x) for n, x in back.items()} == {n: bits_of(x) for n, x in tensors.items()}
        assert {p.name for p in tmp_path.iterdir()} == {"source", "output", "back"}

    def test_a_source_that_has_scales_already(self, run: Run, source: Path, output: Path) -> None:
        write_checkpoint(source, {"w": torch.ones(4, 4), "w_scale": torch.ones(1)})
        assert isinstance(refusal(run, output), UnsupportedError)

    def test_a_declared_tie_whose_halves_differ(self, run: Run, source: Path, output: Path) -> None:
        tensors = {"wte.weight": torch.ones(4, 4), "lm_head.weight": torch.zeros(4, 4)}
        write_checkpoint(source, tensors, config={"tie_word_embeddings": True})
        assert "their values differ" in refusal(run, output).message


class TestRequest:
    """Options that are wrong: exit code 2, before anything is read."""

    @pytest.mark.parametrize(
        ("options", "hint"),
        [
            ({"method": "unti"}, "did you mean `unit`"),
            ({"format": "e4m3"}, "did you mean `e4m3fn`"),
            ({"method": "collage", "format": "e5m2"}, "it writes bf16, fp16"),
            ({"method": "collage", "residual": "exact61"}, "did you mean `exact16`"),
            ({"residual": "bf16"}, "collage"),
            ({"scale": "pow3"}, "pow2 or exact"),
            ({"verify": "everything"}, "logits"),
            ({"gates": ("sqrn>=3",)}, "did you mean `sqnr`"),
            ({"gates": ("sqnr",)}, "--gate"),
            ({"gates": ("sqnr>=high",)}, "--gate"),
            ({"include": ("re:[",)}, "escape"),
            ({"exclude": ("re:(?P<1>x)",)}, "escape"),
            ({"exclude": ("re:a{99999999999}",)}, "escape"),
            ({"include": ("re:" + "(" * 5000,)}, "escape"),
            ({"rules": (FormatRule(pattern="re:*", format="keep"),)}, "escape"),
            ({"rules": (FormatRule(pattern="*", format="fp17"),)}, "did you mean"),
            ({"rules": (FormatRule(pattern="*", format="tf32"),)}, "it writes"),
            ({"method": "collage", "rules": (FormatRule(pattern="*", format="fp16"),)}, "=keep"),
            ({"resume": True, "force": True}, "anew"),
            ({"revision": "main"}, "leave --revision out"),
        ],
        ids=str,
    )
    def test_options_that_are_wrong(self, run: Run, output: Path, options: dict[str, Any], hint: str) -> None:
        error = refusal(run, output, **options)
        assert error.exit_code == 2
        assert hint in str(error.hint)

    @pytest.mark.parametrize("text", ["", "=fp16", "x", "x=", "x=fp17"])
    def test_rules_that_are_wrong(self, text: str) -> None:
        with pytest.raises(UsageError) as caught:
            parse_rule(text)
        assert caught.value.hint

    @pytest.mark.parametrize("text", ["", "0", "0.1", "-1GB", "1PB", "GB", "nan", "inf", "1e9", "9" * 400])
    def test_sizes_that_are_wrong(self, text: str) -> None:
        with pytest.raises(UsageError) as caught:
            parse_size(text)
        assert caught.value.hint

    def test_a_rule_may_hold_an_equals_sign(self) -> None:
        assert parse_rule("re:a=b=keep") == FormatRule(pattern="re:a=b", format="keep")

    def test_the_first_rule_decides_and_exclude_comes_before(self, run: Run, source: Path) -> None:
        write_checkpoint(source, {n: torch.ones(2, 2) for n in ("a.w", "b.w", "c.w", "d.w")})
        rules = tuple(
            FormatRule(pattern=p, format=f) for p, f in (("a.*", "bf16"), ("re:[ab]", "e5m2"), ("d*", "fp32"))
        )
        result = run(rules=rules, exclude=("d.w",), include=("c.*",))
        assert {t.name: t.format for t in result.tensors} == {
            "a.w": "bf16",
            "b.w": "e5m2",
            "c.w": "fp16",
            "d.w": "fp32",
        }
        assert {t.name: t.action for t in result.tensors}["d.w"] == "keep"

    def test_no_memory_for_one_worker(self, run: Run, output: Path) -> None:
        assert refusal(run, output, max_memory=1000).exit_code == 7

    def test_the_published_command_holds_no_folder_and_makes_the_same_output(
        self, source: Path, tmp_path: Path
    ) -> None:
        given = ConvertOptions(
            format="e5m2",
            include=("layer.*", "re:x y"),
            rules=(FormatRule(pattern="a'b", format="keep"),),
            gates=("sqnr>=1",),
            verify="weights",
            workers=1,
        )
        convert(str(source), tmp_path / "out", given, command=f"lpconv convert {source} -o {tmp_path}/out --resume")
        published = json.loads((tmp_path / "out" / "report.json").read_text())["command"]
        assert str(tmp_path) in published, "report.json is of this run, and says what was typed"
        card = (tmp_path / "out" / "README.md").read_text()
        assert str(tmp_path) not in card
        expected = (
            "lpconv convert source --method unit --format e5m2 --verify weights --include 'layer.*' "
            "--include 're:x y' --rule 'a'\"'\"'b=keep' --gate 'sqnr>=1'"
        )
        assert expected in card


class TestGates:
    @pytest.mark.parametrize("gate", ["sqnr>=500", "sqnr<1", "max_rel_error==0", "sqnr>=nan"])
    def test_a_gate_that_fails_keeps_the_output_aside(self, run: Run, output: Path, gate: str) -> None:
        error = refusal(run, output, gates=("sqnr>=1", gate), verify="none")
        assert isinstance(error, VerificationError)
        assert gate in error.message
        kept = output.with_name("output.failed")
        assert str(kept) in str(error.hint)
        assert {"config.json", "model.safetensors", "report.json"} < files_of(kept, without=set()).keys()
        assert not output.with_name("output.partial").exists()

    def test_the_next_run_starts_anew_and_replaces_what_failed(self, run: Run, output: Path) -> None:
        for bound in (500, 600):
            assert f"sqnr>={bound}" in refusal(run, output, gates=(f"sqnr>={bound}",)).message
        run(gates=("sqnr>=1",))
        assert (output / "config.json").exists()


class TestOutput:
    def test_it_exists(self, run: Run, output: Path) -> None:
        output.mkdir()
        with pytest.raises(OutputExistsError, match="exists"):
            run()
        assert files_of(output) == {}

    def test_force_replaces_an_output_of_ours_only(self, run: Run, output: Path) -> None:
        run()
        run(force=True, format="bf16")
        (output / "lpconv.json").unlink()
        before = files_of(output)
        with pytest.raises(OutputExistsError, match="does not delete it"):
            run(force=True)
        assert files_of(output) == before

    def test_a_file(self, run: Run, output: Path) -> None:
        output.write_text("mine")
        for force in (False, True):
            with pytest.raises(OutputExistsError):
                run(force=force)
        assert output.read_text() == "mine"

    @pytest.mark.parametrize(
        ("name", "code"),
        [("source", 8), ("source/out", 2), (".", 8), ("/", 8), ("x" * 300, 7), ("source/config.json/out", 2)],
    )
    def test_places_no_output_can_be(self, source: Path, tmp_path: Path, name: str, code: int) -> None:
        before = files_of(tmp_path)
        with pytest.raises(LpconvError) as caught:
            convert(str(source), tmp_path / name, ConvertOptions(force=True))
        assert caught.value.exit_code == code
        assert files_of(tmp_path) == before

    def test_a_source_inside_an_older_output_survives_force(self, run: Run, output: Path) -> None:
        run()
        inner = write_checkpoint(output / "source")
        with pytest.raises(OutputExistsError, match="lies inside"):
            convert(str(inner), output, ConvertOptions(force=True))
        assert (inner / "model.safetensors").exists()

    def test_restore_does_not_replace_what_it_reads(self, run: Run, output: Path) -> None:
        run()
        with pytest.raises(OutputExistsError, match="same directory"):
            restore(output, output, force=True, progress=Silent())

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_folder_that_is_read_only(self, run: Run, tmp_path: Path, output: Path) -> None:
        tmp_path.chmod(0o555)
        try:
            assert refusal(run, output).exit_code == 7
        finally:
            tmp_path.chmod(0o755)


class TestFullDisk:
    """Exit code 7, nothing published, and `--resume` goes on once there is space."""

    def test_found_before_the_work(self, run: Run, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = shutil.disk_usage(output.parent)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        error = refusal(run, output)
        assert isinstance(error, ResourceError)
        assert error.details["free_bytes"] == 1000
        assert not output.with_name("output.partial").exists()

    @pytest.mark.parametrize("call", ["pwrite", "posix_fallocate", "fsync", "rename"])
    @pytest.mark.parametrize("which", [1, 2, 3])
    def test_found_while_writing(
        self, run: Run, source: Path, output: Path, monkeypatch: pytest.MonkeyPatch, call: str, which: int
    ) -> None:
        write_checkpoint(source, [{f"layer.{i}.weight": torch.full((8, 8), float(i))} for i in range(3)])
        real, calls = getattr(os, call), itertools.count(1)

        def full(*args: Any) -> Any:
            if next(calls) >= which:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            error = refusal(run, output)
        assert isinstance(error, ResourceError)
        assert "no space left" in error.message
        assert "--resume" in str(error.hint)
        run(resume=True)
        assert load_file(output / "model-00003-of-00003.safetensors").keys() == {
            "layer.2.weight", "layer.2.weight_scale",
        }  # fmt: skip

    def test_a_small_file_system(self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_checkpoint(source, {"w": torch.ones(1024, 1024)})
        options = ConvertOptions(format="fp32", verify="none", workers=1)
        with mounted(tmp_path / "small", "size=6m") as folder:
            output = folder / "output"
            with pytest.raises(ResourceError, match="of disk"):
                convert(str(source), output, options)
            (source / "big.txt").write_bytes(bytes(3 * 2**20))
            monkeypatch.setattr("lpconv.convert.run.check_disk", lambda _: None)  # the space goes while we write
            with pytest.raises(ResourceError, match="no space left"):
                convert(str(source), output, options)
            assert not published(output)

    def test_a_read_only_file_system(self, source: Path, tmp_path: Path) -> None:
        with mounted(tmp_path / "read-only", "ro") as folder, pytest.raises(ResourceError, match="cannot write"):
            convert(str(source), folder / "output", ConvertOptions(verify="none", workers=1))


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A tmpfs; skips the test where mounting is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting needs rights that this user has not")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


class TestReadingAnOutput:
    """`verify` and `restore` trust an output no more than `convert` trusts a source."""

    def check(self, output: Path, source: Path, level: str = "hash") -> VerifyResult:
        return verify_output(
            output, against=str(source), level=level, gates=(), trust_remote_code=False, progress=Silent()
        )

    def test_a_file_that_was_changed_or_taken_away(self, run: Run, source: Path, output: Path) -> None:
        (source / "tokenizer.json").write_text("[]")
        run()
        assert self.check(output, source).passed
        (output / "tokenizer.json").write_text("[1]")
        (output / "README.md").unlink()
        found = self.check(output, source)
        assert not found.passed
        assert found.hash is not None
        assert set(found.hash.mismatched) == {"tokenizer.json", "README.md"}

    def test_a_list_of_checksums_that_leaves_the_weights_out(self, run: Run, source: Path, output: Path) -> None:
        run()
        (output / "SHA256SUMS").write_text("")
        found = self.check(output, source)
        assert found.hash is not None
        assert set(found.hash.mismatched) == {"config.json", "lpconv.json", "model.safetensors"}

    @pytest.mark.parametrize("kind", ["changed", "cut", "gone"])
    def test_weights_that_were_changed(self, run: Run, source: Path, output: Path, kind: str) -> None:
        run()
        weights = output / "model.safetensors"
        data = weights.read_bytes()
        weights.write_bytes({"changed": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:-9], "gone": b""}[kind])
        found = self.check(output, source, "weights")
        assert not found.passed
        assert any("SHA-256" in p for p in found.problems)
        assert any("tensor" in p or "safetensors file" in p for p in found.problems[1:])

    def test_another_source(self, run: Run, source: Path, output: Path, tmp_path: Path) -> None:
        run()
        other = write_checkpoint(tmp_path / "other", {"different": torch.ones(2, 2)})
        with pytest.raises(InputError, match="not the checkpoint that was converted"):
            self.check(output, other, "weights")

    def test_codes_without_their_scale(self, run: Run, output: Path, tmp_path: Path) -> None:
        run()
        stored = load_file(output / "model.safetensors")
        del stored["layer.weight_scale"]
        save_file(stored, output / "model.safetensors")
        assert "have no scale" in self.restored(output, tmp_path).message

    def test_codes_of_another_shape_or_dtype(self, run: Run, output: Path, tmp_path: Path) -> None:
        run()
        stored = load_file(output / "model.safetensors")
        for changed in (stored["layer.weight"][:, :4], stored["layer.weight"].float(), stored["layer.weight"][0]):
            save_file(stored | {"layer.weight": changed.clone()}, output / "model.safetensors")
            assert "not stored as lpconv.json says" in self.restored(output, tmp_path).message

    @pytest.mark.parametrize("change", ["root", "residual taken", "residual elsewhere", "unknown form"])
    def test_a_residual_that_is_not_of_these_weights(self, run: Run, output: Path, tmp_path: Path, change: str) -> None:
        run(method="collage", residual="exact16")
        index = output / "collage" / "residual.json"
        if change == "root":
            data = (output / "model.safetensors").read_bytes()
            (output / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        elif change == "residual taken":
            (output / "collage" / "residual.safetensors").unlink()
        elif change == "residual elsewhere":
            (output / "collage" / "residual.safetensors").rename(tmp_path / "residual.safetensors")
            index.write_text(index.read_text().replace("collage/residual", "../residual"))
        else:
            index.write_text(index.read_text().replace("exact16", "exact17"))
        self.restored(output, tmp_path)

    def restored(self, output: Path, tmp_path: Path) -> InputError:
        with pytest.raises(InputError) as caught:
            restore(output, tmp_path / "back", force=False, progress=Silent())
        assert caught.value.hint
        assert not published(tmp_path / "back")
        return caught.value

    @pytest.mark.parametrize("name", ["lpconv.json", "SHA256SUMS"])
    def test_a_directory_that_is_no_output(self, run: Run, source: Path, output: Path, name: str) -> None:
        run()
        (output / name).unlink()
        with pytest.raises(InputError, match=name):
            self.check(output, source)

    def test_an_output_of_a_newer_version(self, run: Run, source: Path, output: Path) -> None:
        run()
        document = json.loads((output / "lpconv.json").read_text())
        (output / "lpconv.json").write_text(json.dumps(document | {"format_version": 2}))
        with pytest.raises(InputError, match="format_version 2"):
            self.check(output, source)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("convert", "{source}", "-o", "{output}", "--gate", "sqnr>=500"), 5, "output.failed"),
        (("convert", "{source}", "-o", "{source}"), 8, "--output"),
        (("convert", "{source}", "-o", "{output}", "--method", "unti"), 2, "did you mean `unit`"),
        (("convert", "{source}/config.json", "-o", "{output}"), 3, "pass the directory"),
        (("convert", "bert-large", "-o", "{output}"), 3, "hf download google-bert/bert-large-uncased"),
        (("convert", "nobody/no-such-model", "-o", "{output}"), 3, "hf download nobody/no-such-model"),
        (("convert", "bert-lagre", "-o", "{output}"), 3, "did you mean `bert-large`"),
        (("convert", "{source}", "-o", "{output}", "--workers", "0"), 2, "workers"),
        (("verify", "{source}"), 3, "lpconv convert"),
        (("restore", "{source}", "-o", "{output}"), 3, "lpconv convert"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_the_command_line_ends_with_the_code_and_a_hint(
    source: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...], code: int, says: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    done = CliRunner().invoke(app, [a.format(source=source, output=output) for a in arguments])
    assert done.exit_code == code, done.output
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not published(output)


def test_verify_of_a_tampered_output_ends_with_5(run: Run, output: Path) -> None:
    run()
    (output / "config.json").write_text("{}")
    done = CliRunner().invoke(app, ["verify", str(output), "--json"])
    assert done.exit_code == 5
    assert json.loads(done.stdout)["error"]["details"]["hash"]["mismatched"] == ["config.json"]


def test_messages_carry_no_control_characters_to_the_terminal(source: Path, output: Path) -> None:
    shards = [{"a": torch.ones(2, 2)}, {"b": torch.ones(2, 2)}]
    write_checkpoint(source, shards)
    index = source / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"b"', '"\\u001b]0;owned\\u0007"'))
    done = CliRunner().invoke(app, ["convert", str(source), "-o", str(output)])
    assert done.exit_code == 3
    assert "owned" in done.stderr
    assert all(line.isprintable() for line in done.stderr.splitlines())
