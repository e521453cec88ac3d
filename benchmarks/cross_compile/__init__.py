"""Compile lpconv's GPU code on a machine without a GPU; see `__main__`."""
