"""What the ranks of `test_rows` do: open models by rows, beside whole ones."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lpconv.models.opening import Opened, open_to_train
from lpconv.models.sharing import running_copy
from lpconv.models.tasks import TASKS
from lpconv.scaled import saved_bytes
from lpconv.scaled.tensor import ScaledTensor
from lpconv.shards import gather_whole, is_sharded, local
from lpconv.train.nonfinite import first_nonfinite
from lpconv.train.options import FinetuneOptions
from lpconv.train.prepare import prepare, shard
from lpconv.train.processes import mesh
from lpconv.train.recipes import arithmetic

STEPS = 2


def opened_unlike(models: Iterable[tuple[str, str, int | None]]) -> dict[str, list[str]]:
    """Of folders, tasks and numbers of labels: what differs between the rows of a model and the whole one, by name."""
    return {folder: _on_all(_opened_unlike(folder, task, labels)) for folder, task, labels in models}


def _opened_unlike(folder: str, task: str, num_labels: int | None) -> list[str]:
    whole_one, rows = (_open(folder, task, num_labels, by_rows=by_rows) for by_rows in (False, True))
    named = [dict(x.model.named_parameters(remove_duplicate=False)) for x in (whole_one, rows)]
    wrong = list(named[0].keys() ^ named[1].keys())
    wrong += [n for n, p in named[0].items() if not _same(p, gather_whole(named[1][n].detach()))]
    wrong += [f"{n}: frozen" for n, p in named[0].items() if p.requires_grad != named[1][n].requires_grad]
    wrong += [f"{n}: not sharded" for n, p in named[1].items() if not is_sharded(p)]
    buffers = [dict(x.model.named_buffers()) for x in (whole_one, rows)]
    wrong += [n for n in buffers[0].keys() | buffers[1].keys() if not _same(buffers[0][n], buffers[1][n])]
    ties = [[[a for a in n if n[a] is n[b]] for b in n] for n in named]
    wrong += [] if ties[0] == ties[1] else ["ties"]
    wrong += [] if whole_one.missing == rows.missing else ["missing"]
    return wrong + [f"{n}: read whole" for n in rows.read_whole]


def saved(models: Iterable[str]) -> dict[str, tuple[int, int]]:
    """What a forward pass of each saves for its backward pass, whole and by rows."""
    return {folder: (_saved(folder, by_rows=False), _saved(folder, by_rows=True)) for folder in models}


def _saved(folder: str, *, by_rows: bool) -> int:
    model = _open(folder, "clm", None, by_rows=by_rows).model
    ids = torch.arange(1, 13)[None]
    return saved_bytes(running_copy(model, mesh()) if by_rows else model, {"input_ids": ids, "labels": ids})


def trained_unlike(cases: dict[str, tuple[str, dict[str, str]]]) -> dict[str, list[str]]:
    """Of folders and recipes: what differs between two steps from rows and from the whole model, on any rank."""
    return {name: _on_all(_trained_unlike(folder, how)) for name, (folder, how) in cases.items()}


def _trained_unlike(folder: str, how: dict[str, str]) -> list[str]:
    expected, found = (_trained(folder, how, by_rows=by_rows) for by_rows in (False, True))
    return [n for n in expected.keys() | found.keys() if n not in expected or not _same(expected[n], found[n])]


def _trained(folder: str, how: dict[str, str], *, by_rows: bool) -> dict[str, Tensor]:
    """Losses, gradients and what is kept after each of the steps, as this rank has them."""
    options = FinetuneOptions(arithmetic=arithmetic(**how), parallel="fsdp2", lr=1e-2)
    model = _open(folder, "clm", None, by_rows=by_rows).model
    prepared = prepare(model, options.arithmetic, options, seed=0)
    shard(prepared.model, options.arithmetic)
    optimizer = prepared.make_optimizer()
    seen: dict[str, Tensor] = {}
    for step in range(STEPS):
        torch.manual_seed(100 * step + dist.get_rank())
        ids = torch.randint(1, model.config.vocab_size, (2, 12))
        with prepared.around_forward("cpu"):
            loss = prepared.model(input_ids=ids, labels=ids).loss
        loss.backward()
        seen |= {f"loss {step}": loss.detach()}
        seen |= {f"gradient {step} {n}": local(p.grad) for n, p in prepared.model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    seen |= {f"value {n}": local(x) for n, x in prepared.values(optimizer).items()}
    states = enumerate(optimizer.state.values())
    return seen | {f"state {i} {k}": local(x) for i, s in states for k, x in s.items() if isinstance(x, Tensor)}


def peaks(folder: str) -> dict[str, list[int]]:
    """What opening and sharding a model adds to the memory of each rank at its peak, whole and by rows, in bytes."""
    arithmetic_ = arithmetic(precision="fp32")

    def opening(by_rows: bool) -> None:
        shard(_open(folder, "clm", None, by_rows=by_rows).model, arithmetic_)

    opening(by_rows=True)  # what the first one loads besides
    return {name: _gathered(_peak(opening, name == "rows")) for name in ("rows", "whole")}


def _peak(work: Callable[[bool], None], by_rows: bool) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew from what is resident now
    before = _status("VmRSS")
    work(by_rows)
    return _status("VmHWM") - before


def _status(what: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(what))
    return 1024 * int(line.split()[1])


def _open(folder: str, task: str, num_labels: int | None, *, by_rows: bool) -> Opened:
    shared = mesh() if by_rows else None
    return open_to_train(TASKS[task], Path(folder), seed=3, num_labels=num_labels, mesh=shared)


def _same(a: Tensor, b: Tensor) -> bool:
    if isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor):
        return (
            a.role is b.role
            and _same(torch.as_tensor(a.scale), torch.as_tensor(b.scale))
            and _same(a.data_part, b.data_part)
        )
    return type(a.detach()) is type(b.detach()) and a.dtype == b.dtype and torch.equal(a.detach(), b.detach())


def _on_all(names: list[str]) -> list[str]:
    return sorted({n for found in _gathered(names) for n in found})


def _gathered(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def nonfinite_on_one() -> list[tuple[str, str] | None]:
    """What each rank finds in a sharded model whose input is infinite on the first rank only."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shard(model, arithmetic(recipe="fp32"))
    x = torch.full((2, 4), torch.inf if dist.get_rank() == 0 else 1.0)
    return _gathered(first_nonfinite(model, lambda: model(x).sum()))
