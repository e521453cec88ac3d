"""Outputs that were changed: `verify` and `restore` trust them no more than `convert` trusts a source."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lpconv.convert.restore import restore
from lpconv.convert.run import convert
from lpconv.errors import InputError
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent
from lpconv.results import VerifyResult
from lpconv.verify.options import VerifyOptions
from lpconv.verify.run import verify_output
from tests.helpers.checkpoints import Run, published, rehash, write_checkpoint


class TestReadingAnOutput:
    """`verify` and `restore` trust an output no more than `convert` trusts a source."""

    def check(self, output: Path, source: Path, level: str = "hash") -> VerifyResult:
        return verify_output(output, VerifyOptions(against=str(source), level=level), progress=Silent())

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
        assert set(found.hash.mismatched) == {"README.md", "config.json", "lpconv.json", "model.safetensors"}

    @pytest.mark.parametrize("kind", ["changed", "cut", "gone"])
    def test_weights_that_were_changed(self, run: Run, source: Path, output: Path, kind: str) -> None:
        run()
        weights = output / "model.safetensors"
        data = weights.read_bytes()
        weights.write_bytes({"changed": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:-9], "gone": b""}[kind])
        found = self.check(output, source, "weights")
        assert not found.passed
        assert any("SHA256SUMS" in p for p in found.problems)
        assert any("tensor" in p for p in found.problems[1:])

    def test_another_source(self, run: Run, source: Path, output: Path, tmp_path: Path) -> None:
        run()
        other = write_checkpoint(tmp_path / "other", {"different": torch.ones(2, 2)})
        with pytest.raises(InputError, match="`different`"):
            self.check(output, other, "weights")

    def test_codes_without_their_scale(self, run: Run, output: Path, tmp_path: Path) -> None:
        run()
        stored = load_file(output / "model.safetensors")
        del stored["layer.weight_scale"]
        save_file(stored, output / "model.safetensors")
        assert "`layer.weight`" in self.restored(output, tmp_path).message

    def test_codes_of_another_shape_or_dtype(self, run: Run, output: Path, tmp_path: Path) -> None:
        run()
        stored = load_file(output / "model.safetensors")
        for changed in (stored["layer.weight"][:, :4], stored["layer.weight"].float(), stored["layer.weight"][0]):
            save_file(stored | {"layer.weight": changed.clone()}, output / "model.safetensors")
            assert "`layer.weight`" in self.restored(output, tmp_path).message

    @pytest.mark.parametrize("change", ["root", "taken", "elsewhere", "form"])
    def test_a_residual_that_is_not_of_these_weights(self, run: Run, output: Path, tmp_path: Path, change: str) -> None:
        run(method="collage", residual="exact16")
        index = output / "collage" / "residual.json"
        if change == "root":
            data = (output / "model.safetensors").read_bytes()
            (output / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        elif change == "taken":
            (output / "collage" / "residual.safetensors").unlink()
        elif change == "elsewhere":
            (output / "collage" / "residual.safetensors").rename(tmp_path / "residual.safetensors")
            index.write_text(index.read_text().replace("collage/residual", "../residual"))
        else:
            index.write_text(index.read_text().replace("exact16", "exact17"))
        self.restored(output, tmp_path)

    def restored(self, output: Path, tmp_path: Path) -> InputError:
        rehash(output)
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


def test_a_list_of_hashes_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    convert("demo", tmp_path / "out", ConvertOptions(verify="none"))
    (tmp_path / "secret").write_text("x")
    with (tmp_path / "out" / "SHA256SUMS").open("a") as sums:
        sums.write(f"{hashlib.sha256(b'x').hexdigest()}  ../secret\n")
    with pytest.raises(InputError, match=r"SHA256SUMS`.*\.\./secret"):
        verify_output(tmp_path / "out", VerifyOptions(), progress=Silent())
    with pytest.raises(InputError, match=r"SHA256SUMS`.*\.\./secret"):
        restore(tmp_path / "out", tmp_path / "back", force=False, progress=Silent())


def test_a_url_that_only_the_output_names_is_not_asked(tmp_path: Path) -> None:
    convert("demo", tmp_path / "out", ConvertOptions(verify="none"))
    document = json.loads((tmp_path / "out" / "lpconv.json").read_text())
    document["source"]["name"] = "http://127.0.0.1:9/model"
    (tmp_path / "out" / "lpconv.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"names `http://127\.0\.0\.1:9/model`") as refused:
        verify_output(tmp_path / "out", VerifyOptions(level="weights"), progress=Silent())
    assert "--against" in str(refused.value.hint)
