"""The model of a case (fp32, random or real weights), a batch for it, and an estimate of its memory."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lpconv.bench.options import CODES, LAYER_KEYS, SCALED, Case, check_layers
from lpconv.bench.roofline import Gemm
from lpconv.data.texts import check_seq_len
from lpconv.errors import ResourceError, UnsupportedError
from lpconv.layers import blocks_of, head, linears
from lpconv.models.inputs import max_length, random_ids, vocabulary_size
from lpconv.models.opening import Blueprint, blueprint
from lpconv.models.presets import PRESETS
from lpconv.report.numbers import share_text, size_text
from lpconv.storage.checkpoint import Checkpoint
from lpconv.train.memory import free_device_bytes

_FIRST_ID = 5  # lower ids are special in many vocabularies


def find_model(case: Case) -> Blueprint:
    """Find the case's model: ``demo``, a directory, a preset, an alias or a hub id, in this order."""
    is_preset = case.model in PRESETS and not os.path.isdir(case.model)
    model = blueprint(case.model if is_preset else Checkpoint.open(case.model, revision=case.revision))
    _limit_layers(model.config, case.layers)
    check_seq_len(case.seq, max_length(model.config))
    model.config.use_cache = False  # only whole sequences are measured, not decoding token by token
    model.config._attn_implementation = "sdpa"
    return model


def _limit_layers(config: Any, layers: int | None) -> None:
    if layers is None:
        return
    key = next((k for k in LAYER_KEYS if hasattr(config, k)), "")
    check_layers(layers, getattr(config, key, 0))
    setattr(config, key, layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]


def make_batch(case: Case, config: Any, *, batch: int | None = None, seq: int | None = None) -> dict[str, Tensor]:
    """Random token ids of shape (batch, seq), equal for equal seeds on every device."""
    shape = (batch or case.batch, seq or case.seq)
    ids = random_ids(shape, vocabulary_size(config), seed=case.seed, first=_FIRST_ID)
    return {"input_ids": ids.to(case.device)}


def step_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss with its inputs as labels; for base models, the mean square of the output."""
    own: Any = model.module if isinstance(model, DistributedDataParallel) else model
    if own.get_output_embeddings() is not None:
        loss: Tensor = model(**batch, labels=batch["input_ids"]).loss
        return loss
    return model(**batch)[0].float().square().mean()  # type: ignore[no-any-return]


_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "fp4": 2, CODES: 2}
_STATE_BYTES = {
    "adamw": 2, "collage-light": 3, "collage-plus": 4, "optimi-kahan": 3, "torchao-stochastic": 2, "torchao-8bit": 1.1,
    "bitsandbytes-8bit": 1.1,
}  # fmt: skip
# Besides the inputs and outputs of Linears, a block keeps about as much again: norms, residuals, the activation's
# input.
_OTHER_ACTIVATIONS = 2.0


def gemms_of(model: nn.Module) -> tuple[Gemm, ...]:
    """The linear layers of a model (on any device, including meta) grouped by shape, in module order."""
    names_by_shape: dict[tuple[int, int, bool], list[str]] = {}
    output_head = head(model)
    for layer in linears(model):
        if layer.kind != "experts":
            key = (layer.out_features, layer.in_features, layer.module is output_head)
            names_by_shape.setdefault(key, []).append(layer.name)
    return tuple(Gemm(names=tuple(names), n=n, k=k, is_head=head) for (n, k, head), names in names_by_shape.items())


def estimate_bytes(model: nn.Module, case: Case, vocab_size: int, *, by_rows: bool = False) -> int:
    """The larger of `running_bytes` and the memory of building the model, which goes through fp32 weights.

    `by_rows`: each process builds only its part of the model.
    """
    build = 4 * sum(p.numel() for p in model.parameters()) // (case.processes if by_rows else 1)
    return max(build, running_bytes(model, case, vocab_size))


def running_bytes(model: nn.Module, case: Case, vocab_size: int) -> int:
    """Estimated memory of one process of a case: weights, gradients, optimizer state, activations and logits.

    `model` may be on any device, including meta. The estimate is within a factor of two.
    """
    parameters = sum(p.numel() for p in model.parameters())
    width = _BYTES[case.format]
    per_token = sum(len(g.names) * (g.n + g.k) for g in gemms_of(model) if not g.is_head)
    logits = case.tokens * vocab_size * (width + (8 if case.mode == "train" else 0))  # fp32 loss
    if case.mode == "infer":
        live = case.tokens * per_token // max(len(blocks_of(model)), 1)
        return parameters * width + int(live * width) + logits
    state = _STATE_BYTES[case.optimizer or "adamw"] * 2 if case.format != "fp32" else 8
    resident = parameters * (2 * width + state) // (case.processes if case.parallel == "fsdp2" else 1)
    return int(resident + case.tokens * per_token * width * _OTHER_ACTIVATIONS + logits)


def check_fits(estimate: int, case: Case, share: float) -> None:
    """Raise ResourceError if `estimate` exceeds the fraction `share` of free memory."""
    free = free_device_bytes(case.device)
    if estimate <= free * share:
        return
    where = "GPU" if case.device != "cpu" else "machine"
    raise ResourceError(
        f"batch {case.batch} x {case.seq} of `{case.model}` needs about {size_text(estimate)}; this {where} has "
        f"{size_text(free)} free, of which a case may use {share_text(share, 1)}",
        hint="lower --batch-size, --seq-len or --layers",
        details={"estimate_bytes": estimate, "free_bytes": free},
    )


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
