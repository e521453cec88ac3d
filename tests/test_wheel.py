"""The wheel carries everything that the installed command reads."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_has_the_demo_model_and_the_templates(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "lpconv").rglob("*"):
        name = path.relative_to(ROOT).as_posix()
        assert not path.is_file() or "__pycache__" in name or name in names, name
    assert any(n.endswith("licenses/LICENSE") for n in names)
