"""Checkpoints on disk: resolving names, reading headers and blocks, writing, journals, side files."""
