"""Memory that may still be taken: of the machine, in containers inside containers, under the limits of a process."""

import errno
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lpconv.errors import ResourceError
from lpconv.machine import _memory_limits, available_memory, free_addresses, out_of_memory, peak_rss_bytes
from tests.helpers.checkpoints import cli_environment

V1, V2 = "cgroup cgroup rw,memory", "cgroup2 cgroup2 rw"
PLENTY_KIB = 2**40 // 1024


class Machine:
    """A tree of /proc and /sys."""

    def __init__(self, root: Path, *, free_kib: int = PLENTY_KIB) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {PLENTY_KIB} kB\nMemAvailable: {free_kib} kB\n")

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def mount(self, kind: str, *, group: str, shown: str = "/") -> None:
        """A hierarchy at /sys/fs/cgroup that shows the tree from `shown` on, and this process's group in it."""
        self.write("proc/self/mountinfo", f"31 23 0:28 {shown} /sys/fs/cgroup rw shared:9 - {kind}\n")
        self.write("proc/self/cgroup", f"{'0:' if kind == V2 else '4:memory'}:{group}\n")

    def v2(self, group: str, limit: str, *, used: int = 0, stat: str = "") -> None:
        self.write(f"sys/fs/cgroup{group}/memory.max", f"{limit}\n")
        self.write(f"sys/fs/cgroup{group}/memory.current", f"{used}\n")
        self.write(f"sys/fs/cgroup{group}/memory.stat", stat)

    def v1(self, group: str, limit: str, *, used: int = 0, stat: str = "") -> None:
        self.write(f"sys/fs/cgroup{group}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"sys/fs/cgroup{group}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"sys/fs/cgroup{group}/memory.stat", stat)

    def limits(self, name: str, soft: str, *, size_kib: int, data_kib: int) -> None:
        self.write(
            "proc/self/limits", f"Limit   Soft Limit   Hard Limit   Units\n{name}   {soft}   unlimited   bytes\n"
        )
        self.write("proc/self/status", f"Name:\tpython\nVmSize:\t {size_kib} kB\nVmData:\t {data_kib} kB\n")

    def found(self) -> tuple[int | None, int]:
        return min((size for size, _ in _memory_limits(self.root)), default=None), available_memory(self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_limit_what_is_free_counts(tmp_path: Path) -> None:
    assert Machine(tmp_path, free_kib=3000).found() == (None, 3000 * 1024)


def test_a_system_without_proc_is_asked_otherwise(tmp_path: Path) -> None:
    assert _memory_limits(tmp_path) == []
    assert 0 < available_memory(tmp_path) <= psutil.virtual_memory().total


def test_a_container_leaves_its_limit_less_what_is_used_and_file_pages_that_nobody_maps_are_free(
    machine: Machine,
) -> None:
    machine.mount(V2, group="/")
    stat = "anon 30\nactive_file 15000000\ninactive_file 10000000\nfile_mapped 5000000\n"
    machine.v2("", "64000000", used=50_000_000, stat=stat)
    assert machine.found() == (64_000_000, 34_000_000)


def test_the_tightest_of_nested_groups_counts(machine: Machine) -> None:
    machine.mount(V2, group="/pod/box")
    machine.v2("", "max")
    machine.v2("/pod", "1000", used=900)
    machine.v2("/pod/box", "500", used=100)
    machine.v2("/elsewhere", "1")
    assert machine.found() == (500, 100)  # the pod's limit is larger, and leaves less


def test_version_1_counts_inner_groups_and_writes_no_limit_as_a_huge_one(machine: Machine) -> None:
    unlimited = str(2**63 - 4096)
    machine.mount(V1, group="/pod/box")
    machine.v1("", unlimited)
    machine.v1("/pod/box", unlimited)
    assert machine.found() == (None, PLENTY_KIB * 1024)
    stat = "active_file 7\ntotal_active_file 0\ntotal_inactive_file 20000000\ntotal_mapped_file 0\n"
    machine.v1("/pod", "64000000", used=50_000_000, stat=stat)
    assert machine.found() == (64_000_000, 34_000_000)


def test_a_container_that_does_not_know_the_name_of_its_own_group(machine: Machine) -> None:
    machine.mount(V1, group="/docker/3f2a", shown="/docker/3f2a")
    machine.v1("", "4000", used=1000)
    assert machine.found() == (4000, 3000)
    machine.mount(V1, group="/docker/3f2a", shown="/docker/other")
    assert machine.found() == (4000, 3000)


def test_a_group_that_is_slowed_down_is_full(machine: Machine) -> None:
    machine.mount(V2, group="/")
    machine.v2("", "4000", used=1000)
    machine.write("sys/fs/cgroup/memory.high", "3000\n")
    assert machine.found() == (3000, 2000)


def test_a_full_container_leaves_nothing(machine: Machine) -> None:
    machine.mount(V2, group="/")
    machine.v2("", "1000", used=5000)
    assert machine.found() == (1000, 0)


@pytest.mark.parametrize(("name", "left"), [("Max address space", 90 * 1024), ("Max data size", 98 * 1024)])
def test_limits_of_the_process(machine: Machine, name: str, left: int) -> None:
    machine.limits(name, str(100 * 1024), size_kib=10, data_kib=2)
    assert machine.found() == (100 * 1024, left)


def test_only_a_limit_of_addresses_bounds_what_may_be_mapped(machine: Machine) -> None:
    machine.limits("Max address space", str(100 * 1024), size_kib=10, data_kib=2)
    assert free_addresses(machine.root) == 90 * 1024
    machine.limits("Max data size", str(100 * 1024), size_kib=10, data_kib=2)
    assert free_addresses(machine.root) is None


def test_a_real_limit_of_the_address_space() -> None:
    code = "from lpconv.machine import *; print(available_memory())"
    command = f"ulimit -v 3000000; exec {sys.executable} -c '{code}'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, env=cli_environment())
    assert 0 < int(done.stdout) < 3_000_000 * 1024


def test_the_peak_is_that_of_the_process_and_not_of_the_one_that_started_it() -> None:
    ballast = bytearray(b"x") * (300 << 20)  # resident, as zeros would not be
    code = "from lpconv.machine import peak_rss_bytes; print(peak_rss_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < len(ballast) < peak_rss_bytes()


def test_without_proc_the_peak_is_what_the_system_says(tmp_path: Path) -> None:
    assert peak_rss_bytes(tmp_path) >= peak_rss_bytes() > 0


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
    ids=str,
)
def test_a_failed_allocation_is_known_whoever_reports_it(error: Exception) -> None:
    found = out_of_memory(error)
    assert isinstance(found, ResourceError)
    assert "--max-memory" in str(found.hint)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), OSError(errno.EIO, "I/O"), KeyError("memory")], ids=str
)
def test_other_errors_are_not_taken_for_one(error: Exception) -> None:
    assert out_of_memory(error) is None


