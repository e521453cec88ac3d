"""`lpconv report` on several runs of a kind, and on a folder of runs of many kinds."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.report.html import html
from lpconv.report.verify import verify_document
from lpconv.results import json_text
from tests.helpers.page_examples import bench, finetune, verification
from tests.helpers.report_examples import bert_result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs = {
        "unit/report.json": bert_result(output="unit"),
        "more/collage/report.json": bert_result("bf16", "collage", output="collage"),
        "tuned-a/report.json": finetune(output="tuned-a"),
        "tuned-b/report.json": finetune(output="tuned-b", recipe="collage-bf16"),
        "monday.json": bench(),
        "tuesday.json": bench(),
        "verify.json": verification(),
        "report/report.json": bert_result(output="report"),  # a folder that is called as its file
    }
    for name, record in runs.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json_text(record))
        if path.name == "report.json":
            (path.parent / "report.html").write_text("<p>its page</p>")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/report.json").write_text('{"kind": "convert"}')
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/report.json").write_text('{"kind": "conv')
    (tmp_path / "cut.json").write_text("{")
    (tmp_path / "notes.json").write_text('{"kind": "mine"}')
    (tmp_path / "tuned-a/runs/twin").mkdir(parents=True)
    (tmp_path / "tuned-a/runs/twin/report.json").write_text("its own")
    return tmp_path


def report(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["report", *map(str, arguments)], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    """Every document of --json that `report` does not draw, and an error."""
    path = tmp_path / "said.json"
    for arguments, words in {
        ("finetune", "demo", "--dry-run"): "`memory_plan`",
        ("convert", "demo", "--dry-run"): "`plan`",
        ("inspect", "demo"): "`inspect`",
        ("convert", "demo", "--method", "none"): "error .*method",
    }.items():
        path.write_text(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
        assert re.search(words, report(path, code=3))
    path.write_text('{"kind": "convert"}')
    assert "said.json" in report(path, code=3)


def test_a_moved_output_is_opened_where_it_is(folder: Path) -> None:
    assert f"{folder}/more/collage'" in report(folder / "more/collage")


def test_fine_tunings_are_drawn_together(folder: Path) -> None:
    page = folder / "page.html"
    text = report(folder / "tuned-a", folder / "tuned-b", "--html", page)
    assert re.search(r"loss, gap +\+0\.050 ± 0\.10 +\+0\.050 ± 0\.10", text)
    assert re.search(r"recipe +unit-fp8-collage +collage-bf16", text)
    html = page.read_text()
    for title in ("What precision cost: gap of held-out loss", "Held-out accuracy", "Training loss"):
        assert html.count(f">{title}</h2>") == 1
    curves = html[html.index(">Training loss</h2>") :].split("</section>")[0]
    assert "tuned-a" in curves
    assert "tuned-b" in curves
    assert len(json.loads(report(folder / "tuned-a", folder / "tuned-b", "--json"))) == 2


def test_benches_are_drawn_together(folder: Path) -> None:
    page = folder / "page.html"
    text = report(folder / "monday.json", folder / "tuesday.json", "--html", page)
    assert re.search(r"fp8 mx, train, 2 x 4096: speed-up +1\.30 \[1\.20, 1\.50\] +1\.30 \[1\.20, 1\.50\]", text)
    speeds = next(part for part in page.read_text().split("</section>") if ">Speed-up " in part)
    assert "fp8 mx: monday" in speeds
    assert "fp8 mx: tuesday" in speeds


def test_a_verification_is_shown_again(folder: Path) -> None:
    text = report(folder / "verify.json", "--html", folder / "page.html")
    assert "failed (level values)" in text
    assert (folder / "page.html").read_text() == html(verify_document(verification()))
    assert json.loads(report(folder / "verify.json", "--json"))["against"] == "llama"
    (folder / "verify.json").write_text('{"kind": "verify"}')
    assert "Verification" in report(folder / "verify.json", code=3)


def test_a_bench_saved_under_any_name_is_shown(folder: Path) -> None:
    saved = (folder / "monday.json").rename(folder / "monday")
    assert "Baseline" in report(saved)
    (folder / "weights").write_bytes(b"\x93\x00")
    assert "report.json" in report(folder / "weights", code=3)


def test_runs_of_two_kinds_are_refused(folder: Path) -> None:
    assert "fine-tunings" in report(folder / "unit", folder / "tuned-a", code=2)
    assert "notes.json" in report(folder / "unit", folder / "notes.json", code=3)
    assert "directory" in report(folder / "unit", folder / "nowhere", code=3)


def test_a_folder_gets_an_index_with_a_way_to_every_page(folder: Path) -> None:
    index = folder / "pages" / "index.html"
    index.parent.mkdir()
    text = report(folder, "--html", index)
    for name in ("unit", "more/collage", "tuned-a", "monday.json", "tuesday.json", "verify.json"):
        assert name in text
    assert re.search(r"^broken .*\n.*cannot", text, flags=re.MULTILINE)
    assert re.search(r"^cut .*\n.*cannot", text, flags=re.MULTILINE)
    assert "cut.json" not in text
    assert "broken" in text
    assert "tuned-a/runs" not in text
    assert "notes" not in text
    links = re.findall('href="([^#"]+)"', index.read_text())
    assert len(links) == 5 + 3  # pages of runs, and one for each kind
    assert all((index.parent / link).is_file() for link in links)
    assert "../more/collage/report.html" in links
    assert "../report/report.html" in links
    assert "index-fine-tunings.html" in links


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    assert "run" in report(tmp_path, code=3)
