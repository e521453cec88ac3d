"""Seeded damage to checkpoints in others' layouts, made by them or by us.

    python -m benchmarks.attack.fuzz_layouts --rounds 200 --save FILE.json

Of each layout so many damaged copies are inspected, opened and decoded whole, restored and converted. Each
either works or ends in an error of ours with exit code 3 or 4 (5 where numbers became NaN), with nothing published. It
ends in exit code 1 with the seed of whatever else happens.
"""

import json
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import common

sys.path.insert(0, str(common.TESTS))

from foreign_files import MAKERS, gpt_oss, make_foreign  # after the path to the helpers of the tests

from lpconv.convert.decode import decode_checkpoint
from lpconv.convert.run import convert
from lpconv.errors import LpconvError
from lpconv.forms.reader import StoredTensors
from lpconv.inspect.headers import inspect
from lpconv.inspect.values import inspect_with_statistics, judge_scales
from lpconv.plan.options import ConvertOptions
from lpconv.progress import Silent

Tensors = dict[str, Tensor]
# What `lpconv convert` writes for transformers itself: the granularity.
OURS = {"--layout transformers, 128x128": "128x128", "--layout transformers, mx": "mx"}
ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    3,
    4,
    1.5,
    2**40,
    "",
    "x",
    [],
    {},
    [1],
    [0, 0],
    [128, 128],
    [-1, 3],
    {"a": 1},
)
DTYPES = (torch.uint8, torch.int8, torch.int32, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64)


def change_config(rng: random.Random, tensors: Tensors, config: dict[str, Any]) -> None:
    """One value of the settings, at any depth, replaced or left out."""
    found: Any = config["quantization_config"]
    while True:
        if not found:
            return
        key = rng.choice(list(found) if isinstance(found, dict) else range(len(found)))
        if isinstance(found[key], (dict, list)) and found[key] and rng.random() < 0.8:
            found = found[key]
            continue
        if isinstance(found, dict) and rng.random() < 0.3:
            del found[key]
        else:
            found[key] = rng.choice(ODD)
        return


def change_tensor(rng: random.Random, tensors: Tensors, config: dict[str, Any]) -> None:
    """One tensor left out, renamed, cut, turned, read as another dtype, or filled with other bytes."""
    name = rng.choice([n for n in sorted(tensors) if "proj" in n] or sorted(tensors))
    x = tensors.pop(name)
    what = rng.randrange(9)
    if what == 0:
        return
    if what == 1:
        name = name[: -rng.randrange(1, 6)] + rng.choice(["", "x", "_scale", "_packed"])
    elif what == 2 and x.numel():
        x = x.narrow(rng.randrange(x.ndim), 0, 1) if x.ndim else x
    elif what == 3:
        x = x.t() if x.ndim == 2 else x.reshape(-1)
    elif what == 4:
        x = x.unsqueeze(rng.randrange(x.ndim + 1))
    elif what == 5:
        wanted = rng.choice(DTYPES)
        x = x.contiguous().view(-1).view(torch.uint8)
        x = x[: x.numel() // wanted.itemsize * wanted.itemsize].view(wanted)
    elif what == 6:
        x = x.float().to(rng.choice(DTYPES))
    elif what == 7 and x.numel():
        raw = x.contiguous().clone().view(-1).view(torch.uint8)
        for _ in range(rng.randrange(1, 30)):
            raw[rng.randrange(raw.numel())] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        x = raw.view(x.dtype).view(x.shape)
    else:
        x = x[:0] if x.ndim else x
    tensors[name] = x.contiguous().clone()


def swap_tensors(rng: random.Random, tensors: Tensors, config: dict[str, Any]) -> None:
    """Two tensors under each other's names."""
    names = sorted(tensors)
    if len(names) > 1:
        a, b = rng.sample(names, 2)
        tensors[a], tensors[b] = tensors[b], tensors[a].clone()


def change_scale(rng: random.Random, tensors: Tensors, config: dict[str, Any]) -> None:
    """A scale that is another one, or inverted."""
    name = rng.choice([n for n in sorted(tensors) if "scale" in n] or sorted(tensors))
    x = tensors[name].float()
    x = 1 / x if rng.random() < 0.3 else x * rng.choice((2.0, 0.25, 3.0, 1e-30, 1e30, -1.0))
    tensors[name] = x.to(tensors[name].dtype)


DAMAGE = (change_scale, change_config, change_tensor, change_tensor, change_tensor, swap_tensors)


def damaged(source: Path, target: Path, rng: random.Random) -> None:
    """A copy with one to three kinds of damage, or flipped bits of the file itself."""
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    for damage in rng.sample(DAMAGE, rng.randrange(1, 4)):
        if tensors:
            damage(rng, tensors, config)
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors")
    if rng.random() < 0.1:
        data = bytearray((target / "model.safetensors").read_bytes())
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(min(len(data), 4000))] ^= 1 << rng.randrange(8)
        (target / "model.safetensors").write_bytes(data)


