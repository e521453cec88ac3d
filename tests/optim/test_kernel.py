"""The fused step is the same compiled and eager, and a compiler that drops the low parts is caught."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

from lpconv.mcf.pairs import nearest_by_bits, nearest_by_cast, nearest_with_offset
from lpconv.optim import CollageAdamW, LowPrecisionAdamW, base, kernel
from lpconv.optim.kernel import STEPS, Kernel, build_step, get_kernel
from lpconv.optim.rules import RULES, largest_ratio
from lpconv.optim.storage import VARIANTS, WITH_OFFSET, Parts, Storage, new_parts, store, stored_value
from tests.helpers.exact_compile import compile_keeps_roundings

PLUS = (Storage.PAIR, Storage.BF16, Storage.PAIR)
needs_exact_compile = pytest.mark.skipif(
    not compile_keeps_roundings(), reason="this build of torch.compile cannot keep bf16 roundings"
)


def some_params(sizes: list[int]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter((torch.randn(n, generator=generator) * 0.02).bfloat16()) for n in sizes]


def run(params: list[nn.Parameter], steps: int = 10, **options: object) -> LowPrecisionAdamW:
    optimizer = LowPrecisionAdamW(params, **({"variant": "plus"} | options))  # type: ignore[arg-type]  # options of this file are right
    for step in range(steps):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i)).bfloat16()
        optimizer.step()
    return optimizer


# Before, code for CPUs ignores the option that keeps casts.
_MODE = "cast" if Version(torch.__version__) >= Version("2.13") else "bits"


@needs_exact_compile
def test_compiled_and_eager_agree_to_the_last_bits_of_fp32() -> None:
    assert get_kernel("adamw", PLUS, "cpu", compiled=True).mode == _MODE
    sizes = [1, 7, 1000, 40_000]
    compiled, eager = some_params(sizes), some_params(sizes)
    a, b = run(compiled), run(eager, compiled=False)
    for p, q in zip(compiled, eager, strict=True):
        for storage, x, y in zip(PLUS, a.parts(p), b.parts(q), strict=True):
            scale = float(stored_value(storage, y).abs().max())
            torch.testing.assert_close(
                stored_value(storage, x), stored_value(storage, y), rtol=2**-7, atol=2**-14 * scale
            )
        assert float((a.state[p]["residual"] == b.state[q]["residual"]).double().mean()) > 0.9


@needs_exact_compile
def test_small_parameters_stepped_together_equal_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [3, 50_000, 64, 1, 0, 20_000, 20_000, 30_000, 30_000, 30_000, 30_000]
    together, alone = some_params(sizes), some_params(sizes)
    run(together)
    monkeypatch.setitem(base._LIMITS, "cpu", (-1, 0))
    run(alone)
    for p, q in zip(together, alone, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", ["adamw", "adamw-paper"])
def test_the_check_refuses_a_compiler_that_drops_the_low_parts(name: str) -> None:
    """Rounding by cast under the default compile: the very mistake that `get_kernel` must catch."""
    broken = torch.compile(STEPS[name].build(PLUS, nearest_by_cast), dynamic=True)
    assert not kernel._agrees(STEPS[name], PLUS, broken, torch.device("cpu"))


@pytest.mark.parametrize("arithmetic", ["fused", "paper"])
def test_compiling_the_whole_step_changes_nothing(arithmetic: str) -> None:
    plain, wrapped = some_params([1000]), some_params([1000])
    options: dict[str, Any] = {"lr": 1e-5, "compiled": False, "arithmetic": arithmetic}
    a, b = CollageAdamW(plain, **options), CollageAdamW(wrapped, **options)
    step = torch.compile(b.step)
    for i in range(3):
        for p in (plain[0], wrapped[0]):
            p.grad = torch.randn(1000, generator=torch.Generator().manual_seed(i)).bfloat16()
        a.step()
        step()
    assert torch.equal(a.state[plain[0]]["residual"], b.state[wrapped[0]]["residual"])


def test_rounding_by_bits_passes_the_check_under_the_default_compile() -> None:
    robust = torch.compile(STEPS["adamw"].build(PLUS, nearest_by_bits), dynamic=True)
    assert kernel._agrees(STEPS["adamw"], PLUS, robust, torch.device("cpu"))


def test_without_a_compiler_the_step_runs_eagerly_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no C++ compiler here")

    monkeypatch.setattr(torch, "compile", no_compiler)
    get_kernel.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"cpu.*cast: RuntimeError"):
            actual = get_kernel("adamw", PLUS, "cpu", compiled=True)
    finally:
        get_kernel.cache_clear()
    assert actual.mode == "eager"


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_exact_compile), False])
def test_odd_shards_give_the_bits_of_the_whole(compiled: bool) -> None:
    """What sharding leans on: no element depends on where in a tensor it lies."""
    whole, pieces = some_params([1003]), some_params([1003])
    sizes = [1, 30, 500, 7, 465]
    shards = [nn.Parameter(t.clone()) for t in torch.split(pieces[0].detach(), sizes)]
    a = CollageAdamW(whole, lr=1e-4, compiled=compiled)
    others = [CollageAdamW([shard], lr=1e-4, compiled=compiled) for shard in shards]
    for step in range(5):
        whole[0].grad = torch.randn(1003, generator=torch.Generator().manual_seed(step)).bfloat16()
        a.step()
        for shard, gradient, optimizer in zip(shards, torch.split(whole[0].grad, sizes), others, strict=True):
            shard.grad = gradient
            optimizer.step()
    for name, value in a.state[whole[0]].items():
        parts = [o.state[s][name] for o, s in zip(others, shards, strict=True)]
        assert torch.equal(value, torch.cat(parts) if value.dim() else parts[0]), name


@pytest.mark.parametrize("variant", ["plus", "stochastic", "fp32-master"])
def test_eager_blocks_give_the_bits_of_the_whole(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, blocks = some_params([1000]), some_params([1000])
    run(whole, variant=variant, compiled=False)
    monkeypatch.setattr(kernel, "_EAGER_BLOCK", 64)
    run(blocks, variant=variant, compiled=False)
    assert torch.equal(whole[0], blocks[0])


@pytest.mark.parametrize("storage", Storage, ids=lambda s: s.label)
def test_every_storage_gives_back_what_it_can_hold(storage: Storage) -> None:
    value = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    value = value + torch.sign(value) * 2**-5  # below, an e4m3fn residual may be subnormal
    parts = new_parts(storage, torch.zeros(4096, dtype=storage.dtype))
    random = torch.randint(0, 2**16, (4096,), dtype=torch.int32)
    if storage is Storage.RATIO:
        value = value / value.abs().max()
    store(storage, parts, value, nearest_by_bits, torch.tensor(0.4) if storage in WITH_OFFSET else random)
    size = 1.0 if storage is Storage.RATIO else value.abs()
    error = float(((stored_value(storage, parts) - value).abs() / size).max())
    # Kahan rounds the update, which from zero weights is the value.
    bound = 2**-8 if storage is Storage.KAHAN else storage.relative_error
    assert error <= bound


@pytest.mark.parametrize("storage", [Storage.DITHERED, Storage.RATIO], ids=lambda s: s.label)
def test_the_mean_over_offsets_is_the_number(storage: Storage) -> None:
    """One bf16 number is off by up to an ulp, one ratio by up to 2/127; next to a power of two ulps differ."""
    value = torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 0.46 + 0.52
    mean = torch.zeros(4096, dtype=torch.float64)
    for i in range(256):
        parts = new_parts(storage, torch.zeros(4096, dtype=storage.dtype))
        store(storage, parts, value, nearest_by_bits, torch.tensor((i + 0.5) / 256 - 0.5))
        mean += stored_value(storage, parts).double() / 256
    assert float((mean - value).abs().max()) < 2.0**-13
    assert float((stored_value(storage, parts) - value).abs().max()) > 2.0**-10


def test_an_offset_keeps_special_numbers() -> None:
    actual = nearest_with_offset(torch.tensor([0.0, torch.inf, torch.nan, 3e38, 1e-40]), torch.tensor(0.3))
    assert actual.isnan().tolist() == [False, False, True, False, False]
    assert actual[:2].tolist() == [0, torch.inf]


@pytest.mark.parametrize("name", ["light-int8", "int8-moment", "eco"])
@pytest.mark.parametrize("nearest", [nearest_by_bits, nearest_by_cast])
def test_variants_of_few_bytes_pass_the_check_and_lose_it_with_their_error(
    name: str, nearest: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that rounds twice has a rounding error of 0, as a compiler makes it."""
    variant = VARIANTS[name]
    storages, kind = (variant.weight, *variant.moments), STEPS[variant.rule or "adamw"]
    assert kernel._agrees(kind, storages, kind.build(storages, nearest), torch.device("cpu"))

    def without_error(parts: Parts, gradient: Tensor, coefficients: Any, random: Tensor | None) -> None:
        own = dict.fromkeys(("gain",), lambda moments, c: torch.zeros(()))
        rule = dataclasses.replace(RULES[variant.rule or "adamw"], **(own if name == "eco" else {}))
        build_step(rule, storages, nearest)(parts, gradient, coefficients, random)
        if variant.weight is Storage.INT8:
            parts[0][1].zero_()

    assert not kernel._agrees(kind, storages, without_error, torch.device("cpu"))


