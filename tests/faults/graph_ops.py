"""The ops of random graphs: how each is applied to tensors, and how its other arguments are drawn."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Settings = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Op:
    """A function of `arity` tensors and of settings, which `draw` chooses for given tensors.

    An exact op gives the same bits at any power-of-two scale; others are compared within a bound.
    """

    apply: Callable[..., Tensor]
    arity: int = 1
    draw: Callable[..., Settings] = lambda rng, *tensors: ()
    exact: bool = True


def tensor_of(dtype: str, shape: tuple[int, ...], seed: int, high: int = 2) -> Tensor:
    """A plain tensor, always the same for the same arguments; integers and booleans are below `high`."""
    generator = torch.Generator().manual_seed(seed)
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point or kind.is_complex:
        return torch.randn(shape, generator=generator, dtype=kind if kind.itemsize > 2 else None).to(kind)
    return torch.randint(0, high, shape, generator=generator).to(kind)


def _spread(rng: Random, x: Tensor, *_: Tensor) -> Settings:
    """Refuse rows of nearly equal numbers, which 16-bit norms in plain torch divide by a rounding error."""
    if x.shape[-1] < 2 or not float(x.double().std(-1, correction=0).min()) > 0.2:
        raise ValueError("no spread")
    return ()


def _dim(rng: Random, x: Tensor, *_: Tensor) -> Settings:
    return (rng.randrange(-x.dim(), x.dim()),)


def _dims(rng: Random, x: Tensor) -> tuple[int, ...]:
    return tuple(rng.sample(range(x.dim()), rng.randint(1, x.dim())))


def _number(rng: Random, *_: Tensor) -> float:
    return rng.choice([0.0, 1.0, -1.0, 2.0, 0.5, 3, -0.3, 1e-5, 1e-3, 0.1, 100.0, 7, True])


def _numbers(rng: Random, *_: Tensor) -> Settings:
    return (_number(rng),)


def _plain(rng: Random, x: Tensor, *_: Tensor) -> Settings:
    """Arguments of `tensor_of` for a tensor that can be combined with `x`."""
    shape = tuple(x.shape) if rng.random() < 0.5 else rng.choice([(), tuple(x.shape[-1:]), (1,) * x.dim()])
    dtype = rng.choice(["float32", "float32", "float64", "bfloat16", "float16", "int64", "int32", "bool", "uint8"])
    return (dtype, shape, rng.randrange(1000), 5 if "int" in dtype else 2)


def _index(rng: Random, x: Tensor, *_: Tensor) -> tuple[int, int]:
    dim = rng.randrange(x.dim())
    return dim, rng.randrange(-x.shape[dim], x.shape[dim])


def _slice(rng: Random, x: Tensor, *_: Tensor) -> Settings:
    dim = rng.randrange(x.dim())
    start = rng.randrange(x.shape[dim])
    return dim, start, rng.randint(start + 1, x.shape[dim]), rng.choice([1, 1, 2])


def _sliced(x: Tensor, dim: int, start: int, stop: int, step: int) -> Tensor:
    return x[(slice(None),) * dim + (slice(start, stop, step),)]


def _reductions(rng: Random, x: Tensor) -> Settings:
    return _dims(rng, x), rng.random() < 0.5


def _factors(x: Tensor) -> tuple[int, ...]:
    return tuple(d for d in (1, 2, 3, 4, 6) if x.numel() % d == 0)


def _shape(rng: Random, x: Tensor) -> Settings:
    first = rng.choice(_factors(x))
    return (rng.choice([(first, x.numel() // first), (-1,), (1, first, -1), (x.numel() // first, first, 1)]),)


def _permutation(rng: Random, x: Tensor) -> Settings:
    return (tuple(rng.sample(range(x.dim()), x.dim())),)


def _mask(rng: Random, x: Tensor, *_: Tensor) -> Settings:
    return (("bool", tuple(x.shape) if rng.random() < 0.6 else tuple(x.shape[-1:]), rng.randrange(1000)),)


def _masked(rng: Random, x: Tensor, *_: Tensor) -> Settings:
    return *_mask(rng, x), _number(rng)


def _rows(rng: Random, x: Tensor, *_: Tensor) -> Settings:
    """A dimension, and `tensor_of`'s arguments for indices into it."""
    dim = rng.randrange(x.dim())
    return dim, ("int64", (rng.randint(1, 4),), rng.randrange(1000), x.shape[dim])


