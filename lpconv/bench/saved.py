"""A bench on disk: written after every row, so that whatever ends the run leaves what was measured."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lpconv.checkpoint.contents import read_json
from lpconv.checkpoint.partfile import write_small
from lpconv.errors import InputError
from lpconv.results import BenchResult, from_json, json_text

__all__ = ["is_bench", "kept", "read_bench"]


@contextmanager
def kept(
    path: Path | None, judged: Callable[[BenchResult], BenchResult], show_partial: Callable[[BenchResult], None]
) -> Iterator[Callable[[BenchResult], BenchResult]]:
    """Yields what takes each result so far and gives it back `judged`, written to `path` if there is one.

    Where the body does not come to its end, the last result goes to `show_partial`.
    """
    latest: list[BenchResult] = []

    def keep(result: BenchResult) -> BenchResult:
        latest[:] = [judged(result)]
        if path is not None:
            write_small(path, json_text(latest[0]))
        return latest[0]

    try:
        yield keep
    except BaseException:  # an interrupt too
        for partial in latest:
            show_partial(partial)
        raise


def is_bench(path: Path) -> bool:
    """Whether the file holds a bench."""
    return path.is_file() and path.suffix == ".json" and read_json(path).get("kind") == "bench"


def read_bench(path: Path) -> BenchResult:
    """The bench in a file; InputError where there is none."""
    document = read_json(path)
    if document.get("kind") != "bench":
        raise InputError(f"`{path}` is no result of a bench", hint="pass a file of `lpconv bench --save`")
    return from_json(BenchResult, document)
