"""The propagation rules: one file per class of ATen ops, collected in `table`."""
