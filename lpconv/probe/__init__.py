"""What a number format would do to a model: exponent histograms of every layer's tensors, forward and backward."""
