"""Example records of `lpconv advise`."""

from typing import Any

from lpconv.advise.options import AdviseOptions
from lpconv.results import AdviceResult, AdviceRow, GapEstimate, LayerPart, Recommendation, to_json

__all__ = ["a_row", "an_advice", "gap"]


def gap(value: float, width: float, count: int = 8) -> GapEstimate:
    return GapEstimate(value=value, low=value - width, high=value + width, count=count)


def a_row(name: str = "unit e4m3fn rows", **changed: Any) -> AdviceRow:
    fields: dict[str, Any] = {
        "purpose": "infer", "name": name, "status": "measured", "size_bytes": 1_000_000, "noise": 1e-3,
        "settings": {"method": "unit", "format": "e4m3fn", "granularity": "row"}, "sqnr_db": 30.2,
        "gap": gap(0.004, 0.002), "figures": {"kl": 2e-3}, "memory_bytes": 5_000_000, "memory_from": "estimate",
        "step_time_s": 0.01, "time_from": "roofline of its Linear layers, from measured peaks", "meets": True,
    }  # fmt: skip
    return AdviceRow(**(fields | changed))


def an_advice(*rows: AdviceRow, **changed: Any) -> AdviceResult:
    first = rows[0] if rows else a_row()
    fields: dict[str, Any] = {
        "name": "demo", "output": "demo-advice", "facts": {"Model": "LlamaForCausalLM"}, "metric": "loss",
        "source_bytes": 4_000_000, "rows": rows or (first, a_row("multipoint int4 4.5 bits", gap=gap(0.05, 0.02))),
        "recommendations": (Recommendation(purpose="infer", row=first.name, words="Convert.", command="lpconv x"),),
        "parts": (LayerPart(tensor="a.weight", format="e4m3fn", bits=8.1, sqnr_db=31.0, divergence=1e-4),),
        "parts_of": first.name, "options": to_json(vars_of(AdviseOptions())),
    }  # fmt: skip
    return AdviceResult(**(fields | changed))


def vars_of(options: AdviseOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}
