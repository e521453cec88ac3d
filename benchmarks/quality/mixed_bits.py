"""Which chooses better bits for the layers of a model, `lpconv advise --bits` or AutoRound's AutoScheme?

    python -m benchmarks.quality.mixed_bits --work FOLDER --out FILE.json [--model M ...] [--bits B ...] [--ours]

Both choose for each Linear layer but the head, with at most B bits per weight on average, scales included, and use the
sample plays. `advise` codes integers by their entropy, with the same bits for all and with bits for each part.
AutoScheme chooses among integers of 2, 3, 4, 5, 6 and 8 bits in groups, once freely, once with one width for q, k and v
and one for gate and up, which vLLM fuses, and `advise` keeps together; lpconv rounds its choices, with searched scales.
Texts and measures are those of `peers.py`. `--ours` leaves AutoScheme out.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import lpconv
from benchmarks import common
from benchmarks.quality import peers
from lpconv.advise.candidates import convert_options
from lpconv.advise.options import AdviseOptions, Budget
from lpconv.advise.run import advise

GROUPS = {"demo": 128, "smollm2": 64, "gemma3": 128}  # sizes that divide all rows
THEIRS = {"AutoScheme": "free", "AutoScheme, fused": "fused"}
MINUTES = 15


def advised(folder: Path, model: Path, bits: float) -> dict[str, dict[str, Any]]:
    """Settings of the conversions that `lpconv advise --bits` measures, by name."""
    options = AdviseOptions(purpose="infer", bits=bits, budget=Budget(minutes=MINUTES), force=True)
    return {r.name: dict(r.settings) for r in advise(model, folder / "advice", options).rows if r.gap is not None}


def auto_scheme(folder: Path, model: Path, bits: float, choice: str, group: int) -> list[str]:
    """Rules of the widths that AutoScheme chooses."""
    widths = folder / f"widths-{model.name}-{bits:g}-{group}-{THEIRS[choice]}.json"
    if not widths.exists():
        job = {
            "peer": "auto-scheme",
            "method": f"{bits - 32 / group} {THEIRS[choice]}",  # without lpconv's scales, of 32 bits
            "group": group,
            "model": str(model),
            "output": str(widths),
            "windows": str(peers.calibration_file(folder, model, 0)),
        }
        (folder / "job.json").write_text(json.dumps(job))
        python, script = peers.environment(folder, "auto-round"), Path(peers.__file__).with_name("peer_rounding.py")
        cost = peers.measured([python, script, folder / "job.json"], folder / "log.txt")
        if "failed" in cost:
            raise SystemExit(f"AutoScheme failed: {cost['failed']}")
        print(model.name, bits, choice, cost)
    chosen = json.loads(widths.read_text())
    return [f"{layer}.weight=int{width}" for layer, width in chosen.items() if width < 16]


def measure(folder: Path, name: str, bits: float, rows: common.Rows, *, ours: bool) -> None:
    """Add the rows of a model and an average width."""
    model = peers.model_at(folder, name)
    held_out, output = peers.HeldOut(folder, model), folder / "outputs" / "mixed"
    choices = advised(folder, model, bits)
    for choice in () if ours else THEIRS:
        integers = {"method": "unit", "format": "int4", "granularity": f"group:{GROUPS[name]}", "scale": "search"}
        choices[choice] = integers | {"rules": auto_scheme(folder, model, bits, choice, GROUPS[name])}
    for choice, settings in choices.items():  # AutoScheme's rules name every layer
        lpconv.convert(model, output, convert_options(settings, allow_mixed_groups=True, force=True))
        row = {"model": name, "bits": bits, "choice": choice, "bytes": peers.stored_bytes(output)}
        rows.put(row | held_out.compare(output) | {"settings": settings})


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: KL on plays and on Python for each model and average, by the way of choosing."""
    found = {(r["model"], r["bits"], r["choice"].rpartition(" bits")[2].strip() or "the same for all"): r for r in rows}
    ways = ("the same for all", "by part", "by part with gptaq", *THEIRS)
    lines = []
    for model, bits in sorted({key[:2] for key in found}):
        cells = (found.get((model, bits, way)) for way in ways)
        kls = (f"{r['plays']['kl']:.3g}, {r['python']['kl']:.3g}" if r else "" for r in cells)
        lines.append((model, f"{bits:g}", *kls))
    return common.markdown(("model", "bits", *ways), lines)


def main() -> None:
    """Run the script (see the module's docstring)."""
    parser = common.parser(__doc__, work="where environments, models and outputs are kept", needs_out=True)
    parser.add_argument("--model", nargs="+", default=list(peers.MODELS), choices=peers.MODELS)
    parser.add_argument("--bits", nargs="+", type=float, default=[5.0])
    parser.add_argument("--ours", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = common.Rows(args.out, ("model", "bits", "choice"), lambda: {"machine": common.machine()})
    with common.work_folder(args.work) as folder:
        for name in args.model:
            for bits in args.bits:
                measure(folder, name, bits, rows, ours=args.ours)


if __name__ == "__main__":
    main()
