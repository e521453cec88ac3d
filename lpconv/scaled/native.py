"""Native unit scaling of an untrained model: its initial weights, and the scale of every parameter.

A matrix of fan-in K is α·Ŵ with Ŵ of unit normal distribution and α = 1/√K (Blake et al. 2023, table A.2, matmul). The
paper multiplies by α in the function; here it is the weight's scale, so transformers knows the function, and a fresh
checkpoint is an ordinary one. Training recovers the scales by the same rules: in lpconv the size of an op's result is
its scale, and the method "native" of `scaled` makes scales follow theory exactly (`rules.native`).
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lpconv.errors import UnsupportedError, UsageError
from lpconv.formats.scale import rms
from lpconv.layers import LinearLayer, embeddings, head, linears
from lpconv.lookup import find
from lpconv.scaled.choices import LEARNING_RATES, NATIVE_MARK
from lpconv.scaled.places import norm_modules
from lpconv.scaled.tensor import ScaledTensor, data_part
from lpconv.shards import local

_FEW_KINDS = 16


@torch.no_grad()
def initialise(model: Any, *, seed: int = 0) -> None:
    """Draw the parameters of `model`, in place: Ŵ/√K, tables of unit size, biases 0; norms are unchanged.

    If the head shares its weight with an embedding, the norm before it takes the factor 1/√K, or the logits would be
    √K. A norm that reads an attention's output takes its 1/√L, or it would cancel that. Raises `UsageError` for loaded
    weights, and `UnsupportedError` for a parameter that no rule covers.
    """
    path = str(getattr(model, "name_or_path", ""))
    if path:
        raise UsageError(
            f"native unit scaling draws new weights, so `{path}` would lose its training",
            hint="train this checkpoint with method unit, which keeps its weights, or build a fresh model from a "
            "config without a name",
        )
    generator = torch.Generator().manual_seed(seed)
    for item in list(_parameter_draws(model)):
        unit = torch.randn(item.parameter.shape, generator=generator)
        item.parameter.copy_(_centre(unit, item.fan_in) * (0.0 if item.is_zero else item.size))
    for table in embeddings(model).values():
        if table.padding_idx is not None and table.weight.requires_grad:
            table.weight[table.padding_idx] = 0
    mark = {"seed": seed, **_norms_with_factors(model)}
    for name, factor in _norm_factors(model, mark).items():
        weight = model.get_submodule(name).weight
        weight.copy_(torch.where(weight == 0, factor - 1, weight * factor))  # 0 in norms that multiply by 1 + weight
    setattr(getattr(model, "config", model), NATIVE_MARK, mark)


def _centre(unit: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Make `unit` sum to zero along the axes of its fan-in, keeping its size.

    An activation's mean is then multiplied by zero. Otherwise it would give all tokens a common part that grows from
    layer to layer, until averages over tokens (attention, weight gradients) are several times their theoretical size.
    """
    count = math.prod(unit.shape[axis] for axis in axes)
    return unit if count == 1 else (unit - unit.mean(axes, keepdim=True)) * math.sqrt(count / (count - 1))


def native_scales(model: nn.Module) -> dict[int, float]:
    """The scale of every trained parameter by id: 1/√K for matrices, 1 for tables, norms and biases.

    Raises `UsageError` for a model that `initialise` did not draw, and `UnsupportedError` like `initialise`.
    """
    mark = getattr(getattr(model, "config", model), NATIVE_MARK, None)
    if not isinstance(mark, Mapping):
        raise UsageError(
            "the static scales of method native only hold for weights that it drew itself",
            hint="use method unit for a trained checkpoint, or make a fresh model with `lpconv.scaled.native`",
        )
    scales = {id(item.parameter): item.size for item in _parameter_draws(model)}
    for module in norm_modules(model):
        scales |= {id(p): 1.0 for p in module.parameters(recurse=False)}
    for name, factor in _norm_factors(model, mark).items():
        scales |= {id(p): factor for p in model.get_submodule(name).parameters()}
    return scales


def averages_causally(model: Any) -> bool:
    """Whether attention masks the future: true for generating models without an encoder."""
    generates = getattr(model, "can_generate", bool)()
    return bool(generates) and not getattr(model.config, "is_encoder_decoder", False)


class _Draw(NamedTuple):
    """A parameter to draw: α·Ŵ, or 0 if it only adds a constant. Products sum over the axes `fan_in`."""

    parameter: Tensor
    size: float
    is_zero: bool = False
    fan_in: tuple[int, ...] = ()


