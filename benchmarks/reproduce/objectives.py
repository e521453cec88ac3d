"""Does every model class train the objective of its task, and do two processes train what one does?

    python -m benchmarks.reproduce.objectives --out FILE.json [--part classes processes] [--recipe RECIPE…]

classes: every class in transformers' mappings for the four tasks, built small. Its loss, with the labels that
`find_objective` chooses, is "right" if it equals the cross entropy of its logits in float64 to 1e-5.

processes: a small Llama, a masked and a classifying BERT and a T5 with targets of unequal lengths, without dropout,
take three steps in each recipe in one process, and in two with `--parallel` ddp and fsdp2. Recorded are the largest
relative differences of losses, gradient norms and held-out losses from one process, and the difference of the gap to
fp32 in nats.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks import common
from benchmarks.reproduce.architectures import LARGEST, small_config
from lpconv.errors import LpconvError
from lpconv.models.objective import IGNORED, find_objective, next_tokens
from lpconv.models.tasks import TASKS, Task
from lpconv.train.options import FinetuneOptions
from lpconv.train.recipes import RECIPES, arithmetic
from lpconv.train.run import finetune

FAMILIES = ("decoder", "masked", "classification", "seq2seq")
MODES = ("one", "ddp", "fsdp2")
PATIENCE_S = 40


def examine_classes() -> dict[str, str]:
    """The verdict on each class, by task and name."""
    verdicts: dict[str, str] = {}
    for task in TASKS.values():
        for model_type, names in task.mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                verdicts.setdefault(f"{task.name}/{name}", verdict(task, name, model_type))
    return verdicts


def verdict(task: Task, name: str, model_type: str) -> str:
    try:
        with patience():
            model = build(name, model_type)
            batch = make_batch(task, model.config)
    except Exception as e:  # a class that cannot be built small is not judged
        return f"not built: {type(e).__name__}"
    try:
        objective = find_objective(model, task, batch)
    except LpconvError as e:
        return f"refused: {e}"
    targets = next_tokens(batch["labels"]) if task.name == "clm" else batch["labels"]
    with torch.no_grad():
        output = model(**batch | ({"labels": targets} if objective.shifted else {}))
    logs = output.logits.double().log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    is_right = abs(float(output.loss) / float(-logs[targets != IGNORED].mean()) - 1) < 1e-5
    return " ".join(["right" if is_right else "wrong", *(["with shifted labels"] if objective.shifted else [])])


def build(name: str, model_type: str) -> Any:
    model_class = getattr(transformers, name)
    config = small_config(CONFIG_MAPPING[model_type])
    wanted = model_class.config_class
    config = config if wanted is None or isinstance(config, wanted) else small_config(wanted)
    config.use_cache = False
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > LARGEST:
        raise OverflowError(size)
    torch.manual_seed(0)
    return model_class(config).eval()


def make_batch(task: Task, config: Any) -> dict[str, Any]:
    top = config.get_text_config().vocab_size - 2
    ids = torch.randint(5, top, (2, 16), generator=torch.Generator().manual_seed(0))
    labels = ids
    if task.name == "classification":
        end = getattr(config, "eos_token_id", None)
        if end is not None:
            ids[:, -1] = end if isinstance(end, int) else end[0]
        labels = torch.tensor([0, 1])
    elif task.name == "mlm":
        labels = torch.where(torch.arange(16) % 2 == 0, IGNORED, ids)
    elif task.name == "seq2seq":
        labels = ids.flip(-1)[:, :9].contiguous()
        labels[1, 6:] = IGNORED
    return {"input_ids": ids, "labels": labels}


@contextlib.contextmanager
def patience() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)


def write_models(folder: Path) -> None:
    """Write the models of the families without dropout, a byte tokenizer, and rows of unequal lengths."""
    sizes = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = transformers.BertConfig(
        **sizes, intermediate_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    t5 = transformers.T5Config(
        vocab_size=260, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    made: dict[str, Any] = {
        "decoder": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=64)),
        "masked": lambda: transformers.BertForMaskedLM(bert),
        "classification": lambda: transformers.BertModel(bert),
        "seq2seq": lambda: transformers.T5ForConditionalGeneration(t5),
    }
    special = ["<pad>", "</s>", "<mask>", "<cls>"]
    letters = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.WordLevel({t: i for i, t in enumerate(letters)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Split("", "isolated")]
    )
    inner.post_processor = processors.TemplateProcessing("<cls> $A </s>", special_tokens=[("<cls>", 3), ("</s>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", mask_token="<mask>", cls_token="<cls>"
    )
    for family, make in made.items():
        torch.manual_seed(0)
        make().save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
    for family in ("classification", "seq2seq"):
        longest = 1 if family == "classification" else 9
        rows = [{"text": f"say {i} " * (i % 5 + 1), "label": "ab"[i % 2] * (i % longest + 1)} for i in range(80)]
        (folder / f"{family}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(mode: str, recipes: list[str], out: Path) -> None:
    """Train every recipe on every family into `out`; runs in each process."""
    os.environ["LPCONV_COMPILE"] = "never"
    torch.set_num_threads(1)
    for family in FAMILIES:
        data: dict[str, Any] = {"data": f"{family}.jsonl"} if family in ("classification", "seq2seq") else {}
        for recipe in recipes:
            options = FinetuneOptions(
                arithmetic=arithmetic(recipe=recipe), steps=3, batch_size=4, seq_len=32, eval_every=0, eval_batches=2,
                twin="none", save_every=0, lr=1e-3, clip=0.5, save="plain",
                parallel="fsdp2" if mode == "fsdp2" else "ddp", **data,
            )  # fmt: skip
            folder = out / mode / family / recipe
            with contextlib.suppress(LpconvError):
                if not (folder / "report.json").exists():
                    finetune(family, folder, options)


def figures(folder: Path) -> dict[str, list[float]] | None:
    if not (folder / "report.json").exists():
        return None
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    run = json.loads((folder / "report.json").read_text())["runs"][0]
    kept = {what: [float(row[what]) for row in rows[1:] if not row["skipped"]] for what in ("loss", "grad_norm")}
    ends = {s["name"]: s["values"][-1] for s in run["evaluations"]}
    return kept | {"held_out": [ends[n] for n in ("eval_loss", "eval_loss_fp32", "eval_loss_published")]}


def compare_processes(recipes: list[str], work: Path | None) -> dict[str, Any]:
    """Differences between two processes and one, by family, recipe and way of sharing."""
    with common.work_folder(work) as folder:
        write_models(folder)
        for mode in MODES:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if mode != "one" else []
            command = [sys.executable, *launch, "-m", "benchmarks.reproduce.objectives", "--worker", mode, "--out", "."]
            environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
            subprocess.run([*command, "--recipe", *recipes], cwd=folder, check=True, env=environment)
        return {
            f"{family}/{recipe}/{mode}": difference(*(folder / m / family / r for m, r in places))
            for family in FAMILIES
            for recipe in recipes
            for mode in MODES[1:]
            for places in [((mode, recipe), (mode, "fp32"), ("one", recipe), ("one", "fp32"))]
        }


def difference(*folders: Path) -> dict[str, float] | str:
    """Differences of two processes' run from one process's, and of their gaps to fp32."""
    two, two_fp32, one, one_fp32 = map(figures, folders)
    if two is None or one is None or two_fp32 is None or one_fp32 is None:
        return "refused"
    if len(two["loss"]) != len(one["loss"]):  # a rank's gradients are those of a mean over fewer rows, so larger
        return f"takes {len(two['loss'])} steps and skips the others, where one process takes {len(one['loss'])}"
    differences = {what: max(abs(a - b) / abs(b) for a, b in zip(two[what], one[what], strict=True)) for what in two}
    pairs = ((two, two_fp32), (one, one_fp32))
    gaps = ([a - b for a, b in zip(x["held_out"], y["held_out"], strict=True)] for x, y in pairs)
    return differences | {"gap_nats": max(abs(a - b) for a, b in zip(*gaps, strict=True))}


def main() -> None:
    parser = common.parser(__doc__, work="keeps the runs, which are then not repeated", needs_out=True)
    parser.add_argument("--part", nargs="+", choices=("classes", "processes"), default=["classes", "processes"])
    parser.add_argument("--recipe", nargs="+", default=[n for n, r in RECIPES.items() if not r.arithmetic.is_native])
    parser.add_argument("--worker", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    if args.worker:
        return train(args.worker, args.recipe, args.out)
    result = common.load_or_begin(args.out)
    result["machine"] = common.machine()
    if "classes" in args.part:
        result["classes"] = examine_classes()
        print(Counter(f"{k.split('/')[0]}: {v.split(':')[0]}" for k, v in result["classes"].items()))
    if "processes" in args.part:
        result["processes"] = result.get("processes", {}) | compare_processes(args.recipe, args.work)
        for name, figure in result["processes"].items():
            print(name, figure)
    common.save(result, args.out)
    return None


if __name__ == "__main__":
    main()
