"""This process on this machine: memory that it may still take, failed allocations, and a stdout of its own.

The tightest of these limits counts: the machine's free memory, the container (its cgroup, version 1 or 2, and all
parent cgroups), and the limits of the process (``ulimit -v`` and ``ulimit -d``). All are read from files below
``/proc`` and ``/sys``, which tests replace through `root`.
"""

import ctypes
import errno
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TextIO

from lpconv.errors import ResourceError, first_line

_ROOT = Path("/")
_ENDLESS = 2**60  # version 1 writes the largest multiple of a page if there is no limit
_KIB = 2**10
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # M_MMAP_THRESHOLD and M_ARENA_MAX of malloc.h
_LARGE = 4 * 2**20  # bytes of a block with pages of its own
# Messages of allocators (Python, torch, the C library) and of the loader if memory for a library's code is missing.
_MESSAGES = ("can't allocate memory", "cannot allocate memory", "bad alloc", "can't start new thread", "out of memory",
         "failed to map segment", "unable to allocate", "std::bad_alloc", "not enough memory",
         # CPython's two messages if an allocation failed during an import and the MemoryError was lost.
         "error return without exception set", "returned null without setting an exception")  # fmt: skip


# Device files of NVIDIA, of AMD, and of Linux in Windows (WSL).
_GPUS = ("nvidia[0-9]*", "kfd", "dxg")


def may_have_gpu(devices: Path = _ROOT / "dev") -> bool:
    """Whether a GPU driver has created a device file. Only torch, which takes seconds to import, knows if it works."""
    return any(any(devices.glob(name)) for name in _GPUS)


def is_first_process() -> bool:
    """Whether this process is the only one or torchrun's first one. Does not import torch."""
    return os.environ.get("RANK", "0") == "0"


_Limit = tuple[int, int]  # a memory limit and the memory used under it, in bytes


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that can be allocated without swapping, an out-of-memory kill or a refusal: the minimum over all limits."""
    left = [size - used for size, used in _memory_limits(root)]
    return max(0, min([_free_memory(root), *left]))


def free_addresses(root: Path = _ROOT) -> int | None:
    """Bytes of address space that this process may still map, touched or not; None without `ulimit -v`."""
    limits = _process_limits(root / "proc/self", {"Max address space": "VmSize"})
    return next((max(0, size - used) for size, used in limits), None)


def out_of_memory(error: BaseException) -> ResourceError | None:
    """Convert a failed allocation of any library to a ResourceError; None for any other error."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's, not imported here
    is_refused = named or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    text = str(error).lower()
    has_message = isinstance(error, (RuntimeError, ImportError, OSError, SystemError)) and any(
        words in text for words in _MESSAGES
    )
    if not is_refused and not has_message:
        return None
    return ResourceError(
        f"out of memory: {first_line(error):.120}",
        hint="free some memory, raise the limit (`ulimit -v` or the container's), or lower --max-memory if "
        "the command has that option",
    )


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use; of all cores on systems that cannot restrict it, like macOS."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def load_average() -> float:
    """Mean number of processes that were running or waiting in the last minute; 0 on systems that do not count them."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def peak_rss_bytes(root: Path = _ROOT) -> int:
    """Peak resident memory of this process in bytes."""
    for line in read_text(root / "proc/self/status").splitlines():
        if line.startswith("VmHWM:"):  # getrusage would include the process that started this one
            return int(line.split()[1]) * _KIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * _KIB  # bytes on macOS, KiB elsewhere


def share_one_heap() -> None:
    """Let new threads allocate from one heap, so that memory freed by one serves the others, and return large blocks as
    soon as they are freed.

    By default glibc gives every thread a heap, and keeps freed blocks of up to 32 MiB in them.
    """
    with suppress(AttributeError, TypeError):
        for parameter, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _LARGE)):
            ctypes.CDLL(None).mallopt(parameter, value)


def trim_heap() -> None:
    """Give memory that the C library keeps for later allocations back to the system."""
    if sys.platform == "linux":
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _free_memory(root: Path) -> int:
    for line in read_text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * _KIB
    import psutil  # imported late: needed only without /proc, and slow to import at start-up

    available: int = psutil.virtual_memory().available
    return available


def _memory_limits(root: Path) -> list[_Limit]:
    counted = {"Max address space": "VmSize", "Max data size": "VmData"}
    return [*_process_limits(root / "proc/self", counted), *_container_limits(root)]


def _process_limits(proc: Path, counted: Mapping[str, str]) -> Iterator[_Limit]:
    """The limits in `counted` that are set, each with the memory that the kernel counts against it."""
    used = dict(line.split(":", 1) for line in read_text(proc / "status").splitlines() if ":" in line)
    for line in read_text(proc / "limits").splitlines():
        for name, size in counted.items():
            soft = line.removeprefix(name).split()[:1] if line.startswith(name) else []
            if soft and soft[0].isdigit():
                yield int(soft[0]), int(used.get(size, "0").split()[0]) * _KIB


def _container_limits(root: Path) -> Iterator[_Limit]:
    """Memory limits of the process's cgroup and of its parents, as far as they are visible from here."""
    own = [line.split(":", 2) for line in read_text(root / "proc/self/cgroup").splitlines() if line.count(":") >= 2]
    for mount in read_text(root / "proc/self/mountinfo").splitlines():
        fields, _, kind = mount.partition(" - ")
        if not kind.startswith("cgroup"):
            continue
        shown, point = fields.split()[3:5]
        is_v2 = kind.startswith("cgroup2")
        if not is_v2 and "memory" not in kind.split()[-1].split(","):
            continue
        path = next((p for _, names, p in own if (not names if is_v2 else "memory" in names.split(","))), None)
        if path is None:
            continue
        for folder in _parent_folders(root / point.lstrip("/"), shown, path):
            yield from _cgroup_limits(folder, is_v2=is_v2)


