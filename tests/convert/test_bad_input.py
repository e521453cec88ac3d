"""Checkpoints that are wrong: each ends in one error of ours with its exit code, and nothing published."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lpconv.convert.run import convert
from lpconv.errors import InputError, LpconvError, UnsupportedError
from lpconv.plan.options import ConvertOptions
from tests.helpers.checkpoints import DEMO_TENSORS, Run, published, refusal, write_checkpoint


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
            {"layer.weight": torch.ones(4, 4), "x": Exploit(proof)}, bin_file, _use_new_zipfile_serialization=not legacy
        )
        error = refusal(run, output)
        assert isinstance(error, InputError)
        assert "weights_only" in str(error.hint)
        assert "`posix.mkdir`" in str(error)
        assert "torch." not in str(error).replace(str(bin_file), ""), "its advice is how to run the code after all"
        assert not proof.exists()
        torch.load(bin_file, weights_only=False)
        assert proof.exists(), "the exploit would not have worked at all"

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ([torch.ones(2, 2)], "dictionary"),
            (torch.ones(2, 2), "dictionary"),
            ({"state_dict": {"a": torch.ones(2)}}, "`state_dict`"),
            ({"epoch": 3}, "`epoch`"),
            ({0: torch.ones(2)}, ": 0 is"),
            ({"__metadata__": torch.ones(2)}, "'__metadata__'"),
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

    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11
    @pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # of torch 2.15
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
         '{"model_type": 5}', '{"text_config": {"num_hidden_layers": 1%s}}' % ("0" * 60), '{"x": "\\ud800"}',
         "[" * 100_000, '{"x": %s}' % ("9" * 5000)],
        ids=lambda text: text[:24] or "empty",
    )  # fmt: skip
    def test_not_a_config(self, run: Run, source: Path, output: Path, text: str) -> None:
        (source / "config.json").write_text(text)
        assert isinstance(refusal(run, output), InputError)

    def test_missing(self, run: Run, source: Path, output: Path) -> None:
        (source / "config.json").unlink()
        assert "no config.json" in refusal(run, output).message

    @pytest.mark.parametrize(("method", "kind"), [("bitsandbytes", UnsupportedError), ("gptq", InputError)])
    def test_quantised_in_a_way_that_is_not_read_or_not_there(
        self, run: Run, source: Path, output: Path, method: str, kind: type[LpconvError]
    ) -> None:
        (source / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
        error = refusal(run, output)
        assert isinstance(error, kind)
        assert f"`{method}`" in error.message

    def test_an_output_of_collage_is_not_converted_with_the_residual_of_other_weights(
        self, run: Run, source: Path, output: Path, tmp_path: Path
    ) -> None:
        run(method="collage")
        data = (output / "model.safetensors").read_bytes()
        (output / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        again = tmp_path / "again"
        with pytest.raises(InputError, match=r"`model\.safetensors`.*residual"):
            convert(str(output), again, ConvertOptions())
        assert not published(again)


class TestFiles:
    """Names, links and kinds of files in a checkpoint directory."""

    def test_no_weights(self, run: Run, source: Path, output: Path) -> None:
        (source / "model.safetensors").unlink()
        assert "weights" in refusal(run, output).message

    def test_several_weight_files_and_no_index(self, run: Run, source: Path, output: Path) -> None:
        for name in ("one", "two"):
            (source / "model.safetensors").rename(source / f"{name}.safetensors")
            write_checkpoint(source)
        (source / "model.safetensors").unlink()
        assert "2 safetensors" in refusal(run, output).message

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
    def test_a_link_out_of_the_directory(self, run: Run, source: Path, output: Path, tmp_path: Path, name: str) -> None:
        secret = tmp_path / "secret"
        (source / name).touch()
        (source / name).rename(secret)
        (source / name).symlink_to(secret)
        error = refusal(run, output)
        assert isinstance(error, InputError)
        assert f"`{source / name}` points" in error.message

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
    @pytest.mark.parametrize("kind", ["self-link", "pipe", "directory"])
    def test_not_a_file(self, run: Run, source: Path, output: Path, name: str, kind: str) -> None:
        (source / name).unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(source / name)
        else:
            (source / name).symlink_to(name if kind == "self-link" else ".")
        assert isinstance(refusal(run, output), InputError)

    def test_an_index_that_is_a_pipe_is_not_waited_for(self, run: Run, source: Path, output: Path) -> None:
        os.mkfifo(source / "model.safetensors.index.json")
        assert "regular" in refusal(run, output).message

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
        run(allow_missing=True)
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
            ({"a": "{1}", "b": "model-00003-of-00003.safetensors"}, "`model-00003-of-00003.safetensors`"),
            ({"a": "{1}", "b": "{1}"}, "tensor `b`"),
            ({"a": "{2}", "b": "{1}"}, "tensor `a` in `model-00002"),
            ({"a": "{1}", "b": "{2}", "c": "{2}"}, "tensor `c`"),
            ({"a": "{1}", "b": "../source/{2}"}, "'../source/"),
            ({"a": "{1}", "b": "/etc/passwd"}, "'/etc/passwd'"),
            ({"a": "{1}", "b": ""}, "tensor `b` into ''"),
            ({"a": "{1}", "b": "."}, "regular"),
            ({"a": "{1}", "b": "x\0y"}, "'x\\x00y'"),
            ({"a": "{1}", "b": "..\\x"}, "'..\\\\x'"),
            ({"a": "{1}", "b": 2}, "tensor `b` into 2"),
            ({"a": "{1}", "b": "config.json"}, "/config.json`"),
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

    def test_one_name_in_two_shards(self, run: Run, source: Path, output: Path) -> None:
        shutil.copy(source / "model-00001-of-00002.safetensors", source / "model-00002-of-00002.safetensors")
        assert "`a` occurs" in refusal(run, output).message

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
