"""A repair on the terminal."""

from rich.console import Group, RenderableType

from lpconv.report.numbers import error_text, plural, scale_text, share_text, sqnr_text
from lpconv.report.printable import printable_record
from lpconv.report.terminal import Name, facts_grid, heading, note_list, section, table_of
from lpconv.results import RepairResult

__all__ = ["render_repair"]


def render_repair(result: RepairResult) -> RenderableType:
    """Which weights got another scale, and what that changed of their numbers."""
    result = printable_record(result)
    changed = [t for t in result.tensors if t.num_changed]
    numbers = (
        "every number is what its codes said" if not changed else f"{plural(len(changed), 'weight')} had to be rounded"
    )
    facts = {
        "Layout": result.layout,
        "Repaired": f"{len(result.tensors)} of {plural(result.num_tensors, 'weight')}; {numbers}",
    }
    rows = (
        (
            Name(name=t.name),
            t.what,
            scale_text(t.before),
            scale_text(t.after),
            share_text(t.num_changed, t.num_elements) if t.num_changed else "none",
            error_text(t.max_rel_error) if t.num_changed else "–",
            sqnr_text(t.sqnr_db, " dB"),
        )
        for t in result.tensors
    )
    return Group(
        *heading(f"{result.path} → {result.output}"),
        facts_grid(facts),
        *section("Scales", table_of("Weight", "What", "Scale", "Now", "Changed", "Largest", "SQNR", rows=rows)),
        *note_list("What is left", result.left),
    )
