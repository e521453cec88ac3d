"""All code paths that lpconv compiles for a GPU; each runs once, on fake tensors, to capture its graphs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.cross_compile.fake_gpu import fake_gpu, like, linear, moved, on_gpu
from benchmarks.cross_compile.inductor import Graph, captured
from lpconv.formats.spec import get_format
from lpconv.kernels import quantise
from lpconv.kernels.linear import FP8_RECIPES
from lpconv.kernels.operands import OperandCast, encode_operand
from lpconv.mcf.expansion import EXACT_OPTIONS
from lpconv.mcf.pairs import nearest_by_bits, nearest_by_cast
from lpconv.optim.kernel import _CHECKED, STEPS, _check_inputs, _compile, _in_rows
from lpconv.optim.storage import VARIANTS
from lpconv.scaled import scaled

_ROWS, _COLUMNS = 1024, 4096  # of matrices
_HIDDEN, _TOKENS = 512, 256  # of models


@dataclass(frozen=True, kw_only=True)
class Path:
    """A code path by name; `elements` divides its byte counts, None for layers and models."""

    name: str
    run: Callable[[], None]
    elements: int | None = None

    def graphs(self) -> list[Graph]:
        """Run the path and return the graphs that it compiles."""
        with captured() as graphs:
            self.run()
        return graphs


def paths() -> Iterator[Path]:
    """All paths, by kind: optimizer steps, casts, layers, models."""
    num_stepped = _CHECKED["cuda"]
    for name in STEPS:
        for variant in [v.name for v in VARIANTS.values() if (v.rule or "adamw") == name] or ["plus"]:
            yield Path(name=f"step {name} {variant}", run=partial(_step, name, variant), elements=num_stepped)
    options: dict[str, dict[str, Any]] = {"by bits": {"by_bits": True}, "without options": {"options": {}}}
    for how, changed in options.items():
        run = partial(_step, "adamw", "plus", **changed)
        yield Path(name=f"step adamw plus {how}", run=run, elements=num_stepped)
    for kernel in (quantise._NEAREST, quantise._WIDE, quantise._STOCHASTIC):
        name = kernel.function.__name__.strip("_")
        yield Path(name=f"round {name} bf16", run=partial(_round, kernel), elements=131_200)
    for scale in ("static", "l2", "max", "tensor", "row", "mx"):
        for axis in (-1, -2) if scale == "row" else (-1,):
            along = {"row": " along columns" if axis == -2 else " along rows"}.get(scale, "")
            yield Path(name=f"cast {scale}{along}", run=partial(_cast, scale, axis), elements=_ROWS * _COLUMNS)
    for name in ("e4m3fn", "e5m2"):
        yield Path(name=f"decode {name}", run=partial(_decode, name), elements=_ROWS * _COLUMNS)
    for recipe in FP8_RECIPES:
        yield Path(name=f"linear {recipe}", run=partial(_linear, recipe))
    yield Path(name="linear bf16, uncast", run=partial(_linear, None))
    for kind in ("llama", "bert"):
        for method, compute in (("plain", "bf16"), ("unit", "fp8"), ("scalify", "fp8")):
            yield Path(name=f"{kind} step {method} {compute}", run=partial(_model, kind, method))
    yield Path(name="llama step unit fp8, static", run=partial(_model, "llama", "unit", operand_scale="static"))


def _step(name: str, variant: str, *, by_bits: bool = False, options: dict[str, Any] = EXACT_OPTIONS) -> None:
    storages = (VARIANTS[variant].weight, *VARIANTS[variant].moments)
    storages = storages[: 1 + (1 if name in ("sgd", "lion") else 2)]
    kind = STEPS[name]
    step = kind.build(storages, nearest_by_bits if by_bits else nearest_by_cast)
    with patch.dict(_CHECKED, cpu=_CHECKED["cuda"]):
        parts, gradient, coefficients, random = _check_inputs(kind, storages, torch.device("cpu"))
    parts, gradient = tuple(tuple(map(_in_rows, p)) for p in parts), _in_rows(gradient)
    random = None if random is None else _in_rows(random)
    with fake_gpu():
        arguments = tuple(tuple(map(like, p)) for p in parts), like(gradient), tuple(map(like, coefficients))
        _compile(step, None if by_bits else options)(*arguments, None if random is None else like(random))


def _round(kernel: Any) -> None:
    examples = kernel.examples(torch.bfloat16, torch.device("cpu"))
    with fake_gpu(), torch.no_grad():
        torch.compile(kernel.function, dynamic=True, fullgraph=True)(*map(like, examples))


def _cast(scale: str, axis: int) -> None:
    cast = OperandCast(scale=scale)

    def function(x: Tensor, state: Tensor | None) -> tuple[Tensor, float | Tensor]:
        return tuple(encode_operand(x, cast, axis=axis, state=state))  # type: ignore[return-value]

    with fake_gpu(), torch.no_grad():
        state = on_gpu(dtype=torch.float32) if scale == "static" else None
        torch.compile(function, fullgraph=True)(on_gpu(_ROWS, _COLUMNS), state)


def _decode(name: str) -> None:
    from lpconv.kernels.decode import decode

    with fake_gpu(), torch.no_grad():
        codes = on_gpu(_ROWS, _COLUMNS, dtype=getattr(torch, get_format(name).torch or ""))
        torch.compile(lambda c, s: decode(c) * s, fullgraph=True)(codes, on_gpu(_ROWS, 1))


def _linear(recipe: str | None) -> None:
    with fake_gpu():
        layer, x = linear(recipe, _COLUMNS, 2 * _COLUMNS), on_gpu(_TOKENS, 2 * _COLUMNS).requires_grad_()
        torch.compile(layer, fullgraph=True)(x).float().square().sum().backward()


def _model(kind: str, method: str, **scales: str) -> None:
    model: Any = _llama() if kind == "llama" else _bert()
    if method == "plain":
        model.to(torch.bfloat16)
    else:
        model = scaled(model, method=method, compute="fp8", strict=True, **scales)  # type: ignore[arg-type]  # of options
    with fake_gpu():
        model = moved(model)
        ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="cuda")
        torch.compile(lambda: model(input_ids=ids, labels=ids).loss)().backward()


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        hidden_size=_HIDDEN, intermediate_size=3 * _HIDDEN, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=1024, use_cache=False,
    ))  # fmt: skip


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(
        hidden_size=_HIDDEN, intermediate_size=4 * _HIDDEN, num_hidden_layers=1, num_attention_heads=8,
        vocab_size=1024, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ))  # fmt: skip
