"""Short fine-tuning in low precision beside a high-precision twin, on `transformers.Trainer`."""
