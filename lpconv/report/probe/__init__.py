"""What a probe found."""
