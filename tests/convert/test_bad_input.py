"""Checkpoints and requests that are wrong: each ends in one error of ours with its exit code, and nothing published."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import DEMO_TENSORS, published, write_checkpoint
from safetensors.torch import load_file
from torch import Tensor

from lpconv.convert.options import ConvertOptions
from lpconv.convert.run import convert
from lpconv.errors import InputError, LpconvError, UnsupportedError
from lpconv.results import ConvertResult

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
