"""The tables of docs/export.md, from the recorded results of this group (see `benchmarks.tables`)."""

from collections.abc import Iterator
from typing import Any

from benchmarks.common import markdown, recorded

Row = tuple[str, ...]


def _figure(nats: float) -> str:
    return "0" if nats == 0 else f"{nats:.1g}" if nats < 0.001 else f"{nats:.3f}" if nats < 0.1 else f"{nats:.2f}"


def _gap(gap: dict[str, float]) -> str:
    return f"{_figure(gap['mean'])}, at most {_figure(gap['largest'])}"


def _vllm() -> Iterator[Row]:
    rows = recorded("vllm")["rows"]
    release = next(r["version"] for r in rows if "version" in r)
    for r in rows:
        runtime = f"vLLM {release}, {r['dtype']}, {r['cpu']}"
        layout = f"compressed-tensors, {r['case']}" if r["options"] else "unquantised"
        if "failed" in r:
            yield layout, r["model"], runtime, "no", "", f"`{r['failed']}`"
            continue
        tokens = f"{r['equal_first_tokens']} of {r['tokens']}"
        yield layout, r["model"], runtime, "yes", tokens, _gap(r["difference"])


def _mlx() -> Iterator[Row]:
    result = recorded("mlx")
    for r in result["rows"]:
        tokens = f"{r['equal_first_tokens']} of {r['tokens']}"
        runtime = f"mlx-lm {r['versions']['mlx-lm']}, float32"
        gap = _gap(r["difference"]) if "difference" in r else ""
        yield f"mlx, {r['scheme']}", result["model"], runtime, "yes", tokens, gap


def _llama_cpp() -> Iterator[Row]:
    for r in recorded("llama-cpp")["rows"]:
        layout, cache = f"gguf, {r['scheme']}", {"F32": "fp32", "F16": "fp16"}[r["cache"]]
        if "failed" in r:
            yield layout, r["model"], f"llama.cpp, cache in {cache}", "no", "", f"`{r['failed']}`"
            continue
        runtime, tokens = f"llama.cpp {r['release']}, cache in {cache}", f"{r['equal_first_tokens']} of {r['tokens']}"
        yield layout, r["model"], runtime, "yes", tokens, _gap(r["difference"])


def _onnx() -> Iterator[Row]:
    for r in recorded("onnx-cache")["rows"]:
        layout, runtime = f"ONNX with a cache, {r['form']}", f"{r['runtime']} {r.get('version', '')}".strip()
        if "failed" in r:
            yield layout, r["model"], runtime, "no", "", f"`{r['failed']}`"
            continue
        tokens = f"{r['equal_tokens']} of {r['of']}"
        yield layout, r["model"], runtime, "yes", tokens, _gap(r["difference"]) if "difference" in r else ""


def _bits() -> Iterator[Row]:
    """One row per case, with the models as columns."""
    rows = recorded("bits")["rows"]
    models = list(dict.fromkeys(r["model"] for r in rows))
    yield "layout", "decoded by", "returns", *models
    for layout, case in dict.fromkeys((r["layout"], r["case"]) for r in rows):
        by_model = {r["model"]: r for r in rows if (r["layout"], r["case"]) == (layout, case)}
        counts = [_count(by_model[m]) if m in by_model else "not run" for m in models]
        first = next(iter(by_model.values()))
        dtypes = sorted({r["dtype"] for r in by_model.values() if "dtype" in r})
        yield f"{layout}, {case}", f"{first['decoder']} {first['version']}", ", ".join(dtypes), *counts


def _count(row: dict[str, Any]) -> str:
    return "refused" if "refused" in row else f"{row['equal']} of {row['read']}"


def tables() -> str:
    """How close the runtimes come, and how many weights they decode to lpconv's bits."""
    head = ("written", "model", "runtime", "served", "equal greedy tokens", "log-probabilities differ by, in nats")
    served = (row for rows in (_vllm, _mlx, _llama_cpp, _onnx) for row in rows())
    bits, *counts = _bits()
    return f"{markdown(head, served)}\n{markdown(bits, counts)}"
