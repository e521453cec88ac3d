"""Ranges of blocks of a tensor, without torch, since plans use them."""

from collections.abc import Iterator

BLOCK_ELEMENTS = 2**19
CHECKED_ELEMENTS = 2**15  # elements that are compared with the slow reference at once


def block_ranges(num_elements: int, cols: int = 1) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the blocks of a tensor, in order: whole rows of `cols` elements, at least one row."""
    return _ranges(num_elements, cols, BLOCK_ELEMENTS)


def checked_ranges(num_elements: int, cols: int = 1) -> Iterator[tuple[int, int]]:
    """Yield parts of a block for comparison with the slow reference, whose fp64 temporaries then stay in the cache."""
    return _ranges(num_elements, cols, CHECKED_ELEMENTS)


def _ranges(num_elements: int, cols: int, block_size: int) -> Iterator[tuple[int, int]]:
    size = max(block_size // cols, 1) * cols if num_elements else 1
    for start in range(0, num_elements, size):
        yield start, min(start + size, num_elements)
