"""Multi-component floats: one number kept as an unevaluated sum of two or three low-precision ones."""
