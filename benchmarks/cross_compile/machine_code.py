"""Compile Triton kernels to machine code without a GPU, and count registers, spills and roundings."""

import functools
import importlib.util
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.cross_compile.inductor import Target


@dataclass(frozen=True, kw_only=True, eq=False)
class MachineCode:
    """A compiled kernel; `spilled` is in bytes per thread, `assembly` is PTX or GCN."""

    assembly: str
    registers: int
    spilled: int
    cubin: bytes  # empty for GCN
    launch: dict[str, int]  # block sizes and warps

    @property
    def instructions_per_element(self) -> float:
        """Machine instructions per element of a kernel without loops, not counting no-ops; 0 for GCN."""
        text = _dump(self.cubin, "--dump-sass") if self.cubin else ""  # slow, so only on demand
        instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?\s*(?!NOP)[A-Z]", text)
        return self._per_element(len(instructions))

    @property
    def widened_per_element(self) -> float:
        """Conversions from 16 bits to fp32 in the PTX, per element of a kernel without loops.

        Arithmetic in bf16 rounds by itself and counts as two conversions, of its operands.
        """
        one, two = (self._count(rf"(?:add|sub|mul|fma)(?:\.rn)?\.{dtype}\s") for dtype in ("bf16", "bf16x2"))
        return self._per_element(self._count(r"cvt\.f32\.(?:bf16|f16)") + 2 * one + 4 * two)

    @property
    def num_fused(self) -> int:
        """Fused multiply-adds in fp32, which skip the rounding of the product."""
        return self._count(r"fma\.rn\.f32")

    def _count(self, pattern: str) -> int:
        """Instructions in the PTX that match a regular expression."""
        return len(re.findall(rf"^\s*(?:@!?%p\d+ +)?{pattern}", self.assembly, re.MULTILINE))

    def _per_element(self, count: int) -> float:
        return count * 32 * self.launch["num_warps"] / self.launch["XBLOCK"]


class NotSupported(Exception):
    """The compiler rejects the kernel for this target."""


def load(name: str, source: str, folder: Path) -> Any:
    """Load Inductor's kernel object from its source, without compiling it."""
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    triton_heuristics.CachingAutotuner.precompile = lambda self, *args, **kwargs: None  # type: ignore[method-assign]
    triton_helpers.set_driver_to_gpu = lambda: None
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def compile_kernel(name: str, source: str, target: Target) -> MachineCode:
    """Compile with the first of Inductor's configurations. Raises NotSupported."""
    return _compiled(source.replace(name, "kernel"), target)


@functools.cache  # paths share kernels
def _compiled(source: str, target: Target) -> MachineCode:
    import triton
    from triton.backends.compiler import GPUTarget

    with tempfile.TemporaryDirectory() as folder:
        kernel = load("kernel", source, Path(folder))
        meta, config = kernel.triton_meta, kernel.configs[0]
        signature = dict(meta["signature"]) | dict.fromkeys(config.kwargs, "constexpr")
        constants = dict(meta.get("constants", {})) | config.kwargs
        ast = triton.compiler.ASTSource(
            fn=kernel.fn, signature=signature, constexprs=constants, attrs=meta["configs"][0]
        )
        try:
            built = triton.compile(
                ast,
                target=GPUTarget(target.backend, target.arch, target.warp),
                options={
                    "num_warps": config.num_warps,
                    "num_stages": config.num_stages,
                    "enable_fp_fusion": meta.get("enable_fp_fusion", True),
                },
            )
        except Exception as error:  # Triton raises many kinds
            raise NotSupported(_last_line(str(error))) from error
    launch = {**config.kwargs, "num_warps": config.num_warps}
    if target.backend == "hip":
        text = built.asm["amdgcn"]
        spills = sum(int(n) for n in re.findall(r"\.[sv]gpr_spill_count: +(\d+)", text))
        (registers,) = re.findall(r"\.vgpr_count: +(\d+)", text)
        return MachineCode(assembly=text, registers=int(registers), spilled=4 * spills, cubin=b"", launch=launch)
    cubin = built.asm["cubin"]
    used = _dump(cubin, "--dump-resource-usage")
    registers, stack = (int(re.findall(rf"{word}:(\d+)", used)[-1]) for word in ("REG", "STACK"))
    return MachineCode(assembly=built.asm["ptx"], registers=registers, spilled=stack, cubin=cubin, launch=launch)


def _dump(cubin: bytes, option: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), option, file.name], capture_output=True, text=True, check=True).stdout


def _last_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
