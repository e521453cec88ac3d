"""Parts of a model: the layers that multiply by a weight, the output head, embeddings and blocks.

Code that replaces, counts, times or watches layers uses these functions. They name no model class and do not import
transformers, because kernels and optimizers accept any module.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearLayer:
    """A weight W in y = x Wᵀ, with W of shape (`out_features`, `in_features`).

    `module`, called `name`, owns it under `parameter`. `kind` is "Linear", "Conv1D" (GPT-2's, which stores Wᵀ) or
    "experts" (several such weights in one 3-D parameter; each token uses a few of them). `is_plain` is False for a
    subclass, which may use the weight without being called.
    """

    name: str
    module: nn.Module
    parameter: str
    kind: str
    in_features: int
    out_features: int
    is_plain: bool = True

    @property
    def is_replaceable(self) -> bool:
        """Whether another module with the same weight can take the place of `module`."""
        return self.is_plain and self.kind != "experts"


def linears(model: nn.Module) -> list[LinearLayer]:
    """The weights that a model multiplies by, in module order; a module that is used twice counts once."""
    return [layer for name, module in model.named_modules() for layer in _linears_of(name, module)]


def _linears_of(name: str, module: Any) -> list[LinearLayer]:
    kinds = [c.__name__ for c in type(module).__mro__]
    if isinstance(module, nn.Linear) or "Conv1D" in kinds:
        kind = "Linear" if isinstance(module, nn.Linear) else "Conv1D"
        rows, columns = module.weight.shape
        n, k = (rows, columns) if kind == "Linear" else (columns, rows)
        return [
            LinearLayer(
                name=name, module=module, parameter="weight", kind=kind, in_features=k, out_features=n,
                is_plain=kinds[0] == kind,
            )
        ]  # fmt: skip
    if not isinstance(getattr(module, "num_experts", None), int):
        return []
    stacks = {key: tuple(p.shape) for key, p in module._parameters.items() if p is not None and p.ndim == 3}
    swapped = getattr(module, "is_transposed", False)  # transformers sets this on modules that store Wᵀ
    return [
        LinearLayer(
            name=name, module=module, parameter=key, kind="experts",
            in_features=n if swapped else k, out_features=k if swapped else n,
        )
        for key, (_, n, k) in stacks.items()
    ]  # fmt: skip


def convolutions(model: nn.Module) -> list[nn.Module]:
    """The convolutions of a model in module order, without subclasses of torch's classes."""
    return [m for m in model.modules() if type(m) in (nn.Conv1d, nn.Conv2d, nn.Conv3d)]


def head(model: nn.Module) -> nn.Module | None:
    """The module that computes logits: the output embeddings, or else the last linear layer outside of the base model.

    None for a base model without a head, and for models not from transformers.
    """
    get = getattr(model, "get_output_embeddings", None)
    output: nn.Module | None = get() if callable(get) else None
    base = getattr(model, "base_model", None)
    if output is not None or base is None or base is model:
        return output
    inside = set(base.modules())
    return next((x.module for x in reversed(linears(model)) if x.module not in inside), None)


def embeddings(model: nn.Module) -> dict[str, nn.Embedding]:
    """The embedding tables of tokens, positions and token types, by module name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Embedding)}


def weighted_modules(model: nn.Module) -> dict[str, Any]:
    """Modules that own a `weight`, by name: linear layers, embeddings, norms, convolutions."""
    return {name: m for name, m in model.named_modules() if isinstance(getattr(m, "weight", None), Tensor)}


def block_lists(model: nn.Module) -> list[list[nn.Module]]:
    """The lists of repeated blocks of a model that are not within another list. A block has modules of its own."""
    lists = {name: [*m] for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    outer = [blocks for name, blocks in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    return [blocks for blocks in outer if any(True for block in blocks for _ in block.children())]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of the model: its longest list of blocks, or else of modules, or the model itself."""
    lists = block_lists(model) or [[*m] for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    return max(lists, key=len, default=[model])
