"""`scaled`: train and run an unmodified model on scaled tensors; and `saved_bytes`, the memory of its backward pass."""

import fnmatch
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lpconv.errors import UnsupportedError, UsageError
from lpconv.formats.scale import pow2_floor
from lpconv.formats.spec import OPERAND_BLOCKS
from lpconv.kernels.compiled import is_compiling
from lpconv.kernels.linear import FP4_RECIPES, wide_modules
from lpconv.layers import weighted_modules
from lpconv.lookup import find, nearest_name
from lpconv.scaled.choices import USUAL_OPERAND_SCALE, OperandScales, operand_scales
from lpconv.scaled.native import averages_causally, initialise, native_scales
from lpconv.scaled.pair import Numerics, Role
from lpconv.scaled.places import heads, install, place
from lpconv.scaled.rules.own import leave
from lpconv.scaled.saved import SavedCodes
from lpconv.scaled.scales import MAX_SCALE, MIN_SCALE
from lpconv.scaled.tensor import ScaledTensor, data_part, scaled_tensor
from lpconv.shards import gather_whole, local, placed_like

_BLOCK = 2**20  # elements
ZERO_SCALE = 2.0**-6  # for parameters that are all zero: the power of two below 0.02, the usual initializer_range


@dataclass(frozen=True, kw_only=True)
class Compute:
    """The dtype of parameters and activations, and the formats of matmul operands if these are narrower."""

    carrier: torch.dtype
    operand: str | None = None
    gradient: str | None = None


COMPUTE: dict[str, Compute] = {
    "fp32": Compute(carrier=torch.float32),
    "fp16": Compute(carrier=torch.float16),
    "bf16": Compute(carrier=torch.bfloat16),
    "fp8": Compute(carrier=torch.bfloat16, operand="e4m3fn", gradient="e5m2"),
    "fp4": Compute(carrier=torch.bfloat16, operand="e2m1", gradient="e2m1"),
}

