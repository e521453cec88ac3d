"""What can be rehearsed of CUDA passes, and docs/reference/cuda.md names every place that asks for it."""

import shutil
from pathlib import Path

import pytest

from tests.cuda import cuda_page


@pytest.mark.skipif(not cuda_page.CAN_FAKE_GPU, reason="fake GPUs need a build without CUDA, or a GPU")
@pytest.mark.skipif(shutil.which("g++") is None, reason="autograd on fake CUDA tensors needs a C++ compiler")
def test_every_rehearsal_passes_and_the_page_on_cuda_is_current(tmp_path: Path) -> None:
    errors, reached = cuda_page.rehearse(tmp_path)

    assert {name: error for name, error in errors.items() if error is not None} == {}
    text = cuda_page.page(reached)
    assert "NO REASON GIVEN" not in text, "say in cuda_page.UNTRIED why no rehearsal reaches it, or write one"
    page = cuda_page.ROOT / "docs" / "reference" / "cuda.md"
    assert page.read_text(encoding="utf-8") == text, "run the command on its top"


def test_a_new_branch_would_be_found() -> None:
    import ast

    source = "def f(x):\n    if x.is_cuda:\n        return torch.cuda.device_count()\n    return x.to('cuda:0')\n"

    assert list(cuda_page._asking(ast.parse(source), "")) == [("f", 2), ("f", 3), ("f", 4)]
