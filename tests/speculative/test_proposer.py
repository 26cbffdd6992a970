"""Trees: their shape, their limits, what they learn; other drafters; slots and memory."""

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.outputs import DraftTree
from ngramspec.sampling.batch import Span, pack
from ngramspec.sampling.topk import find_topk
from ngramspec.speculative import Candidates, Drafter, TreeProposer, features, recycled, tree_builder, warmup
from ngramspec.speculative.budget import marginal_cost
from ngramspec.speculative.drafter import DraftOptions, DraftParams, PassTopK
from ngramspec.speculative.feature_weights import load_weights, make_cold_weights, save_weights
from ngramspec.speculative.output_cache import TENANTS
from ngramspec.speculative.proposer import SOURCES

FREE = np.ones(600)  # rows cost nothing
FLAT = 1 + 0.005 * np.arange(600.0)


def ints(*values) -> np.ndarray:
    return np.array(values, np.int32)


def propose(proposer, slots=(0,), depth=64, cost=FLAT, max_nodes=1000):
    return proposer.propose(ints(*slots), np.full(len(slots), depth, np.int32), cost, len(slots), max_nodes)


def paths(tree) -> list[list[int]]:
    """The tokens from the root to each node."""
    out = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        out.append([*(out[parent] if parent >= 0 else []), token])
    return out


def check(tree, n_sources=1):
    n = len(tree)
    assert (tree.tokens.dtype, tree.parents.dtype, tree.probs.dtype, tree.sources.dtype) == (np.int32, np.int32, np.float32, np.uint8)
    assert (tree.parents < np.arange(n)).all()
    assert (tree.parents >= -1).all()
    assert len({tuple(p) for p in paths(tree)}) == n, "siblings differ"
    assert (tree.sources < n_sources).all()
    assert ((tree.probs > 0) & (tree.probs < 1)).all()
    above = np.concatenate([tree.probs, [1.0]])
    assert (tree.probs <= above[tree.parents] + 1e-6).all(), "a path's probability never rises"
    shares = np.zeros(n + 1)
    np.add.at(shares, tree.parents, tree.probs)
    assert (shares <= above * (1 + 1e-5)).all(), "siblings share their parent's probability"


def walk(tree, output) -> list[int]:
    child = {(p, t): i for i, (p, t) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))}
    node, path = -1, []
    for token in output:
        node = child.get((node, token), -2)
        if node == -2:
            break
        path.append(node)
    return path


TEXTS = st.lists(st.integers(0, 6), min_size=1, max_size=120)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(TEXTS, min_size=1, max_size=4),
    st.lists(st.integers(0, 6), min_size=1, max_size=40),
    st.integers(0, 12),
    st.integers(0, 10),
    st.integers(0, 30),
    st.sampled_from([0.0, 0.005, 0.04, 1.0]),
)
def test_trees_keep_their_limits(texts, output, length, rows, max_nodes, slope):
    """Through a whole generation: shape, depth, rows, the batch's limit, depth per sequence, banned tokens and stops."""
    proposer = TreeProposer(DraftOptions(vocab_size=10, spec_length=length, spec_rows=rows, max_seqs=6, history=64))
    slots = ints(*range(1, 1 + len(texts)))
    for slot, text in zip(slots, texts, strict=True):
        proposer.begin(int(slot), ints(*text), DraftParams(banned=[3], stops=[5, 3]))
    depth = np.arange(len(texts), dtype=np.int32) * 3
    at = 0
    while at < len(output):
        trees = proposer.propose(slots, depth, 1 + slope * np.arange(50.0), len(texts), max_nodes)
        assert len(trees) == len(texts)
        assert sum(map(len, trees)) <= max_nodes
        taken = []
        for b, tree in enumerate(trees):
            check(tree)
            assert len(tree) <= rows
            for path in paths(tree):
                assert len(path) <= min(length, depth[b])
                assert 3 not in path
                assert 5 not in path[:-1]
            taken.append(walk(tree, output[at:]))
        step = min(map(len, taken)) + 1
        new = ints(*output[at : at + step])
        proposer.observe(slots, [new] * len(texts), [ints(*path[: step - 1]) for path in taken])
        at += step


