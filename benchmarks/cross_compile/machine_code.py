"""Machine code of a Triton kernel for a GPU that is not there, and what it needs: registers, spills, conversions."""

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
    """A compiled kernel. `spilled` counts bytes per thread that do not fit the registers; `assembly` is PTX or GCN."""

    assembly: str
    registers: int
    spilled: int
    cubin: bytes  # empty for GCN
    launch: dict[str, int]  # block sizes and warps
    parameters: tuple[tuple[str, str], ...]  # name and type of those that reach the GPU

    @property
    def instructions_per_element(self) -> float:
        """Instructions, without no-ops, that a kernel without loops has for each element of its block; 0 for GCN."""
        text = _dump(self.cubin, "--dump-sass") if self.cubin else ""  # slow, so only on demand
        instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?\s*(?!NOP)[A-Z]", text)
        return len(instructions) * 32 * self.launch["num_warps"] / self.launch["XBLOCK"]

    def count(self, pattern: str) -> int:
        """How many instructions match a regular expression."""
        return len(re.findall(rf"^\s*(?:@!?%p\d+ +)?{pattern}", self.assembly, re.MULTILINE))


class NotSupported(Exception):
    """The compiler refuses the kernel for this target; the message says why."""


def load(name: str, source: str, folder: Path) -> Any:
    """Inductor's kernel object of a source text, not compiled."""
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


def compile_kernel(name: str, source: str, target: Target, *, fuses_products: bool | None = None) -> MachineCode:
    """Compile with the first of Inductor's configurations. Raises NotSupported.

    `fuses_products` overrides whether a product and a sum may become one fused multiply-add, rounded once.
    """
    return _compiled(source.replace(name, "kernel"), target, fuses_products)


@functools.cache  # paths share kernels
def _compiled(source: str, target: Target, fuses_products: bool | None) -> MachineCode:
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
                    "enable_fp_fusion": meta.get("enable_fp_fusion", True)
                    if fuses_products is None
                    else fuses_products,
                },
            )
        except Exception as error:  # Triton raises many kinds
            raise NotSupported(_last_line(str(error))) from error
    launch = {**config.kwargs, "num_warps": config.num_warps}
    names = tuple((n, t) for n, t in signature.items() if t != "constexpr" and n not in constants)
    if target.backend == "hip":
        text = built.asm["amdgcn"]
        spills = sum(int(n) for n in re.findall(r"\.[sv]gpr_spill_count: +(\d+)", text))
        (registers,) = re.findall(r"\.vgpr_count: +(\d+)", text)
        return MachineCode(
            assembly=text, registers=int(registers), spilled=4 * spills, cubin=b"", launch=launch, parameters=names
        )
    cubin = built.asm["cubin"]
    used = _dump(cubin, "--dump-resource-usage")
    registers, stack = (int(re.findall(rf"{word}:(\d+)", used)[-1]) for word in ("REG", "STACK"))
    return MachineCode(
        assembly=built.asm["ptx"], registers=registers, spilled=stack, cubin=cubin, launch=launch,
        parameters=names,
    )  # fmt: skip


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
