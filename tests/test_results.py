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


def test_another_schema_version_is_refused() -> None:
    document = to_json(a_result()) | {"schema_version": 99}
    with pytest.raises(InputError, match="schema_version 99"):
        from_json(ConvertResult, document)


def test_a_missing_key_is_refused() -> None:
    document = to_json(a_result())
    del document["method"]
    with pytest.raises(InputError, match="method"):
        from_json(ConvertResult, document)


def test_a_wrong_type_inside_a_mapping_is_refused() -> None:
    document = to_json(a_result()) | {"versions": {"torch": ["2.13"]}}
    with pytest.raises(InputError, match="str"):
        from_json(ConvertResult, document)


@pytest.mark.parametrize("role", ["twins", {}, "", 1], ids=str)
def test_a_role_that_no_run_has_is_refused(role: object) -> None:
    with pytest.raises(InputError, match=" run, twin"):
        from_json(RunRecord, {"role": role})
