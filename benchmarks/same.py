"""The baseline against itself: an interval of the ratio that tells the truth contains 1.

    python benchmarks/same.py                       # ten times; fails where fewer than nine intervals contain 1
    python benchmarks/same.py --model bert-base --layers 2 --mode train --seconds 10

Each time two fresh processes with the same case take turns, as baseline and variant do in `lpconv bench`, in as many
launches. What differs between processes (where their memory lies, which core they like) is the part of the noise that
one launch cannot see: `--launches 1` shows it.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from lpconv.bench.cases import Case
from lpconv.bench.interleave import interleave, ratio_of
from lpconv.bench.options import Effort
from lpconv.bench.rows import MEMORY_SHARE, new_team
from lpconv.results import RatioRecord

_SHARE = 0.9  # of the intervals; 95 % ones miss by themselves now and then


def compare_with_itself(case: Case, effort: Effort) -> RatioRecord:
    """Processes with the same case, two at a time and measured in turn: an honest interval contains 1."""
    launches = []
    for _ in range(effort.launches):
        with new_team(case.processes) as one, new_team(case.processes) as other:
            for team in (one, other):
                team.prepare(case, MEMORY_SHARE / 2)
            for team in (one, other):
                team.receive()
            launches.append(interleave(one, other, effort.of_a_launch()))
    return ratio_of(launches)


def main() -> int:
    """Parse, run, print, write; 1 where too few intervals contain 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--mode", choices=("infer", "train"), default="infer")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--compile", choices=("blocks", "model", "off"), default="blocks")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of measuring each process (3)")
    parser.add_argument("--json", type=Path, help="write the ratios here too")
    options = parser.parse_args()
    case = Case(
        model=options.model, layers=options.layers, format="bf16", method="plain", mode=options.mode,
        optimizer="adamw" if options.mode == "train" else None, batch=options.batch, seq=options.seq,
        compiled=options.compile, device=options.device, threads=options.threads,
    )  # fmt: skip
    effort = Effort(
        min_iterations=2 * options.rounds, min_seconds=options.seconds, rounds=options.rounds, launches=options.launches
    )
    ratios = []
    for i in range(options.times):
        ratios.append(compare_with_itself(case, effort))
        r = ratios[-1]
        print(
            f"{i + 1:3d}  {r.value:.4f}  [{r.low:.4f}, {r.high:.4f}]  {'holds' if r.low <= 1 <= r.high else 'MISSES'} 1"
        )
    holding = sum(r.low <= 1 <= r.high for r in ratios)
    print(f"{holding} of {len(ratios)} intervals contain 1")
    if options.json:
        document = {"schema_version": 1, "case": asdict(case), "ratios": [asdict(r) for r in ratios]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if holding >= _SHARE * len(ratios) else 1


if __name__ == "__main__":
    sys.exit(main())
