"""What native unit scaling makes of a model that is not trained: its weights, and the scale of every parameter.

A matrix of fan-in K is α·Ŵ with Ŵ of unit normal distribution and α = 1/√K (Blake et al. 2023, table A.2, matmul). The
paper multiplies by α in the function; here it is the weight's scale, so the function is one that transformers has, and
a fresh checkpoint is an ordinary one. Whoever opens it for training finds the scales again by the same rules.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lpconv.errors import UnsupportedError, UsageError
from lpconv.layers import embeddings, head, linears
from lpconv.scaled.choices import NATIVE_MARK
from lpconv.scaled.places import norm_modules

__all__ = ["averages_causally", "initialise", "native_scales"]

_FEW_KINDS = 16


@torch.no_grad()
def initialise(model: Any, *, seed: int = 0) -> None:
    """Draw the parameters of `model`, in place: Ŵ/√K, tables of unit size, biases 0; norms stay as they were made.

    Where the head shares its weight with an embedding, 1/√K goes to the norm before it, or the logits would be √K.
    Raises `UsageError` for weights that were loaded, and `UnsupportedError` for a parameter that no rule covers.
    """
    path = str(getattr(model, "name_or_path", ""))
    if path:
        raise UsageError(
            f"native unit scaling draws all weights anew: `{path}` would lose what it learnt",
            hint="train a checkpoint with method unit, which keeps its function; for a fresh model build one from a "
            "config without a name",
        )
    generator = torch.Generator().manual_seed(seed)
    for drawn in list(_drawn(model)):
        unit = torch.randn(drawn.parameter.shape, generator=generator)
        drawn.parameter.copy_(_centred(unit, drawn.fan_in) * (0.0 if drawn.is_zero else drawn.size))
    for table in embeddings(model).values():
        if table.padding_idx is not None and table.weight.requires_grad:
            table.weight[table.padding_idx] = 0
    norm = _norm_of_tied_head(model)
    if norm is not None:
        model.get_submodule(norm).weight.mul_(_head_factor(model))
        if _norm_of_tied_head(model) is not None:  # a norm that multiplies by 1 + weight
            raise _no_norm(model)
    setattr(getattr(model, "config", model), NATIVE_MARK, {"seed": seed, "head_norm": norm})


def _centred(unit: Tensor, axes: tuple[int, ...]) -> Tensor:
    """`unit` with sums of zero along the axes of its fan-in, at its size.

    An activation's mean is then multiplied by zero. It would give all tokens a common part that grows from layer to
    layer, up to the point where averages over tokens (attention, weight gradients) are several times what theory says.
    """
    count = math.prod(unit.shape[axis] for axis in axes)
    return unit if count == 1 else (unit - unit.mean(axes, keepdim=True)) * math.sqrt(count / (count - 1))


def native_scales(model: nn.Module) -> dict[int, float]:
    """The scale of every trained parameter, by its id: 1/√K of matrices, 1 of tables, norms and biases.

    Raises `UsageError` for a model that `initialise` did not draw, and `UnsupportedError` as it does.
    """
    mark = getattr(getattr(model, "config", model), NATIVE_MARK, None)
    if not isinstance(mark, Mapping):
        raise UsageError(
            "method native scales by theory, which holds for weights that it drew itself",
            hint="use method unit for a trained checkpoint; `lpconv.scaled.native` makes a fresh model",
        )
    scales = {id(drawn.parameter): drawn.size for drawn in _drawn(model)}
    for module in norm_modules(model):
        scales |= {id(p): 1.0 for p in module.parameters(recurse=False)}
    if mark.get("head_norm"):
        scales |= {id(p): _head_factor(model) for p in model.get_submodule(mark["head_norm"]).parameters()}
    return scales


def averages_causally(model: Any) -> bool:
    """Whether a mask in attention hides the future: in models that generate, but for those with an encoder."""
    generates = getattr(model, "can_generate", bool)()
    return bool(generates) and not getattr(model.config, "is_encoder_decoder", False)


class _Drawn(NamedTuple):
    """A parameter that is drawn: α·Ŵ, or 0 where it is no choice between inputs. Products sum over axes of `fan_in`."""

    parameter: Tensor
    size: float
    is_zero: bool = False
    fan_in: tuple[int, ...] = ()


def _drawn(model: nn.Module) -> Iterator[_Drawn]:
    """What is drawn, tied parameters once: as a table, whose size a tied head takes over."""
    known = _matrices(model) | {id(t.weight): _table(t) for t in embeddings(model).values()}
    norms = {id(m) for m in norm_modules(model)}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or id(module) in norms or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{prefix}.{key}" if prefix else key
            yield known.get(id(parameter)) or _other(name, module, key, parameter)


def _matrices(model: nn.Module) -> dict[int, _Drawn]:
    """Matrices at 1/√K; the last one of each of L attentions, with which its branch ends, at 1/√(K·L).

    What all tokens share passes an average whole, and each layer would double it, until tokens are alike and the
    gradients of Q and K vanish. The paper's authors give attention a small share of the residual, τ ≈ 0.01, too.
    """
    last = [linears(m)[-1] for m in _attentions(model)]
    ends = {id(getattr(layer.module, layer.parameter)) for layer in last}
    found = {}
    for layer in linears(model):
        weight = getattr(layer.module, layer.parameter)
        share = len(last) if id(weight) in ends else 1
        is_transposed = layer.kind == "Conv1D" or getattr(layer.module, "is_transposed", False)
        size = (layer.in_features * share) ** -0.5
        found[id(weight)] = _Drawn(weight, size, fan_in=(-2 if is_transposed else -1,))
    return found


def _attentions(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that are attention by their class's name and hold matrices."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if "Attention" in type(module).__name__ and not is_inside and linears(module):
            found[name] = module
    return list(found.values())


def _table(table: nn.Embedding) -> _Drawn:
    """Of unit size; one of a few kinds, such as segments, adds the same to nearly all tokens and starts as a bias."""
    return _Drawn(table.weight, 1.0, is_zero=table.num_embeddings <= _FEW_KINDS)


def _other(name: str, module: nn.Module, key: str, parameter: Tensor) -> _Drawn:
    if key == "bias" or key.endswith("_bias"):
        return _Drawn(parameter, 1.0, is_zero=True)
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return _Drawn(parameter, math.prod(parameter.shape[1:]) ** -0.5, fan_in=tuple(range(1, parameter.dim())))
    if parameter.dim() > 1 and parameter.shape[0] == 1:  # vectors that are added to every example, such as positions
        return _Drawn(parameter, 1.0)
    raise UnsupportedError(
        f"no native rule for parameter `{name}` of {type(module).__name__}",
        hint="rules cover matrices, convolutions, embeddings, norms and biases; method unit takes any architecture",
    )


def _head_factor(model: nn.Module) -> float:
    return math.sqrt(1 / _tied_head(model).weight.shape[1])


def _tied_head(model: nn.Module) -> Any:
    """The head, if its weight is an embedding's; else None."""
    found = head(model)
    weights = [table.weight for table in embeddings(model).values()]
    return found if any(getattr(found, "weight", None) is weight for weight in weights) else None


