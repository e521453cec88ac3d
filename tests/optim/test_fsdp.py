"""Two ranks with FSDP2: elementwise state does not depend on the mesh, and checkpoints move between world sizes."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from lpconv.optim import LowPrecisionAdamW, fp32_state_dict, start_from_fp32

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
STEPS = 20
# What each keeps of a bias of the model.
STATE = {
    "plus": {"residual", "exp_avg", "exp_avg_sq", "exp_avg_sq_residual"},
    "light-int8": {"residual", "exp_avg", "exp_avg_sq"},
    "int8-moment": {"residual", "exp_avg_ratio", "exp_avg_sq"},
    "eco": {"exp_avg", "exp_avg_sq"},
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 300), nn.ReLU(), nn.Linear(300, 7)).bfloat16()


def fp32_values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(t.shape, generator=generator) * 0.1 for n, t in model().state_dict().items()}


def train(net: nn.Module, optimizer: LowPrecisionAdamW, steps: range) -> None:
    """Gradients are set, not computed: reducing them over ranks may round, and that is not the optimizer's doing."""
    for step in steps:
        for i, p in enumerate(net.parameters()):
            full = torch.randn(p.shape, generator=torch.Generator().manual_seed(step * 100 + i)).bfloat16()
            p.grad = like(full, p)
        optimizer.step()


def like(full: Tensor, p: Tensor) -> Tensor:
    """The part of `full` that this rank has of `p`."""
    if not isinstance(p, DTensor):
        return full
    return distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)


def make(net: nn.Module, variant: str) -> LowPrecisionAdamW:
    return LowPrecisionAdamW(net.parameters(), lr=1e-3, variant=variant, compiled=False, nonfinite_gradients="skip")


def two_ranks(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.set_num_threads(1)
    for variant in STATE:
        sharded(rank, folder, variant)
        replicated(rank, variant)
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort an ordinary exit ("terminate called without an active exception")


def sharded(rank: int, folder: str, variant: str) -> None:
    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    optimizer = make(net, variant)
    start_from_fp32(optimizer, net, fp32_values())
    train(net, optimizer, range(STEPS))

    bias = next(p for n, p in net.named_parameters() if n == "0.bias")
    bias.grad = torch.full_like(bias, float("nan") if rank == 0 else 1.0)
    optimizer.step()
    assert optimizer.num_skipped == 1, "a NaN on one rank skips the step on all"

    state = {name: t.full_tensor() for name, t in optimizer.state[bias].items() if isinstance(t, DTensor)}
    full = fp32_state_dict(optimizer, net)
    if rank == 0:
        torch.save({"fp32": full, "bias": state}, f"{folder}/{variant}.pt")
    weights, optim = get_state_dict(net, optimizer)
    save({"model": weights, "optim": optim}, checkpoint_id=f"{folder}/{variant}")


def replicated(rank: int, variant: str) -> None:
    """Ranks with batches of their own must keep the same weights, to the bit."""
    net = DistributedDataParallel(model())
    optimizer = make(net, variant)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        torch.autograd.backward(net(torch.randn(4, 13, generator=generator).bfloat16()).float().square().mean())
        optimizer.step()
    for p in net.parameters():
        of_rank_0 = p.detach().clone()
        dist.broadcast(of_rank_0, 0)
        assert torch.equal(p, of_rank_0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    spawn(two_ranks, args=(str(folder),), nprocs=2)  # type: ignore[no-untyped-call]  # untyped in torch
    return folder


def alone(steps: int, variant: str) -> tuple[nn.Module, LowPrecisionAdamW]:
    net = model()
    optimizer = make(net, variant)
    start_from_fp32(optimizer, net, fp32_values())
    train(net, optimizer, range(steps))
    return net, optimizer


@pytest.mark.parametrize("variant", STATE)
def test_two_ranks_equal_one_process_bit_for_bit(variant: str, trained: Path) -> None:
    actual = torch.load(trained / f"{variant}.pt")
    net, optimizer = alone(STEPS, variant)
    for name, value in fp32_state_dict(optimizer, net).items():
        assert torch.equal(actual["fp32"][name], value), name
    bias = dict(net.named_parameters())["0.bias"]
    assert set(actual["bias"]) == STATE[variant]
    for name, value in actual["bias"].items():
        assert torch.equal(value, optimizer.state[bias][name]), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # what is meant here
@pytest.mark.parametrize("variant", STATE)
def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(variant: str, trained: Path) -> None:
    net = model()
    optimizer = make(net, variant)
    weights, optim = get_state_dict(net, optimizer)  # also makes the state to load into
    load({"model": weights, "optim": optim}, checkpoint_id=str(trained / variant))
    set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=optim)
    train(net, optimizer, range(STEPS, STEPS + 5))

    unbroken, reference = alone(STEPS + 5, variant)
    for name, value in fp32_state_dict(reference, unbroken).items():
        assert torch.equal(fp32_state_dict(optimizer, net)[name], value), name
