"""Number formats as values, rounding, scales and exponent histograms."""
