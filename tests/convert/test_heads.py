"""Heads and embeddings that a `--rule` converts in the layouts of others: as readers take them, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lpconv.convert.run import convert, plan
from lpconv.errors import LpconvError
from lpconv.layouts.reader import StoredTensors
from lpconv.plan.options import ConvertOptions, FormatRule
from tests.helpers.elsewhere import opens_elsewhere
from tests.helpers.models import tiny


def options_of(scheme: str, **rules: str) -> ConvertOptions:
    more: dict[str, Any] = {"granularity": "group:32"} if scheme == "W4A16" else {}
    given = tuple(FormatRule(pattern=f"*{name}*", format=number) for name, number in rules.items())
    return ConvertOptions(scheme=scheme, rules=given, verify="weights", **more)


@pytest.mark.parametrize(
    ("scheme", "number"),
    [("W4A16", "int4"), ("W4A16", "int8"), ("FP8_DYNAMIC", "e4m3fn"), ("TRANSFORMERS_MXFP8", "e4m3fn")],
)
def test_transformers_opens_a_quantised_head(scheme: str, number: str, tmp_path: Path) -> None:
    source, output = tiny("llama", tmp_path / "source", tie_word_embeddings=False), tmp_path / "out"
    convert(str(source), output, options_of(scheme, lm_head=number))
    (opened,) = opens_elsewhere(output)
    with StoredTensors.open(output) as stored:
        assert stored.forms["lm_head.weight"].format.name == number  # type: ignore[union-attr]  # it is coded
        assert torch.equal(opened.weights["lm_head.weight"], stored.tensor("lm_head.weight"))
    settings = json.loads((output / "config.json").read_text())["quantization_config"]
    targets = [t for group in settings.get("config_groups", {}).values() for t in group["targets"]]
    assert ("lm_head" in targets) == (scheme != "TRANSFORMERS_MXFP8")  # vLLM finds a head by its name only


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC", "TRANSFORMERS_MXFP8"])
@pytest.mark.parametrize(("ruled", "named"), [("embed", "mlx"), ("lm_head", "embed")])
def test_embeddings_that_readers_cannot_decode_are_refused(scheme: str, ruled: str, named: str, tmp_path: Path) -> None:
    """So are heads that are tied to them, which the file does not have."""
    source = tiny("llama", tmp_path / "source")
    with pytest.raises(LpconvError, match=ruled) as refused:
        plan(str(source), tmp_path / "out", options_of(scheme, **{ruled: "e4m3fn" if "FP8" in scheme else "int4"}))
    assert named in str(refused.value.hint)
