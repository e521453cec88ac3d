"""What this machine supports: number formats per device, scaled matrix products on GPUs, and installed packages.

Every working device can store and use every format: a format without native support is decoded exactly to a wider
native one. GPU limits are NVIDIA's compute capabilities: tensor cores for fp16 from 7.0 (Volta), int8 from 7.5
(Turing), bf16 and tf32 from 8.0 (Ampere), fp8 from 8.9 (Ada) and 9.0 (Hopper), fp4 with e8m0 block scales from 10.0
(Blackwell).
"""

import platform
import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from lpconv.errors import UnsupportedError, typed_line
from lpconv.formats.spec import FORMATS, Format
from lpconv.lookup import find
from lpconv.machine import may_have_gpu, read_text
from lpconv.results.doctor import (
    EMULATED,
    ERROR,
    NATIVE,
    UNAVAILABLE,
    DeviceRecord,
    DoctorResult,
    FormatSupport,
    PackageRecord,
    ProductSupport,
)
from lpconv.version import __version__

EXTRAS = ("onnx", "gguf", "gpu", "ray", "remote", "eval", "peers", "test")
_GROUPS = {"fp8": ("e4m3fn", "e5m2"), "fp6": ("e3m2", "e2m3"), "fp4": ("e2m1",)}  # groups of formats with a common name
# CPU flags in Linux (x86, then Arm) for matrix products in a 16-bit format.
_CPU_FLAGS = {"bf16": ("avx512_bf16", "amx_bf16", "bf16"), "fp16": ("avx512_fp16", "amx_fp16", "asimdhp")}
_CPU_FEATURES = frozenset(flag for flags in _CPU_FLAGS.values() for flag in flags) | {"avx2", "avx512f", "amx_int8"}
_CAPABILITIES = {
    "fp16": (7, 0), "bf16": (8, 0), "tf32": (8, 0), "e4m3fn": (8, 9), "e5m2": (8, 9),
    "e2m1": (10, 0), "e8m0fnu": (10, 0), "int8": (7, 5),
}  # fmt: skip
_CPUINFO, _DEV = Path("/proc/cpuinfo"), Path("/dev")
# (name, format of the left operand, number of scales of each operand); the right operand is e4m3fn.
_PRODUCTS = (
    ("fp8, scale per tensor", "e4m3fn", 1), ("fp8, e5m2 by e4m3fn", "e5m2", 1), ("fp8, scale per row", "e4m3fn", 128),
)  # fmt: skip
_BF16_ERROR = 2.0**-8  # error bound of a product with float32 sums and a bfloat16 result


def examine() -> DoctorResult:
    """What this machine supports: formats, scaled products, packages. Imports torch only if there may be a GPU."""
    gpus = _gpus() if may_have_gpu(_DEV) else ()
    devices = (cpu_device(read_text(_CPUINFO)), *gpus)
    return DoctorResult(
        lpconv=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        devices=devices,
        formats=tuple(support for device in devices for support in format_support(device)),
        products=tuple(product for device in devices for product in try_products(device)),
        packages=tuple(_packages()),
    )