@given(texts=st.lists(TEXTS, min_size=1, max_size=3), max_nodes=st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_chains_have_no_branches(texts, max_nodes):
    proposer = TreeProposer(DraftOptions(vocab_size=8, max_seqs=3))
    proposer.chains = True
    for slot, text in enumerate(texts):
        proposer.begin(slot, ints(*text))
    chains = propose(proposer, range(len(texts)), cost=FREE, max_nodes=max_nodes)
    assert sum(map(len, chains)) <= max_nodes
    for chain in chains:
        check(chain)
        assert chain.parents.tolist() == list(range(-1, len(chain) - 1))


def test_a_chain_is_grown_and_not_cut_out_of_a_tree():
    proposer = TreeProposer(DraftOptions(vocab_size=100, max_seqs=1))
    tokens = [50, 1, 2, 3, 4, 5, 6, 7, 8, 51, 1, 2, 33, 34, 35, 36, 37, 38, 52, 1, 2]
    proposer.begin(0, ints(*tokens))
    (tree,) = propose(proposer, cost=FREE, max_nodes=8)
    proposer.chains = True
    (chain,) = propose(proposer, cost=FREE, max_nodes=8)
    assert len(set(tree.parents.tolist())) < 8, "some of the tree's nodes are siblings"
    assert max(map(len, paths(tree))) < len(chain) == 8
    first, other = ([3, 4, 5, 6, 7, 8], [33, 34, 35, 36, 37, 38])[:: 1 if chain.tokens[0] == 3 else -1]
    assert chain.tokens.tolist()[:6] == first
    proposer.begin(0, ints(*tokens), DraftParams(banned=first[:1]))
    (chain,) = propose(proposer, cost=FREE, max_nodes=6)
    assert chain.tokens.tolist() == other, "what is banned leaves its place to the next"


def test_text_without_repeats_drafts_nothing():
    proposer = TreeProposer(DraftOptions(vocab_size=1000, max_seqs=1))
    proposer.begin(0, np.arange(500, dtype=np.int32))
    tree = propose(proposer, cost=FREE)[0]
    assert len(tree) == 0
    proposer.observe(ints(0), [ints(700)], [ints()])


def test_a_repeated_text_is_drafted_to_the_end():
    """Once the copying has been confirmed, the whole rest is one path."""
    text = np.random.default_rng(0).permutation(400)[:60].astype(np.int32)
    proposer = TreeProposer(DraftOptions(vocab_size=1000, max_seqs=1, spec_length=32, spec_rows=40))
    proposer.begin(0, np.concatenate([text, text[:10]]))
    at = 10
    while at < 25:
        tree = propose(proposer)[0]
        path = walk(tree, text[at:].tolist())
        new = text[at : at + len(path) + 1]
        proposer.observe(ints(0), [new], [ints(*path)])
        at += len(new)
    assert len(walk(propose(proposer)[0], text[at:].tolist())) >= 16


def test_copying_resumes_behind_an_edit():
    """After a replaced token the old text is drafted on, although no context of two tokens matches across the edit."""
    text = np.random.default_rng(1).permutation(900)[:80].astype(np.int32)
    proposer = TreeProposer(DraftOptions(vocab_size=1000, max_seqs=1))
    proposer.begin(0, text)
    for token in [*text[:20].tolist(), 950]:
        propose(proposer)
        proposer.observe(ints(0), [ints(token)], [ints()])
    assert propose(proposer, cost=FREE)[0].tokens[0] == text[21]


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=3), st.lists(st.floats(0.01, 3.0), min_size=60, max_size=60))
def test_budget_takes_the_best_prefix_of_the_best_first_order(texts, steps):
    """Against the tree that grows when rows are nearly free: its nodes in falling order, cut where tokens per second are highest."""
    proposer = TreeProposer(DraftOptions(vocab_size=10, spec_rows=1000, spec_length=1000, max_seqs=3), weights=make_cold_weights())
    for slot, text in enumerate(texts):
        proposer.begin(slot, ints(*text))
    slots, n = range(len(texts)), len(texts)
    cost = np.cumsum(steps)
    free = 1e6 + np.arange(60.0) * 1e-9
    everything = np.sort(np.concatenate([t.probs for t in propose(proposer, slots, cost=free, max_nodes=40)]).astype(float))[::-1]
    kept = np.sort(np.concatenate([t.probs for t in propose(proposer, slots, cost=cost, max_nodes=40)]).astype(float))[::-1]
    np.testing.assert_allclose(kept, everything[: len(kept)], rtol=1e-4)
    costs = marginal_cost.compute_pass_costs(cost, n, len(everything))
    speeds = (n + np.concatenate(([0.0], np.cumsum(everything)))) / costs
    assert (n + kept.sum()) / costs[len(kept)] >= speeds.max() * (1 - 1e-4)


