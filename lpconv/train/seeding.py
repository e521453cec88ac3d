"""One seed per step, so that what is drawn in a step depends on nothing before it."""

import hashlib

import torch

__all__ = ["seed_step"]


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seed torch's generators from all three."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)
