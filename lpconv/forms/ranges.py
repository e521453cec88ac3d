"""Blocks of a tensor and their sizes, without torch: a plan asks for them."""

from collections.abc import Iterator

__all__ = ["BLOCK_ELEMENTS", "CHECKED_ELEMENTS", "WORKSPACE_BYTES", "block_ranges"]

BLOCK_ELEMENTS = 2**18
CHECKED_ELEMENTS = 2**15  # that are compared with the slow reference at once
WORKSPACE_BYTES = 44 * BLOCK_ELEMENTS  # of a `Workspace`


def block_ranges(num_elements: int, cols: int = 1) -> Iterator[tuple[int, int]]:
    """(start, stop) of the blocks of a tensor, in order: whole rows of `cols` elements, at least one."""
    size = max(BLOCK_ELEMENTS // cols, 1) * cols if num_elements else 1
    for start in range(0, num_elements, size):
        yield start, min(start + size, num_elements)
