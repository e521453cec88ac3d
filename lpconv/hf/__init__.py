"""Importing this package lets transformers' `from_pretrained` open what `lpconv convert` wrote."""

from lpconv.hf.load import load
from lpconv.hf.plugin import LpconvConfig, LpconvQuantizer, register

__all__ = ["LpconvConfig", "LpconvQuantizer", "load", "register"]

register()
