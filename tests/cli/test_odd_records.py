"""Records of runs that were damaged or come from elsewhere: refused with exit code 3, never a traceback."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lpconv.cli.main import app
from lpconv.errors import InputError
from lpconv.results import (
    AdviceResult,
    Recommendation,
    RunRecord,
    TrackedRecord,
    from_json,
    json_text,
)
from tests.helpers.advice_examples import a_row, an_advice

TRACKED = {"step": 1, "layer": "a", "role": "weight", "format": "e4m3fn", "underflow": 0.0, "overflow": 0.0}


def _report(folder: Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["report", str(folder)])
    return done.exit_code, done.stderr


@pytest.mark.parametrize("kind", [{}, [], 3, None, {"bench": 1}])
def test_a_kind_that_is_no_word(tmp_path: Path, kind: Any) -> None:
    (tmp_path / "report.json").write_text(json.dumps({"kind": kind, "tensors": []}))
    code, said = _report(tmp_path)
    assert (code, "hint:" in said) == (3, True), said


@pytest.mark.parametrize("purpose", ["serve", {}, None])
def test_a_purpose_that_nobody_asks_for(tmp_path: Path, purpose: Any) -> None:
    advice = an_advice(a_row(), recommendations=(Recommendation(purpose="infer", row=None, words="none"),))
    document = json.loads(json_text(advice))
    assert from_json(AdviceResult, document) == advice
    document["recommendations"][0]["purpose"] = purpose
    (tmp_path / "advice.json").write_text(json.dumps(document))
    code, said = _report(tmp_path)
    assert (code, "infer, train" in said) == (3, True), said


@pytest.mark.parametrize("role", ["twins", {}, "", 1])
def test_a_role_that_no_run_has(role: Any) -> None:
    with pytest.raises(InputError, match=" run, twin"):
        from_json(RunRecord, {"role": role})
    with pytest.raises(InputError, match=" weight, input"):
        from_json(TrackedRecord, TRACKED | {"role": role})
    assert from_json(TrackedRecord, TRACKED).role == "weight"
