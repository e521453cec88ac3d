"""The tables of this folder's README, from the recorded results (see `benchmarks.tables`)."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.common import markdown, recorded
from lpconv.optim import LowPrecisionAdamW, base

MODELS = {
    "SmolLM2-135M": LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, tie_word_embeddings=True,
    ),
    "Llama-7B": LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000,
    ),
}  # fmt: skip
# Products per second in bf16 and fp8, and bytes per second: NVIDIA's data sheets (SXM, dense products).
GPUS = {
    "A100": (312e12, 0.0, 2.039e12), "H100": (989e12, 1979e12, 3.35e12), "H200": (989e12, 1979e12, 4.8e12),
    "B200": (2250e12, 4500e12, 8e12),
}  # fmt: skip
TOKENS, WIDTH = 8192, 4096
LAUNCH_MS = 40e-3  # time in which the host launches a compiled step, measured on a CPU


def _rows(target: str | None = None) -> list[dict[str, Any]]:
    return [r for r in recorded("cross_compile")["rows"] if target in (None, r["target"])]


def machine_code() -> str:
    """One row per path, with the registers on every target."""
    rows = _rows()
    paths = list(dict.fromkeys(r["path"] for r in rows))
    by_path = groupby(sorted(rows, key=lambda r: paths.index(r["path"])), lambda r: str(r["path"]))
    head = ("path", "kernels", "bytes per element, least", "dropped roundings", "fused", "registers, by target")
    return markdown(head, (_line(path, {r["target"]: r for r in same}) for path, same in by_path)) + _notes(rows)


def _line(path: str, by_target: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    row = by_target.get("sm_90") or next(iter(by_target.values()))
    moved = [f"{row[k] / row['elements']:.2f}" for k in ("bytes_moved", "least_bytes") if "elements" in row]
    dropped, fused = "", ""
    if "widened" in row:
        wanted = row["wanted_widened"]
        dropped, fused = f"{max(0, wanted - row['widened']):.0f} of {wanted}", str(row["fused"])
    registers = ", ".join(_registers(r) for r in by_target.values())
    return path, " + ".join(map(str, row["kernels"])), ", ".join(moved), dropped, fused, registers


def _registers(row: dict[str, Any]) -> str:
    if "not_supported" in row:
        return "—"
    return f"{row['registers']}" + (f" (spills {row['spilled']} bytes)" if row["spilled"] else "")


def _notes(rows: list[dict[str, Any]]) -> str:
    targets = ", ".join(dict.fromkeys(r["target"] for r in rows))
    spilling = {name for r in rows for name in r.get("spills_in", ())}
    are_rotary = all({"cos", "sin"} <= set(name.split("_")) for name in spilling)
    words = (
        "compute the rotary embeddings of transformers' code" if are_rotary else f"are {', '.join(sorted(spilling))}"
    )
    refused = [r for r in rows if "not_supported" in r]
    where = ", ".join(sorted({r["target"] for r in refused}))
    return (
        f"\nTargets: {targets}. "
        + (f"Kernels that spill {words}. " if spilling else "No kernel spills. ")
        + f"Triton rejects {len({r['path'] for r in refused})} paths for {where} (—): lpconv runs them eagerly.\n"
    )


def fp8_training() -> str:
    """Kernels of layers and models on sm_90, by purpose."""
    purposes = ("cast", "scale", "decode", "other")
    rows = []
    for r in (r for r in _rows("sm_90") if r["path"].startswith("linear") or " step " in r["path"]):
        reads = " + ".join(", ".join(map(str, counts.values())) for counts in r.get("reads", ()) if counts)
        counts = (str(r["purposes"].get(p, 0)) for p in purposes)
        rows.append((r["path"], " + ".join(map(str, r["kernels"])), *counts, reads))
    return markdown(("path", "kernels", "casts", "scales", "decoding", "other", "reads"), rows)


def optimizer_launches() -> str:
    """Launches of one optimizer step, with the limits for CPUs and for GPUs."""
    (step,) = [r for r in _rows("sm_90") if r["path"] == "step adamw plus"]
    per_element = step["bytes_moved"] / step["elements"]
    rows = []
    for name, config in MODELS.items():
        with torch.device("meta"):
            params = list(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).parameters())
        for device in ("cpu", "cuda"):
            calls, copies, copied = _launches(params, device)
            traffic_ms = 1e3 * (per_element * sum(p.numel() for p in params) + 12 * copied) / GPUS["H100"][2]
            times = f"{LAUNCH_MS * (calls + copies):.1f}", f"{traffic_ms:.1f}"
            limit = f"{base._LIMITS[device][0]:,}"
            rows.append((name, str(len(params)), limit, str(calls), str(copies), *times))
    return markdown(("model", "tensors", "shared up to", "kernel calls", "copies", "host, ms", "H100 memory, ms"), rows)


def _launches(params: list[torch.nn.Parameter], device: str) -> tuple[int, int, int]:
    """Kernel calls, copies and copied elements of one step, with the limits for `device`."""
    for p in params:
        p.grad = torch.empty_like(p)
    with (
        patch.dict(base._LIMITS, meta=base._LIMITS[device]),
        patch.object(LowPrecisionAdamW, "_run_kernel") as run,
        patch("torch._foreach_copy_") as copy,
    ):
        LowPrecisionAdamW(params, variant="plus").step()
    copied = sum(t.numel() for call in copy.call_args_list for t in call.args[0])
    return run.call_count, copy.call_count, copied // 3


def bounds() -> str:
    """Least times in ms, from the bytes of the compiled kernels."""
    moved = {r["path"]: r["bytes_moved"] / r["elements"] for r in _rows("sm_90") if "elements" in r}
    steps = (p for p in moved if p.startswith("step adamw") and not p.endswith(("by bits", "without options")))
    rows = [_bound(f"{path}, ms per billion", [1e9 * moved[path] / b for *_, b in GPUS.values()]) for path in steps]
    work, operands = 6 * TOKENS * WIDTH**2, 2 * TOKENS * WIDTH + WIDTH**2
    rows.append(_bound("layer in bf16, ms", [work / bf16 for bf16, *_ in GPUS.values()]))
    for kind in ("static", "tensor", "row along rows"):
        cast = operands * (moved[f"cast {kind}"] + 1)
        times = [work / fp8 + cast / b if fp8 else None for _, fp8, b in GPUS.values()]
        rows.append(_bound(f"layer in fp8, {kind.split()[0]} scales, ms", times))
    return markdown(("", *GPUS), rows)


def _bound(what: str, seconds: Iterable[float | None]) -> tuple[str, ...]:
    return what, *("—" if s is None else f"{1e3 * s:.2f}" for s in seconds)
