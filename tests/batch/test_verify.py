"""The walk over chains and trees: acceptance of none, some and all; laziness; agreement with a plain replay."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.batch.pack import depths
from ngramspec.batch.types import DraftTree
from ngramspec.batch.verify import follow, walk


def tree(tokens: list[int], parents: list[int]) -> DraftTree:
    n = len(tokens)
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.ones(n, np.float32), np.zeros(n, np.uint8))


def test_none_some_all() -> None:
    chain = tree([5, 6, 7], [-1, 0, 1])
    assert list(walk(chain, [9, 0, 0, 0].__getitem__)) == [(9, -1)]
    assert list(walk(chain, [5, 6, 9, 0].__getitem__)) == [(5, 0), (6, 1), (9, -1)]
    assert list(walk(chain, [5, 6, 7, 8].__getitem__)) == [(5, 0), (6, 1), (7, 2), (8, -1)]
    assert list(walk(None, [4].__getitem__)) == [(4, -1)]


def test_rows_of_the_path_alone_are_picked() -> None:
    picked = []

    def sample(row: int) -> int:
        picked.append(row)
        return {0: 6, 2: 8, 4: 1}[row]

    branching = tree([5, 6, 7, 8], [-1, -1, 0, 1])
    assert list(walk(branching, sample)) == [(6, 1), (8, 3), (1, -1)]
    assert picked == [0, 2, 4]


def test_a_consumer_that_stops_ends_the_picking() -> None:
    picked: list[int] = []
    for token, _ in walk(tree([5, 6], [-1, 0]), lambda row: picked.append(row) or [5, 6, 7][row]):  # type: ignore[func-returns-value]
        if token == 5:
            break
    assert picked == [0]


@settings(deadline=None)  # the first call compiles
@given(st.data())
def test_accepts_what_token_by_token_would_write(data: st.DataObject) -> None:
    """A model that is a function of the path: the walk writes the model's own continuation, as far as the tree reaches."""
    n = data.draw(st.integers(0, 12))
    parents, tokens = [], []
    for i in range(n):
        parent = data.draw(st.integers(-1, i - 1))
        token = data.draw(st.integers(0, 3))
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
        else:
            parents.append(-1)
            tokens.append(100 + i)
    paths = {-1: ()}
    for i, parent in enumerate(parents):
        paths[i] = (*paths[parent], tokens[i])
    salt = data.draw(st.integers(0, 9))
    model = lambda path: hash((salt, path)) % 4  # noqa: E731
    accepted = list(walk(tree(tokens, parents), lambda row: model(paths[row - 1])))
    sampled = np.array([model(paths[row - 1]) for row in range(len(tokens) + 1)], np.int32)
    draft = tree(tokens, parents)
    assert follow(draft.tokens, draft.parents, sampled).tolist() == [node for _, node in accepted[:-1]]
    text: tuple[int, ...] = ()
    for token, node in accepted:
        assert token == model(text)
        text = (*text, token)
        assert (node >= 0) == (text in paths.values())
    assert [node for _, node in accepted][-1] == -1
    assert (depths(np.array(parents, np.int32)) == [len(paths[i]) for i in range(len(parents))]).all()
