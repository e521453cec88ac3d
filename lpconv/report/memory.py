"""The document of a memory plan: what a training step needs on each GPU."""

from lpconv.report.document import Document, Table, section, sections_of
from lpconv.report.numbers import MISSING, count_text, size_text
from lpconv.results import MemoryPlan

_LEFT_OUT = (
    "Estimated peaks of the forward and backward pass. Temporary tensors of the optimizer and the device's own memory "
    "are not included. To publish the model, the first process gathers it in fp32 in CPU memory."
)


def memory_document(plan: MemoryPlan) -> Document:
    """The number of GPUs that each recipe needs, and the memory of one GPU with the requested recipe."""
    devices = tuple(next(iter(plan.gpus.values()), {}))
    rows = tuple(
        (recipe, *(MISSING if n is None else str(n) for n in counts.values())) for recipe, counts in plan.gpus.items()
    )
    most = max(m.num_ranks for m in plan.memory)
    fewest = f"The smallest number of GPUs that is enough; {MISSING} if {most} are not"
    return Document(
        kind="finetune",
        title=f"{plan.name}: memory of a step",
        facts={
            "Parameters": count_text(plan.num_parameters),
            "A step": f"{plan.batch_size} sequences of {plan.seq_len} tokens over all GPUs, at least one per GPU",
            "Shared": "parameters, gradients and optimizer state, with `--parallel fsdp2` on several GPUs",
        },
        sections=sections_of(
            section(fewest, Table(columns=("Recipe", *devices), rows=rows)),
            section(f"Memory per GPU with recipe {plan.recipe}", _rank_table(plan), _LEFT_OUT),
        ),
    )


def _rank_table(plan: MemoryPlan) -> Table:
    plans = [m for m in plan.memory if m.recipe == plan.recipe]
    parts = (p.capitalize() for p in plans[0].parts)
    rows = ((str(m.num_ranks), *(size_text(x) for x in m.parts.values()), size_text(m.total_bytes)) for m in plans)
    return Table(columns=("GPUs", *parts, "Together"), rows=tuple(rows))
