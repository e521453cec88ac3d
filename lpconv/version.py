"""The version of lpconv, in a module without imports so that reading it does not import the package."""

__version__ = "0.1.0"