def test_the_check_allows_eco_a_weight_rounded_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps of half an ulp, weights off by 2^-16 round otherwise for some, whose moments then differ much."""
    variant, kind, rule = VARIANTS["eco"], STEPS["adamw-eco"], RULES["adamw-eco"]
    storages, device = (variant.weight, *variant.moments), torch.device("cpu")
    parts, gradient, coefficients, random = kernel._check_inputs(kind, storages, device)
    large = (*coefficients[:2], coefficients[2] * 4, *coefficients[3:10], coefficients[10] / 4)

    def inputs(*args: object) -> Any:
        return tuple(tuple(t.clone() for t in tensors) for tensors in parts), gradient, large, random

    def off(x: Tensor, g: Tensor, moments: Any, c: Any) -> Any:
        x, new = rule.update(x, g, moments, c)
        return x * (1 + 2.0**-16), new

    monkeypatch.setattr(kernel, "_check_inputs", inputs)
    step = build_step(dataclasses.replace(rule, update=off), storages, nearest_by_bits)
    (actual, found_m, _), (wanted, wanted_m, _) = inputs()[0], inputs()[0]
    step((actual, found_m, inputs()[0][2]), *inputs()[1:])
    kind.build(storages, nearest_by_bits)((wanted, wanted_m, inputs()[0][2]), *inputs()[1:])
    is_flipped = actual[0] != wanted[0]
    assert bool(is_flipped.any())
    assert float((found_m[0] - wanted_m[0]).abs()[is_flipped].min()) > 0.05
    assert kernel._agrees(kind, storages, step, device)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.9), (0.95, 0.99)])
def test_no_gradients_bring_the_first_moment_over_its_bound(betas: tuple[float, float]) -> None:
    """The worst gradients shrink by beta1 / beta2 for each step back in time; they reach the bound."""
    beta1, beta2 = betas
    m = v = 0.0
    for k in reversed(range(2000)):
        g = (beta1 / beta2) ** k
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        assert m <= largest_ratio(betas) * math.sqrt(v) * (1 + 1e-9)
    assert m >= 0.99 * largest_ratio(betas) * math.sqrt(v)


def test_kernel_runs_on_views() -> None:
    """Blocks of a larger buffer, as a flat parameter gives them."""
    flat = torch.randn(100).bfloat16()
    before = flat.clone()
    step = build_step(RULES["sgd"], (Storage.PAIR, Storage.BF16), nearest_by_bits)
    low, momentum = torch.zeros(50).bfloat16(), torch.zeros(50).bfloat16()
    coefficients = tuple(torch.tensor(c) for c in (1.0, 0.0, 0.5, 0.0, 1.0, 0.0))
    Kernel(mode="eager", step=step).run(((flat[25:75], low), (momentum,)), torch.ones(50), coefficients, None)
    moved: Tensor = flat != before
    assert bool(moved[25:75].all())
    assert not bool(moved[:25].any() | moved[75:].any())