def test_expensive_rows_are_not_drafted():
    proposer = TreeProposer(DraftOptions(vocab_size=10, max_seqs=1))
    proposer.begin(0, ints(*[1, 2, 3, 4] * 20))
    assert len(propose(proposer, cost=np.arange(100.0))[0]) == 0
    assert len(propose(proposer, depth=0)[0]) == 0
    assert len(propose(proposer, max_nodes=0)[0]) == 0
    assert len(propose(proposer, max_nodes=-3)[0]) == 0
    assert len(propose(proposer)[0]) > 0


def test_learning_moves_probability_towards_what_happens():
    """The same evidence, confirmed again and again, is believed more; refuted, less."""

    def after(truth):
        proposer = TreeProposer(DraftOptions(vocab_size=100, max_seqs=1), weights=make_cold_weights(), rates=(0.02, 0.02))
        first = None
        for _ in range(60):
            proposer.begin(0, ints(1, 2, 3, 9, 8, 7, 1, 2))
            tree = propose(proposer, cost=FREE)[0]
            found = walk(tree, [3])
            p = float(tree.probs[found[0]]) if found else 0.0
            first = p if first is None else first
            proposer.observe(ints(0), [ints(truth)], [ints()])
        return first, p

    first, last = after(3)
    assert last > first + 0.05
    first, last = after(50)
    assert last < first - 0.05


def test_nothing_is_learned_without_a_proposal():
    proposer = TreeProposer(DraftOptions(vocab_size=100, max_seqs=1), weights=make_cold_weights())
    before = [a.copy() for a in proposer.weights]
    proposer.begin(0, ints(1, 2, 3, 1, 2))
    proposer.observe(ints(0), [ints(3)], [ints()])
    for a, b in zip(before, proposer.weights, strict=True):
        assert (a == b).all()
    assert propose(proposer)[0].tokens[0] == 1


def test_batch_mates_do_not_matter_to_the_evidence():
    """A sequence's candidates are the same alone and among others (rows free, so that the budget takes all)."""
    texts = [np.random.default_rng(s).integers(0, 6, 100).astype(np.int32) for s in range(5)]
    together = TreeProposer(DraftOptions(vocab_size=10, max_seqs=5), weights=make_cold_weights())
    for slot, text in enumerate(texts):
        together.begin(slot, text)
    many = propose(together, range(5), cost=FREE)
    for slot, text in enumerate(texts):
        alone = TreeProposer(DraftOptions(vocab_size=10, max_seqs=1), weights=make_cold_weights())
        alone.begin(0, text)
        one = propose(alone, cost=FREE)[0]
        np.testing.assert_array_equal(one.probs, many[slot].probs)  # equal ones may come in another order
        assert paths(one)[:20] == paths(many[slot])[:20]


class Scripted:
    """Proposes one fixed tree; records what it is told."""

    name = "scripted"

    def __init__(self, tokens, parents, probs):
        self.tree = Candidates(ints(*tokens), ints(*parents), np.array(probs, np.float32))
        self.seen: list = []

    def begin(self, seq, tokens):
        self.seen.append(("begin", seq, tokens.tolist()))

    def propose(self, seqs, budget):
        return [self.tree for _ in seqs]

    def observe(self, seq, accepted, rejected):
        self.seen.append(("observe", seq, accepted.tolist(), rejected.tolist()))

    def end(self, seq):
        self.seen.append(("end", seq))


