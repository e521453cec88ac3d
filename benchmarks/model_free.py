"""Convert to FP8_DYNAMIC beside llm-compressor's `model_free_ptq`, which needs no model definition either.

    pip install --no-deps --target SITE llmcompressor
    python benchmarks/model_free.py --work DIRECTORY --site SITE [--size 2GB] [--rounds 2]

Both write e4m3fn codes with a scale for each row of the `Linear` weights, embedding and head excluded, in the layout of
compressed-tensors. A case is a process of its own, with all that it imports: lpconv with and without its check of the
weights, llm-compressor with one worker and with two. Cases take turns. Where other work shares the machine, compare
processor time and peak memory rather than seconds.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from benchmarks.convert import Case, Measurement, Subject, machine, measure, subject_in, versions

_COMMON = ("--method", "unit", "--format", "e4m3fn", "--granularity", "row", "--layout", "compressed-tensors",
           "--exclude", "lm_head*", "--exclude", "*embed_tokens*", "--json", "--quiet")  # fmt: skip
_HERE = Path(__file__).parent.parent
_PEER = """
import sys
sys.path.append(sys.argv[3])
sys.stdout = sys.stderr
from llmcompressor.entrypoints.model_free import model_free_ptq
ignore = ["lm_head", "re:.*embed_tokens.*"]
count = int(sys.argv[4])
model_free_ptq(sys.argv[1], sys.argv[2], scheme="FP8_DYNAMIC", ignore=ignore, max_workers=count, device="cpu")
"""


def cases(site: Path) -> list[Case]:
    ours = (sys.executable, "-m", "lpconv", "convert", "SOURCE", "--output", "OUTPUT", *_COMMON)
    theirs = (sys.executable, "-c", _PEER, "SOURCE", "OUTPUT", str(site))
    return [
        *(Case(name=f"lpconv --verify {v}", command=(*ours, "--verify", v), tree=_HERE) for v in ("none", "weights")),
        *(Case(name=f"model_free_ptq, max_workers={n}", command=(*theirs, n)) for n in ("1", "2")),
    ]


def table(found: Sequence[Measurement]) -> str:
    """Markdown: one row per case, medians over rounds and the largest peak."""
    lines = ["| case | s | processor s | peak MB | GB written |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(m.case for m in found):
        runs = [m for m in found if m.case == name]
        wall, cpu = (statistics.median(getattr(m, k) for m in runs) for k in ("wall_s", "cpu_s"))
        peak = max(m.peak_rss_bytes for m in runs) / 1e6
        lines.append(f"| {name} | {wall:.1f} | {cpu:.1f} | {peak:.0f} | {runs[0].bytes_out / 1e9:.2f} |")
    return "\n".join(lines) + "\n"


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoint, kept, and for outputs")
    parser.add_argument("--site", type=Path, required=True, help="folder that has llmcompressor")
    parser.add_argument("--size", default="2GB")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/model-free.json")
    args = parser.parse_args()
    args.work, args.site = args.work.resolve(), args.site.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    found: list[Measurement] = []
    subject: Subject = subject_in(args.work, args.size, "bfloat16")
    peer = next(d.version for d in metadata.distributions(path=[str(args.site)]) if d.name == "llmcompressor")
    context = {**machine(args.work), **versions(), "llmcompressor": peer}
    for index in range(args.rounds):
        for case in cases(args.site):
            with tempfile.TemporaryDirectory(dir=args.work) as folder:
                found.append(measure(case, subject, Path(folder) / "output", index=index, rest_s=1))
            print(table(found), file=sys.stderr)
    document = {"schema_version": 1, **context, "measurements": [dataclasses.asdict(m) for m in found]}
    args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(found), end="")


if __name__ == "__main__":
    _main()
