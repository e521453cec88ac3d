"""Files that ship with lpconv: a tiny checkpoint trained by this project, and public-domain text to train and test it.

Both are ordinary files in the package, so their paths work in an installed wheel. `README.md` in this folder describes
their origin; `benchmarks/reproduce/train_demo.py` makes the checkpoint again. `texts.py` reads texts of any kind.
"""

from importlib.resources import files
from pathlib import Path

from lpconv.lookup import find

__all__ = ["SELF", "demo_checkpoint", "demo_text", "text_at"]

SELF = "self"  # names the text that a model writes itself for its calibration
TEXTS = {"train": "train.txt", "heldout": "heldout.txt"}


def demo_checkpoint() -> Path:
    """Directory of the demo checkpoint: a byte-level Llama in Hugging Face form, fp32 safetensors, tied embeddings.

    Its `metrics.json` has the figures of its training, held-out bits per byte first.
    """
    return Path(str(files(__name__) / "demo"))


def demo_text(split: str) -> Path:
    """The ASCII text file of `split`: plays that the demo checkpoint was trained on (`train`), or one that it was not
    (`heldout`).

    In `train`, a line ``<|endoftext|>`` separates two plays; the demo tokenizer reads it as one id. Raises `UsageError`
    for any other split.
    """
    return Path(str(files(__name__) / "text" / find("text split", split, TEXTS)))


def text_at(name: str) -> Path:
    """The text file for a name: a path, or ``demo`` for the plays that the demo checkpoint was trained on."""
    return demo_text("train") if name == "demo" else Path(name)
