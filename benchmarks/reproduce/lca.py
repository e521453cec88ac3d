"""What rounding costs, in nats: loss change allocation of the embedded model under the ways to keep bf16 weights.

    python -m benchmarks.reproduce.lca --out FILE.json

Each run takes the same steps on two thirds of the play that the model never saw; the probe batches come from the last
third. AdamW, β = (0.9, 0.99), gradients clipped to norm 1.
"""

from dataclasses import asdict
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks import common
from benchmarks.reproduce.byte_models import batch_of, corpus
from lpconv.data import demo_checkpoint
from lpconv.optim import LowPrecisionAdamW
from lpconv.optim.storage import VARIANTS
from lpconv.probe.lca import LossChange, LossChangeStep, summarise


def run(variant: str, lr: float, steps: int) -> LossChangeStep:
    play = corpus("heldout")
    cut = len(play) * 2 // 3
    model = LlamaForCausalLM.from_pretrained(demo_checkpoint(), dtype=torch.bfloat16)
    optimizer = LowPrecisionAdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), variant=variant, compiled=False)
    lca = LossChange(model, optimizer, [batch_of("llama", play[cut:], 8, 128, torch.Generator().manual_seed(1))])
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch_of("llama", play[:cut], 8, 128, generator)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with lca.measure():
            optimizer.step()
    return summarise(lca.steps)


def row(variant: str, total: LossChangeStep) -> str:
    change = total.loss_after - total.loss_before
    share = total.rounding_share + 0.0  # no -0.0 %
    return f"| {variant} | {change:+.4f} | {total.rounding:+.4f} | {share:.1%} | {total.closure_error:.0e} |"


def main() -> None:
    parser = common.parser(__doc__, needs_out=True)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args()
    print("| weights | change of the loss | rounding | share | closure error |\n|---|---|---|---|---|")
    runs: dict[str, Any] = {}
    for variant in args.variants:
        total = run(variant, args.lr, args.steps)
        runs[variant] = asdict(total)
        print(row(variant, total), flush=True)
    report = {"command": common.command(), "machine": common.machine(), "lr": args.lr, "runs": runs}
    common.save(report, args.out)


if __name__ == "__main__":
    main()
