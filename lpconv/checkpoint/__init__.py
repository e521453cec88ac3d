"""Checkpoints on disk: resolve a name, read headers and blocks, write, journal, side files."""
