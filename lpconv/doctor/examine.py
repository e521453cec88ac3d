"""Look at this machine. Nothing is installed, downloaded or changed."""

import os
import platform
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from lpconv.doctor.packages import extras, packages
from lpconv.doctor.products import try_products
from lpconv.doctor.support import CPU_FEATURES, format_support
from lpconv.machine import available_memory, may_have_gpu, memory_limit
from lpconv.results import CacheRecord, DeviceRecord, DoctorResult, MachineRecord, PackageRecord
from lpconv.version import __version__

__all__ = ["cpu_device", "examine", "gpu_problem"]

_CPUINFO = Path("/proc/cpuinfo")
_DEV = Path("/dev")
_NVIDIA = "nvidia[0-9]*"


def examine() -> DoctorResult:
    """What this machine can do, with outputs in the working directory.

    torch, which takes seconds to import, is asked where a GPU may be.
    """
    required = packages()
    gpus, gpu_problems = _gpus() if may_have_gpu(_DEV) else ((), ())
    devices = (cpu_device(_read(_CPUINFO)), *gpus)
    return DoctorResult(
        lpconv=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        devices=devices,
        formats=tuple(support for device in devices for support in format_support(device)),
        packages=required,
        extras=extras(),
        machine=_machine(Path.cwd()),
        cache=_cache(),
        products=tuple(product for device in devices for product in try_products(device)),
        problems=(*_package_problems(required), *gpu_problems),
    )


def cpu_device(cpuinfo: str) -> DeviceRecord:
    """The CPU as Linux describes it in ``/proc/cpuinfo``; elsewhere, with no text, its name only."""
    fields = dict(_cpuinfo_fields(cpuinfo))
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return DeviceRecord(
        kind="cpu",
        name=fields.get("model name") or platform.processor() or platform.machine(),
        features=tuple(sorted(CPU_FEATURES.intersection(flags))),
        num_cores=_num_cores(),
        memory_bytes=psutil.virtual_memory().total,
    )


def _cpuinfo_fields(cpuinfo: str) -> Iterator[tuple[str, str]]:
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        yield key.strip(), value.strip()


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_problem(capability: tuple[int, ...], built_for: Iterable[str]) -> str | None:
    """Why a torch built for the architectures `built_for` (``sm_90``, ``compute_90``) cannot run a GPU, or None.

    Binaries run on GPUs of the same major version from their minor version on; ``compute_`` code is compiled on any
    later GPU.
    """
    for arch in built_for:
        kind, _, number = arch.partition("_")
        digits = number.rstrip("af")  # 90a, 100f: code for features of that very family
        if not digits.isdigit():
            continue
        major, minor = divmod(int(digits), 10)
        if kind == "compute" and capability >= (major, minor):
            return None
        if capability[0] == major and capability[1] >= minor:
            return None
    has = "{}.{}".format(*capability)
    return f"compute capability {has}, which this torch is not built for (it has {', '.join(built_for)})"


def _gpus() -> tuple[tuple[DeviceRecord, ...], tuple[str, ...]]:
    try:
        import torch
    except (ImportError, OSError) as e:
        return (), (f"torch does not import ({e}); install it anew",)
    if torch.cuda.is_available():
        return tuple(_gpu(i) for i in range(torch.cuda.device_count())), ()
    if any(_DEV.glob(_NVIDIA)):
        why = "is built for CPUs only" if torch.version.cuda is None else "finds no working driver"
        return (), (f"an NVIDIA GPU is here, but torch {torch.__version__} {why}; see https://pytorch.org/get-started",)
    return (), ()


def _gpu(index: int) -> DeviceRecord:
    import torch

    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    is_rocm = torch.version.hip is not None
    return DeviceRecord(
        kind="rocm" if is_rocm else "cuda",
        name=properties.name,
        index=index,
        capability=None if is_rocm else capability,
        num_cores=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        problem="lpconv knows NVIDIA GPUs only" if is_rocm else gpu_problem(capability, torch.cuda.get_arch_list()),
    )


def _machine(folder: Path) -> MachineRecord:
    memory = psutil.virtual_memory()
    disk = shutil.disk_usage(folder)
    return MachineRecord(
        memory_bytes=memory.total,
        memory_available_bytes=available_memory(),
        memory_limit_bytes=memory_limit(),
        disk_path=str(folder.resolve()),
        disk_bytes=disk.total,
        disk_free_bytes=disk.free,
    )


def _cache() -> CacheRecord:
    from huggingface_hub import constants

    directory = Path(constants.HF_HUB_CACHE)
    models = list(directory.glob("models--*"))
    return CacheRecord(
        directory=str(directory), exists=directory.is_dir(), num_models=len(models), offline=constants.HF_HUB_OFFLINE
    )


def _package_problems(required: tuple[PackageRecord, ...]) -> Iterator[str]:
    for package in required:
        if package.ok:
            continue
        state = f"{package.installed} is too old" if package.installed else "is not installed"
        yield f"{package.name} {state}: pip install '{package.name}>={package.required}'"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
