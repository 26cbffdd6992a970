"""The walk over chains and trees: acceptance of none, some and all; laziness; agreement with a plain replay; all sequences at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.outputs import DraftTree
from ngramspec.sampling.batch import Span, compute_depths, pack
from ngramspec.sampling.sampler import NotFiniteError, Sampler
from ngramspec.sampling.topk import rank_rows
from ngramspec.sampling.verify import match_batch, match_draft
from ngramspec.sampling_params import SamplingParams


def tree(tokens: list[int], parents: list[int]) -> DraftTree:
    n = len(tokens)
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.ones(n, np.float32), np.zeros(n, np.uint8))


def test_none_some_all() -> None:
    chain = tree([5, 6, 7], [-1, 0, 1])
    assert list(match_draft(chain, [9, 0, 0, 0].__getitem__)) == [(9, -1)]
    assert list(match_draft(chain, [5, 6, 9, 0].__getitem__)) == [(5, 0), (6, 1), (9, -1)]
    assert list(match_draft(chain, [5, 6, 7, 8].__getitem__)) == [(5, 0), (6, 1), (7, 2), (8, -1)]
    assert list(match_draft(None, [4].__getitem__)) == [(4, -1)]


def test_rows_of_the_path_alone_are_picked() -> None:
    picked = []

    def sample(row: int) -> int:
        picked.append(row)
        return {0: 6, 2: 8, 4: 1}[row]

    branching = tree([5, 6, 7, 8], [-1, -1, 0, 1])
    assert list(match_draft(branching, sample)) == [(6, 1), (8, 3), (1, -1)]
    assert picked == [0, 2, 4]


def test_a_consumer_that_stops_ends_the_picking() -> None:
    picked: list[int] = []
    for token, _ in match_draft(tree([5, 6], [-1, 0]), lambda row: picked.append(row) or [5, 6, 7][row]):  # type: ignore[func-returns-value]
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
    accepted = list(match_draft(tree(tokens, parents), lambda row: model(paths[row - 1])))
    text: tuple[int, ...] = ()
    for token, node in accepted:
        assert token == model(text)
        text = (*text, token)
        assert (node >= 0) == (text in paths.values())
    assert [node for _, node in accepted][-1] == -1
    assert (compute_depths(np.array(parents, np.int32)) == [len(paths[i]) for i in range(len(parents))]).all()


V = 6
PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=2.0, top_k=3, top_p=0.9, min_p=0.05),
    SamplingParams(temperature=1.0, presence_penalty=0.5),  # needs its sampler for every row
    None,  # part of a prompt, or a rule that is not the walk
)


def random_tree(rng: np.random.Generator) -> DraftTree:
    nodes: list[tuple[int, int]] = []
    for _ in range(rng.integers(0, 14)):
        node = int(rng.integers(-1, len(nodes))), int(rng.integers(V))
        if node not in nodes:
            nodes.append(node)
    return tree([token for _, token in nodes], [parent for parent, _ in nodes])


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("on_device", [False, True])
def test_all_sequences_at_once_are_walked_as_each_by_itself(seed: int, on_device: bool) -> None:
    """Greedy and drawn, beside parts of prompts, rows for their log-probabilities, and logits that no token can be picked from."""
    rng = np.random.default_rng(seed)
    tables = BlockTables(40, 8, 160)
    spans = []
    for slot in range(int(rng.integers(1, 8))):
        params = PARAMS[rng.integers(len(PARAMS))]
        sampler = None
        if params is not None:
            settings = {"index": slot, "seed": 2**63 + seed, "prompt": np.zeros(1, np.int64), "vocab_size": V, "stop_ids": frozenset()}
            sampler = Sampler(params, **settings)  # type: ignore[arg-type]
        n, start = int(rng.integers(1, 5)), int(rng.integers(0, 40))
        draft = random_tree(rng) if rng.random() < 0.8 else None
        assert tables.reserve(slot, start + n + 14)
        wanted = int(rng.integers(1, n + 1)) if sampler is not None else int(rng.integers(0, 2))
        tokens = rng.integers(0, V, n).astype(np.int32)
        spans.append(Span(slot, tokens, start, draft if wanted else None, wanted, sampler, max(start, 1), sampler is not None))
    batch = pack(spans, tables)
    logits = (rng.standard_normal((len(batch.logits_rows), V)) * 3).astype(np.float32)
    for bad in (np.nan, np.inf):
        logits[rng.random(len(logits)) < 0.05, rng.integers(V)] = bad
    greedy = rank_rows(logits, 1)[0]
    if on_device:  # all rows of sequences that can be served hold what these pick
        for span in spans:
            if span.sampler is not None:
                for row in range(span.root_logits, span.end_logits):
                    depth = int(batch.positions[batch.logits_rows[row]]) + 1 - span.n_prompt
                    greedy[row] = picked(span.sampler, logits[row], depth)
    for span, run in zip(spans, match_batch(batch, greedy, None if on_device else logits), strict=True):
        if span.sampler is None or not span.sampler.needs_only_logits:
            assert run is None
            continue
        sampler, rows = span.sampler, logits[span.root_logits : span.end_logits]
        position = span.start + len(span.tokens) - span.n_prompt
        tokens, path = [], []
        for token, node in match_draft(span.tree, lambda row: picked(sampler, rows[row], position + len(tokens))):  # noqa: B023
            tokens.append(token)
            path += [node] if node >= 0 else []
        assert run is not None
        assert (run[0].tolist(), run[1].tolist()) == (tokens, path)


def picked(sampler: Sampler, row: np.ndarray, position: int) -> int:
    try:
        return sampler.sample(row, position)
    except NotFiniteError:
        return -1
