"""Noise and bias of gradients in a recipe with rounded products, against fp32 products on the same batches.

Training with stochastic rounding stops helping where the norm of the gradient falls below √3 of the noise (Chmiel et
al. 2025, arXiv 2505.19115). Bias does not average out over steps, but it is not noise either: it belongs to the
gradient of the model with rounded weights and activations, which is the model that is trained.
"""

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lpconv.kernels.linear import FP4_RECIPES, FP8_RECIPES, LinearRecipe, use_recipe
from lpconv.probe.track import model_loss
from lpconv.results import GradientNoise, RecipeNoise
from lpconv.scaled.places import heads

# Recipes of `lpconv finetune` that change the products of linear layers and nothing else.
NOISE_RECIPES: dict[str, LinearRecipe] = {
    "mxfp8": FP8_RECIPES["mx"],
    "nvfp4": FP4_RECIPES["nvfp4"],
    "quartet2": FP4_RECIPES["ms-eden"],
    "mxfp4": FP4_RECIPES["mx"],
}


def gradient_noise(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    recipes: Mapping[str, LinearRecipe] = NOISE_RECIPES,
    steps: int | None = None,
    loss: Callable[[Any], Tensor] = model_loss,
    seed: int = 0,
) -> tuple[RecipeNoise, ...]:
    """Return the norms of the gradient, of the noise and of the bias that each recipe's rounding adds to it.

    With g the gradient for exact products, and g' and g" two for those of the recipe that differ in their random bits:
    noise² = ‖g' - g"‖² / 2 is the variance of stochastic rounding, and bias² = (g' - g)·(g" - g), without the noise on
    average, the error of everything that is rounded to nearest. Both are summed over the weights of the layers that
    the recipe multiplies, and over `steps` batches (None: all). Recipes with sums that are not finite are left out.
    Everything but the products stays as the model has it, so pass a model in fp32. Heads stay exact, as in training.
    Weights do not change.
    """
    shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
    rounded = {recipe: copy.deepcopy(model, dict(shared)) for recipe in recipes}
    layers = {recipe: use_recipe(m, recipes[recipe], keep=heads(m)) for recipe, m in rounded.items()}
    weights = {f"{layer}.weight" for names in layers.values() for layer in names}
    squares: defaultdict[tuple[str, str], float] = defaultdict(float)  # by kind and weight
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for batch in itertools.islice(batches, steps):
            exact = _gradients(model, batch, loss, weights)
            for name, g in exact.items():
                squares["gradient", name] += _dot(g, g)
            for recipe, other in rounded.items():
                first, second = (_gradients(other, batch, loss, weights) for _ in range(2))
                for name, g in exact.items():
                    a, b = first[name], second[name]
                    squares[f"noise {recipe}", name] += _dot(a - b, a - b) / 2
                    squares[f"bias {recipe}", name] += _dot(a - g, b - g)

    def norms(recipe: str, of: Iterable[str]) -> dict[str, float]:
        kinds = {"gradient": "gradient", "noise": f"noise {recipe}", "bias": f"bias {recipe}"}
        sums = {k: sum(squares[kind, f"{layer}.weight"] for layer in of) for k, kind in kinds.items()}
        return {k: math.sqrt(max(total, 0.0)) for k, total in sums.items()}  # NaN stays NaN

    return tuple(
        RecipeNoise(
            name=recipe,
            **total,
            layers=tuple(GradientNoise(name=layer, **norms(recipe, [layer])) for layer in names),
        )
        for recipe, names in layers.items()
        if all(map(math.isfinite, (total := norms(recipe, names)).values()))
    )


def _gradients(
    model: nn.Module, batch: Mapping[str, Tensor], loss: Callable[[Any], Tensor], weights: Container[str]
) -> dict[str, Tensor]:
    """The gradients of one batch for some weights, by name, zero for unused ones; the model keeps none."""
    loss(model(**batch)).backward()  # type: ignore[no-untyped-call]
    used = {name: p for name, p in model.named_parameters() if name in weights}
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in used.items()}
    model.zero_grad(set_to_none=True)
    return gradients


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a.flatten().double(), b.flatten().double()))