def requirements(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The formats of each name that `require` takes. Raises UsageError for unknown names."""
    known = {**{name: (name,) for name in FORMATS}, **_GROUPS, **dict.fromkeys((*EXTRAS, "gpu"), ())}
    return {name: find("requirement", name, known) for name in names}


def require(names: Iterable[str], result: DoctorResult) -> None:
    """Raise UnsupportedError unless this machine has everything in `names`; UsageError for unknown names.

    A format (or `fp8`, `fp6`, `fp4`) counts if some device multiplies it natively, `gpu` if torch can use a GPU, and an
    extra if all its packages are installed.
    """
    wanted = requirements(names)
    lacking = [(name, *lack) for name, formats in wanted.items() for lack in _missing_parts(name, formats, result)]
    if lacking:
        raise UnsupportedError(
            "not available here: " + "; ".join(f"{name} ({why})" for name, why, _ in lacking),
            hint="; ".join(f"{name}: {fix}" for name, _, fix in lacking),
            details={"missing": [{"name": name, "why": why, "fix": fix} for name, why, fix in lacking]},
        )


def _missing_parts(name: str, formats: tuple[str, ...], result: DoctorResult) -> Iterator[tuple[str, str]]:
    """(reason, remedy) for each thing that the requirement `name` lacks; empty if it is met."""
    missing = [p.name for p in result.packages if p.extra == name != "gpu" and not p.ok]
    if missing:
        yield ", ".join(missing) + " not installed", f"pip install 'lpconv[{name}]'"
    native = {s.format for s in result.formats if s.level == NATIVE}
    for fmt in [f for f in formats if f not in native][:1]:
        yield ", ".join(f"{s.level} on {s.device}" for s in result.formats if s.format == fmt), f"use {_needs(fmt)}"
    gpus = [d for d in result.devices if d.kind != "cpu"]
    if name == "gpu" and all(d.problem for d in gpus):
        why = "; ".join(f"{d.name}: {d.problem}" for d in gpus) or "torch finds no GPU"
        yield why, "use a machine with an NVIDIA GPU and a torch built for it"


def cpu_device(cpuinfo: str) -> DeviceRecord:
    """The CPU described by the text of Linux's ``/proc/cpuinfo``; if the text is empty, only its name."""
    fields = dict(re.findall(r"^(\S.*?)\s*:[ \t]*(.*)$", cpuinfo, flags=re.MULTILINE))
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    name = fields.get("model name") or platform.processor() or platform.machine()
    return DeviceRecord(kind="cpu", name=name, features=tuple(sorted(_CPU_FEATURES.intersection(flags))))


def gpu_problem(capability: tuple[int, ...], built_for: Iterable[str]) -> str | None:
    """Why a torch built for the architectures `built_for` (``sm_90``, ``compute_90``) cannot run on a GPU, or None.

    Binaries run on GPUs of the same major version and the same or a later minor version; ``compute_`` code is compiled
    for any later GPU.
    """
    for kind, digits in re.findall(r"\b([a-z]+)_(\d+)[af]?\b", " ".join(built_for)):  # also 90a and 100f
        major, minor = divmod(int(digits), 10)
        if capability >= (major, minor) and (kind == "compute" or capability[0] == major):
            return None
    has = "{}.{}".format(*capability)
    return f"compute capability {has}, which this torch is not built for (it has {', '.join(built_for)})"


def _gpus() -> tuple[DeviceRecord, ...]:
    import torch

    if not torch.cuda.is_available():
        why = "is built for CPUs only" if torch.version.cuda is None else "finds no working driver"
        problem = f"torch {torch.__version__} {why}; see https://pytorch.org/get-started"
        is_there = any(_DEV.glob("nvidia[0-9]*"))
        return (DeviceRecord(kind="cuda", name="NVIDIA GPU", index=0, problem=problem),) if is_there else ()
    return tuple(_gpu(i) for i in range(torch.cuda.device_count()))


def _gpu(index: int) -> DeviceRecord:
    import torch

    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return DeviceRecord(kind="rocm", name=properties.name, index=index, problem="lpconv knows NVIDIA GPUs only")
    capability = (properties.major, properties.minor)
    problem = gpu_problem(capability, torch.cuda.get_arch_list())
    return DeviceRecord(kind="cuda", name=properties.name, index=index, capability=capability, problem=problem)


def format_support(device: DeviceRecord) -> tuple[FormatSupport, ...]:
    """How `device` handles each known format."""
    return tuple(_support(fmt, device) for fmt in FORMATS.values())


def _support(fmt: Format, device: DeviceRecord) -> FormatSupport:
    level, note = NATIVE, ""
    if device.problem:
        level, note = UNAVAILABLE, device.problem
    elif not _is_native(fmt.name, device):
        wider = "bf16" if _fits_bf16(fmt) and _is_native("bf16", device) else "fp32"
        level, note = EMULATED, f"decoded exactly to {wider}; native needs {_needs(fmt.name)}"
    return FormatSupport(format=fmt.name, device=device.label, level=level, note=note)


def _is_native(name: str, device: DeviceRecord) -> bool:
    if device.kind == "cpu":
        return name == "fp32" or not set(device.features).isdisjoint(_CPU_FLAGS.get(name, ()))
    return name == "fp32" or (device.capability or ()) >= _CAPABILITIES.get(name, (99,))


def _fits_bf16(fmt: Format) -> bool:
    bf16 = FORMATS["bf16"]
    in_range = fmt.max <= bf16.max and fmt.min_subnormal >= bf16.min_subnormal
    return fmt.name != "bf16" and fmt.mantissa_bits <= bf16.mantissa_bits and in_range


def _needs(format_name: str) -> str:
    """Description of the hardware that multiplies a format natively."""
    where = [f"a CPU with {'/'.join(_CPU_FLAGS[format_name])}"] if format_name in _CPU_FLAGS else []
    if format_name in _CAPABILITIES:
        where.append("a GPU of compute capability {}.{}".format(*_CAPABILITIES[format_name]))
    return " or ".join(where) or "hardware that lpconv does not know"


def try_products(device: DeviceRecord) -> tuple[ProductSupport, ...]:
    """Whether `device` multiplies fp8 with the scales that lpconv passes to tensor cores.

    Each product runs once on a GPU and is compared with the exact one, because a table of what GPU, torch and cuBLASLt
    support together would go out of date.
    """
    if device.problem:
        return ()
    fp8 = device.kind != "cpu" and _is_native("e4m3fn", device)
    products = []
    for layout, left, rows in _PRODUCTS:
        note = _try_product(left, rows, device.label) if fp8 else "decoded exactly to bf16"
        level = EMULATED if not fp8 else ERROR if note else NATIVE
        products.append(ProductSupport(layout=layout, device=device.label, level=level, note=note))
    return tuple(products)


def _try_product(left: str, rows: int, device: str) -> str:
    """Description of what is wrong with a product of random codes on a device; "" if it is correct."""
    import torch

    from lpconv.formats.codes import code_dtype
    from lpconv.kernels.matmul import matmul

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(128, 256, generator=generator).to(code_dtype(name)) for name in (left, "e4m3fn"))
    scale_a, scale_b = (2.0 ** torch.randint(-4, 5, (rows, 1), generator=generator) for _ in range(2))
    exact = (a.double() * scale_a) @ (b.double() * scale_b).t()
    try:
        right, scale_b = b.to(device).t(), scale_b.to(device).t()
        product = matmul(a.to(device), right, scale_a=scale_a.to(device), scale_b=scale_b).cpu()
    except Exception as e:  # a missing kernel, an unmet requirement or a driver error: each is reported
        return typed_line(e)
    error = float((product.double() - exact).norm() / exact.norm())
    return "" if error < _BF16_ERROR else f"wrong numbers: relative error {error:.2g}"


def _packages() -> Iterator[PackageRecord]:
    """The packages that lpconv and its extras require, according to its package metadata."""
    try:
        lines = metadata.requires("lpconv") or ()
    except metadata.PackageNotFoundError:  # running from a source tree that is not installed
        return
    for line in lines:
        needed = Requirement(line)
        extra = next((e for e in EXTRAS if f'extra == "{e}"' in str(needed.marker)), None)
        try:
            installed = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            installed = None
        ok = installed is not None and needed.specifier.contains(installed, prereleases=True)
        yield PackageRecord(name=needed.name, required=str(needed.specifier), extra=extra, installed=installed, ok=ok)
