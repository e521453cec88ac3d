"""Model and optimizer of a bench case, by format and method. A peer library is a function and a line in `_PEERS`."""

import dataclasses
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lpconv.bench.models import step_loss
from lpconv.bench.options import CODES, SCALED, Case
from lpconv.errors import UnsupportedError
from lpconv.kernels.linear import FP4_RECIPES, FP8_RECIPES, FP16_LINEAR, Multiplying, calibrate, use_recipe
from lpconv.layers import head
from lpconv.models.load import load
from lpconv.models.opening import Blueprint
from lpconv.optim import CollageAdamW
from lpconv.scaled import AdamW as ScaledAdamW, scaled

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_RECIPES = {"fp8": FP8_RECIPES, "fp4": FP4_RECIPES}
_FP8_CAPABILITY = (8, 9)
_LR = 1e-4


def is_emulated(case: Case) -> bool:
    """Whether the products of the case run in a wider format than its name says."""
    if case.format in ("fp32", "bf16"):
        return False
    if case.format == CODES or not case.device.startswith("cuda"):
        return True  # codes and fp8 multiply in bf16, and fp16 in fp32
    if case.format == "fp16":
        return False
    # Block scales need tensor cores of capability 10, for which lpconv has no kernel yet.
    return case.format == "fp4" or case.method == "mx" or torch.cuda.get_device_capability() < _FP8_CAPABILITY


def with_codes(known: Blueprint, case: Case) -> nn.Module:
    """The model of a checkpoint with weights kept as codes, and everything else in bf16."""
    assert known.checkpoint is not None, "the bench has checked it"
    model: nn.Module = load(
        known.checkpoint, dtype=torch.bfloat16, model_class=known.model_class, config=known.config, resident=True
    )
    return model.to(case.device)


def apply_recipe(model: nn.Module, case: Case, batch: dict[str, Tensor]) -> nn.Module:
    """Convert `model` (fp32) to the format of the case; fp8 recipes have bf16 parameters, except those in `SCALED`.

    Raises UnsupportedError where a device or a peer cannot do it.
    """
    if case.method in SCALED:
        return scaled(model, method=case.method, compute=case.format)
    if case.format not in _RECIPES:
        model.to(_DTYPES[case.format])
        if case.format == "fp16" and case.device == "cpu":
            use_recipe(model, FP16_LINEAR)  # torch multiplies float16 on a CPU ten and more times slower than float32
        return model
    model.to(torch.bfloat16)
    if case.method in _RECIPES[case.format]:
        return _cast(model, case, batch)
    return _PEERS[case.method](model, case)


def _cast(model: nn.Module, case: Case, batch: dict[str, Tensor]) -> nn.Module:
    kept = head(model)  # it stays in 16 bits under every recipe, as in other libraries
    names = use_recipe(model, _RECIPES[case.format][case.method], keep=() if kept is None else (kept,))
    if not names:
        raise UnsupportedError(
            f"`{case.model}` has no Linear layer to run in {case.format}", hint="measure another model"
        )

    def step() -> None:
        if case.mode == "train":
            step_loss(model, batch).backward()  # type: ignore[no-untyped-call]
            model.zero_grad(set_to_none=True)
        else:
            with torch.no_grad():
                model(**batch)

    calibrate(model, step)
    if case.method == "delayed":
        step()  # a history to scale by
    if case.mode == "infer":
        for module in model.modules():
            if isinstance(module, Multiplying):
                module.freeze()
    return model


def _torchao(model: nn.Module, case: Case, *, recipe: str) -> nn.Module:
    if case.mode == "infer":
        return _torchao_inference(model, case, recipe)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=is_emulated(case))
    changed: nn.Module = convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: _fits_tensor_cores(model, module)
    )
    return changed


def _torchao_inference(model: nn.Module, case: Case, recipe: str) -> nn.Module:
    if is_emulated(case):
        raise UnsupportedError(
            "torchao's fp8 inference needs a GPU of compute capability 8.9 or higher",
            hint="compare with --mode train, in which torchao emulates fp8",
        )
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, PerTensor, quantize_

    granularity = PerRow() if recipe == "rowwise" else PerTensor()
    quantize_(
        model,
        Float8DynamicActivationFloat8WeightConfig(granularity=granularity),
        filter_fn=lambda module, name: _fits_tensor_cores(model, module),
    )
    return model


def _fits_tensor_cores(model: nn.Module, module: Any) -> bool:
    """Apply torchao, which replaces only Linears with sizes that are multiples of 16."""
    if not isinstance(module, nn.Linear) or module is head(model):
        return False
    return module.in_features % 16 == 0 and module.out_features % 16 == 0


def _transformer_engine(model: nn.Module, case: Case) -> nn.Module:
    """Replace every Linear except the head by TransformerEngine's, with its default recipe (delayed scaling)."""
    if is_emulated(case):
        raise UnsupportedError(
            "TransformerEngine needs a GPU of compute capability 8.9 or higher", hint="leave `te` out of --method"
        )
    te = importlib.import_module("transformer_engine.pytorch")
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and _fits_tensor_cores(model, module):
            ours = te.Linear(
                module.in_features, module.out_features, bias=module.bias is not None, params_dtype=torch.bfloat16
            )
            with torch.no_grad():
                ours.weight.copy_(module.weight)
                if module.bias is not None:
                    ours.bias.copy_(module.bias)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, ours)
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with te.fp8_autocast(enabled=True):
            return plain(*args, **kwargs)

    model.forward = forward
    return model


_PEERS: dict[str, Callable[[nn.Module, Case], nn.Module]] = {
    "torchao-tensorwise": partial(_torchao, recipe="tensorwise"),
    "torchao-rowwise": partial(_torchao, recipe="rowwise"),
    "te": _transformer_engine,
}


def make_optimizer(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    """Create the optimizer of a training case, with state in the dtype of the parameters unless its name differs."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if case.method in SCALED:
        if case.optimizer != "adamw":
            raise UnsupportedError(
                f"scaled tensors cannot be trained with {case.optimizer}", hint="use --optimizer adamw"
            )
        state = torch.float32 if case.format == "fp32" else torch.bfloat16
        return ScaledAdamW(parameters, lr=_LR, master=False, state_dtype=state)
    assert case.optimizer is not None
    return _OPTIMIZERS[case.optimizer](parameters)


def _peer(module: str, name: str, parameters: list[Any], **settings: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = getattr(importlib.import_module(module), name)(parameters, lr=_LR, **settings)
    return optimizer


_OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=_LR, fused=True),
    "collage-light": partial(CollageAdamW, lr=_LR, betas=(0.9, 0.95), variant="light"),
    "collage-plus": partial(CollageAdamW, lr=_LR, betas=(0.9, 0.95), variant="plus"),
    "optimi-kahan": partial(_peer, "optimi", "AdamW", kahan_sum=True),
    "torchao-stochastic": partial(_peer, "torchao.optim", "_AdamW", bf16_stochastic_round=True),
    "torchao-8bit": partial(_peer, "torchao.optim", "AdamW8bit"),
    "bitsandbytes-8bit": partial(_peer, "bitsandbytes.optim", "AdamW8bit"),
}
