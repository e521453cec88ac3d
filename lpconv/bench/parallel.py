"""Run every step in several processes together, with torch's DistributedDataParallel or FSDP2."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lpconv.bench.cases import SCALED, Case
from lpconv.bench.models import step_loss
from lpconv.errors import UnsupportedError
from lpconv.models.opening import Blueprint


def check_parallel(case: Case) -> None:
    """Raise UnsupportedError if the case's gradients cannot be averaged over processes."""
    if case.processes == 1 or case.mode != "train" or case.method not in SCALED:
        return
    if case.parallel != "fsdp2":
        raise UnsupportedError(
            "DistributedDataParallel cannot average the gradients of scaled tensors",
            hint="pass --parallel fsdp2, which can",
        )
    if case.format == "fp16":
        raise UnsupportedError(
            "FSDP keeps gradients in the parameter's dtype, and fp16 cannot hold them without a scale",
            hint=f"measure {case.method} in fp8, or in fp16 with one process",
        )
    if case.compiled != "off":
        raise UnsupportedError(
            "scaled tensors under --parallel fsdp2 have not been tested with torch.compile", hint="pass --compile off"
        )


def join(case: Case, rank: int, meeting: str) -> None:
    """Join the process group of the case through the file `meeting`. Does nothing for a single process."""
    if case.processes == 1:
        return
    # gloo for values that the processes agree on, even if NCCL transfers the gradients.
    backend = "gloo" if case.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=case.processes)


def max_over_processes(number: int) -> int:
    """The maximum of `number` over all processes. Waits for all of them."""
    if not dist.is_initialized():
        return number
    largest = torch.tensor(number)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def wrap_parallel(model: nn.Module, case: Case, batch: dict[str, Tensor]) -> nn.Module:
    """`model` wrapped to train in step with the other processes.

    Unchanged for a single process, and for inference, where copies need no communication.
    """
    if case.processes == 1 or case.mode == "infer":
        return model
    if case.parallel == "fsdp2":
        return _shard_model(model, case)
    _freeze_unused(model, batch)
    # Buffers are scales, constant or from the process's own history; DDP would broadcast the first one's every time.
    return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)


def rows_of(case: Case, known: Blueprint) -> DeviceMesh | None:
    """The device mesh if each process loads only its rows of the model; None if each needs the whole model first.

    Each process needs the whole model except with FSDP2, and also there if weights are random, or if layers are
    replaced and calibrated before sharding.
    """
    is_cast = case.format != "fp8" or case.method in SCALED
    return _mesh(case) if case.parallel == "fsdp2" and known.checkpoint is not None and is_cast else None


def _mesh(case: Case) -> DeviceMesh:
    return init_device_mesh(torch.device(case.device).type, (case.processes,))


def _shard_model(model: nn.Module, case: Case) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy  # takes a second to import

    from lpconv.models.sharing import shard_parameters

    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if case.method in SCALED else None)
    shard_parameters(model, _mesh(case), policy)
    return model


def _freeze_unused(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Freeze parameters that get no gradient, such as a pooler's: DDP waits for the gradient of each parameter."""
    step_loss(model, batch).backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.grad is not None)
    model.zero_grad(set_to_none=True)
