"""What the ranks of `test_fsdp_scaled` do: train a small model, sharded, beside a whole one."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from lpconv.errors import LpconvError
from lpconv.optim import LowPrecisionAdamW, fp32_state_dict, start_from_fp32
from lpconv.scaled import AdamW, StepGuard, from_disk, scaled, to_disk, unscaled_state_dict
from lpconv.shards import local
from lpconv.train.prepare import ScaledLowPrecisionAdamW

STEPS = 2
Values = dict[str, Tensor]
_CARRIERS = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def plain(*, tied: bool = False, frozen: str = "?") -> nn.Module:
    """Numbers of rows that four ranks cannot share evenly: 61 of the table, and 9, of which the last rank has none."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=9, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, pad_token_id=0, tie_word_embeddings=tied,
    )  # fmt: skip
    model: nn.Module = hf.LlamaForCausalLM(config)
    for name, p in model.named_parameters():
        p.requires_grad_(frozen not in name)
    return model


def batch(seed: int = 0) -> Values:
    ids = torch.randint(1, 61, (2, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def sharded(model: Any, dtype: torch.dtype | None, reduce_dtype: torch.dtype | None = torch.float32) -> nn.Module:
    """`model` by FSDP2, a group for each layer, gathered in `dtype`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model  # type: ignore[no-any-return]


class Run:
    """A model and how it is trained: whole or sharded, and scaled where `how` names options of `lpconv.scaled`."""

    def __init__(self, how: dict[str, Any], variant: str | None, *, is_sharded: bool, **kind: Any) -> None:
        source = plain(**kind)
        start = {n: p.detach().clone() for n, p in source.named_parameters()}
        keeps_fp32 = is_sharded and variant is None  # where one process keeps an fp32 copy in the optimizer
        if not how:
            self.model = source.bfloat16()
        else:
            self.model = scaled(source, **how, **({"carrier": torch.float32} if keeps_fp32 else {}))
        if is_sharded:
            sharded(self.model, _CARRIERS[how["compute"]] if keeps_fp32 else None)
        self.optimizer, self.values = self._optimizer(how, variant, start)

    def _optimizer(
        self, how: dict[str, Any], variant: str | None, start: Values
    ) -> tuple[torch.optim.Optimizer, Callable[[], Values]]:
        model = self.model
        if variant is None:
            narrow = how["compute"] != "fp32"
            state = {"state_dtype": torch.float16} if how["method"] == "scalify" else {}
            kept = {p: start[n] for n, p in model.named_parameters()} if narrow else {}
            adamw = AdamW(model.parameters(), lr=1e-2, start=kept, **state)
            return adamw, lambda: {n: self._kept(adamw, n, p) for n, p in model.named_parameters()}
        settings: dict[str, Any] = {"lr": 1e-2, "variant": variant, "compiled": False}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="variant")
            if how:
                scaled_adamw = ScaledLowPrecisionAdamW(model, start, weight_decay=0.01, **settings)
                return scaled_adamw, lambda: {n: whole(x) for n, x in scaled_adamw.values().items()}
            optimizer = LowPrecisionAdamW(model.parameters(), **settings)
        start_from_fp32(optimizer, model, start)
        return optimizer, lambda: fp32_state_dict(optimizer, model)

    def _kept(self, optimizer: AdamW, name: str, p: Any) -> Tensor:
        if "master" in optimizer.state[p]:
            return optimizer.state[p]["master"] * p.scale  # type: ignore[no-any-return]
        return whole(unscaled_state_dict(self.model)[name])

    def step(self, *batches: Values) -> Tensor:
        """Gradients of each batch, and one step; the loss of the last."""
        self.optimizer.zero_grad()
        for x in batches:
            loss: Tensor = self.model(**x).loss
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()

    def gradients(self) -> Values:
        """In fp32, by name."""
        return {n: _value(p.grad) for n, p in self.model.named_parameters() if p.grad is not None}


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[no-any-return]


def _value(grad: Any) -> Tensor:
    return grad.dequantize() if hasattr(grad, "dequantize") and hasattr(grad, "scale") else whole(grad).float()


def differing(found: Values, expected: Values) -> list[str]:
    """Names whose values are not the same bits; all names must be there."""
    return [n for n in expected.keys() | found.keys() if not torch.equal(found[n], expected[n])]


def beside_one(cases: dict[str, tuple[dict[str, Any], str | None, dict[str, Any]]]) -> dict[str, list[str]]:
    """What differs between the sharded run of a case and a whole one, with the same batch on all ranks."""
    return {name: _unlike_one(how, variant, kind) for name, (how, variant, kind) in cases.items()}


def _unlike_one(how: dict[str, Any], variant: str | None, kind: dict[str, Any]) -> list[str]:
    many = Run(how, variant, is_sharded=True, **kind)
    trace = [(many.step(batch(i)), many.gradients()) for i in range(STEPS)]
    values = many.values()
    if dist.get_rank() > 0:
        return []
    one = Run(how, variant, is_sharded=False, **kind)
    wrong = []
    for i, (loss, gradients) in enumerate(trace):
        wrong += [] if torch.equal(one.step(batch(i)), loss) else [f"loss {i}"]
        wrong += [f"gradient {n}" for n in differing(gradients, one.gradients())]
    return wrong + [f"weight {n}" for n in differing(values, one.values())]


def averages(how: dict[str, Any]) -> tuple[Values, Values]:
    """Gradients of another batch on each rank, and the mean of those that one process finds for each batch."""
    world = dist.get_world_size()
    many = Run(how, None, is_sharded=True)
    many.step(batch(dist.get_rank()))
    each = []
    for seed in range(world):
        one = Run(how, None, is_sharded=False)
        one.step(batch(seed))
        each.append(one.gradients())
    return many.gradients(), {n: sum(g[n] for g in each) / world for n in each[0]}  # type: ignore[misc]  # not empty


class _Wire(TorchDispatchMode):
    """Counts what a rank gives to collectives, by op."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "c10d" and op._opname in ("_allgather_base_", "_reduce_scatter_base_"):
            self.bytes[op._opname] = self.bytes.get(op._opname, 0) + args[1].nbytes
        return op(*args, **(kwargs or {}))


def on_the_wire(operand_scale: str) -> dict[str, int]:
    """Bytes that this rank sends in a step, each to all others."""
    run = Run({"method": "unit", "compute": "fp8", "operand_scale": operand_scale}, None, is_sharded=True)
    with _Wire() as wire:
        run.step(batch())
    return wire.bytes


def save_after(steps: int, how: dict[str, Any]) -> None:
    """Train, and write a distributed checkpoint."""
    run = Run(how, None, is_sharded=True)
    for i in range(steps):
        run.step(batch(i))
    state = {"model": unscaled_state_dict(run.model), "optim": get_optimizer_state_dict(run.model, run.optimizer)}
    save(state, checkpoint_id="checkpoint", no_dist=False)


def go_on(steps: range, how: dict[str, Any]) -> list[str]:
    """Train on from the checkpoint; what differs from one process that was never interrupted."""
    run = Run(how, None, is_sharded=True)
    state = {"model": unscaled_state_dict(run.model), "optim": get_optimizer_state_dict(run.model, run.optimizer)}
    load(state, checkpoint_id="checkpoint")
    from_disk(run.model, state["model"])
    set_optimizer_state_dict(run.model, run.optimizer, state["optim"])
    one = Run(how, None, is_sharded=False)
    for i in range(steps.stop):
        one.step(batch(i))
    for i in steps:
        run.step(batch(i))
    return differing(run.values(), one.values())


@contextmanager
def _noting(found: dict[str, str], what: str) -> Iterator[None]:
    try:
        yield
    except LpconvError as e:
        found[what] = f"{e} {e.hint}"


def refusals() -> dict[str, str]:
    """What is said of combinations that would lose gradients or scales in silence."""
    found: dict[str, str] = {}
    with _noting(found, "kept in fp16"):
        sharded(scaled(plain(), compute="fp16"), None)(**batch())
    with _noting(found, "summed in fp16"):
        model = sharded(scaled(plain(), compute="fp16", carrier=torch.float32), torch.float16, torch.float16)
        model(**batch()).loss.backward()
    with _noting(found, "every"):
        sharded(scaled(plain(), method="scalify", rescale=("every:1",)), None)(**batch())
    return found


def guarded() -> tuple[bool, set[float], bool]:
    """A step whose gradient is NaN on the last rank: whether it was taken, the headroom of the next, whether weights
    stayed.
    """
    run = Run({"method": "unit", "compute": "fp8"}, None, is_sharded=True)
    guard = StepGuard(run.model)
    run.model(**batch()).loss.backward()
    before = copy.deepcopy(to_disk(run.model))
    if dist.get_rank() == dist.get_world_size() - 1:
        run.model.model.norm.weight.grad.to_local().fill_(torch.nan)
    taken = guard.step(run.optimizer)
    run.model(**batch())
    headroom = {local(p).numerics.headroom for p in run.model.parameters()}  # type: ignore[attr-defined]  # all scaled
    return taken, headroom, not differing(to_disk(run.model), before)


def four_ranks(cases: Any, how: dict[str, Any]) -> dict[str, list[str]]:
    """All cases beside one process; and a checkpoint."""
    save_after(1, how)
    return beside_one(cases)


def two_ranks(cases: Any, averaged: dict[str, dict[str, Any]], resumed: dict[str, Any]) -> dict[str, Any]:
    """The other tests, by name."""
    return {
        "beside one": beside_one(cases),
        "averages": {name: averages(how) for name, how in averaged.items()},
        "wire": {kind: on_the_wire(kind) for kind in ("static", "tensor")},
        "resumed": go_on(range(1, 2), resumed),
        "refusals": refusals(),
        "guarded": guarded(),
    }


def run_program(text: str) -> None:
    """What a page shows."""
    exec(compile(text, "program", "exec"), {})
