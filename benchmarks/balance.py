"""Do powers of two that are moved between layers make a layout lose less? Measured on the demo model, a Llama.

    python benchmarks/balance.py --out benchmarks/results/balance.json

A norm hands a channel on to q, k and v or to gate and up, and `up` hands one on to `down`: there a channel may be made
larger by a power of two, and the column that meets it smaller. The fp32 logits stay bit for bit, which is asserted.
Columns are made alike so: 2^k is what is nearest to (RMS of the column / median of these)^strength. Then each layout is
written, and figures are those of `granularity_peers.py`: Σx² / Σ(x - x̂)² over all weights, in dB, KL of the source to
the result in nats per token of the held-out plays, and the loss of the next token.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from granularity import FORMS
from granularity_peers import LENGTH, WINDOWS, figures, said, sqnr
from torch import Tensor

import lpconv
from lpconv.convert.options import ConvertOptions
from lpconv.convert.run import convert
from lpconv.data import demo_checkpoint, demo_text
from lpconv.forms.reader import StoredTensors
from lpconv.models.tokenizer import read_tokenizer, tokenize

STRENGTHS = (0.0, 0.5, 1.0)


def powers(consumers: list[Tensor], strength: float) -> Tensor:
    """2^k of each column."""
    rms = torch.cat(consumers).double().square().mean(0).sqrt()
    return torch.exp2((strength * (rms / rms.median()).log2()).round()).float()


def balance(model: Any, strength: float) -> int:
    """Move powers of two in place; gives how many channels were moved."""
    moved = 0
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for producer, consumers in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
                (mlp.up_proj, (mlp.down_proj,)),
            ):
                power = powers([c.weight for c in consumers], strength)
                producer.weight.mul_(power if producer.weight.dim() == 1 else power[:, None])
                for consumer in consumers:
                    consumer.weight.div_(power)
                moved += int((power != 1).sum())
    return moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out, path = parser.parse_args().out, demo_checkpoint()
    tokenizer, found = read_tokenizer(path), {}
    for strength in STRENGTHS:
        model = lpconv.load(path, dtype=torch.float32)
        ids = tokenize(demo_text("heldout"), tokenizer, seq_len=LENGTH, vocab_size=model.config.vocab_size)
        windows = ids.windows[:WINDOWS]
        source = said(model, windows)
        row: dict[str, Any] = {"channels": balance(model, strength)}
        assert torch.equal(said(model, windows), source), "these pairs change no bit"
        plain = {n: p.detach().clone() for n, p in model.named_parameters()}
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            model.save_pretrained(folder / "source")
            for i, (name, asked) in enumerate(FORMS):
                options = ConvertOptions(layout="compressed-tensors", verify="none", **asked)  # type: ignore[arg-type]
                result = convert(str(folder / "source"), folder / str(i), options)
                with StoredTensors.open(folder / str(i)) as stored:
                    got = {t.name: stored.tensor(t.name).float() for t in result.tensors if t.action == "convert"}
                with torch.no_grad():
                    for n, x in {**plain, **got}.items():
                        model.get_parameter(n).copy_(x)
                answer = figures(source, said(model, windows), windows, has_head=True)
                row[name] = {"sqnr_db": sqnr(plain, got), **answer}
        found[str(strength)] = row
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