# Calls that macOS lacks, removed after libraries have chosen their own by the platform.
_AS_MACOS = """
import os, pathlib, sys, sysconfig, psutil, torch, transformers
sysconfig.get_config_vars()
for name in ("posix_fadvise", "posix_fallocate", "fdatasync", "sched_getaffinity", "sched_setaffinity"):
    delattr(os, name)
sys.platform = "darwin"
read_text = pathlib.Path.read_text
def read(path, *how, **options):
    return read_text(pathlib.Path("/absent") if str(path).startswith(("/proc", "/sys")) else path, *how, **options)
pathlib.Path.read_text = read
"""
_AS_WINDOWS = "import sys; sys.platform = 'win32'; sys.modules.update(dict.fromkeys(('fcntl', 'resource')))\n"
_BATCH = "version: 1\njobs: [{id: one, model: demo, format: bf16, output: one}, {id: two, model: demo, output: two}]\n"


@pytest.mark.parametrize(
    ("system", "arguments", "code"),
    [
        (_AS_MACOS, "convert demo --format e4m3fn -o out", 0),
        (_AS_MACOS, "batch jobs.yaml --parallel 2", 0),
        (_AS_MACOS, "doctor", 0),
        (_AS_WINDOWS, "inspect demo", 4),
    ],
)
def test_other_systems(system: str, arguments: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text(_BATCH)
    run = f"import runpy; sys.argv[1:] = {arguments.split()}; runpy.run_module('lpconv', run_name='__main__')"
    command = [sys.executable, "-c", system + run]
    done = subprocess.run(command, cwd=tmp_path, env=cli_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert code == 0 or (done.stderr.startswith("error:") and "WSL" in done.stderr and "fcntl" in done.stderr)
