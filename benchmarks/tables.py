"""Generated tables of docs/ and of the READMEs here, from the recorded results.

    python -m benchmarks.tables            # list the outdated tables, with exit code 1 if there are any
    python -m benchmarks.tables --write    # update them

A table stands between `<!-- NAME -->` and `<!-- end of NAME -->`.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import ROOT, recorded
from benchmarks.cross_compile import tables as machine_code
from benchmarks.quality import curves, merge, mixed_bits, own_text, peers
from benchmarks.reproduce import four_bits, unit_attention
from benchmarks.serving import tables as serving
from benchmarks.speed import gpu_tables

TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/advise.md", "mixed"): lambda: mixed_bits.table(recorded("mixed-bits")["rows"]),
    ("docs/export.md", "serving tables"): serving.tables,
    ("docs/measured.md", "H200"): gpu_tables.summary,
    ("docs/methods/gptq.md", "own text"): lambda: own_text.table(recorded("own-text")["rows"]),
    ("docs/methods/gptq.md", "tokens"): lambda: peers.tokens_table(recorded("calibration-tokens")["rows"]),
    ("docs/methods/entropy.md", "curves"): lambda: curves.table(curves.recorded_rows()),
    ("docs/methods/merge.md", "merge"): lambda: merge.table(recorded("merge")["rows"]),
    ("benchmarks/cross_compile/README.md", "machine code"): machine_code.machine_code,
    ("benchmarks/cross_compile/README.md", "fp8 training"): machine_code.fp8_training,
    ("benchmarks/cross_compile/README.md", "optimizer launches"): machine_code.optimizer_launches,
    ("benchmarks/cross_compile/README.md", "bounds"): machine_code.bounds,
    ("benchmarks/quality/README.md", "peers"): lambda: peers.table(recorded("peers")),
    ("benchmarks/reproduce/README.md", "four bits"): lambda: four_bits.table(four_bits.recorded_runs()),
    ("benchmarks/reproduce/README.md", "noise in four bits"): lambda: four_bits.noise_table(four_bits.recorded_noise()),
    ("benchmarks/reproduce/README.md", "unit attention"): lambda: unit_attention.table(unit_attention.recorded_runs()),
    ("benchmarks/speed/README.md", "H200"): gpu_tables.tables,
}


def updated(page: str, name: str, table: str) -> str:
    """The page with the current table. Raises ValueError if the markers are missing."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    if end not in rest:
        raise ValueError(f"the page has no {begin.strip()} … {end}")
    return f"{before}{begin}\n{table.strip()}\n\n{end}{rest.partition(end)[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update the pages")
    writes = parser.parse_args().write
    outdated = []
    for (place, name), table in TABLES.items():
        path: Path = ROOT / place
        page = path.read_text(encoding="utf-8")
        current = updated(page, name, table())
        if current != page:
            outdated.append(f"{place}: {name}")
            if writes:
                path.write_text(current, encoding="utf-8")
    print("\n".join(outdated) or "all tables are current")
    return 1 if outdated and not writes else 0


if __name__ == "__main__":
    sys.exit(main())
