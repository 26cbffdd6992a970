"""The object that all hosts share: what it takes for accepted, whom it recognises, what it lets go, and that it adds nothing."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec import InvalidInputError
from ngramspec.integrations.draft_session import Guest
from ngramspec.sampling.topk import find_topk

VOCAB = 50


def guest(**options) -> Guest:
    return Guest(**{"vocab_size": VOCAB, "max_seqs": 4, "depth": 8} | options)


def model(text: list[int]) -> int:
    """What a model would write: text that repeats, but for a token now and then."""
    n = len(text)
    return 7 if n % 23 == 0 else n * n % 11


def verified(text: list[int], chain: list[int]) -> list[int]:
    """What a host appends: of the chain what the model takes, then the model's own token."""
    new: list[int] = []
    for token in chain:
        if model([*text, *new]) != token:
            break
        new.append(token)
    return [*new, model([*text, *new])]


def test_importing_takes_neither_torch_nor_transformers():
    code = "import sys, ngramspec.integrations.draft_session; print('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_importing_takes_half_a_second_where_numba_takes_three_tenths(tmp_path):
    """Of processor time, with modules compiled to bytecode as an installed package has them. Most of it is numba's, and a slow machine is
    slow at both."""
    compiled = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    compiled.pop("PYTHONDONTWRITEBYTECODE", None)

    def spent_s(code):
        code = f"{code}\nimport resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_utime)"
        run = subprocess.run([sys.executable, "-c", code], env=compiled, capture_output=True, text=True, check=True)
        return float(run.stdout)

    codes, ratios = ("pass", "import numba", "import ngramspec.integrations.draft_session"), list[float]()
    while not ratios or (min(ratios) > 0.5 / 0.3 and len(ratios) < 5):
        bare, numba, guest = map(spent_s, codes)
        ratios.append((guest - bare) / (numba - bare))
    assert min(ratios) <= 0.5 / 0.3, ratios


