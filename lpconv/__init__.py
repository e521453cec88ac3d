"""lpconv rewrites Hugging Face checkpoints into low-precision forms that still are the model.

Importing this package loads neither torch nor transformers. The pieces live in sub-packages, lowest layer first:
`formats`, `report`, `mcf`, `kernels`, `checkpoint`, `scaled`, `optim`, `methods`, `convert`, `hf`, `cli`.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
