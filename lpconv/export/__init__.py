"""Converted and plain checkpoints as ONNX, for runtimes that know nothing of lpconv."""
