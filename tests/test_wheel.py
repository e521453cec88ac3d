"""The wheel and the sdist carry everything that users, and those who run the tests, read."""

import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist, unpacked, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    _build("sdist", ROOT, folder)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = (p for p in folder.iterdir() if p.is_dir())
    _build("wheel", unpacked, folder)
    return folder


def _build(target: str, source: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)


def _wheel(folder: Path) -> zipfile.ZipFile:
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


def _metadata(folder: Path) -> Message:
    with _wheel(folder) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith("dist-info/METADATA"))
        return Parser().parsestr(wheel.read(name).decode())


def test_the_wheel_has_the_demo_model_and_the_templates(built: Path) -> None:
    names = set(_wheel(built).namelist())
    for path in (ROOT / "lpconv").rglob("*"):
        name = path.relative_to(ROOT).as_posix()
        assert not path.is_file() or "__pycache__" in name or name in names, name
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"lpconv"}


def test_the_sdist_has_what_the_tests_read(built: Path) -> None:
    (unpacked,) = (p for p in built.iterdir() if p.is_dir())
    for top in ("lpconv", "tests", "benchmarks", "docs", ".github"):
        for path in (ROOT / top).rglob("*"):
            name = path.relative_to(ROOT)
            # hidden folders are caches of tools, such as .ruff_cache
            is_cache = "__pycache__" in name.parts or any(part.startswith(".") for part in name.parts[1:])
            assert not path.is_file() or is_cache or (unpacked / name).is_file(), name
    for single in ("README.md", "LICENSE", "pyproject.toml", ".pre-commit-hooks.yaml"):
        assert (unpacked / single).read_bytes() == (ROOT / single).read_bytes()


def test_the_metadata_say_what_it_is(built: Path) -> None:
    facts = _metadata(built)
    assert "lpconv" in facts["Author"]
    assert facts["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in facts.get_all("Classifier", [])
    assert "quantization" in facts["Keywords"].split(",")
    assert facts["Description-Content-Type"] == "text/markdown"
    with _wheel(built) as wheel:
        (entry,) = (n for n in wheel.namelist() if n.endswith("entry_points.txt"))
        assert "lpconv = lpconv.__main__:main" in wheel.read(entry).decode()
