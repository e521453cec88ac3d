"""Random graphs of ops give plain torch's results and gradients on scaled tensors; see `graphs`."""

from collections import Counter
from random import Random

import pytest
import torch

from lpconv.scaled.pair import Role
from tests.faults import graphs
from tests.faults.graphs import Graph, Leaf, Step

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's warnings of what the graphs do
GRAPHS, BATCHES = 100, 8
SEED = 1000  # other graphs than a run by hand begins with


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_graphs_equal_plain_torch(batch: int) -> None:
    found = [f"graph {n}: {what}\n{g}" for n, g, what in graphs.failures(GRAPHS, SEED + batch * GRAPHS, Counter())]
    assert not found, "\n\n".join(found)


def test_graphs_are_deep_and_their_ops_are_rarely_refused() -> None:
    refusals: Counter[str] = Counter()
    steps = [step for seed in range(100) for step in graphs.draw(Random(seed), refusals)[0].steps]
    assert len(steps) > 700
    assert len({step.op for step in steps}) > 120
    assert refusals.total() < len(steps) / 4


def test_a_wrong_rule_is_found_and_its_graph_is_shrunk_to_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from lpconv.scaled import rules

    layout = rules.RULES[torch.ops.aten.neg.default]
    monkeypatch.setitem(rules.RULES, torch.ops.aten.neg.default, lambda call, x: layout(call, x.with_data(x.data + 1)))
    leaf = Leaf("float32", (4, 6), 0, 2.0, Role.ACTIVATION)
    steps = (Step("relu", (0,), ()), Step("neg", (1,), ()), Step("add number", (2,), (1.0,)), Step("abs", (0,), ()))
    small = graphs.shrink(Graph((leaf,), steps))
    assert [step.op for step in small.steps] == ["neg"]
    assert "result 1 is" in str(graphs.difference(small))
