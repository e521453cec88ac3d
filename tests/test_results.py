"""Records survive the trip through JSON text, infinities included; the text is stable and strict."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lpconv.errors import InputError
from lpconv.results import ConvertResult, RunRecord, from_json, json_text, to_json
from tests.helpers.report_examples import bert_result


def refuse(token: str) -> Any:
    raise ValueError(f"{token} is no JSON")


def test_a_result_survives_the_text() -> None:
    tensors = (replace(bert_result().tensors[1], sqnr_db=math.inf), *bert_result().tensors[2:])
    result = bert_result(tensors=tensors)
    assert from_json(ConvertResult, json.loads(json_text(result), parse_constant=refuse)) == result


def test_keys_are_sorted_and_text_is_ascii() -> None:
    text = json_text(bert_result(warnings=("é \udcff",)))
    keys = list(json.loads(text))
    assert keys == sorted(keys)
    assert text.isascii()
    assert text.endswith("}\n")


def test_a_bare_nan_never_reaches_the_text() -> None:
    tensors = (replace(bert_result().tensors[1], sqnr_db=math.nan),)
    document = json.loads(json_text(bert_result(tensors=tensors)), parse_constant=refuse)
    assert document["tensors"][0]["sqnr_db"] == "nan"


@pytest.mark.parametrize("value", [Path("a/b"), {"x": Path("a/b")}, (Path("a/b"),)])
def test_options_of_any_kind_are_written(value: Any) -> None:
    assert "a/b" in json_text(bert_result(options={"cache": value}))


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"schema_version": 99}, "schema_version 99"), ({}, "method"), ({"versions": {"t": ["2"]}}, "str")],
)
def test_other_versions_missing_keys_and_wrong_types_are_refused(changes: dict[str, object], word: str) -> None:
    document = to_json(bert_result()) | changes
    if not changes:
        del document["method"]
    with pytest.raises(InputError, match=word):
        from_json(ConvertResult, document)


@pytest.mark.parametrize("role", ["twins", {}, "", 1], ids=str)
def test_a_role_that_no_run_has_is_refused(role: object) -> None:
    with pytest.raises(InputError, match=" run, twin"):
        from_json(RunRecord, {"role": role})