def read_all(path: Path) -> None:
    """Every weight, decoded."""
    with StoredTensors.open(path) as stored:
        for name in stored.forms:
            stored.tensor(name)


def outcome(do: Callable[[], object]) -> str:
    """What a call ends in: ``works`` or an exit code; any other exception passes."""
    try:
        do()
    except LpconvError as e:
        if e.exit_code not in (3, 4, 5) or not e.hint:
            raise
        return f"exit {e.exit_code}"
    return "works"


def calls(path: Path, out: Path) -> dict[str, Callable[[], object]]:
    """What is done with a damaged checkpoint."""
    quick = ConvertOptions(method="collage", residual="exact16", verify="weights", workers=1)
    return {
        "inspect": lambda: judge(path),
        "inspect --stats": lambda: inspect_with_statistics(path, Silent()),
        "read": lambda: read_all(path),
        "restore": lambda: decode_checkpoint(path, out / "plain", dtype="fp32", force=False, progress=Silent()),
        "convert": lambda: convert(str(path), out / "collage", quick),
    }


def judge(path: Path) -> None:
    """As the command does."""
    found = inspect(path)
    if not found.problems:
        judge_scales(found, path)


def fuzz(layout: str, source: Path, rounds: int) -> Counter[str]:
    """How often each call ended in what."""
    found: Counter[str] = Counter()
    for seed in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            folder, rng = Path(name), random.Random(f"{layout} {seed}")
            (folder / "model").mkdir()
            damaged(source, folder / "model", rng)
            for what, do in calls(folder / "model", folder).items():
                try:
                    ended = outcome(do)
                except Exception as e:
                    raise SystemExit(f"{layout}, seed {seed}, {what}: {type(e).__name__}: {e}") from e
                found[f"{what}: {ended}"] += 1
                left = {"restore": "plain", "convert": "collage"}.get(what)
                if left and ended != "works" and (folder / left).exists():
                    raise SystemExit(f"{layout}, seed {seed}, {what}: published what it refused")
    return found


def small_source(folder: Path) -> Path:
    """A plain checkpoint with the weights of one small layer."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"self_attn.q_proj": (128, 64), "self_attn.k_proj": (64, 64), "mlp.down_proj": (64, 256)}
    weights = {
        f"model.layers.0.{n}.weight": torch.randn(shape, generator=generator) * 0.05 for n, shape in shapes.items()
    }
    weights["model.norm.weight"] = torch.ones(64)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    return folder


def small_model(folder: Path) -> Path:
    """A plain model of whole blocks: its class says which weights are Linear's."""
    if not folder.exists():
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 64, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, dtype="bfloat16"))
        model.bfloat16().save_pretrained(folder)
    return folder


def make(layout: str, plain: Path, target: Path) -> Path:
    """A healthy checkpoint of a layout."""
    if layout in OURS:
        options = ConvertOptions(layout="transformers", verify="none", format="e4m3fn", granularity=OURS[layout])
        convert(str(small_model(plain.with_name("llama"))), target, options)
        return target
    if layout != "mxfp4":
        return make_foreign(layout, plain, target)
    shutil.copytree(plain, target)
    x = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0))
    save_file(gpt_oss("model.layers.0.mlp.experts.down_proj", x), target / "model.safetensors")
    (target / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    return target


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="damaged copies of each layout")
    parser.add_argument("--layouts", nargs="*", default=[*MAKERS, "mxfp4", *OURS])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as name:
        plain = small_source(Path(name) / "plain")
        for layout in args.layouts:
            results[layout] = dict(sorted(fuzz(layout, make(layout, plain, Path(name) / layout), args.rounds).items()))
            print(layout, results[layout], flush=True)
    common.save({"rounds": args.rounds, "outcomes": results}, args.out)


if __name__ == "__main__":
    main()
