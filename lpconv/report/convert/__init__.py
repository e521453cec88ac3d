"""What a conversion planned, did, verified and compares with, and what a checkpoint holds."""
