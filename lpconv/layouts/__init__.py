"""The layouts of checkpoints: one file per tool that reads and writes them, listed in `LAYOUTS`.

`lpconv.layouts.layout` explains the records; `headers` recognises a checkpoint's layout, and `reader` opens it.
"""

from dataclasses import replace

from lpconv.layouts import compressed_tensors, gguf, lpconv, mlx, transformers_fp8
from lpconv.layouts.gpt_oss import GPT_OSS
from lpconv.layouts.gptq_awq import AWQ, GPTQ
from lpconv.layouts.layout import Layout, Scheme
from lpconv.layouts.modelopt import MODELOPT

__all__ = ["LAYOUTS", "READ", "SCHEMES", "Layout", "Scheme"]

LAYOUTS = {
    layout.name: layout
    for layout in (
        lpconv.LAYOUT, compressed_tensors.LAYOUT, transformers_fp8.LAYOUT, mlx.LAYOUT, gguf.LAYOUT,
        GPTQ, AWQ, MODELOPT, GPT_OSS,
    )
}  # fmt: skip
# Schemes by name, lpconv's own last. Upper-case names without a prefix are presets of compressed-tensors, as in vLLM.
SCHEMES = {s.name: replace(s, layout=x.name) for x in LAYOUTS.values() if x is not lpconv.LAYOUT for s in x.schemes}
SCHEMES |= {s.name: s for s in lpconv.LAYOUT.schemes}
# Third-party layouts by the values of `quant_method` that name them.
READ = {method: layout for layout in LAYOUTS.values() for method in layout.methods if layout is not lpconv.LAYOUT}
