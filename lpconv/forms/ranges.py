"""Blocks of a tensor and their sizes, without torch: a plan asks for them."""

from collections.abc import Iterator

BLOCK_ELEMENTS = 2**19
CHECKED_ELEMENTS = 2**15  # that are compared with the slow reference at once


def block_ranges(num_elements: int, cols: int = 1) -> Iterator[tuple[int, int]]:
    """(start, stop) of the blocks of a tensor, in order: whole rows of `cols` elements, at least one."""
    return _ranges(num_elements, cols, BLOCK_ELEMENTS)


def checked_ranges(num_elements: int, cols: int = 1) -> Iterator[tuple[int, int]]:
    """The parts of a block that are compared with a slow reference, so that its fp64 temporaries stay in a cache."""
    return _ranges(num_elements, cols, CHECKED_ELEMENTS)


def _ranges(num_elements: int, cols: int, wanted: int) -> Iterator[tuple[int, int]]:
    size = max(wanted // cols, 1) * cols if num_elements else 1
    for start in range(0, num_elements, size):
        yield start, min(start + size, num_elements)
