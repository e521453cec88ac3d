"""Measure time, memory, energy and error of low precision on this machine, relative to a compiled baseline."""

from typing import TYPE_CHECKING

from lpconv.lazy import lazily

if TYPE_CHECKING:
    from lpconv.bench.options import BenchOptions as BenchOptions, Effort as Effort
    from lpconv.bench.outcome import read_bench as read_bench
    from lpconv.bench.run import bench as bench

__all__ = lazily(__name__)
