"""What `lpconv convert` writes unless options say so, decided from the headers of the checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lpconv.convert.run import convert, plan
from lpconv.plan import ConvertOptions
from lpconv.plan.suited import largest_group
from tests.helpers.checkpoints import shallow_demo
from tests.helpers.models import tiny


@pytest.mark.parametrize(
    ("dtype", "options", "format"),
    [
        (torch.bfloat16, ConvertOptions(), "e4m3fn"),
        (torch.float16, ConvertOptions(gates=("sqnr>=20",)), "e4m3fn"),
        (torch.bfloat16, ConvertOptions(method="unit"), "fp16"),
        (torch.float32, ConvertOptions(), "fp16"),
    ],
)
def test_a_copy_without_options_is_smaller(
    dtype: torch.dtype, options: ConvertOptions, format: str, tmp_path: Path
) -> None:
    file = shallow_demo(tmp_path / "source") / "model.safetensors"
    save_file({name: weight.to(dtype) for name, weight in load_file(file).items()}, file, {"format": "pt"})
    planned = plan(str(file.parent), tmp_path / "out", options)
    result = convert(str(file.parent), tmp_path / "out", options)
    assert (planned.format, result.format) == (format, format)
    written, stored = (tmp_path / "out" / "model.safetensors").stat().st_size, file.stat().st_size
    assert (written < 0.9 * stored) == (options.method is None)
    assert any("e4m3fn" in warning for warning in planned.warnings) == (format == "e4m3fn")
    again = plan(str(tmp_path / "out"), tmp_path / "again", ConvertOptions())
    assert any("quantised" in warning for warning in again.warnings) == (format == "e4m3fn")


@pytest.mark.parametrize(
    ("columns", "size"), [((256, 512), 128), ((576, 1536), 64), ((96, 3), 32), ((100,), 32), ((), 128)]
)
def test_groups_divide_the_rows_of_every_matrix(columns: tuple[int, ...], size: int) -> None:
    assert largest_group(columns) == size


@pytest.mark.parametrize(
    ("options", "num_converted", "named"),
    [
        (ConvertOptions(scheme="W4A16"), 2, "group:64"),
        (ConvertOptions(scheme="W4A16", granularity="group:64"), 14, None),
        (ConvertOptions(scheme="FP8_BLOCK"), 2, "--granularity row"),
        (ConvertOptions(format="int4"), 14, "64"),
        (ConvertOptions(format="int4", granularity="group:64"), 14, None),
    ],
)
def test_groups_that_do_not_divide_most_matrices_are_reported(
    options: ConvertOptions, num_converted: int, named: str | None, tmp_path: Path
) -> None:
    """Two layers of seven matrices each, of which only `down_proj` has 128 columns, the others 64."""
    source = tiny("llama", tmp_path / "source", hidden_size=64, intermediate_size=128, tie_word_embeddings=False)
    planned = plan(str(source), tmp_path / "out", options)
    assert sum(t.format in ("int4", "e4m3fn") for t in planned.tensors) == num_converted
    assert [named in warning for warning in planned.warnings if named] == [True] * (named is not None)


def test_only_groups_that_divide_every_matrix_are_recommended(tmp_path: Path) -> None:
    source = tiny("llama", tmp_path / "source", hidden_size=40, intermediate_size=72)
    planned = plan(str(source), tmp_path / "out", ConvertOptions(format="int4"))
    assert any("72" in warning for warning in planned.warnings)
    assert not any("group:" in warning for warning in planned.warnings)