def test_scipy_is_not_needed():
    code = """
import sys
sys.modules["scipy"] = None
from ngramspec.integrations.draft_session import Guest
guest = Guest(vocab_size=9, max_seqs=1, depth=2)
guest.begin("a", [1, 2, 1])
for ms in range(1, 20):
    guest.chains(["a"], [2], 1)
    guest.observe(["a"], [[2]])
    guest.took(1, float(ms))
print(guest.step_timer.gain)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=40), min_size=1, max_size=4), st.booleans(), st.data())
def test_texts_are_what_the_model_writes_and_what_the_guest_knows(prompts, chains, data):
    host = guest()
    texts = [list(prompt) for prompt in prompts]
    keys = list(range(len(texts)))
    for key, text in zip(keys, texts, strict=True):
        host.begin(key, text)
    for _ in range(12):
        room = data.draw(st.lists(st.integers(0, 10), min_size=len(keys), max_size=len(keys)))
        if chains:
            drafts = host.chains(keys, room, len(keys))
        else:
            trees = host.propose(keys, room, len(keys))
            drafts = [tree.tokens[:1].tolist() for tree in trees]
        assert all(len(draft) <= min(most, host.depth) for draft, most in zip(drafts, room, strict=True))
        new = [verified(text, draft) for text, draft in zip(texts, drafts, strict=True)]
        for text, each in zip(texts, new, strict=True):
            text.extend(each)
        host.observe(keys, new)
        host.took(len(keys) + sum(map(len, drafts)), 10.0)
        assert [host.get_tokens(key).tolist() for key in keys] == texts
    assert host.stats.tokens == sum(map(len, texts)) - sum(map(len, prompts))
    assert host.stats.accepted <= host.stats.drafted
    assert host.stats.passes == 12 * len(keys)


def test_a_text_that_repeats_is_drafted_and_counted():
    host = guest()
    text = list(range(1, 12)) * 3
    host.begin("a", text)
    (chain,) = host.chains(["a"], [8], 1)
    assert chain == [1, 2, 3, 4, 5, 6, 7, 8][: len(chain)]
    assert chain
    host.observe(["a"], [[*chain, 0]])
    stats = host.end("a", finished=True)
    assert (stats.passes, stats.tokens, stats.drafted, stats.accepted) == (1, len(chain) + 1, len(chain), len(chain))
    assert stats.accepted_by_source == {"ngram": len(chain)}
    assert stats.drafted_by_depth == [1] * len(chain)
    assert host.stats.tokens == stats.tokens


def test_accepted_paths_are_found_in_trees():
    host = guest(depth=16, slope=0.0)
    host.begin("a", [40, 1, 2, 3, 4, 41, 1, 2, 13, 14, 42, 1, 2])
    (tree,) = host.propose(["a"], [4], 1)
    assert {3, 13} <= set(tree.tokens.tolist())
    host.observe(["a"], [[13, 14, 9]])
    accepted = host.stats.accepted
    assert accepted == 1 + (14 in tree.tokens[tree.parents == tree.tokens.tolist().index(13)])


def test_what_goes_on_is_observed_and_what_does_not_begins():
    host = guest()
    assert host.sync("a", [1, 2, 3], n_output=1)
    assert not host.sync("a", [1, 2, 3, 4, 5])
    assert not host.sync("a", [1, 2, 3, 4, 5])
    assert host.get_tokens("a").tolist() == [1, 2, 3, 4, 5]
    assert host.stats.tokens == 2
    assert host.sync("a", [1, 2, 9], n_output=1), "another text"
    assert host.sync("a", [1, 2]), "a shorter one"
    assert host.sync("a", [1, 2, *range(host.depth + 2)]), "more than a step can add: a prompt"
    assert len(host) == 1


def answers_of(host: Guest, tenant, other) -> list[int]:
    host.begin("old", [1, 2, 3, 30, 31, 32, 33, 34, 35, 36], n_output=7, tenant=tenant)
    host.end("old", finished=True)
    host.begin("new", [4, 5, 30, 31, 32], tenant=other)
    return host.chains(["new"], [8], 1)[0]


def test_finished_answers_speak_in_their_tenants_later_texts():
    assert answers_of(guest(slope=0.0), "a", "a")[:2] == [33, 34]
    assert answers_of(guest(slope=0.0), "a", "b") == []
    assert answers_of(guest(slope=0.0), None, None) == []
    assert answers_of(guest(slope=0.0, answers=0), "a", "a") == []


def test_an_aborted_text_is_no_answer():
    host = guest()
    host.begin("old", [1, 30, 31, 32, 33, 34], n_output=5)
    host.end("old", finished=False)
    host.begin("new", [4, 5, 30, 31, 32])
    assert host.chains(["new"], [8], 1) == [[]]


def test_predictions_bans_and_stops():
    host = guest(stops=[12])
    host.begin("a", [1, 2], prediction=[10, 11, 12, 13, 14])
    assert host.chains(["a"], [8], 1)[0] == [10, 11, 12], "nothing behind a stop"
    host.begin("a", [1, 2], prediction=[10, 11, 12, 13, 14], stops=[], banned=[13])
    assert host.chains(["a"], [8], 1)[0] == [10, 11, 12]


def test_who_was_not_heard_of_for_longest_gives_way():
    host = guest(max_seqs=2)
    host.begin("a", [1])
    host.begin("b", [2])
    host.observe(["a"], [[3]])
    host.begin("c", [4])
    assert "b" not in host
    assert ("a" in host, "c" in host, len(host)) == (True, True, 2)
    assert host.chains(["a", "b", "c"], [4, 4, 4], 3)[1] == []
    host.observe(["b"], [[1]])
    assert host.end("b", finished=True).tokens == 0


def test_a_thousand_texts_leave_nothing_behind():
    host = guest(answers=500)
    rng = np.random.default_rng(0)
    for i in range(1000):
        host.begin(i, rng.integers(0, VOCAB, 20))
        host.chains([i], [8], 1)
        host.observe([i], [rng.integers(0, VOCAB, 5)])
        if i >= 3:
            host.end(i - 3, finished=i % 2 == 0)
    for i in range(997, 1000):
        host.end(i, finished=False)
    assert len(host) == 0
    assert sorted(host._free) == [0, 1, 2, 3]
    assert host._drafts._buffers == [None] * 4
    assert host.stats.tokens == 5000


def drafted(host: Guest, ms_per_row: float) -> int:
    """How much is drafted for a text that is copied half of the time, where rows take that long."""
    rng = np.random.default_rng(1)
    text = rng.integers(0, VOCAB, 400).tolist()
    host.begin("a", text)
    n = 0
    for _ in range(60):
        (chain,) = host.chains(["a"], [8], 1)
        n += len(chain)
        at = int(rng.integers(0, 390))
        new = [*chain[:1], *text[at : at + 3]]
        text.extend(new)
        host.observe(["a"], [new])
        host.took(1 + len(chain), 1.0 + ms_per_row * len(chain))
    return n


def test_dear_rows_are_drafted_for_less_and_steady_guests_look_at_no_time():
    cheap, dear = drafted(guest(), 0.001), drafted(guest(), 0.9)
    assert cheap > 2 * dear
    assert drafted(guest(steady=True), 0.001) == drafted(guest(steady=True), 0.9)


def test_the_cost_is_learned_from_the_steps():
    host = guest()
    host.begin("a", [1, 2, 3] * 9)
    for i in range(90):
        (chain,) = host.chains(["a"], [i % 9], 1)
        host.observe(["a"], [[*chain, 1]])
        host.took(1 + len(chain), 20.0 + 0.2 * len(chain))
    cost_ms, threshold = host.step_timer.plan(host._load)
    assert cost_ms[9] - cost_ms[1] < 20.0 * 0.06 * 8, "less than was believed at first"
    assert 18 < cost_ms[1] < 22
    assert threshold > 0


def test_the_models_own_candidates_are_drafted():
    host = guest(recycle=True, slope=0.0)
    host.begin("a", [1, 2])
    rows = np.zeros((1, VOCAB), np.float32)
    rows[0, 9], rows[0, 8] = 30.0, 5.0
    for _ in range(3):
        host.record_topk("a", np.array([1]), np.array([2]), *find_topk(rows))
    host.begin("a", [5, 1, 2])
    assert host.recycles
    assert host.chains(["a"], [1], 1) == [[9]]
    assert not guest().recycles


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be"),
        ({"max_seqs": 0}, "max_seqs must be"),
        ({"max_seqs": True}, "max_seqs must be"),
        ({"depth": 1000}, "depth must be an integer from 1 to 256, got 1000"),
        ({"depth": "4"}, "depth must be"),
        ({"answers": -1}, "answers must be"),
        ({"slope": -1}, "slope must be"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InvalidInputError, match=message):
        guest(**options)


@pytest.mark.parametrize(
    ("tokens", "hints", "message"),
    [
        ([], {}, "a text must have a token"),
        ([1], {"n_output": 2}, "n_output"),
        ([VOCAB], {}, "token ids of a text must be 0 to 49"),
        ([-1], {}, "token ids"),
        ([[1]], {}, "flat list"),
        ([1.5], {}, "flat list"),
        ([1], {"prediction": [VOCAB]}, "token ids of a prediction"),
        ([1], {"tenant": 3}, "tenant must be text or None"),
        ([1], {"datastores": ["none"]}, "datastores must be left out, since none is open"),
    ],
)
def test_bad_texts_are_refused_with_nothing_changed(tokens, hints, message):
    host = guest()
    host.begin("a", [1, 2, 3])
    with pytest.raises(InvalidInputError, match=message):
        host.begin("a", tokens, **hints)
    assert host.get_tokens("a").tolist() == [1, 2, 3]
