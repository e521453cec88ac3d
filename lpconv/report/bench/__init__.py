"""What a bench measured."""
