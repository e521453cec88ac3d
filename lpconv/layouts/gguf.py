"""GGUF of llama.cpp as a layout; `lpconv.gguf` has the rest."""

from lpconv.gguf import GGUF, WEIGHTS
from lpconv.gguf.blocks import GgufBlocks, find_gguf
from lpconv.layouts.layout import Layout, Scheme

_OPENS = "llama.cpp"
LAYOUT = Layout(
    name=GGUF,
    methods=(GGUF,),
    read=find_gguf,
    form=GgufBlocks,
    file=WEIGHTS,
    mixes_types=True,
    schemes=(
        Scheme("GGUF_F16", "fp16", "tensor", 16, _OPENS, "llama.cpp without loss, if fp16 holds the weights"),
        Scheme("GGUF_BF16", "bf16", "tensor", 16, _OPENS, "llama.cpp, for weights that are bf16"),
        Scheme("GGUF_Q8_0", "int8", "group:32", 8.5, _OPENS, "llama.cpp, 8-bit integers"),
        Scheme("GGUF_Q4_0", "int4", "group:32", 4.5, _OPENS, "llama.cpp, 4-bit integers"),
        Scheme("GGUF_MXFP4", "e2m1", "mx", 4.25, _OPENS, "llama.cpp, 4-bit floats"),
    ),
    opening="This directory has a GGUF file for llama.cpp: {codes}. `llama-cli -m PATH/model.gguf` runs it, as do "
    "programs that use llama.cpp; lpconv is not needed. In Python, with `pip install llama-cpp-python`:",
    python=("from llama_cpp import Llama", "model = Llama({path!r})"),
    tag="gguf",
    library="gguf",
)
