"""The version of lpconv. It stands at the ground, so that nothing has to ask the whole package for it."""

__version__ = "0.1.0"