def _parameter_draws(model: nn.Module) -> Iterator[_Draw]:
    """All parameters to draw, tied ones once: as a table, whose size a tied head shares."""
    known = _matrices(model) | {id(t.weight): _table(t) for t in embeddings(model).values()}
    norms = {id(m) for m in norm_modules(model)}
    visited: set[int] = set()
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or id(module) in norms or id(parameter) in visited:
                continue
            visited.add(id(parameter))
            name = f"{prefix}.{key}" if prefix else key
            yield known.get(id(parameter)) or _draw_of_other(name, module, key, parameter)


def _matrices(model: nn.Module) -> dict[int, _Draw]:
    """Matrices at 1/√K; the last matrix of each of L attentions, which ends its branch, at 1/√(K·L).

    The common part of all tokens passes an average undiminished, and each layer would double it, until tokens are alike
    and the gradients of Q and K vanish. The paper's authors give attention a small share of the residual, τ ≈ 0.01,
    too.
    """
    last = _branch_ends(model)
    ends = {id(getattr(layer.module, layer.parameter)) for layer in last}
    matrices = {}
    for layer in linears(model):
        weight = getattr(layer.module, layer.parameter)
        share = len(last) if id(weight) in ends else 1
        is_transposed = layer.kind == "Conv1D" or getattr(layer.module, "is_transposed", False)
        size = (layer.in_features * share) ** -0.5
        matrices[id(weight)] = _Draw(weight, size, fan_in=(-2 if is_transposed else -1,))
    return matrices


def _branch_ends(model: Any) -> list[LinearLayer]:
    """The last matrix of each attention that writes into the residual stream (Phi-3 lists QKV after it)."""
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    layers = [linears(m)[::-1] for m in _attentions(model)]
    return [next((x for x in own if x.out_features == width), own[0]) for own in layers]


def _attentions(model: nn.Module) -> list[nn.Module]:
    """The outermost modules with "Attention" in their class name that have matrices."""
    attentions: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in attentions)
        if "Attention" in type(module).__name__ and not is_inside and linears(module):
            attentions[name] = module
    return list(attentions.values())


def _table(table: nn.Embedding) -> _Draw:
    """A table of unit size after its class's own factor.

    A table of few kinds, such as segments, adds the same vector to nearly all tokens and starts at 0 like a bias.
    """
    return _Draw(table.weight, 1 / _own_factor(table), is_zero=table.num_embeddings <= _FEW_KINDS)


def _own_factor(table: nn.Embedding) -> float:
    """The factor of a class derived from `nn.Embedding`, such as √K in Gemma: its result for a table of ones."""
    if type(table).forward is not nn.Embedding.forward:
        ones = table.weight.new_ones(1, 1)
        with contextlib.suppress(Exception):  # tables of positions take other inputs than ids: a shape, a length, …
            overrides = {"weight": ones.expand_as(table.weight)}
            return float(torch.func.functional_call(table, overrides, (ones.long(),)).mean()) or 1.0
    return 1.0


def _draw_of_other(name: str, module: nn.Module, key: str, parameter: Tensor) -> _Draw:
    if key == "bias" or key.endswith("_bias"):
        return _Draw(parameter, 1.0, is_zero=True)
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return _Draw(parameter, math.prod(parameter.shape[1:]) ** -0.5, fan_in=tuple(range(1, parameter.dim())))
    if parameter.dim() > 1 and parameter.shape[0] == 1:  # vectors that are added to every example, such as positions
        return _Draw(parameter, 1.0)
    raise UnsupportedError(
        f"method native has no rule for parameter `{name}` of {type(module).__name__}",
        hint="method unit works on any architecture; native knows matrices, convolutions, embeddings, norms and biases",
    )


def _head_factor(model: nn.Module) -> float:
    """The size of the head's input at which logits have unit size: 1/√K divided by the size of its table."""
    weight = _tied_head(model).weight
    size = next(_table(table).size for table in embeddings(model).values() if table.weight is weight)
    return math.sqrt(1 / weight.shape[1]) / size


def _tied_head(model: nn.Module) -> Any:
    """The head if it shares the weight of an embedding, else None."""
    output_head = head(model)
    weights = [table.weight for table in embeddings(model).values()]
    return output_head if any(getattr(output_head, "weight", None) is weight for weight in weights) else None