def _norm_of_tied_head(model: Any) -> str | None:
    """The norm whose output a tied head multiplies; None where no head is tied or what it multiplies is small enough.

    Found by one forward pass, for code says nothing about it: the norm's output is the very memory that the head reads.
    """
    tied = _tied_head(model)
    if tied is None:
        return None
    outputs: dict[int, str] = {}
    fed: list[Tensor] = []
    names = {id(m): name for name, m in model.named_modules()}
    hooks = [
        m.register_forward_hook(lambda m, _, out: outputs.__setitem__(out.data_ptr(), names[id(m)]))
        for m in norm_modules(model)
    ]
    hooks.append(tied.register_forward_pre_hook(lambda _, args: fed.append(args[0])))
    try:
        model(**model.dummy_inputs)
    except Exception as e:  # models that read pixels or sound fail in ways of their own
        raise _no_norm(model) from e
    finally:
        for hook in hooks:
            hook.remove()
    if not fed or float(fed[-1].square().mean().sqrt()) < 2 * _head_factor(model):
        return None
    if fed[-1].data_ptr() not in outputs:
        raise _no_norm(model)
    return outputs[fed[-1].data_ptr()]


def _no_norm(model: nn.Module) -> UnsupportedError:
    return UnsupportedError(
        f"no native rule for the head of {type(model).__name__}: it shares its weight with an embedding, of unit size, "
        "and no norm before it could be found that takes the factor 1/√K",
        hint="set tie_word_embeddings=False in the config",
    )
