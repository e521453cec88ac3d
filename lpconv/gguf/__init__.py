"""GGUF, the file format of llama.cpp: its files read like checkpoints, and written.

- `view` represents a file as a checkpoint directory, which `read` makes from the file's metadata.
- `blocks` has the forms of its tensors, and `arranged` their order of elements.
- `model` and `vocabulary` describe a checkpoint as llama.cpp sees it, and `plan` plans the file to write.
"""

from lpconv.errors import check_installed

GGUF = "gguf"  # the kind of the weights, the layout and the `quant_method`
SUFFIX = ".gguf"
WEIGHTS = "model.gguf"  # in an output; in a view of another file, a link to it
# The supported types: (numbers, bytes) of a block along a row.
BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20),
    "Q5_0": (32, 22), "Q5_1": (32, 24), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "MXFP4": (32, 17),
}  # fmt: skip


def check_package(what: str) -> None:
    """Raise the error of `check_installed` unless the package gguf is installed, which `what` needs."""
    check_installed(what, GGUF, extra=GGUF)