def _norm_factors(model: nn.Module, mark: Mapping[str, Any]) -> dict[str, float]:
    """Factors of norms by name, for norms that have one."""
    factors = {name: len(_branch_ends(model)) ** -0.5 for name in mark.get("branch_norms", ())}
    return factors | ({mark["head_norm"]: _head_factor(model)} if mark.get("head_norm") else {})


def _norms_with_factors(model: Any) -> dict[str, Any]:
    """Names of norms with a factor: `head_norm` before a tied head, `branch_norms` after an attention's last matrix.

    `head_norm` is None if no head is tied or its input is small enough. One forward pass finds these norms by the
    memory that one module returns and another reads, since the code does not tell.
    """
    tied, norms, ends = _tied_head(model), set(norm_modules(model)), {layer.module for layer in _branch_ends(model)}
    names = {m: name for name, m in model.named_modules()}
    returned: dict[int, tuple[Any, Any]] = {}  # with the output, so that its memory is not reused
    read: list[tuple[Any, Any, Tensor]] = []  # (module, the module that returned its input, the input)

    def on_output(module: Any, args: Any, out: Any) -> None:
        read.append((module, returned.get(args[0].data_ptr(), (None, None))[0], args[0]))
        returned[out.data_ptr()] = (module, out)

    with contextlib.ExitStack() as hooks:
        for m in norms | ends | ({tied} - {None}):
            hooks.enter_context(m.register_forward_hook(on_output))
        try:
            inputs = dict(model.dummy_inputs)
            if getattr(model.config, "is_encoder_decoder", False) and "input_ids" in inputs:
                inputs.setdefault("decoder_input_ids", inputs["input_ids"])
            model(**inputs)
        except Exception as e:  # models that read pixels or sound raise various exceptions
            if tied is not None:
                raise _no_norm_error(model) from e
    branch = [names[module] for module, source, _ in read if module in norms and source in ends]
    fed = [(source, x) for module, source, x in read if module is tied]
    head_norm = None
    if fed and float(fed[-1][1].square().mean().sqrt()) >= 2 * _head_factor(model):
        if fed[-1][0] not in norms:
            raise _no_norm_error(model)
        head_norm = names[fed[-1][0]]
    return {"head_norm": head_norm, **({"branch_norms": branch} if branch else {})}


def _no_norm_error(model: nn.Module) -> UnsupportedError:
    return UnsupportedError(
        f"method native has no rule for the head of {type(model).__name__}: it is tied to an embedding of unit size, "
        "and no norm before it was found that could take the factor 1/√K",
        hint="set tie_word_embeddings=False in the config",
    )


def native_groups(
    parameters: Iterable[Tensor], lr: float, *, rule: str = "unit", **options: Any
) -> list[dict[str, Any]]:
    """Return parameter groups of a natively scaled model for `lpconv.scaled.AdamW`.

    `rule` is a learning-rate rule of `LEARNING_RATES`, `options` are added to every group. Scaled AdamW steps on Ŵ with
    lr/σ, so a group's own rate is lr·σ.
    """
    find("learning-rate rule", rule, LEARNING_RATES)
    by_rate: dict[float, list[Tensor]] = {}
    for parameter in parameters:
        own = local(parameter)
        scale = float(own.scale) if isinstance(own, ScaledTensor) else 1.0
        rate = lr * scale
        if rule == "u-mup" and parameter.dim() > 1:  # only tables have the scale 1, and their width is the last axis
            rate *= scale if scale < 1 else parameter.shape[-1] ** -0.5
        by_rate.setdefault(rate, []).append(parameter)
    return [{"params": alike, "lr": rate, **options} for rate, alike in by_rate.items()]


def data_sizes(model: nn.Module, step: Callable[[], object]) -> dict[str, list[float]]:
    """Root mean squares of the data of linear outputs, their gradients and weight gradients.

    `step()` runs one forward and backward pass.
    """
    sizes: dict[str, list[float]] = {"outputs": [], "gradients": [], "weight gradients": []}

    def note(what: str, x: Tensor) -> None:
        sizes[what].append(float(rms(data_part(x.detach()))))

    def on_output(_: nn.Module, __: Any, out: Tensor) -> None:
        note("outputs", out)
        out.register_hook(lambda grad: note("gradients", grad))  # type: ignore[no-untyped-call]  # torch's

    with contextlib.ExitStack() as hooks:
        for x in (x for x in linears(model) if x.kind != "experts"):
            hooks.enter_context(x.module.register_forward_hook(on_output))
        step()
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.grad is not None:
            note("weight gradients", parameter.grad)
    return sizes