def _gathered(rng: Random, x: Tensor, *_: Tensor) -> Settings:
    dim = rng.randrange(x.dim())
    return dim, ("int64", tuple(x.shape), rng.randrange(1000), x.shape[dim])


def _dtype(rng: Random, *_: Tensor) -> Settings:
    return (rng.choice(["float32", "bfloat16", "float16", "float64"]),)


def _classes(rng: Random, x: Tensor) -> Settings:
    return (("int64", tuple(x.shape[:1]), rng.randrange(1000), x.shape[1]),)


def _weighted(rng: Random, x: Tensor) -> Settings:
    return *_classes(rng, x), rng.choice([0.0, 0.1]), rng.choice(["mean", "sum"]), rng.random() < 0.5


def _wide(loss: Tensor) -> Tensor:
    """A loss in fp32, as a scaled loss of 16-bit tensors is (docs/limitations.md)."""
    return loss.float() if loss.dtype.itemsize == 2 else loss


def _entropy(x: Tensor, classes: Settings, smoothing: float, reduction: str, weighted: bool) -> Tensor:
    weight = tensor_of("float32", (x.shape[1],), 3).abs().to(x.dtype) if weighted else None
    return _wide(F.cross_entropy(x, tensor_of(*classes), weight, label_smoothing=smoothing, reduction=reduction))


def _heads(x: Tensor) -> Tensor:
    return x.reshape(1, 2, -1, x.shape[-1])


def _by_name(*functions: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    return {f.__name__: f for f in functions}


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "normalize": lambda x: F.normalize(x, dim=-1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms norm": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6),
    "layer norm in pieces": lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6),
}
ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    **_by_name(F.gelu, F.silu, F.hardswish, F.elu, F.mish, F.selu, F.softsign),
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "turned": lambda x: torch.view_as_real(
        torch.view_as_complex(x.reshape(-1, 2)) * torch.polar(torch.ones(()), torch.ones(()))
    ),
    "dot self": lambda x: x.flatten().dot(x.flatten()),
    "norm in pieces": lambda x: (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype),
    "logsumexp": lambda x: x.logsumexp(-1),
    "attention": lambda x: F.scaled_dot_product_attention(_heads(x), _heads(x), _heads(x), is_causal=True),
}
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **_by_name(torch.neg, torch.abs, torch.relu, torch.square, torch.sign, torch.tanh, torch.sigmoid, F.softplus),
    **_by_name(torch.exp, torch.expm1, torch.sin, torch.cos, torch.erf),
    "log1p of abs": lambda x: x.abs().log1p(),
    "sqrt of abs": lambda x: x.abs().sqrt(),
    "sqrt plus": lambda x: (x * x + 0.5).sqrt(),
    "rsqrt plus": lambda x: (x * x + 0.25).rsqrt(),
    "reciprocal": lambda x: (x.abs() + 0.5).reciprocal(),
    "log plus": lambda x: (x * x + 1).log(),
    **_by_name(torch.clone, torch.detach, torch.floor, torch.round, torch.frac),
    "logsigmoid": F.logsigmoid,
    **_by_name(F.hardtanh, F.relu6, torch.angle),
    "zeros like": torch.zeros_like,
    "ones like": torch.ones_like,
    "isnan": torch.isnan,
    "to list": lambda x: torch.tensor(x.tolist(), dtype=torch.float64),
    "item": lambda x: torch.tensor(x.sum().item(), dtype=torch.float64),
    "long": lambda x: x.long(),
    "sum all": torch.sum,
    "mean all": torch.mean,
    "max all": torch.max,
    "numel": lambda x: x * x.numel(),
    "contiguous": lambda x: x.contiguous(),
    "atan": torch.atan,
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(-1, 2)) * (1 + 2j)),
    "view": lambda x: x.view(x.shape),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": lambda x: x.squeeze(),
    "t": lambda x: x.mT,
    "flatten": lambda x: x.flatten(),
    "expand": lambda x: x.expand(2, *x.shape),
    "diagonal": lambda x: x.diagonal(),
    "real": lambda x: torch.view_as_complex(x.view(-1, 2)).real,
    "imag": lambda x: torch.view_as_complex(x.view(-1, 2)).imag,
    "softmax of logits": lambda x: x.softmax(-1),
}

