"""Compiles what lpconv runs on a GPU, on a machine without one; see `__main__`."""
