"""Time `lpconv inspect` on a checkpoint of many shards: 300 files, 12 tensors each, as a 300-layer model would have.

python -m benchmarks.inspect_headers [--shards 300] [--rounds 5]
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lpconv.checkpoint.header import TensorInfo, encode_header

TENSORS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
           "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm", "a", "b", "c")  # fmt: skip


def make(folder: Path, shards: int) -> None:
    """Sparse files: the headers are real, the data are holes."""
    weight_map = {}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    for i in range(shards):
        name, position, infos = f"model-{i + 1:05d}-of-{shards:05d}.safetensors", 0, []
        for tensor in TENSORS:
            end = position + 2 * 1024 * 1024
            full = f"model.layers.{i}.{tensor}.weight"
            infos.append(TensorInfo(name=full, dtype="BF16", shape=(1024, 1024), begin=position, end=end))
            weight_map[full], position = name, end
        header = encode_header(infos, {"format": "pt"})
        with (folder / name).open("wb") as f:
            f.write(header)
            f.truncate(len(header) + position)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), args.shards)
        wall, cpu = [], []
        for _ in range(args.rounds):
            before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "lpconv", "inspect", folder, "--json"], check=True, capture_output=True
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            wall.append(time.perf_counter() - started)
            cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    result = {
        "shards": args.shards,
        "median_wall_s": statistics.median(wall),
        "median_cpu_s": statistics.median(cpu),
        "wall_s": wall,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
