"""How much memory a case will take, from shapes alone, before anything is built; and how much there is."""

import torch
from torch import nn

from lpconv.bench.cases import Case
from lpconv.bench.gemm import Gemm
from lpconv.bench.models import blocks_of
from lpconv.errors import ResourceError
from lpconv.layers import head, linears
from lpconv.report.numbers import share_text, size_text

__all__ = ["available_bytes", "check_fits", "estimate_bytes", "gemms_of"]

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
_STATE_BYTES = {
    "adamw": 2, "collage-light": 3, "collage-plus": 4, "optimi-kahan": 3, "torchao-stochastic": 2, "torchao-8bit": 1.1,
    "bitsandbytes-8bit": 1.1,
}  # fmt: skip
# Beside the Linears' inputs and outputs a block keeps about as much again: norms, residuals, the activation's input.
_OTHER_ACTIVATIONS = 2.0


def gemms_of(model: nn.Module) -> tuple[Gemm, ...]:
    """The linear layers of a model (on any device, meta too) by shape, in the order of the model."""
    found: dict[tuple[int, int, bool], list[str]] = {}
    kept = head(model)
    for layer in linears(model):
        if layer.kind != "experts":
            key = (layer.out_features, layer.in_features, layer.module is kept)
            found.setdefault(key, []).append(layer.name)
    return tuple(Gemm(names=tuple(names), n=n, k=k, is_head=head) for (n, k, head), names in found.items())


def estimate_bytes(model: nn.Module, case: Case, vocab_size: int) -> int:
    """Weights, gradients, optimizer state, activations and logits of one process of a case, from the model on the meta
    device.

    The build passes through fp32 weights, which may be the most there is. An estimate: within a factor of two.
    """
    parameters = sum(p.numel() for p in model.parameters())
    width = _BYTES[case.format]
    per_token = sum(len(g.names) * (g.n + g.k) for g in gemms_of(model) if not g.is_head)
    logits = case.tokens * vocab_size * (width + (8 if case.mode == "train" else 0))  # the loss is in fp32
    building = 4 * parameters
    if case.mode == "infer":
        live = case.tokens * per_token // max(len(blocks_of(model)), 1)
        return max(building, parameters * width + int(live * width) + logits)
    state = _STATE_BYTES[case.optimizer or "adamw"] * 2 if case.format != "fp32" else 8
    resident = parameters * (2 * width + state) // (case.processes if case.parallel == "fsdp2" else 1)
    return max(building, int(resident + case.tokens * per_token * width * _OTHER_ACTIVATIONS + logits))


def check_fits(estimate: int, case: Case, share: float) -> None:
    """Raise ResourceError where `estimate` exceeds that share of the memory that is free now."""
    free = available_bytes(case.device)
    if estimate <= free * share:
        return
    where = "GPU" if case.device != "cpu" else "machine"
    raise ResourceError(
        f"batch {case.batch} x {case.seq} of `{case.model}` needs about {size_text(estimate)}; this {where} has "
        f"{size_text(free)} free, of which the case may take {share_text(share, 1)}",
        hint="take a smaller --batch or --seq, or fewer --layers",
        details={"estimate_bytes": estimate, "free_bytes": free},
    )


def available_bytes(device: str) -> int:
    """Free memory of the device; of a CPU the machine's, within the container's limit."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info()[0])
    from lpconv.machine import available_memory  # it wants psutil, which a machine with a GPU may do without

    return available_memory()