def _parent_folders(mount: Path, shown: str, path: str) -> list[Path]:
    """Folders of a cgroup and its parents below `mount`, which shows the hierarchy from `shown` down."""
    inside = PurePosixPath(path)
    # In a container the mount may begin at the cgroup itself, under a name that exists only on the host.
    parts = inside.relative_to(shown).parts if inside.is_relative_to(shown) else ()
    return [mount.joinpath(*(p for p in parts[:n] if p not in ("/", ".."))) for n in range(len(parts) + 1)]


def _cgroup_limits(folder: Path, *, is_v2: bool) -> Iterator[_Limit]:
    # Above `memory.high` the kernel throttles the process almost to a standstill.
    limits = ("memory.max", "memory.high") if is_v2 else ("memory.limit_in_bytes",)
    sizes = [int(text) for name in limits if (text := read_text(folder / name).strip()).isdigit()]
    if not sizes or min(sizes) >= _ENDLESS:
        return
    used = read_text(folder / ("memory.current" if is_v2 else "memory.usage_in_bytes")).strip()
    yield min(sizes), int(used or 0) - _file_pages(read_text(folder / "memory.stat"), is_v2=is_v2)


def _file_pages(stat: str, *, is_v2: bool) -> int:
    """Bytes of page cache that the kernel can reclaim: file pages that no process has mapped."""
    counts = dict(line.split(maxsplit=1) for line in stat.splitlines())
    names = ("active_file", "inactive_file", "file_mapped") if is_v2 else (
        "total_active_file", "total_inactive_file", "total_mapped_file")  # fmt: skip
    active, inactive, mapped = (int(counts.get(name, 0)) for name in names)
    return max(0, active + inactive - mapped)


def read_text(path: Path) -> str:
    """Contents of a file of the system; empty if it does not exist, as on macOS."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def own_stdout() -> TextIO:
    """A text stream to the current stdout; from now on, direct writes to file descriptor 1 go to stderr.

    The tokenizers library, for example, reports an unexpected field of tokenizer.json on stdout, in the middle of a
    JSON document. If the shell closed stdout or stderr (``>&-``), writes to it are discarded.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    sys.stdout.flush()
    descriptor = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return os.fdopen(descriptor, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1)
