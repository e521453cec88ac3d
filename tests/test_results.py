"""Records survive the trip through JSON, infinities included."""

import json
import math

import pytest

from lpconv.errors import InputError
from lpconv.results import (
    ByteCounts,
    ConvertResult,
    LogitsCheck,
    RunRecord,
    SourceRecord,
    TensorRecord,
    VerifyResult,
    from_json,
    to_json,
)


def a_result() -> ConvertResult:
    tensor = TensorRecord(
        name="a.weight", shape=(2, 3), source_dtype="F32", action="convert", format="fp16", reason="matrix",
        scale=0.5, sqnr_db=math.inf, max_rel_error=0.0,
    )  # fmt: skip
    return ConvertResult(
        method="unit", format="fp16", output="out", source=SourceRecord(name="a", resolved="/a"), tensors=(tensor,),
        files=(), bytes=ByteCounts(read=24, written=12), seconds=0.1, peak_rss_bytes=1,
        verify=VerifyResult(level="weights", passed=True, logits=LogitsCheck(skipped="no config")),
    )  # fmt: skip


def test_round_trip() -> None:
    document = json.loads(json.dumps(to_json(a_result()), allow_nan=False))
    assert from_json(ConvertResult, document) == a_result()


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"schema_version": 99}, "schema_version 99"), ({}, "method"), ({"versions": {"t": ["2"]}}, "str")],
)
def test_other_versions_missing_keys_and_wrong_types_are_refused(changes: dict[str, object], word: str) -> None:
    document = to_json(a_result()) | changes
    if not changes:
        del document["method"]
    with pytest.raises(InputError, match=word):
        from_json(ConvertResult, document)


@pytest.mark.parametrize("role", ["twins", {}, "", 1], ids=str)
def test_a_role_that_no_run_has_is_refused(role: object) -> None:
    with pytest.raises(InputError, match=" run, twin"):
        from_json(RunRecord, {"role": role})