def test_an_external_tree_merges_into_the_same_tree():
    """Same prefix, same node; new branches hang where they belong; every node knows its source."""
    drafter = Scripted([3, 20, 4, 21], [-1, -1, 0, 1], [0.9, 0.05, 0.8, 0.04])
    assert isinstance(drafter, Drafter)
    proposer = TreeProposer(DraftOptions(vocab_size=100, max_seqs=1), drafters=[drafter], weights=make_cold_weights())
    assert proposer.source_names == [*SOURCES, "datastore", "scripted"]
    proposer.begin(0, ints(1, 2, 3, 9, 1, 2))
    tree = propose(proposer, cost=FREE)[0]
    check(tree, len(proposer.source_names))
    found = {tuple(p): s for p, s in zip(paths(tree), tree.sources.tolist(), strict=True)}
    assert {(3,), (3, 4), (3, 9), (20,), (20, 21)} <= set(found)
    assert found[3, 4] == found[20,] == proposer.source_names.index("scripted")
    assert found[3, 9] == 0
    by_path = {tuple(p): v for p, v in zip(paths(tree), tree.probs.tolist(), strict=True)}
    assert by_path[3,] > by_path[20,]
    path = walk(tree, [3, 4])
    proposer.observe(ints(0), [ints(3, 4, 7)], [ints(*path)])
    proposer.end(0)
    assert drafter.seen[0] == ("begin", 0, [1, 2, 3, 9, 1, 2])
    assert drafter.seen[1][:3] == ("observe", 0, [3, 4, 7])
    assert set(drafter.seen[1][3]) == {20, 21}
    assert drafter.seen[2] == ("end", 0)


def test_external_drafters_work_without_tables():
    drafter = Scripted([5, 6], [-1, 0], [0.9, 0.8])
    proposer = TreeProposer(DraftOptions(vocab_size=100, max_seqs=1, use_ngram=False), drafters=[drafter], weights=make_cold_weights())
    proposer.begin(0, ints(5, 6, 5, 6, 5))
    tree = propose(proposer)[0]
    assert paths(tree) == [[5], [5, 6]]
    assert [proposer.source_names[i] for i in tree.sources] == ["scripted", "scripted"]
    for _ in range(100):
        proposer.observe(ints(0), [ints(5, 6, 7)], [ints()])


def test_a_lying_drafter_is_believed_less():
    drafter = Scripted([50], [-1], [0.95])
    proposer = TreeProposer(DraftOptions(vocab_size=100, max_seqs=1), drafters=[drafter], weights=make_cold_weights(), rates=(0.05, 0.05))
    proposer.begin(0, ints(1))
    probs = []
    for token in range(2, 40):
        tree = propose(proposer, cost=FREE)[0]
        probs.append(float(tree.probs[0]) if len(tree) else 0.0)
        proposer.observe(ints(0), [ints(token)], [ints()])
    assert probs[-1] < probs[0] / 2


@pytest.mark.parametrize(
    "tree",
    [
        ([1, 2], [0, -1], [0.5, 0.5]),
        ([1], [-2], [0.5]),
        ([-1], [-1], [0.5]),
        ([10**6], [-1], [0.5]),
        ([1, 2], [-1], [0.5]),
        ([1], [-1], [np.nan]),
    ],
)
def test_a_malformed_external_tree_switches_its_drafter_off(tree, caplog):
    drafter = Scripted(*tree)
    proposer = TreeProposer(DraftOptions(vocab_size=100, max_seqs=1), drafters=[drafter])
    proposer.begin(0, ints(1, 2, 3, 1, 2))
    with caplog.at_level(logging.ERROR):
        check(propose(proposer)[0], 2)
        check(propose(proposer)[0], 2)
    assert len(caplog.records) == 1
    assert proposer.drafters == [None]


