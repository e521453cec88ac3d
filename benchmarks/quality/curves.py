"""Kept quality against file size: entropy-coded integers next to formats with blocks, as a table and as a picture.

    python -m benchmarks.quality.curves            # docs/bits.png; needs matplotlib

Rows of entropy-coded integers are from `entropy-coded.json`, which `benchmarks.quality.peers` wrote with the layouts
"2.5 bits" to "6 bits"; all others are from `peers.json`. Bits count codes and scales of converted matrices.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import common

MODELS = {"demo": "demo (0.9 M)", "smollm2": "SmolLM2 135M", "gemma3": "Gemma 3 270M"}
_CODED = tuple(f"{n:g} bits" for n in (2.5, 3, 3.5, 4, 4.5, 6))
# By name in the picture: the rounding of each, and its layouts. Those of one layout are points.
CURVES: dict[str, tuple[str, tuple[str, ...]]] = {
    "entropy-coded, nearest": ("nearest", _CODED),
    "entropy-coded, gptq, one step": ("gptq, one step", _CODED),
    "entropy-coded, gptq": ("gptq", _CODED),
    "entropy-coded, gptaq": ("gptaq", _CODED),
    "integers in groups of 32, nearest": ("nearest", tuple(f"int{n} g32" for n in (2, 3, 4, 5, 6))),
    "integers in groups of 32, gptaq and search": ("gptaq, search", tuple(f"int{n} g32" for n in (2, 3, 4, 5, 6))),
    "NVFP4, gptq and search": ("gptq, search", ("NVFP4",)),
    "NVFP4, gptaq and search": ("gptaq, search", ("NVFP4",)),
    "llm-compressor GPTQ, imatrix": ("llm-compressor GPTQ, imatrix", tuple(f"int{n} g32" for n in (2, 3, 4, 5, 6))),
    "AutoRound, int4 in groups of 32": ("AutoRound, 200 steps", ("int4 g32",)),
    "GGUF Q4_0 and Q8_0, nearest": ("nearest", ("GGUF Q4_0", "GGUF Q8_0")),
}


def recorded_rows() -> list[dict[str, Any]]:
    rows = [*common.recorded("peers")["rows"], *common.recorded("entropy-coded")["rows"]]
    return [r for r in rows if "failed" not in r]


def points(rows: Sequence[dict[str, Any]], model: str, curve: str) -> list[tuple[float, ...]]:
    """(bits per weight, KL on plays, KL on Python) of a curve, as means over seeds."""
    rounding, layouts = CURVES[curve]
    found = []
    for layout in layouts:
        same = [r for r in rows if (r["model"], r["layout"], r["rounding"]) == (model, layout, rounding)]
        if same:
            found.append((bits_of(layout), *(fmean(r[text]["kl"] for r in same) for text in ("plays", "python"))))
    return found


def bits_of(layout: str) -> float:
    """Stored bits per weight, with scales: bf16 ones for groups, fp8 ones for blocks of 16."""
    if layout.endswith("bits"):
        return float(layout.split()[0])
    return 4.5 if layout == "NVFP4" else int(layout.removeprefix("GGUF Q").removeprefix("int")[0]) + 0.5


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: KL on plays and on Python for each model, by form and bits per weight."""
    lines = []
    for curve in CURVES:
        found = {m: {bits: kls for bits, *kls in points(rows, m, curve)} for m in MODELS}
        for bits in sorted({bits for of_model in found.values() for bits in of_model}):
            cells = (", ".join(f"{kl:.3g}" for kl in found[m].get(bits, ())) for m in MODELS)
            lines.append((curve, f"{bits:g}", *cells))
    return common.markdown(("form and rounding", "bits", *MODELS.values()), lines)


def picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw KL on plays against bits per weight, a panel per model."""
    from matplotlib import pyplot

    models = [m for m in MODELS if any(r["model"] == m for r in rows)]
    figure, panels = pyplot.subplots(1, len(models), figsize=(4.2 * len(models), 3.6), layout="constrained")
    for panel, model in zip(panels, models, strict=True):
        for number, curve in enumerate(CURVES):
            if found := points(rows, model, curve):
                bits, kls, _ = zip(*found, strict=True)
                style = "-o" if "entropy" in curve else "--s" if len(found) > 1 else "D"
                panel.semilogy(bits, kls, style, color=f"C{number}", label=curve, markersize=4, linewidth=1.5)
        panel.set(title=MODELS[model], xlabel="stored bits per weight")
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("KL to the source, nats per token")
    drawn = {label: handle for p in panels for handle, label in zip(*p.get_legend_handles_labels(), strict=True)}
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    picture(recorded_rows(), common.ROOT / "docs" / "bits.png")


if __name__ == "__main__":
    main()
