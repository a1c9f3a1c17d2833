"""N-gram lookup: equal to the slow obvious search, whatever the rounds were."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import selfdraft
from selfdraft import Plan
from selfdraft.drafters import ngram
from selfdraft.drafters.base import Observed
from selfdraft.drafters.ngram import Ngram
from selfdraft.sampling import Noise
from tests.models import prompts, tiny

SILENT = Noise(torch.zeros(1, dtype=torch.long), 0.0)


def slow_lookup(text: list[int], longest: int, depth: int) -> list[int]:
    """What followed the longest earlier match of the end of the text; the latest one among equals."""
    for size in range(longest, 0, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if len(text) > size and text[end - size : end] == text[-size:]:
                return text[end : end + depth]
    return []


def drafts(tree) -> list[list[int]]:
    """The drafted tokens of every row, after a look at the shape: a chain, then nothing but empty nodes."""
    found = []
    for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        count = sum(parent >= 0 for parent in parents)
        assert parents == [-1, *range(count), *[-1] * (len(parents) - 1 - count)]
        found.append(tokens[1 : count + 1])
    return found


def observed(texts: list[list[int]], first: list[int], last: list[int]) -> Observed:
    """What a drafter is told when the tokens first..last-1 of each row were committed, the padding in front."""
    time = max(end - begin for begin, end in zip(first, last, strict=True))
    tokens, positions = [], []
    for text, begin, end in zip(texts, first, last, strict=True):
        padding = time - (end - begin)
        tokens.append([0] * padding + text[begin:end])
        positions.append([*range(end, end + padding), *range(begin, end)])
    return Observed(torch.tensor(tokens), torch.tensor(positions), torch.tensor(last), None, max(last))


@settings(deadline=None)
@given(st.data())
def test_drafts_are_those_of_the_slow_search_whatever_the_rounds(data):
    rows, longest, depth = 2, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    token = st.integers(0, 2)
    texts = [data.draw(st.lists(token, min_size=12, max_size=30)) for _ in range(rows)]
    drafter = Ngram(longest)
    state = drafter.begin(rows)
    first = [0] * rows
    last = [data.draw(st.integers(1, 6)) for _ in range(rows)]
    while all(end < len(text) for end, text in zip(last, texts, strict=True)):
        root = torch.tensor([text[end] for text, end in zip(texts, last, strict=True)])
        tree = drafter.propose(state, observed(texts, first, last), root, Plan(depth), SILENT)
        assert tree.tokens[:, 0].equal(root)
        expected = [slow_lookup(text[: end + 1], longest, depth) for text, end in zip(texts, last, strict=True)]
        assert drafts(tree) == expected
        first, last = last, [end + data.draw(st.integers(1, 4)) for end in last]


def test_the_history_grows_with_the_text(monkeypatch):
    monkeypatch.setattr(ngram, "GROWTH", 4)
    text = [index * index % 7 for index in range(60)]
    drafter = Ngram(3)
    state = drafter.begin(1)
    for end in range(1, 59):
        seen = observed([text], [end - 1], [end])
        tree = drafter.propose(state, seen, torch.tensor([text[end]]), Plan(5), SILENT)
        assert drafts(tree) == [slow_lookup(text[: end + 1], 3, 5)]
    assert state.tokens.shape[1] >= 59


def test_a_text_that_repeats_itself_is_drafted_and_accepted():
    """The case that lookup is for. A model that may say one thing only repeats it for ever."""
    model = tiny("llama")
    inputs = prompts((6,))
    only = int(model.generate(**inputs, max_new_tokens=1, do_sample=False)[0, -1])
    ours = selfdraft.generate(
        model,
        **inputs,
        drafter="ngram",
        suppress_tokens=[token for token in range(128) if token != only],
        max_new_tokens=30,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert ours.sequences[0, 6:].tolist() == [only] * 30
    assert ours.stats.accepted == ours.stats.drafted
    assert ours.stats.tokens_per_round > 1.8