ROUNDED_PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "smooth l1": F.smooth_l1_loss,
    "dot": lambda x, y: torch.dot(x.flatten(), y.flatten()),
    "mv": lambda x, y: torch.mv(x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "xlogy": lambda x, y: torch.xlogy(x, y.abs() + 0.1),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y * y + 1),
    "cosine": lambda x, y: F.cosine_similarity(x, y, dim=-1),
    "logaddexp": torch.logaddexp,
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **_by_name(torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum),
    "div": lambda x, y: x / (y * y + 0.5),
    "fmod": lambda x, y: x % 2 + y,
    "matmul": lambda x, y: x @ y,
    "matmul t": lambda x, y: x @ y.mT,
    "mse": lambda x, y: _wide(F.mse_loss(x, y)),
    "lt": lambda x, y: (x < y) * x,
    "l1": F.l1_loss,
    "outer": lambda x, y: torch.outer(x.flatten()[:3], y.flatten()[:3]),
    "linear": lambda x, y: F.linear(x, y, y[:, 0]),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "heaviside": lambda x, y: x * torch.heaviside(x.detach(), y.detach()),
    "copysign": lambda x, y: torch.copysign(x, y.detach()),
    "embedding": lambda x, y: F.embedding(tensor_of("int64", (3,), 1, x.shape[0]), x) + y,
    "masked by": lambda x, y: torch.where(x > y, x, y),
    "cdist": lambda x, y: torch.cdist(x, y, p=1.0),
    "addmm": lambda x, y: torch.addmm(x[0], x, y, beta=0.5, alpha=2),
    "add alpha": lambda x, y: torch.add(x, y, alpha=0.25),
    "baddbmm": lambda x, y: torch.baddbmm(x[:, :1], x, y),
}

IN_PLACE: dict[str, Callable[..., Tensor]] = {
    "add_": lambda x, y: x.add_(y),
    "mul_": lambda x, y: x.mul_(y),
    "copy_": lambda x, y: x.copy_(y),
    "sub_": lambda x, y: x.sub_(y, alpha=2),
    "div_": lambda x, y: x.div_(y.detach().abs() + 1),
    "addcmul_": lambda x, y: x.addcmul_(y, y),
    "lerp_": lambda x, y: x.lerp_(y, 0.5),
    "baddbmm_": lambda x, y: x.addmm_(x.detach().clone(), y.clone()),
}