@pytest.mark.parametrize("method", ["begin", "propose", "observe", "end"])
def test_a_drafter_that_raises_fails_no_request(method, caplog):
    drafter = Scripted([3], [-1], [0.5])

    def fail(*_):
        raise RuntimeError("no")

    setattr(drafter, method, fail)
    proposer = TreeProposer(DraftOptions(vocab_size=100, max_seqs=2), drafters=[drafter])
    with caplog.at_level(logging.ERROR):
        for slot in (0, 1):
            proposer.begin(slot, ints(1, 2, 3, 1, 2))
            tree = propose(proposer, (slot,))[0]
            assert tree.tokens[0] == 3
            proposer.observe(ints(slot), [ints(3, 1)], [ints(0)])
            proposer.end(slot)
    assert len([r for r in caplog.records if "switched off" in r.message]) == 1


def test_slots_are_reused_and_resumed():
    """A resumed sequence (preemption) drafts as one that never stopped; an ended slot keeps nothing of the old one."""
    text = np.random.default_rng(3).integers(0, 5, 90).astype(np.int32)
    a = TreeProposer(DraftOptions(vocab_size=10, max_seqs=1), weights=make_cold_weights(), rates=(0.0, 0.0))
    b = TreeProposer(DraftOptions(vocab_size=10, max_seqs=1), weights=make_cold_weights(), rates=(0.0, 0.0))
    a.begin(0, text[:50])
    a.observe(ints(0), [text[50:]], [ints()])
    b.begin(0, np.full(300, 7, np.int32))
    b.end(0)
    b.end(0)
    b.begin(0, text)
    assert paths(propose(a)[0]) == paths(propose(b)[0])
    assert a._buffers[0] is not None


def test_many_banned_tokens():
    proposer = TreeProposer(DraftOptions(vocab_size=1000, max_seqs=3))
    proposer.begin(1, ints(*[1, 2, 3, 4] * 10), DraftParams(banned=range(100, 900), stops=[3]))
    proposer.begin(2, ints(*[200, 201] * 10), DraftParams(banned=range(100, 900)))
    trees = propose(proposer, (1, 2), cost=FREE)
    assert len(trees[1]) == 0
    assert all(3 not in path[:-1] for path in paths(trees[0]))


def test_shipped_weights_have_learned_what_stands_beside_a_store() -> None:
    """A group's weight is not the same everywhere, nor is it the same beside a store and without."""
    weights, third = load_weights(), features.SETS // 3
    for group in (0, features.OUTPUT_CACHE, features.EXTERNAL + features.DATASTORE):
        assert weights.mix[2 * third :, group].std() > 0.02
    assert np.abs(weights.mix[2 * third :] - weights.mix[:third]).mean() > 0.02
    sure, unsure = weights.states[features.EXTERNAL, 2 + 9 * 21 + 6 * 3 + 2], weights.states[features.EXTERNAL, 2]
    assert sure > unsure + 1, "a match of 64 tokens that all its occurrences go on from, against one of two tokens and a rare one"


def test_weights_survive_the_file(tmp_path):
    weights = make_cold_weights()
    weights.mix[3, 2] = 0.5
    save_weights(tmp_path / "w.npz", weights)
    for a, b in zip(weights, load_weights(tmp_path / "w.npz"), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)
    save_weights(tmp_path / "bad.npz", tree_builder.Weights(weights.states[:3], weights.mix))
    with pytest.raises(ValueError, match="states must be finite and of shape"):
        load_weights(tmp_path / "bad.npz")


def test_shipped_weights_load():
    load_weights()


@pytest.mark.parametrize(
    "options",
    [{"max_order": 1}, {"max_order": 99}, {"history": 3}, {"history": 10**8}, {"spec_rows": -1}, {"max_seqs": 0}, {"vocab_size": 0}],
)
def test_bad_settings_are_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        TreeProposer(DraftOptions(**{"vocab_size": 10, **options}))


def test_warmup_compiles_all_of_it():
    warmup()


