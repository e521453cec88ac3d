"""What a step would need of each rank, on the terminal. Import this module lazily: it loads rich."""

from rich.console import Group, RenderableType
from rich.text import Text

from lpconv.report.numbers import MISSING, count_text, size_text
from lpconv.report.printable import printable_record
from lpconv.report.terminal import facts_grid, heading, section, table_of
from lpconv.results import MemoryPlan

_LEFT_OUT = (
    "Peaks of the two passes, by formula. The optimizer's own temporary tensors and what a device keeps for itself "
    "come on top. To publish the model, the first process gathers it in fp32 in the memory of its machine."
)


def render_memory(plan: MemoryPlan) -> RenderableType:
    """How many GPUs have room under each recipe, and what one of them needs under the recipe asked for."""
    plan = printable_record(plan)
    facts = {
        "Parameters": count_text(plan.num_parameters),
        "A step": f"{plan.batch_size} sequences of {plan.seq_len} tokens over all GPUs, at least one on each",
        "Shared": "parameters, gradients and optimizer state, by `--parallel fsdp2` where there are several GPUs",
    }
    devices = list(next(iter(plan.gpus.values()), {}))
    rows = [
        (recipe, *(MISSING if n is None else str(n) for n in found.values())) for recipe, found in plan.gpus.items()
    ]
    most = max(m.num_ranks for m in plan.memory)
    return Group(
        *heading(f"{plan.name}: memory of a step"),
        facts_grid(facts),
        *section(
            f"The smallest number of GPUs of which each has room; {MISSING} where {most} have none",
            table_of("Recipe", *devices, rows=rows),
        ),
        *_of_ranks(plan),
        Text(f"\n{_LEFT_OUT}"),
    )


def _of_ranks(plan: MemoryPlan) -> tuple[RenderableType, ...]:
    found = [m for m in plan.memory if m.recipe == plan.recipe]
    parts = list(found[0].parts)
    rows = [(str(m.num_ranks), *(size_text(x) for x in m.parts.values()), size_text(m.total_bytes)) for m in found]
    columns = ("GPUs", *(p.capitalize() for p in parts), "Together")
    return section(f"One GPU's part with recipe {plan.recipe}", table_of(*columns, rows=rows))
