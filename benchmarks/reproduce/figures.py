"""What the figures of the miniatures share: panels side by side in one file, and the panel of a training."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

from benchmarks.reproduce.miniature import Curve, mean_curve

matplotlib.use("agg")
from matplotlib import pyplot as plt


@contextmanager
def panels(path: Path, count: int) -> Iterator[Sequence[Axes]]:
    """Yield `count` panels to draw on; afterwards add legends and save the figure."""
    _, drawn = plt.subplots(1, count, figsize=(4 + 4 * count, 4.5), layout="constrained")
    yield drawn
    for axes in drawn:
        axes.legend(fontsize=8)
    plt.savefig(path, dpi=110)
    plt.close()


def plot_training(axes: Axes, kind: str, curves: Sequence[Curve], *, dashed: Iterable[str] = ()) -> None:
    """Plot the held-out loss of every arm over the steps, averaged over seeds."""
    for arm in dict.fromkeys(c.arm for c in curves):
        axes.plot(*mean_curve(curves, arm), "--" if arm in dashed else "-", label=arm)
    axes.set(title=f"training, {kind}", xlabel="step", ylabel="held-out loss, nats per byte")
