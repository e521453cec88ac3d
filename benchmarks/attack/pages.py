"""The pages that every command writes, looked at in a headless Chromium: wide, on a phone, light and dark.

    python -m benchmarks.attack.pages --work DIRECTORY --out FILE.json [--pictures DIRECTORY]

Runs the commands below on the embedded model in DIRECTORY, unless their outputs are there already, and then looks at
every page for what `browser.py` calls a problem: a page or box that slides sideways, labels that are cut, raw values,
 values that only a pointer finds, text of too little contrast. Needs an installed Chromium, and several
minutes of one core. `tests/report/test_pages_in_browser.py` does the same in CI, from records.
"""

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import common
from benchmarks.attack.browser import Browser, find_browser, problems
from lpconv.data import demo_text

_TUNE = "finetune demo --steps 40 --seq-len 64"
# A page, and the command that writes it.
COMMANDS = {
    "runs/unit/report.html": "convert demo --method unit --format e4m3fn -o runs/unit",
    "runs/collage/report.html": "convert demo --method collage -o runs/collage",
    "runs/failed.failed/report.html": "convert demo --gate sqnr>=99 -o runs/failed",
    "runs/gptq/report.html": "convert demo --scheme W4A16 --rounding gptq --calibrate demo -o runs/gptq",
    "advice/advice.html": "advise demo --for infer --budget quality=0.004,minutes=3 -o advice",
    "verify.html": "verify runs/unit --against demo --data text.txt --max-tokens 512 --html verify.html",
    "compare.html": "report runs/unit runs/collage --html compare.html",
    "runs/probe/report.html": "probe demo -o runs/probe",
    "runs/fp8/report.html": f"{_TUNE} --recipe unit-fp8 --seeds 2 --gate loss<=1 -o runs/fp8",
    "runs/bf16/report.html": f"{_TUNE} --recipe collage-bf16 --lca -o runs/bf16",
    "finetunes.html": "report runs/fp8 runs/bf16 --html finetunes.html",
    "what-if.html": "report runs/probe --what-if e5m2 --html what-if.html",
    "bench.html": "report runs/train.json --html bench.html",
    "benches.html": "report runs/train.json runs/infer.json --html benches.html",
    "index.html": "report runs --html index.html",
}
_BENCH = "bench demo --compile off --baseline bf16 --format bf16,fp16,fp8 --seq 64 --rounds 8 --min-time 0.2 --mode "
BENCHES = {f"runs/{mode}.json": f"{_BENCH}{mode} --save runs/{mode}.json" for mode in ("train", "infer")}
VIEWS = {"wide": (1280, False), "wide, dark": (1280, True), "phone": (390, False), "phone, dark": (390, True)}


def make_pages(work: Path) -> None:
    """Run what has left no page yet; gates that fail are wanted (exit code 5)."""
    shutil.copyfile(demo_text("heldout"), work / "text.txt")
    for page, command in (BENCHES | COMMANDS).items():
        if not (work / page).exists():
            done = subprocess.run([sys.executable, "-m", "lpconv", *shlex.split(command)], cwd=work, check=False)
            assert done.returncode in (0, 5), command


def look(work: Path, pictures: Path | None) -> list[dict[str, object]]:
    """A row for each page and view: its height in pixels, and what is wrong."""
    executable = find_browser()
    assert executable is not None, "install Chromium"
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as profile, Browser(executable, Path(profile)) as browser:
        for page, command in COMMANDS.items():
            browser.open((work / page).resolve())
            for view, (width, dark) in VIEWS.items():
                browser.look(width=width, dark=dark)
                height = browser.ask("document.documentElement.scrollHeight")
                rows.append({"page": page, "command": f"lpconv {command}", "view": view, "width": width,
                             "height": height, "problems": problems(browser)})  # fmt: skip
                if pictures is not None:
                    name = f"{page}-{view}".replace("/", "-").replace(".html", "").replace(", ", "-")
                    browser.picture(pictures / f"{name}.png", height=min(height, 4000))
    return rows


def main() -> None:
    parser = common.parser(__doc__, needs_out=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--pictures", type=Path)
    asked = parser.parse_args()
    for folder in (asked.work / "runs", asked.pictures):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    make_pages(asked.work)
    rows = look(asked.work, asked.pictures)
    common.save(rows, asked.out)
    print(f"{len(rows)} views of {len(COMMANDS)} pages, {sum(bool(r['problems']) for r in rows)} with problems")


if __name__ == "__main__":
    main()
