"""The propagation rules: one file per class of ATen ops, collected in `table`.

A rule's docstring gives its result as a (data, scale) pair. d_x and s_x are the data and scale of an operand x, d and s
of the only operand, g the incoming gradient, r the factor of a contraction.
"""
