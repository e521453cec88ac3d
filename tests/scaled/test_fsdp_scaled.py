"""Scaled and Collage recipes sharded by FSDP2 over 2 and 4 ranks: what one process computes, bit for bit."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lpconv.data import demo_checkpoint
from tests.helpers.ranks import on_ranks
from tests.scaled import fsdp_worker as worker

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

FP8: dict[str, Any] = {"method": "unit", "compute": "fp8"}
STATIC = FP8 | {"operand_scale": "static"}
SCALIFY: dict[str, Any] = {"method": "scalify", "compute": "fp8"}
CASES: dict[str, tuple[dict[str, Any], str | None, dict[str, Any]]] = {
    "unit fp16, tied": ({"method": "unit", "compute": "fp16"}, None, {"tied": True}),
    "unit fp8": (FP8, None, {}),
    "unit fp8 by codes, frozen": (STATIC, None, {"frozen": "layers.0"}),
    "unit fp8, collage plus": (FP8, "plus", {}),
    "unit fp8 by codes, collage light, tied": (STATIC, "light", {"tied": True}),
    "collage plus": ({}, "plus", {"tied": True}),
    "unit fp32, frozen": ({"method": "unit", "compute": "fp32"}, None, {"frozen": "embed_tokens"}),
    "bf16": ({}, "bf16", {}),
}


OF_FOUR = [n for n in CASES if "tied" in n or "frozen" in n]
OF_TWO = [n for n in CASES if n not in OF_FOUR]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def four(folder: Path) -> Any:
    """What 4 ranks find: cases that differ from one process. They also leave a checkpoint."""
    return on_ranks(4, worker.four_ranks, folder, {n: CASES[n] for n in OF_FOUR}, FP8)


@pytest.fixture(scope="module")
def two(folder: Path, four: Any) -> Any:
    """What 2 ranks find, by test; they go on from the checkpoint of 4."""
    cases = {n: CASES[n] for n in OF_TWO}
    return on_ranks(2, worker.two_ranks, folder, cases, {"unit": STATIC, "scalify": SCALIFY}, FP8)


def test_four_ranks_compute_what_one_process_does_bit_for_bit(four: Any) -> None:
    """The same batch on all ranks, so that a mean is exact: losses, gradients and trained weights."""
    assert four == {name: [] for name in OF_FOUR}


def test_two_ranks_compute_what_one_process_does_bit_for_bit(two: Any) -> None:
    assert two["beside one"] == {name: [] for name in OF_TWO}


@pytest.mark.parametrize("method", ["unit", "scalify"])
def test_gradients_are_averaged_over_ranks(method: str, two: Any) -> None:
    """Each rank has a batch of its own, and under Scalify scales of its own. A sum of two has one order."""
    found, expected = two["averages"][method]
    assert not worker.differing(found, expected)


def test_weights_that_are_cast_as_they_are_cross_as_bytes(two: Any) -> None:
    """A step gathers layers twice, in both passes, and tables and the last norm once; gradients are summed in fp32."""
    parts = {n: math.ceil(len(p) / 2) * p[0].numel() for n, p in worker.plain().named_parameters()}
    matrices = sum(size for n, size in parts.items() if n.endswith("_proj.weight"))
    norms = sum(size for n, size in parts.items() if n.endswith("layernorm.weight"))
    rest = sum(parts.values()) - matrices - norms
    for kind, bytes_each in (("static", 1), ("tensor", 2)):
        sent = two["wire"][kind]
        assert sent["_allgather_base_"] == 2 * (bytes_each * matrices + 2 * norms) + 2 * rest
        assert sent["_reduce_scatter_base_"] == 2 * 4 * sum(parts.values())


def test_a_checkpoint_of_four_ranks_goes_on_with_two(two: Any) -> None:
    assert two["resumed"] == []


def test_what_would_lose_gradients_or_scales_is_refused(two: Any) -> None:
    assert "carrier=torch.float32" in two["refusals"]["kept in fp16"]
    assert "reduce_dtype=torch.float32" in two["refusals"]["summed in fp16"]
    assert "every:N" in two["refusals"]["every"]


def test_a_gradient_that_is_not_finite_on_one_rank_stops_the_step_on_all(two: Any) -> None:
    assert two["guarded"] == (False, {2.0}, True)


def test_the_program_in_the_docs(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/sharded-training.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (folder / "llama").symlink_to(demo_checkpoint())
    on_ranks(2, worker.run_program, folder, program.replace('dist.init_process_group("gloo")\n', ""))
    assert len(list((folder / "step-3").glob("*.distcp"))) == 2
