"""Bad options, parameters and gradients are refused with a hint, and leave everything as it was."""

from typing import Any

import pytest
import torch
from torch import nn

from lpconv.errors import InputError, UnsupportedError, UsageError
from lpconv.optim import CollageAdamW, CollageLion, CollageSGD, LowPrecisionAdamW


def param() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"betas": (0.9, 1.0)},
        {"betas": (-0.1, 0.9)},
        {"eps": -1e-8},
        {"weight_decay": float("inf")},
        {"variant": "pluss"},
        {"arithmetic": "papr"},
        {"fused": True},
        {"nonfinite_gradients": "drop"},
        {"state_dtype": torch.float16},
        {"variant": "int8-moment", "betas": (0.9, 0.8)},
        {"arithmetic": "paper", "variant": "kahan"},
        {"arithmetic": "paper", "state_dtype": torch.float32},
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises((UsageError, UnsupportedError)) as caught:
        LowPrecisionAdamW([param()], **({"variant": "plus"} | options))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (CollageSGD, {"momentum": -1.0}),
        (CollageLion, {"betas": (0.9, 2.0)}),
        *((make, {"variant": "kahan"}) for make in (CollageAdamW, CollageSGD, CollageLion)),
    ],
)
def test_bad_options_of_collage(make: Any, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        make([param()], **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64, torch.float8_e5m2])
def test_parameters_of_other_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match=str(dtype)):
        CollageAdamW([nn.Parameter(torch.ones(4).to(dtype))])


def test_a_refused_group_is_not_added() -> None:
    optimizer = CollageAdamW([param()])
    with pytest.raises(UsageError):
        optimizer.add_param_group({"params": [param()], "lr": -1.0})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("arithmetic", ["fused", "paper"])
def test_nonfinite_gradients_leave_everything_as_it_was(bad: float, arithmetic: str) -> None:
    for mode in ("skip", "raise"):
        good, hit = param(), param()
        optimizer = CollageAdamW([good, hit], nonfinite_gradients=mode, arithmetic=arithmetic, compiled=False)
        for p in (good, hit):
            p.grad = torch.ones_like(p)
        optimizer.step()
        before = [(t.clone(), t) for p in (good, hit) for t in (p.detach(), *optimizer.state[p].values())]
        assert hit.grad is not None
        hit.grad[2] = bad
        if mode == "skip":
            optimizer.step()
        else:
            with pytest.raises(InputError, match="NaN"):
                optimizer.step()
        assert optimizer.num_skipped == 1
        assert all(torch.equal(kept, now) for kept, now in before)


def test_ignore_is_what_torch_does() -> None:
    p = param()
    optimizer = CollageAdamW([p], compiled=False)
    p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    assert bool(p.isnan().all())


def test_sparse_gradients() -> None:
    embedding = nn.Embedding(5, 3, sparse=True, dtype=torch.bfloat16)
    torch.autograd.backward(embedding(torch.tensor([1])).sum())
    optimizer = CollageAdamW(embedding.parameters(), compiled=False)
    with pytest.raises(UnsupportedError, match="sparse") as caught:
        optimizer.step()
    assert "sparse=False" in str(caught.value.hint)
    assert not optimizer.state


def test_mixed_dtypes_in_a_group_are_each_kept_their_way() -> None:
    low, full = param(), nn.Parameter(torch.ones(4))
    optimizer = CollageAdamW([low, full], compiled=False)
    for p in (low, full):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert "residual" in optimizer.state[low]
    assert set(optimizer.state[full]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[full]["exp_avg_sq"].dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "moment", "better"),
    [
        (lambda p: CollageAdamW([p], variant="light", betas=(0.9, 0.999)), "exp_avg_sq", "plus"),
        (lambda p: CollageAdamW([p], variant="plus", betas=(0.999, 0.999)), "exp_avg", "full"),
        (lambda p: CollageLion([p], variant="light", betas=(0.9, 0.999)), "exp_avg", "full"),
        (lambda p: CollageSGD([p], lr=0.1, variant="light", momentum=0.9995), "momentum_buffer", "full"),
    ],
)
def test_a_moment_that_cannot_decay_is_warned_of(make: Any, moment: str, better: str) -> None:
    with pytest.warns(UserWarning, match=f"keeps `{moment}` in bf16.*use variant='{better}'"):
        make(param())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("variant", "beta2"), [("plus", 0.999), ("light", 0.99), ("fp32-master", 0.9999)])
def test_a_moment_that_can_decay_is_not(variant: str, beta2: float) -> None:
    LowPrecisionAdamW([param()], variant=variant, betas=(0.9, beta2))


def test_a_model_in_fp32_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="fp32.*'plus'"):
        CollageAdamW([nn.Parameter(torch.ones(4))])
