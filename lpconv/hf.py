"""Importing this module lets transformers' `from_pretrained` open outputs of `lpconv convert`."""

from lpconv.models.load import load
from lpconv.models.plugin import LpconvConfig, LpconvQuantizer, register

__all__ = ["LpconvConfig", "LpconvQuantizer", "load", "register"]

register()
