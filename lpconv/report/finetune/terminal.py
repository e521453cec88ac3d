"""A fine-tuning on the terminal: the verdict, the gap of every metric, what happened on the way.

Import this module lazily: it loads rich.
"""

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from lpconv.report.finetune.words import (
    diagnostics,
    gap_rows,
    gate_lines,
    layer_rows,
    main_run,
    title,
    verdict,
    worst_tracked,
)
from lpconv.report.numbers import share_text, size_text
from lpconv.report.printable import printable_record
from lpconv.report.terminal import facts_grid, heading, note_list, section, table_of
from lpconv.results import FinetuneResult

__all__ = ["render_finetune", "render_recipes"]


def render_finetune(result: FinetuneResult) -> RenderableType:
    """What was trained, what precision cost, and where."""
    result = printable_record(result)
    return Group(
        *heading(title(result)),
        Text(verdict(result)),
        Text(),
        facts_grid(result.facts),
        *_gaps(result),
        *note_list("Gates", gate_lines(result)),
        *note_list("On the way", diagnostics(result)),
        *note_list("Where most was lost", worst_tracked(result)),
        *_layers(result),
        *_memory(result),
        *note_list("Warnings", result.warnings),
    )


def _gaps(result: FinetuneResult) -> tuple[RenderableType, ...]:
    if not result.gaps:
        return ()
    table = table_of("Metric", result.recipe, result.twin or "", "Gap", "<Beyond noise?")
    for row in gap_rows(result):
        table.add_row(*map(Text, row))
    return section("After the last step, mean over seeds", table)


def _layers(result: FinetuneResult) -> tuple[RenderableType, ...]:
    rows = layer_rows(result)
    if not rows:
        return ()
    table = table_of("Layer", "Loss change", "By rounding", "Weights that helped")
    for row in rows:
        table.add_row(*map(Text, row))
    return section("Loss change by layer; negative helped", table)


def _memory(result: FinetuneResult) -> tuple[RenderableType, ...]:
    memory = main_run(result).memory
    if memory is None:
        return ()
    table = table_of("Part", "Size", "Of the peak")
    for part, size in memory.parts.items():
        table.add_row(Text(part), Text(size_text(size)), Text(share_text(size, memory.measured_bytes)))
    table.add_row(Text(f"peak, {memory.instrument}"), Text(size_text(memory.measured_bytes)), Text("100 %"))
    return section("Memory of a step at its peak", table)


def render_recipes(recipes: Mapping[str, tuple[str, str, str, str, str]]) -> RenderableType:
    """The table of recipes: precision, method, optimizer, loss scale and purpose by name."""
    table = table_of("Recipe", "<Precision", "<Method", "<Optimizer", "<Loss scale", "<What it is for")
    for name, cells in recipes.items():
        table.add_row(Text(name), *map(Text, cells))
    return table
