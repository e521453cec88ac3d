"""A fine-tuning on the terminal: the verdict, the gap of every metric, what happened on the way.

Import this module lazily: it loads rich.
"""

from rich.console import Group, RenderableType
from rich.text import Text

from lpconv.report.finetune.words import (
    HELD_OUT_COLUMNS,
    diagnostics,
    gap_rows,
    held_out_rows,
    held_out_words,
    layer_rows,
    memory_rows,
    title,
    verdict,
    worst_tracked,
)
from lpconv.report.numbers import gate_lines
from lpconv.report.printable import printable_record
from lpconv.report.terminal import after_gap, facts_grid, heading, note_list, section, table_of
from lpconv.results import FinetuneResult


def render_finetune(result: FinetuneResult) -> RenderableType:
    """What was trained, what precision cost, and where."""
    result = printable_record(result)
    return Group(
        *heading(title(result)),
        Text(verdict(result)),
        Text(),
        facts_grid(result.facts),
        *_gaps(result),
        *_held_out(result),
        *note_list("Gates", gate_lines(result.gates)),
        *note_list("On the way", diagnostics(result)),
        *note_list("Where most was lost", worst_tracked(result)),
        *_layers(result),
        *_memory(result),
        *note_list("Warnings", result.warnings),
    )


def _gaps(result: FinetuneResult) -> tuple[RenderableType, ...]:
    if not result.gaps:
        return ()
    columns = ("Metric", result.recipe, result.twin or "", "Gap", "Std. error", "<Beyond noise?")
    return section("After the last step, mean over seeds", table_of(*columns, rows=gap_rows(result)))


def _held_out(result: FinetuneResult) -> tuple[RenderableType, ...]:
    if not result.held_out:
        return ()
    table = table_of(*HELD_OUT_COLUMNS, rows=held_out_rows(result))
    return section("Before the first step and after the last", Group(table, after_gap(Text(held_out_words(result)))))


def _layers(result: FinetuneResult) -> tuple[RenderableType, ...]:
    rows = layer_rows(result)
    if not rows:
        return ()
    table = table_of("Layer", "Loss change", "By rounding", "Weights that helped", rows=rows)
    return section("Loss change by layer; negative helped", table)


def _memory(result: FinetuneResult) -> tuple[RenderableType, ...]:
    rows = memory_rows(result)
    return section("Memory of a step at its peak", table_of("Part", "Size", "Of the peak", rows=rows)) if rows else ()