def sources(proposer, tree):
    return {tuple(p): proposer.source_names[i] for p, i in zip(paths(tree), tree.sources.tolist(), strict=True)}


def test_finished_answers_speak_in_later_sequences_of_the_same_tenant():
    proposer = TreeProposer(DraftOptions(vocab_size=100, max_seqs=2), weights=make_cold_weights())
    proposer.remember(ints(*range(10, 40)), "a")
    proposer.begin(0, ints(1, 2, 12, 13, 14), DraftParams(tenant="a"))
    proposer.begin(1, ints(1, 2, 12, 13, 14), DraftParams(tenant="b"))
    mine, others = propose(proposer, (0, 1), cost=FREE)
    assert [15, 16, 17, 18] in paths(mine)
    assert sources(proposer, mine)[15, 16] == "answers"
    assert len(others) == 0
    proposer.begin(1, ints(1, 2, 12, 13, 14), DraftParams(tenant=None))
    assert len(propose(proposer, (1,), cost=FREE)[0]) == 0


def test_answers_do_not_run_into_each_other():
    proposer = TreeProposer(DraftOptions(vocab_size=100, max_seqs=1), weights=make_cold_weights())
    proposer.remember(ints(1, 2, 3))
    proposer.remember(ints(4, 5, 6))
    proposer.begin(0, ints(9, 2, 3))
    assert len(propose(proposer, cost=FREE)[0]) == 0
    proposer.begin(0, ints(9, 4, 5))
    assert paths(propose(proposer, cost=FREE)[0]) == [[6]]


def test_answers_are_bounded_and_can_be_off():
    proposer = TreeProposer(DraftOptions(vocab_size=10**6, max_seqs=1, answers=500), weights=make_cold_weights())
    for i in range(40):
        proposer.remember(np.arange(1000 * i, 1000 * i + 100, dtype=np.int32))
    size = proposer._output_cache.tables.buffers[1].nbytes
    for i in range(40, 200):
        proposer.remember(np.arange(1000 * i, 1000 * i + 100, dtype=np.int32))
    assert proposer._output_cache.tables.buffers[1].nbytes == size
    proposer.begin(0, ints(199_010, 199_011))
    assert propose(proposer, cost=FREE)[0].tokens[0] == 199_012
    proposer.begin(0, ints(10_010, 10_011))
    assert len(propose(proposer, cost=FREE)[0]) == 0
    proposer.remember(np.arange(5000, dtype=np.int32))  # longer than what is kept: its end stays
    proposer.begin(0, ints(4990, 4991))
    assert propose(proposer, cost=FREE)[0].tokens[0] == 4992
    off = TreeProposer(DraftOptions(vocab_size=100, max_seqs=1, answers=0), weights=make_cold_weights())
    off.remember(ints(*range(10, 40)))
    off.begin(0, ints(12, 13))
    assert len(propose(off, cost=FREE)[0]) == 0


def test_the_tenant_not_heard_of_for_longest_is_forgotten():
    proposer = TreeProposer(DraftOptions(vocab_size=1000, max_seqs=1), weights=make_cold_weights())
    proposer.begin(0, ints(1, 2), DraftParams(tenant="t0"))
    for i in range(TENANTS + 1):
        proposer.remember(ints(1, 2, 3), f"t{i}")
    propose(proposer, cost=FREE)  # t0 is gone under a running sequence: nothing is read from freed tables
    drafted = []
    for i in range(TENANTS + 1):
        proposer.begin(0, ints(1, 2), DraftParams(tenant=f"t{i}"))
        drafted.append(len(propose(proposer, cost=FREE)[0]))
    assert drafted == [0] + [1] * TENANTS


