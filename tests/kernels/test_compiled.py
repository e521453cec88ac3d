"""Kernels know when a compiler traces them."""

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode

from lpconv.kernels.compiled import is_compiling


def test_graphs_of_tensor_subclasses_are_compiled_whatever_torchs_own_flag_says() -> None:
    assert not is_compiling()
    with tracing(TracingContext(FakeTensorMode())):
        assert not torch.compiler.is_compiling()
        assert is_compiling()
    assert torch.compile(lambda x: x + is_compiling(), backend="eager", fullgraph=True)(torch.zeros(1)).item() == 1
