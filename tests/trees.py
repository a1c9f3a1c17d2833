"""Random draft trees for property tests, and the slow obvious forms of what is computed on them."""

from hypothesis import strategies as st

VOCAB = 5

Tree = tuple[list[int], list[int]]  # tokens and parents of one row


@st.composite
def trees(draw, nodes: int | None = None, empty: bool = True) -> Tree:
    """Parents come before their children and siblings differ; some nodes are empty, and some hang below empty ones."""
    count = nodes or draw(st.integers(1, 12))
    tokens, parents = [draw(st.integers(0, VOCAB - 1))], [-1]
    for index in range(1, count):
        parent = draw(st.integers(-1 if empty else 0, index - 1))
        taken = {tokens[i] for i in range(1, index) if parents[i] == parent}
        free = [token for token in range(VOCAB) if token not in taken]
        if parent >= 0 and not free:
            parent = index - 1  # whose children are still to come
            free = list(range(VOCAB))
        tokens.append(draw(st.sampled_from(free or [0])))
        parents.append(parent)
    return tokens, parents


@st.composite
def batches(draw, rows: int = 3) -> tuple[list[list[int]], list[list[int]]]:
    """Several trees with the same number of nodes: tokens and parents, [batch][nodes]."""
    count = draw(st.integers(1, 12))
    drawn = [draw(trees(nodes=count)) for _ in range(rows)]
    return [tokens for tokens, _ in drawn], [parents for _, parents in drawn]


def path_of(parents: list[int], node: int) -> list[int]:
    """From the topmost ancestor down to the node itself, by following parents."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def slow_walk(tokens: list[int], parents: list[int], picks: list[int], max_depth: int) -> list[int]:
    """The kept path: from the root to the child that equals the pick, as long as there is one."""
    path = [0]
    while len(path) <= max_depth:
        children = [i for i in range(1, len(tokens)) if parents[i] == path[-1] and tokens[i] == picks[path[-1]]]
        if not children:
            break
        path.append(children[0])
    return path