def test_a_prediction_is_followed_from_its_first_token_and_again_after_a_departure():
    proposer = TreeProposer(DraftOptions(vocab_size=1000, max_seqs=1))
    foreseen = np.arange(100, 160, dtype=np.int32)
    proposer.begin(0, ints(1, 2, 3), DraftParams(prediction=foreseen))
    tree = propose(proposer)[0]
    assert paths(tree)[:3] == [[100], [100, 101], [100, 101, 102]]
    assert set(sources(proposer, tree).values()) == {"prediction"}
    text = [*range(100, 120), 7, 8, 9, *range(130, 160)]  # ten tokens replaced by three others
    made = passes = 0
    while made < len(text):
        tree = propose(proposer)[0]
        path = walk(tree, text[made:])
        new = text[made : made + len(path) + 1]
        proposer.observe(ints(0), [ints(*new)], [ints(*path)])
        made, passes = made + len(new), passes + 1
    assert passes <= 12


def test_a_sequence_resumes_in_the_middle_of_its_prediction():
    proposer = TreeProposer(DraftOptions(vocab_size=1000, max_seqs=1))
    proposer.begin(0, ints(1, 2, 3, *range(100, 110)), DraftParams(prediction=np.arange(100, 160, dtype=np.int32), n_output=10))
    assert paths(propose(proposer)[0])[0] == [110]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.lists(st.integers(0, 6), min_size=1, max_size=60), st.data())
def test_any_prediction_is_harmless(foreseen, text, data):
    proposer = TreeProposer(DraftOptions(vocab_size=7, max_seqs=1), weights=make_cold_weights())
    proposer.begin(0, ints(0), DraftParams(prediction=ints(*foreseen)))
    made = 0
    while made < len(text):
        tree = propose(proposer, cost=FREE)[0]
        check(tree, 7)
        path = walk(tree, text[made:])
        new = text[made : made + len(path) + 1]
        proposer.observe(ints(0), [ints(*new)], [ints(*path)])
        made += len(new)


def test_the_models_own_candidates_are_drafted():
    proposer = TreeProposer(DraftOptions(vocab_size=200, max_seqs=1), weights=make_cold_weights())
    rows = np.zeros((2, 200), np.float32)
    rows[0, [50, 60]], rows[1, 70] = (9.0, 8.8), 9.0
    tables = BlockTables(1, 1, 16)
    assert tables.reserve(0, 3)
    tree = DraftTree(ints(50), ints(-1), np.ones(1, np.float32), np.zeros(1, np.uint8))
    seen = PassTopK(np.array([[-1, 4, 0]]), pack([Span(0, ints(5), 1, tree)], tables), *find_topk(rows))
    proposer.observe(ints(), [], [], seen)  # of a sequence that has just ended
    proposer.begin(0, ints(9, 5))
    tree = propose(proposer, cost=FREE)[0]
    assert {(50,), (60,), (50, 70)} <= {tuple(p) for p in paths(tree)}
    assert set(sources(proposer, tree).values()) == {"recycled"}


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(1, 4), st.integers(0, 2**31))
def test_kept_candidates_are_the_likeliest(vocab_size, n, seed):
    rows = np.random.default_rng(seed).permutation(vocab_size * n).reshape(n, vocab_size).astype(np.float32) / 50
    kept = recycled.new_recycled(vocab_size, 16)
    last = np.arange(n, dtype=np.int32) % vocab_size
    tables = BlockTables(n, n, 16)
    assert all(tables.reserve(slot, 1) for slot in range(n))
    batch = pack([Span(slot, last[slot : slot + 1], 0) for slot in range(n)], tables)
    heard = np.array([(slot, -1, slot) for slot in range(n)])
    given = batch.input_ids, batch.parents, batch.roots, batch.ends, batch.root_logits
    recycled.record_batch_topk(kept, heard, *given, *find_topk(rows))
    if vocab_size < features.KEPT:
        assert (kept.tokens == -1).all()
        return
    i = n - 1  # a later row overwrites an earlier one of the same token
    order = np.argsort(-rows[i])[: features.KEPT]
    far = rows[i, order[0]] - rows[i, order]
    want = [int(t) for t, d in zip(order, far, strict=True) if d < recycled.GAPS[-1]]
    assert kept.tokens[last[i], : len(want)].tolist() == want
    assert (kept.tokens[last[i], len(want) : len(want) + 1] == -1).all()
