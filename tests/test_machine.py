"""Memory that may still be taken, inside a container and outside of one."""

from pathlib import Path

import psutil
import pytest

from lpconv.machine import available_memory, memory_limit


def container(folder: Path, limit: str, used: int, file_pages: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - file_pages}\ninactive_file {file_pages}\n")
    return folder


def test_a_container_allows_what_its_limit_leaves_and_file_pages_are_free(tmp_path: Path) -> None:
    folder = container(tmp_path, "64000000", used=50_000_000, file_pages=20_000_000)
    assert memory_limit(folder) == 64_000_000
    assert available_memory(folder) == 34_000_000


def test_a_full_container_leaves_nothing(tmp_path: Path) -> None:
    assert available_memory(container(tmp_path, "1000", used=5000, file_pages=0)) == 0


@pytest.mark.parametrize("limit", ["max", None])
def test_without_a_limit_the_machine_decides(tmp_path: Path, limit: str | None) -> None:
    if limit:
        container(tmp_path, limit, used=1, file_pages=0)
    assert memory_limit(tmp_path) is None
    assert 0 < available_memory(tmp_path) <= psutil.virtual_memory().total
