"""DraftTree: ancestors, empty nodes, and which cache slots a node may see."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfdraft.generate import tree_visibility
from selfdraft.tree import DraftTree
from tests.trees import batches, path_of


def tree_of(tokens: list[list[int]], parents: list[list[int]]) -> DraftTree:
    return DraftTree(torch.tensor(tokens), torch.tensor(parents))


@settings(deadline=None)
@given(batches())
def test_ancestors_are_those_found_by_following_parents(batch):
    reach = tree_of(*batch).reach
    for row, parents in enumerate(batch[1]):
        for node in range(len(parents)):
            assert reach[row, node].nonzero().flatten().tolist() == sorted(path_of(parents, node))


@settings(deadline=None)
@given(batches())
def test_only_the_root_and_nodes_with_a_parent_are_nodes(batch):
    expected = [[node == 0 or parent >= 0 for node, parent in enumerate(parents)] for parents in batch[1]]
    assert tree_of(*batch).is_node.tolist() == expected


def test_ancestors_of_the_longest_chains_are_complete():
    for nodes in (1, 2, 3, 8, 9, 64, 65):
        chain = DraftTree.chain(torch.zeros(2, nodes, dtype=torch.long))
        assert chain.reach.equal(torch.ones(2, nodes, nodes, dtype=torch.bool).tril())
        assert chain.is_node.all()


@settings(deadline=None)
@given(batches(), st.data())
def test_a_node_sees_the_committed_slots_and_its_own_path_alone(batch, data):
    tree = tree_of(*batch)
    rows, nodes = tree.tokens.shape
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
    width = max(lengths) + nodes + data.draw(st.integers(0, 5))
    reach = tree.reach
    visible, positions = tree_visibility(torch.tensor(lengths), reach, reach.sum(dim=2) - 1, width)
    for row, (length, parents) in enumerate(zip(lengths, batch[1], strict=True)):
        for node in range(nodes):
            path = path_of(parents, node)
            expected = [slot < length or slot - length in path for slot in range(width)]
            assert visible[row, node].tolist() == expected
            for depth, each in enumerate(path):
                assert positions[row, length + each] == length + depth
        assert positions[row, :length].tolist() == list(range(length))
