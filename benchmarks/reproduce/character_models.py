"""Language models over bytes in one form and three kinds, as in the character-LM sweep of unit scaling: convolution,
attention or recurrence, norms before or after each branch or none, branches that are added in two ways."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

__all__ = ["KINDS", "NORMS", "VARIANTS", "CharacterLM", "Shape"]

NUM_BYTES, HEAD_SIZE, KERNEL, GROUPS = 256, 32, 7, 8


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model of the sweep. `residual` is "sum" for x + f(x) and "mean" for the running mean
    √(1-τ)·x + √τ·f(x) with τ = 1/(1 + l) at branch l from 1 on; `norm` is "pre", "post" or "none"."""

    kind: str = "attention"
    norm: str = "pre"
    residual: str = "mean"
    width: int = 64
    depth: int = 3
    length: int = 64


class Convolution(nn.Module):
    """A causal convolution in groups, and ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Conv1d(width, width, KERNEL, groups=GROUPS)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return F.relu(self.inner(F.pad(x_BLD.transpose(1, 2), (KERNEL - 1, 0)))).transpose(1, 2)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (-1, HEAD_SIZE)).transpose(1, 2) for y in self.inner(x_BLD).chunk(3, 2))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Recurrence(nn.Module):
    """A recurrent highway: h ← σ(-g)·h + σ(g)·tanh(t)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.state = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        steps = self.inner(x_BLD).unbind(1)
        hidden, found = None, []
        for step in steps:
            gate, update = (step if hidden is None else step + self.state(hidden)).chunk(2, 1)
            fresh = torch.sigmoid(gate) * torch.tanh(update)
            hidden = fresh if hidden is None else self.stay(gate) * hidden + fresh
            found.append(hidden)
        return torch.stack(found, 1)

    def stay(self, gate: Tensor) -> Tensor:
        return torch.sigmoid(-gate)


class RecurrenceByDifference(Recurrence):
    """The same function, with 1 - σ(g) for σ(-g)."""

    def stay(self, gate: Tensor) -> Tensor:
        return 1 - torch.sigmoid(gate)


class Feedforward(nn.Module):
    """Four times the width, and ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.out(F.relu(self.inner(x_BLD)))


KINDS: dict[str, type[nn.Module]] = {"convolution": Convolution, "attention": Attention, "recurrence": Recurrence}
VARIANTS = KINDS | {"recurrence by 1 - gate": RecurrenceByDifference}
NORMS = ("pre", "post", "none")


class Branch(nn.Module):
    """x and f(x), at their weights, with a norm before or after."""

    def __init__(self, body: nn.Module, shape: Shape, index: int) -> None:
        super().__init__()
        tau = 1 / (1 + index)
        self.weights = (1.0, 1.0) if shape.residual == "sum" else (math.sqrt(1 - tau), math.sqrt(tau))
        self.body, self.place = body, shape.norm
        self.norm = nn.Identity() if shape.norm == "none" else nn.LayerNorm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        stay, go = self.weights
        branch = self.body(self.norm(x) if self.place == "pre" else x)
        out = x * stay + branch * go
        return self.norm(out) if self.place == "post" else out


class CharacterLM(nn.Module):
    """Predicts each byte from those before it; the loss in nats is part of the model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.embedding, self.positions = nn.Embedding(NUM_BYTES, width), nn.Embedding(shape.length, width)
        makers = [maker for _ in range(shape.depth) for maker in (VARIANTS[shape.kind], Feedforward)]
        self.trunk = nn.Sequential(*(Branch(make(width), shape, i) for i, make in enumerate(makers, start=1)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUM_BYTES)
        self.apply(_start)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        places = torch.arange(input_ids.shape[1] - 1, device=input_ids.device)
        x = self.embedding(input_ids[:, :-1]) + self.positions(places)
        logits = self.head(self.norm(self.trunk(x)))
        return CausalLMOutput(loss=F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten()))


def _start(module: nn.Module) -> None:
    """The sweep's plain start: Glorot's uniform matrices and convolutions, tables of unit size, biases 0."""
    if isinstance(module, (nn.Linear, nn.Conv1d)):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