SCALED_METHODS = dict.fromkeys(("unit", "native", "scalify"))
STATIC_METHODS = ("unit", "native")


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How a model was scaled: stored on the model, read with `scaling_of`.

    `scales` holds the static scale of every parameter by name; tied names share one. `unit` is a scaled tensor with the
    numerics in which the backward pass begins, `saved` stores saved activations as codes. `autocast` is the dtype of a
    plain forward pass with scaled gradients only (`adaptive_scaling`), None for scaled tensors throughout.
    """

    method: str
    compute: str
    numerics: Numerics
    scales: Mapping[str, float]
    saved: SavedCodes | None
    unit: ScaledTensor
    autocast: torch.dtype | None = None

    def around_forward(self, weight: Tensor) -> AbstractContextManager[Any]:
        """The context of the forward pass: autocast, the encoding of saved tensors, or nothing."""
        if self.autocast is not None:
            return torch.autocast(weight.device.type, self.autocast, enabled=self.autocast != torch.float32)
        if self.saved is not None and torch.is_grad_enabled() and not is_compiling():
            return self.saved.during_forward(weight.dtype)
        return nullcontext()


def scaled(
    model: nn.Module,
    *,
    method: str = "unit",
    compute: str = "fp32",
    carrier: torch.dtype | None = None,
    rescale: Iterable[str] | None = None,
    critical: Iterable[str] = (),
    operand_scale: str | OperandScales = USUAL_OPERAND_SCALE,
    save_codes: bool = True,
    strict: bool = False,
) -> nn.Module:
    """Make `model` compute on (data, scale) pairs, in place; its forward code and all names are unchanged.

    Every floating-point parameter W becomes a `ScaledTensor` σ·Ŵ with σ = 2^⌊log2 RMS(W)⌋, in the dtype of `compute`
    ("fp8": `carrier`, bfloat16 by default, with matmul operands in e4m3fn, and incoming gradients in e5m2 unless each
    row has a scale). Outputs are plain tensors; `loss.backward()` leaves scaled gradients, read with
    `p.grad.dequantize()`. Train with `lpconv.scaled.AdamW` or SGD.

    - "unit" keeps every scale static.
    - "native" does too, with the scales that theory gives a model drawn by `lpconv.scaled.native` (see its docs).
    - "scalify" adds dynamic rescaling at the named places `rescale`: any of "layernorm_grad" (the default),
      "logits_grad", "softmax_grad", "weight_grad" and "every:N" (the parameters, every N training passes).

    Under "fp8" operands are cast with their own scales, chosen by `operand_scale` (parsed by `choices.operand_scales`).
    "fp4" casts them to e2m1 as `kernels.linear.FP4_RECIPES` says for that scale, and leaves the last blocks wide.
    Modules whose name matches a pattern of `critical` multiply in the carrier dtype, and so does the output head. With
    `save_codes`, "fp8" also stores tensors saved for the backward pass in 8 bits, except in those modules, in the loss
    head, and if weight gradients stay in the carrier dtype.

    `strict` makes an op without a rule an `UnsupportedError`; otherwise it is computed on values and counted, see
    `fallbacks`. Raises `UsageError` for unknown names, a model that is already scaled, and parameters that are not
    finite.
    """
    find("method", method, SCALED_METHODS)
    scales = operand_scales(operand_scale) if isinstance(operand_scale, str) else operand_scale
    compute_spec = find("compute", compute, COMPUTE)
    if compute_spec.operand:
        scales.check(compute)
    if rescale is not None and method != "scalify":
        raise UsageError(f"`rescale` only applies to method scalify, not to {method}", hint="use method='scalify'")
    refuse_scaled(model)
    dtype = carrier or compute_spec.carrier
    places = ("layernorm_grad",) if rescale is None else tuple(rescale)
    for name in places:
        place(name)
    numerics = Numerics(
        operand=compute_spec.operand,
        gradient=compute_spec.gradient,
        operand_scales=scales,
        softmax_grad="softmax_grad" in places,
        native=method == "native",
        causal=method == "native" and averages_causally(model),
        strict=strict,
    )
    exact = _exact_modules(model, tuple(critical)) if compute_spec.operand else []
    is_fp4 = compute_spec.operand == "e2m1"
    if is_fp4:
        exact += wide_modules(model, FP4_RECIPES["nvfp4"]).difference(exact)  # the same in all
    saves_codes = save_codes and not is_fp4 and scales.grad_weight not in ("carrier", *OPERAND_BLOCKS)
    scaling = Scaling(
        method=method,
        compute=compute,
        numerics=numerics,
        scales=_replace_parameters(model, dtype, numerics, exact, native_scales(model) if numerics.native else {}),
        saved=SavedCodes(compute_spec.operand) if compute_spec.operand and saves_codes else None,
        unit=scaled_tensor(torch.ones(()), 1.0, role=Role.GRADIENT, numerics=numerics),
    )
    if numerics.native:
        _scale_constants(model, numerics)
    install(model, places if method == "scalify" else (), exact)
    return return_plain(model, scaling)


def native(model: nn.Module, *, seed: int = 0, **options: Any) -> nn.Module:
    """Initialise `model` from `seed` for native unit scaling and scale it, in place; `options` are those of `scaled`.

    fp8 operands are cast without another scale, unless `operand_scale` is given. Train with
    ``AdamW(native_groups(model.parameters(), lr))``. Raises `UsageError` for loaded weights, and `UnsupportedError` for
    a parameter without a native rule or, during the run, for such an op.
    """
    initialise(model, seed=seed)
    settings: dict[str, Any] = {"operand_scale": "static", "strict": True, **options}
    return scaled(model, method="native", **settings)


def refuse_scaled(model: nn.Module) -> None:
    """Raise `UsageError` for a model that is already scaled."""
    if scaling_of(model) is not None:
        raise UsageError(
            "the model is already scaled",
            hint="load the model again, or get plain weights back with `unscaled_state_dict`",
        )


def return_plain(model: nn.Module, scaling: Scaling) -> nn.Module:
    """Store `scaling` on the model and make its forward return plain tensors."""
    model.lpconv_scaling = scaling  # type: ignore[assignment]  # nn.Module types every attribute as a tensor or module
    model.__class__ = _scaled_class(type(model))
    return model


def scaling_of(model: nn.Module) -> Scaling | None:
    """Return the settings that `scaled` recorded on the model, or None for a plain model."""
    scaling = getattr(model, "lpconv_scaling", None)
    return scaling if isinstance(scaling, Scaling) else None


def fallbacks(model: nn.Module) -> dict[str, int]:
    """Counts of the ops that were not exact, most frequent first."""
    scaling = scaling_of(model)
    if scaling is None:
        raise UsageError("the model is not scaled", hint="call lpconv.scaled.scaled(model) first")
    return dict(scaling.numerics.counts.most_common())


def unscaled_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict as plain tensors σ·Ŵ under the original names, e.g. for `save_pretrained(state_dict=…)`.

    Sharded tensors stay sharded, for distributed checkpoints; `full_tensor()` gathers one. Tied tensors stay tied.
    """
    return _unscale_all(model.state_dict())


