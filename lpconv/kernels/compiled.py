"""torch.compile with a check that it keeps our rounding.

A compiler that fuses elementwise code may drop a rounding as a needless round trip (inductor removes casts to bfloat16
and back, and with them every low component of a multi-component float). No setting prevents this across torch versions,
so each kernel is checked where it runs: before its first use it is compiled, run on inputs that would reveal a lost
rounding, and compared with eager execution bit for bit. If compilation fails or one bit differs, the eager function is
used from then on, with a warning once, and `fallback_reason` records why for reports.

`LPCONV_COMPILE=never` in the environment keeps everything eager, `always` compiles for small tensors too.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from packaging.version import Version
from torch import Tensor

from lpconv.errors import typed_line

COMPILES_SUBCLASSES = Version(torch.__version__) >= Version("2.13")  # without the faults named where this is used
MIN_ELEMENTS = 1 << 20  # for fewer, eager takes about a millisecond and compilation seconds

_eager = False


def is_compiling() -> bool:
    """Whether a compiler traces this code, so that values cannot be read and memory cannot be reused.

    Before torch 2.13, `torch.compiler.is_compiling` is False while the graphs of tensor subclasses are made.
    """
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None


@contextmanager
def eager_mode() -> Iterator[None]:
    """Disable compilation inside the context, in all threads, for work that is shorter than a compilation."""
    global _eager
    before, _eager = _eager, True
    try:
        yield
    finally:
        _eager = before


class CheckedKernel:
    """A function of tensors that is compiled on first use and checked against eager mode.

    `function` takes tensors and returns one; `examples` creates arguments that reveal a lost rounding, for a dtype and
    device. Each such pair is compiled and checked separately. `fallback_reason` says why, for the pairs that run
    eagerly instead of compiled.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        examples: Callable[[torch.dtype, torch.device], tuple[Tensor, ...]],
        *,
        min_elements: int = MIN_ELEMENTS,
    ) -> None:
        self.function = function
        self.examples = examples
        self.min_elements = min_elements
        self.fallback_reason: dict[str, str] = {}
        self._proved: dict[str, Callable[..., Tensor]] = {}

    def wants(self, x: Tensor, dtype: torch.dtype | None = None) -> bool:
        """Whether `x` is large enough, and its device and the environment allow it, to run compiled (in `dtype`)."""
        mode = os.environ.get("LPCONV_COMPILE", "auto")
        if _eager or mode == "never" or is_compiling() or x.device.type not in ("cpu", "cuda"):
            return False
        return (mode == "always" or x.numel() >= self.min_elements) and _kind(x, dtype) not in self.fallback_reason

    def __call__(self, *args: Tensor) -> Tensor:
        """The function's result, compiled if that passed the check for the dtype and device of the first argument."""
        kind = _kind(args[0])
        if kind not in self._proved:
            self._proved[kind] = self._prove(args[0])
        # torch.compile would compile again for another autograd mode, and for a view of a base of another rank.
        with torch.no_grad():
            return self._proved[kind](*(a.data for a in args))

    def _prove(self, like: Tensor) -> Callable[..., Tensor]:
        compiled = torch.compile(self.function, dynamic=True, fullgraph=True)
        try:
            with torch.no_grad():
                got = compiled(*(a.data for a in self.examples(like.dtype, like.device)))
        except Exception as error:  # for any failure in a compiler back end, eager gives the same numbers
            reason = f"torch.compile failed: {typed_line(error)}"
        else:
            if _same_bits(got, self.function(*self.examples(like.dtype, like.device))):
                return compiled
            reason = "torch.compile changed the rounding"
        self.fallback_reason[_kind(like)] = reason
        warnings.warn(f"{self.function.__name__} runs eagerly for {_kind(like)}: {reason}", stacklevel=3)
        return self.function


def _kind(x: Tensor, dtype: torch.dtype | None = None) -> str:
    return f"{str(dtype or x.dtype).removeprefix('torch.')} on {x.device.type}"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are bitwise equal, except for NaN, whose sign and payload nothing fixes."""
    if a.dtype != b.dtype or not torch.equal(a.isnan(), b.isnan()):
        return False
    if a.itemsize == 1:  # torch has no masked_fill for fp8
        a, b = a.float(), b.float()
    a, b = a.masked_fill(a.isnan(), 0), b.masked_fill(b.isnan(), 0)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
