"""Does training the scales of a `--bits` output lower its KL to the source: one per matrix, or one per row?

    OMP_NUM_THREADS=1 python -m benchmarks.quality.trained_steps --work FOLDER --out FILE.json [--bits 3 4.5]

The demo, its integers fixed: 200 steps of Adam on 8 windows of 128 tokens of the sample plays, from a learning rate of
0.003 to 0, minimise KL to the source's predictions. Scales for rows are not stored by this form, and cost more bytes.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

import lpconv
from benchmarks import common
from benchmarks.quality import peers
from benchmarks.quality.held_out import compare_texts, converted, outputs_of, texts, windows_of
from lpconv.data import demo_text

ROUNDINGS = {"nearest": "", "gptq": " --rounding gptq --calibrate demo"}
STEPS, RATE = 200, 0.003


def train(source: Any, model: Any, windows: Tensor, *, of_rows: bool) -> None:
    """Multiply the matrices that differ from the source's by trained factors."""
    weights = dict(source.named_parameters())
    matrices = {n: p.detach() for n, p in model.named_parameters() if p.ndim == 2 and not torch.equal(p, weights[n])}
    factors = {n: torch.ones(len(w) if of_rows else 1, 1, requires_grad=True) for n, w in matrices.items()}
    optimizer, drawn = torch.optim.Adam(factors.values(), lr=RATE), torch.Generator().manual_seed(0)
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    for _ in range(STEPS):
        ids = windows[torch.randint(len(windows), (8,), generator=drawn)]
        with torch.no_grad():
            wanted = source(input_ids=ids).logits.log_softmax(-1).flatten(0, 1)
        scaled = {n: w * factors[n] for n, w in matrices.items()}
        got = torch.func.functional_call(model, scaled, kwargs={"input_ids": ids}).logits.log_softmax(-1).flatten(0, 1)
        optimizer.zero_grad()
        kl_div(got, wanted, log_target=True, reduction="batchmean").backward()
        optimizer.step()
        slower.step()
    with torch.no_grad():
        for name, weight in matrices.items():
            weight.mul_(factors[name])


def main() -> None:
    parser = common.parser(__doc__, work="where outputs are kept", needs_out=True)
    parser.add_argument("--bits", nargs="+", default=["3", "4.5"])
    args = parser.parse_args()
    head = {"machine": common.machine(), "command": common.command()}
    rows = common.Rows(args.out, ("bits", "rounding", "trained"), lambda: head)
    with common.work_folder(args.work) as folder:
        path = peers.model_at(folder, "demo")
        source = lpconv.load(path, dtype=torch.float32)
        (plays,) = windows_of(path, {"train": demo_text("train")}, None).values()
        held_out = windows_of(path, texts(folder))
        wanted = {name: outputs_of(source, ids) for name, ids in held_out.items()}
        for bits in args.bits:
            for rounding, options in ROUNDINGS.items():
                output: Path = folder / f"{bits}-{rounding}"
                converted(path, output, f"--bits {bits}{options}")
                for trained in ("nothing", "matrices", "rows"):
                    if rows.has(bits, rounding, trained):
                        continue
                    model = lpconv.load(output, dtype=torch.float32)
                    if trained != "nothing":
                        train(source, model, plays, of_rows=trained == "rows")
                    got = {name: outputs_of(model, ids) for name, ids in held_out.items()}
                    rows.put({"bits": bits, "rounding": rounding, "trained": trained, **compare_texts(wanted, got)})


if __name__ == "__main__":
    main()