OPS: dict[str, Op] = {
    **{name: Op(apply=f) for name, f in UNARY.items()},
    **{name: Op(apply=f, exact=False) for name, f in ROUNDED.items()},
    **{name: Op(apply=f, draw=_spread, exact=False) for name, f in NORMS.items()},
    **{name: Op(apply=f, arity=2) for name, f in BINARY.items()},
    **{name: Op(apply=f, arity=2, exact=False) for name, f in ROUNDED_PAIRS.items()},
    **{name: Op(apply=lambda x, y, f=f: f(x, y.clone()), arity=2) for name, f in IN_PLACE.items()},
    # numbers
    "add number": Op(apply=lambda x, c: x + c, draw=_numbers),
    "mul number": Op(apply=lambda x, c: x * c, draw=_numbers),
    "number minus": Op(apply=lambda x, c: c - x, draw=_numbers),
    "div number": Op(apply=lambda x, c: x / (c or 3), draw=_numbers),
    "number over": Op(apply=lambda x, c: c / (x * x + 1), draw=_numbers),
    "pow": Op(apply=lambda x, c: x**c, draw=lambda rng, x: (rng.choice([2, 3, 1, 0]),)),
    "clamp": Op(apply=lambda x, c: x.clamp(-abs(c), abs(c)), draw=_numbers),
    "clamp min": Op(apply=lambda x, c: x.clamp(min=c), draw=_numbers),
    "clip max": Op(apply=lambda x, c: x.clamp_max(c), draw=_numbers),
    "threshold": Op(apply=lambda x, c: F.threshold(x, 0.1, c), draw=_numbers),
    "ge": Op(apply=lambda x, c: x * (x >= c), draw=_numbers),
    "leaky relu": Op(apply=lambda x, c: F.leaky_relu(x, abs(c)), draw=_numbers),
    "full like": Op(apply=torch.full_like, draw=_numbers),
    "complex number": Op(apply=lambda x, c: (x * complex(c, 1)).abs(), draw=_numbers, exact=False),
    # plain tensors
    "add plain": Op(apply=lambda x, *p: x + tensor_of(*p), draw=_plain),
    "plain minus": Op(apply=lambda x, *p: tensor_of(*p) - x, draw=_plain),
    "mul plain": Op(apply=lambda x, *p: x * tensor_of(*p), draw=_plain),
    "over plain": Op(apply=lambda x, *p: x / (tensor_of(*p).abs() + 1), draw=_plain),
    "maximum plain": Op(apply=lambda x, *p: torch.maximum(x, tensor_of(*p)), draw=_plain),
    "where plain": Op(
        apply=lambda x, m, *p: torch.where(tensor_of(*m), x, tensor_of(*p)),
        draw=lambda rng, x: (*_mask(rng, x), *_plain(rng, x)),
    ),
    "plain where": Op(
        apply=lambda x, m, *p: torch.where(tensor_of(*m), tensor_of(*p), x),
        draw=lambda rng, x: (*_mask(rng, x), *_plain(rng, x)),
    ),
    "cat plain": Op(apply=lambda x, *p: torch.cat([x, tensor_of(p[0], tuple(x.shape), *p[2:])]), draw=_plain),
    "matmul plain": Op(
        apply=lambda x, s: x @ tensor_of("float32", (x.shape[-1], 3), s).to(x.dtype),
        draw=lambda rng, x: (rng.randrange(99),),
    ),
    "into plain": Op(apply=lambda x, *p: tensor_of(p[0], tuple(x.shape), p[2]).copy_(x), draw=_plain),
    # joins
    "where": Op(apply=lambda x, y, m: torch.where(tensor_of(*m), x, y), arity=2, draw=_mask),
    "where number": Op(apply=lambda x, m, c: torch.where(tensor_of(*m), x, c), draw=_masked),
    "cat": Op(apply=lambda x, y, d: torch.cat([x, y, x], d), arity=2, draw=_dim),
    "stack": Op(apply=lambda x, y, d: torch.stack([x, y], d), arity=2, draw=_dim),
    "cat last": Op(apply=lambda x, y: torch.cat((x, y), -1), arity=2),
    # shapes
    "view as": Op(apply=lambda x, s: x.view(s), draw=_shape),
    "reshape": Op(apply=lambda x, s: x.reshape(s), draw=_shape),
    "permute": Op(apply=lambda x, p: x.permute(p), draw=_permutation),
    "select": Op(apply=lambda x, d, i: x.select(d, i), draw=_index),
    "slice": Op(apply=_sliced, draw=_slice),
    "transpose": Op(apply=lambda x, a, b: x.transpose(a, b), draw=lambda rng, x: _dim(rng, x) + _dim(rng, x)),
    "chunk": Op(apply=lambda x, d: x.chunk(2, d)[-1], draw=_dim),
    "split": Op(apply=lambda x, d: x.split(2, d)[0], draw=_dim),
    "unbind": Op(apply=lambda x, d: x.unbind(d)[-1], draw=_dim),
    "unfold": Op(apply=lambda x, d: x.unfold(d, 2, 2), draw=_dim),
    "flip": Op(apply=lambda x, d: x.flip(d), draw=_dim),
    "roll": Op(apply=lambda x, d: x.roll(1, d), draw=_dim),
    "repeat": Op(apply=lambda x, n: x.repeat(n, *(1,) * (x.dim() - 1)), draw=lambda rng, x: (rng.randint(1, 2),)),
    "pad": Op(apply=lambda x, c: F.pad(x, (1, 2), value=c), draw=_numbers),
    "tril": Op(apply=lambda x, k: x.tril(k), draw=lambda rng, x: (rng.randint(-1, 1),)),
    "movedim": Op(apply=lambda x, d: x.movedim(d, 0), draw=_dim),
    "as strided": Op(apply=lambda x: x.view(-1).narrow(0, 0, 4).as_strided((2, 2), (2, 1))),
    "interleave": Op(apply=lambda x, d: x.repeat_interleave(2, d), draw=_dim),
    "meshed": Op(apply=lambda x: x.unflatten(-1, (2, -1))),
    # indexing
    "index": Op(apply=lambda x, d, i: x[(slice(None),) * d + (tensor_of(*i),)], draw=_rows),
    "index select": Op(apply=lambda x, d, i: x.index_select(d, tensor_of(*i)), draw=_rows),
    "gather": Op(apply=lambda x, d, i: x.gather(d, tensor_of(*i)), draw=_gathered),
    "take along": Op(apply=lambda x, d, i: x.take_along_dim(tensor_of(*i), d), draw=_gathered),
    "masked select": Op(apply=lambda x, m: x[tensor_of(*m)], draw=_mask),
    "masked fill": Op(apply=lambda x, m, c: x.masked_fill(tensor_of(*m), c), draw=_masked),
    "index put": Op(
        apply=lambda x, y, d, i: x.index_copy(d, tensor_of(*i), y.index_select(d, tensor_of(*i))), arity=2, draw=_rows
    ),
    "index add": Op(
        apply=lambda x, y, d, i: x.index_add(d, tensor_of(*i), y.index_select(d, tensor_of(*i)), alpha=2),
        arity=2,
        draw=_rows,
    ),
    "scatter": Op(apply=lambda x, y, d, i: x.scatter(d, tensor_of(*i), y.detach()), arity=2, draw=_gathered),
    "scatter add": Op(apply=lambda x, y, d, i: x.scatter_add(d, tensor_of(*i), y), arity=2, draw=_gathered),
    "scatter number": Op(
        apply=lambda x, d, i, c: x.scatter(d, tensor_of(*i), c), draw=lambda rng, x: (*_gathered(rng, x), _number(rng))
    ),
    "scatter reduce": Op(
        apply=lambda x, y, d, i: x.scatter_reduce(d, tensor_of(*i), y, "amax"), arity=2, draw=_gathered
    ),
    "accumulate": Op(
        apply=lambda x, y, d, i: x.index_put((tensor_of("int64", i[1], i[2], x.shape[0]),), y[0], accumulate=True),
        arity=2,
        draw=_rows,
    ),
    "slice scatter": Op(
        apply=lambda x, y, d, i: x.slice_scatter(y.narrow(d, 0, 1), d, i % x.shape[d], i % x.shape[d] + 1),
        arity=2,
        draw=_index,
    ),
    "select scatter": Op(apply=lambda x, y, d, i: x.select_scatter(y.select(d, 0), d, i), arity=2, draw=_index),
    "masked scatter": Op(apply=lambda x, y, m: x.masked_scatter(tensor_of(*m), y), arity=2, draw=_mask),
    # writes
    "set item": Op(apply=lambda x, y, d, i: (x.select(d, i).copy_(y.select(d, 0).clone()), x)[1], arity=2, draw=_index),
    "set number": Op(
        apply=lambda x, d, i, c: (x.select(d, i).fill_(c), x)[1], draw=lambda rng, x: (*_index(rng, x), _number(rng))
    ),
    "set mask": Op(apply=lambda x, m, c: (x.__setitem__(tensor_of(*m), c), x)[1], draw=_masked),
    "mul number_": Op(apply=lambda x, c: x.mul_(c), draw=_numbers),
    "set plain": Op(apply=lambda x, *p: x.copy_(tensor_of(*p)), draw=_plain),
    "add plain_": Op(apply=lambda x, *p: x.add_(tensor_of(*p)), draw=_plain),
    "add number_": Op(apply=lambda x, c: x.add_(c), draw=_numbers),
    "fill_": Op(apply=lambda x, c: x.fill_(c), draw=_numbers),
    "zero_": Op(apply=lambda x: x.zero_()),
    "relu_": Op(apply=lambda x: x.relu_()),
    "clamp_": Op(apply=lambda x, c: x.clamp_(max=abs(c)), draw=_numbers),
    "masked fill_": Op(apply=lambda x, m, c: x.masked_fill_(tensor_of(*m), c), draw=_masked),
    "slice mul_": Op(apply=lambda x, *s: (_sliced(x, *s).mul_(3), x)[1], draw=_slice),
    "unsqueeze_": Op(apply=lambda x: x.unsqueeze_(0)),
    "t_": Op(apply=lambda x: x.t_(), exact=False),
    "index put_": Op(
        apply=lambda x, y, d, i: x.index_put_((tensor_of("int64", i[1], i[2], x.shape[0]),), y[0].clone()),
        arity=2,
        draw=_rows,
    ),
    "index fill_": Op(
        apply=lambda x, d, i, c: x.index_fill_(d, tensor_of(*i), c), draw=lambda rng, x: (*_rows(rng, x), _number(rng))
    ),
    "imag mul_": Op(apply=lambda x: (torch.view_as_complex(x.view(-1, 2)).imag.mul_(2), x)[1]),
    "real copy_": Op(apply=lambda x: (torch.view_as_complex(x.view(-1, 2)).real.fill_(1.5), x)[1]),
    "scatter_": Op(apply=lambda x, y, d, i: x.scatter_add_(d, tensor_of(*i), y.clone()), arity=2, draw=_gathered),
    "diagonal_": Op(apply=lambda x: (x.diagonal().fill_(0.5), x)[1]),
    "sigmoid_": Op(apply=lambda x: x.sigmoid_()),
    "neg_": Op(apply=lambda x: x.neg_()),
    "set slice": Op(apply=lambda x, y, *s: (_sliced(x, *s).copy_(_sliced(y, *s).clone()), x)[1], arity=2, draw=_slice),
    # reductions
    **{
        name: Op(
            apply=lambda x, d, k, f=f: f(x, d, keepdim=k),
            draw=_reductions,
            exact=name not in ("var", "std", "logsumexp_dims", "norm"),
        )
        for name, f in {
            "sum": torch.sum,
            "mean": torch.mean,
            "amax": torch.amax,
            "var": torch.var,
            "std": torch.std,
            "logsumexp_dims": torch.logsumexp,
            "amin": torch.amin,
            "norm": lambda x, d, keepdim: torch.linalg.vector_norm(x, 2, d, keepdim=keepdim),
        }.items()
    },
    **{
        name: Op(apply=lambda x, d, f=f: f(x, d), draw=_dim)
        for name, f in {
            "max": lambda x, d: x.max(d).values,
            "min": lambda x, d: x.min(d)[0],
            "sort": lambda x, d: x.sort(d).values,
            "argmax": lambda x, d: x.argmax(d),
            "cumsum": torch.cumsum,
            "cummax": lambda x, d: x.cummax(d).values,
            "topk": lambda x, d: x.topk(2, d).values,
            "median": lambda x, d: x.median(d).values,
            "softmax": torch.softmax,
            "any": lambda x, d: x.any(d),
            "argsort": lambda x, d: x.argsort(d),
            "diff": lambda x, d: x.diff(dim=d),
            "cumprod": torch.cumprod,
            "kthvalue": lambda x, d: x.kthvalue(1, d).values,
            "count": lambda x, d: x.count_nonzero(d),
            "glu": F.glu,
            "softmin": F.softmin,
        }.items()
    },
    "prod": Op(apply=lambda x, d: x.prod(d), draw=_dim, exact=False),
    "sum wide": Op(
        apply=lambda x, d, t: x.sum(d, dtype=getattr(torch, t)),
        draw=lambda rng, x: (*_dim(rng, x), rng.choice(["float32", "float64"])),
    ),
    "softmax wide": Op(apply=lambda x, d: x.softmax(d, dtype=torch.float32).to(x.dtype), draw=_dim),
    "log softmax": Op(apply=lambda x, d: x.float().log_softmax(d), draw=_dim),
    # dtypes
    "to": Op(apply=lambda x, t: x.to(getattr(torch, t)), draw=_dtype),
    "type as": Op(apply=lambda x, y: x.type_as(y), arity=2),
    # norms, losses, convolutions
    "layer norm, affine": Op(
        apply=lambda x, y: F.layer_norm(x, x.shape[-1:], y.flatten()[: x.shape[-1]].to(x.dtype), None),
        draw=_spread,
        arity=2,
        exact=False,
    ),
    "group norm": Op(apply=lambda x: F.group_norm(x.reshape(2, 2, -1), 2), draw=_spread, exact=False),
    "batch norm": Op(
        apply=lambda x: F.batch_norm(x.reshape(-1, 2), None, None, training=True), draw=_spread, exact=False
    ),
    "cross entropy": Op(apply=_entropy, draw=_weighted),
    "bce": Op(apply=lambda x: F.binary_cross_entropy_with_logits(x.float(), (x.detach() > 0).float()), exact=False),
    "conv1d": Op(apply=lambda x, y: F.conv1d(x.reshape(1, 2, -1), y.flatten()[:8].reshape(2, 2, 2)), arity=2),
    "pool": Op(apply=lambda x: F.max_pool2d(x.reshape(1, 1, -1, x.shape[-1]), 2)),
    "avg pool": Op(apply=lambda x: F.avg_pool2d(x.reshape(1, 1, -1, x.shape[-1]), 2)),
    "interpolate": Op(apply=lambda x: F.interpolate(x.reshape(1, 2, -1), scale_factor=2)),
    "kl": Op(
        apply=lambda x, y: F.kl_div(x.float().log_softmax(-1), y.float().softmax(-1), reduction="batchmean"),
        arity=2,
        exact=False,
    ),
    "nan to num": Op(apply=lambda x: x.nan_to_num(0.0)),
    "empty": Op(apply=lambda x: x[:0]),
    "new zeros": Op(apply=lambda x: x.new_zeros(2, 3)),
    "new tensor": Op(apply=lambda x: x.new_ones(x.shape)),
    "scalar power": Op(apply=lambda x, c: (abs(c) + 0.5) ** x, draw=_numbers, exact=False),
}
