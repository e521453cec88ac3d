"""How much memory this process may still take."""

from pathlib import Path

import psutil

__all__ = ["available_memory", "memory_limit"]

_CGROUP = Path("/sys/fs/cgroup")


def memory_limit(cgroup: Path = _CGROUP) -> int | None:
    """The container's limit in bytes (cgroup v2), or None where there is none."""
    text = _read(cgroup / "memory.max").strip()
    return int(text) if text.isdigit() else None


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes that can be taken without swapping or being killed: the machine's, within the container's limit.

    What the container uses counts file pages that the kernel gives back when they are needed; they are left out.
    """
    available: int = psutil.virtual_memory().available
    limit = memory_limit(cgroup)
    if limit is None:
        return available
    used = _read(cgroup / "memory.current").strip()
    counts = dict(line.split(maxsplit=1) for line in _read(cgroup / "memory.stat").splitlines())
    taken = int(used or 0) - int(counts.get("inactive_file", 0))
    return max(0, min(available, limit - taken))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
