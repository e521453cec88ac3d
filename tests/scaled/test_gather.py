"""What FSDP2 sums of scaled gradients: the bits of their values, without a copy of them."""

import math

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from lpconv.scaled.gather import copy_to_reduce
from lpconv.scaled.pair import Scaled, value
from lpconv.train.memory import largest_sum, profiled_memory

assert _fsdp_collectives  # it makes the op
CHUNK_CAT = torch.ops.fsdp.chunk_cat.default


def test_values_are_copied_in_bit_for_bit() -> None:
    """Uneven rows, static scales and one that data set, a plain gradient, and what is not finite."""
    specials = torch.tensor([math.inf, -math.inf, math.nan, -0.0, 1e-38])
    gradients = [
        Scaled(torch.randn(10, 7).bfloat16(), 2.0**-20),
        torch.randn(5).bfloat16(),
        Scaled(torch.randn(3, 4, 2).bfloat16(), torch.tensor(2.0**9)),
        Scaled(specials.bfloat16(), 0.25),
    ]
    rows = [(10, 7), (5, 1), (3, 8), (5, 1)]
    for num_ranks in (1, 2, 3, 4):
        width = sum(math.ceil(n / num_ranks) * size for n, size in rows)
        expected, found = torch.full((num_ranks, width), 9.0), torch.full((num_ranks, width), 7.0)
        CHUNK_CAT([value(g).float() for g in gradients], 0, num_ranks, out=expected)
        copy_to_reduce(CHUNK_CAT, [gradients, 0, num_ranks], {"out": found})
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_gradients_are_not_widened_beside_the_buffer() -> None:
    gradients = [Scaled(torch.randn(256, 256).bfloat16(), 0.5) for _ in range(4)]
    buffer = torch.empty(4, 256 * 256)
    with profiled_memory() as seen:
        copy_to_reduce(CHUNK_CAT, [gradients, 0, 4], {"out": buffer})
    assert largest_sum(seen) < buffer.nbytes // 2
