"""What a fine-tuning did beside its twin."""