def _unscale_all(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    unscaled: dict[int, Tensor] = {}  # by data, which tied parameters share
    return {name: unscaled.setdefault(id(data_part(local(x))), _unscale(x)) for name, x in state.items()}


def _unscale(x: Tensor) -> Tensor:
    own = local(x)
    return placed_like(x, own.dequantize(x.dtype)) if isinstance(own, ScaledTensor) else x


def _scaled_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `base` that returns and saves plain tensors; its name and signature are those of `base`.

    A subclass, because a hook would stay outside the graph that `torch.compile` captures, and a forward set on the
    instance would still belong to the original after a deepcopy.
    """

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        scaling = scaling_of(self)
        assert scaling is not None
        if takes_cache and is_compiling() and torch.is_grad_enabled():  # its unused gradients would have to be scaled
            kwargs["use_cache"] = False
        with _outside_inference_mode(), scaling.around_forward(next(self.parameters())):
            outputs = base.forward(self, *args, **kwargs)
            return _leave_outputs(outputs, scaling)

    def save_pretrained(
        self: nn.Module, *args: Any, state_dict: Mapping[str, Tensor] | None = None, **kwargs: Any
    ) -> Any:
        """`base.save_pretrained` with plain tensors: the checkpoint opens without lpconv."""
        plain = _unscale_all(state_dict or self.state_dict())
        return base.save_pretrained(self, *args, state_dict=plain, **kwargs)  # type: ignore[attr-defined]  # checked below

    takes_cache = "use_cache" in inspect.signature(base.forward).parameters
    own = {"forward": forward, "__module__": base.__module__, "__doc__": base.__doc__}
    own |= {"save_pretrained": save_pretrained} if hasattr(base, "save_pretrained") else {}
    return type(base.__name__, (base,), own)


def _outside_inference_mode() -> AbstractContextManager[Any]:
    """Leave inference mode, but without gradients if it was on: views of wrapper tensors from it cannot be tracked."""
    if is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


def _leave_outputs(outputs: Any, scaling: Scaling) -> Any:
    """Make scaled tensors in tuples, lists and mappings plain; other objects are unchanged.

    A key-value cache therefore stays scaled and can be passed to the next call. Under autocast outputs are plain, but
    those that require a gradient are still converted, because their gradient enters there.
    """
    is_plain_start = scaling.autocast is not None and isinstance(outputs, Tensor) and outputs.requires_grad
    if isinstance(outputs, ScaledTensor) or is_plain_start:
        return leave(outputs, scaling.unit, scaling.method not in STATIC_METHODS)
    if isinstance(outputs, dict):
        return type(outputs)(**{k: _leave_outputs(v, scaling) for k, v in outputs.items()})
    if isinstance(outputs, (tuple, list)):
        plain = [_leave_outputs(v, scaling) for v in outputs]
        return type(outputs)(*plain) if hasattr(outputs, "_fields") else type(outputs)(plain)  # a NamedTuple
    return outputs


def weight_scale(name: str, weight: Tensor) -> float:
    """σ = 2^⌊log2 RMS⌋; 2^-6 for a meta tensor and for an all-zero tensor, whose values training will choose."""
    if weight.is_meta:
        return ZERO_SCALE
    blocks = torch.split(weight.reshape(-1), _BLOCK)  # in one piece this would need four times the weight's memory
    sums = [x.double().square().sum() for x in blocks]
    rms = float((torch.stack(sums).sum() / weight.numel()).sqrt()) if weight.numel() else 0.0
    if not rms < MAX_SCALE:
        raise UsageError(
            f"parameter `{name}` has Inf or NaN", hint="go back to a checkpoint before the step that produced it"
        )
    return max(float(pow2_floor(rms)), MIN_SCALE) if rms > 0 else ZERO_SCALE


def _exact_modules(model: nn.Module, patterns: tuple[str, ...]) -> list[nn.Module]:
    """The output head and the modules whose name matches a pattern, which multiply in the carrier dtype."""
    names = list(weighted_modules(model))
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            near = nearest_name(pattern.strip("*."), names)
            hint = f"did you mean `{near}`?" if near else "patterns match whole dotted names"
            raise UsageError(f"pattern `{pattern}` matches no module with a weight", hint=hint)
    matching = [model.get_submodule(n) for n in names if any(fnmatch.fnmatchcase(n, p) for p in patterns)]
    return [*matching, *(head for head in heads(model) if head not in matching)]


def _replace_parameters(
    model: nn.Module,
    dtype: torch.dtype,
    numerics: Numerics,
    exact: Iterable[nn.Module],
    known_scales: Mapping[int, float],
) -> dict[str, float]:
    """Replace every floating-point parameter by its scaled form, keeping ties, and return the scales by name.

    Parameters whose id is in `known_scales` take that scale, others one from their values. All scales are computed
    first, so that a parameter without a valid scale leaves the model unchanged.
    """
    exact_ids = {id(p) for module in exact for p in module.parameters(recurse=False)}
    owned = list(_owned_parameters(model))
    scales = {id(p): known_scales.get(id(p)) or weight_scale(name, gather_whole(p.detach())) for name, _, _, p in owned}
    hats: dict[int, nn.Parameter] = {}
    for _, module, key, parameter in owned:
        if id(parameter) not in hats:
            data = (local(parameter.detach()) / scales[id(parameter)]).to(dtype)
            role = Role.EXACT if id(parameter) in exact_ids else Role.WEIGHT
            hat = scaled_tensor(data, scales[id(parameter)], role=role, numerics=numerics)
            placed = placed_like(parameter, hat)
            hats[id(parameter)] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
        module._parameters[key] = hats[id(parameter)]
        module.__class__ = _class_converting_once(type(module))  # type: ignore[arg-type]  # a class has a hash
    return {name: scales[id(p)] for name, _, _, p in owned}


@functools.cache
def _class_converting_once(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `base` that ignores conversions that change nothing, such as Switch Transformers' in each forward.

    Torch would replace scaled parameters by themselves, which fails while a graph holds them.
    """

    def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        own = (*self._parameters.values(), *self._buffers.values())
        with torch.no_grad():
            is_unchanged = all(x is None or fn(x) is x for x in own)
        if not is_unchanged:
            return base._apply(self, fn, recurse)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch
        for child in self.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    return type(base.__name__, (base,), {"_apply": _apply, "__module__": base.__module__, "__doc__": base.__doc__})


def _scale_constants(model: nn.Module, numerics: Numerics) -> None:
    """Scale buffers with a single moderate number, such as Gemma's embedding factor; -1e9 is a mask."""
    for module in model.modules():
        for key, x in module._buffers.items():
            if x is not None and x.dim() == 0 and x.is_floating_point() and 2.0**-20 < abs(x) < 2.0**20:
                module._buffers[key] = scaled_tensor(x.sign(), float(x.abs()), numerics=numerics)


def _owned_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield (name, module, key, parameter) for every floating-point parameter, once per place that holds it."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            if parameter.is_complex():
                raise UnsupportedError(
                    f"parameter `{name}` is complex", hint="scaled tensors support real numbers only"
                )
            if parameter.is_floating_point():
                yield name, module, name.rpartition(".")[2], parameter


def saved_bytes(model: nn.Module, batch: Mapping[str, Any]) -> int:
    """Return how many bytes a forward pass on `batch` saves for its backward pass, without the parameters.

    Counted by saved-tensor hooks, for scaled and plain models alike; a storage that several ops save counts once.
    """
    # Storages, not tensors: an op's saved output would keep the graph alive for ever.
    storages: dict[int, torch.UntypedStorage] = {}
    own = {data_part(p).untyped_storage()._cdata for p in model.parameters()}  # works for meta tensors too

    def keep(x: Tensor) -> Tensor:
        storage = data_part(x).untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage
        return x.detach()

    scaling = scaling_of(model)
    if scaling is None or scaling.saved is None:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            model(**batch)
    else:
        scaling.saved.note = keep
        try:
            model(**batch)
        finally:
            scaling.saved.note = None
    return sum(storage.nbytes() for storage in storages.values())
