"""Odd but real checkpoints, drawn at random: equal to what transformers opens, or refused (`odd_checkpoints.py`)."""

import pytest

from tests.faults.odd_checkpoints import QUIRKS, Case, run_case


@pytest.mark.parametrize("seed", range(1000, 1030))
def test_a_drawn_checkpoint_opens_in_transformers_as_before_or_is_refused(seed: int) -> None:
    case = Case.drawn(seed)
    assert not run_case(case).startswith("DIFFERS"), f"{case}: {run_case(case)}"


@pytest.mark.parametrize("quirk", sorted(QUIRKS))
def test_each_quirk_alone_is_exact_or_refused(quirk: str) -> None:
    import torch

    kind = "bin" if "alias" in quirk or "layers" in quirk else "safetensors"
    case = Case(seed=1, cls="LlamaForCausalLM", dtype=torch.float32, kind=kind, quirks=(quirk,), conversion="exact")
    assert not run_case(case).startswith("DIFFERS"), run_case(case)
