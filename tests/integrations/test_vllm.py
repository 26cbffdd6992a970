"""vLLM's proposer on a batch shaped like vLLM's: rows that swap, condense, vanish and come back, missed steps, requests in and out.

vLLM itself is not needed: a stand-in of its runner keeps the persistent batch and verifies drafts; a text is a function of its request.
"""

import itertools
import sys
import types

import numpy as np
import pytest
import torch

from ngramspec import HostVersionError, InvalidInputError, UnsupportedModelError
from ngramspec.datastore.errors import TokenizerMismatchError
from ngramspec.integrations import vllm, vllm_logits
from ngramspec.tokenizer.encode import Encoding
from tests import tiny_store
from tests.tiny import byte_tokenizer

VOCAB, LONGEST, DEPTH = 256, 400, 6


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.32.0"))
    monkeypatch.delenv(vllm.SETTINGS, raising=False)


def config(max_num_seqs=8, ranks=1, **settings):
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(max_model_len=LONGEST, model="tiny", tokenizer="tiny", get_vocab_size=lambda: VOCAB),
        scheduler_config=types.SimpleNamespace(max_num_seqs=max_num_seqs),
        speculative_config=types.SimpleNamespace(num_speculative_tokens=DEPTH),
        parallel_config=types.SimpleNamespace(tensor_parallel_size=ranks),
        device_config=types.SimpleNamespace(device_type="cpu"),
        additional_config={"ngramspec": settings} if settings else {},
    )


def proposer(**options):
    return vllm.Proposer(config(**{"steady": True, "slope": 0.0} | options))


class Request:
    def __init__(self, name, prompt, output, **params):
        self.name, self.prompt, self.output, self.done = name, list(prompt), list(output), 0
        params = {"max_tokens": len(output), "all_stop_token_ids": set(), "extra_args": None} | params
        self.sampling_params = types.SimpleNamespace(**params)
        self.num_prompt_tokens = len(self.prompt)
        self.silent = (params["extra_args"] or {}).get("speculation") == 0

    @property
    def text(self):
        return self.prompt + self.output[: self.done]

    def verify(self, draft):
        """What a step gives: of the draft what the text goes on with, and one token more."""
        n = 0
        rest = self.output[self.done :]
        while n < len(draft) and n + 1 < len(rest) and draft[n] == rest[n]:
            n += 1
        self.done += n + 1
        return rest[: n + 1]


class Runner:
    """What vLLM's runner has: requests by id, and a batch whose rows are theirs."""

    def __init__(self, drafter, rows=8, known=True):
        self.drafter, self.known = drafter, known
        self.requests, self.drafts, self.ever = {}, {}, {}
        ids = np.zeros((rows, LONGEST), np.int32)
        self.input_batch = types.SimpleNamespace(req_ids=[], token_ids_cpu=ids)
        self.drafted = self.accepted = 0
        if known:
            self.load_model()

    def load_model(self):
        self.drafter.load_model(None)

    def step(self, requests, missed=False, prefilling=()):
        """One step for these, in this order of rows; those in `prefilling` compute a part of their prompts."""
        self.requests |= {request.name: request for request in requests}
        self.ever |= self.requests
        sampled = []
        for request in requests:
            draft = self.drafts.get(request.name, []) if request not in prefilling else []
            new = [] if request in prefilling else request.verify(draft)
            self.drafted += len(draft)
            self.accepted += max(len(new) - 1, 0)
            sampled.append(new)
        lengths = np.zeros(len(self.input_batch.token_ids_cpu), np.int32)
        for i, request in enumerate(requests):
            lengths[i] = len(request.text)
            self.input_batch.token_ids_cpu[i, : lengths[i]] = request.text
        self.input_batch.req_ids = [request.name for request in requests]
        self.drafts = {}
        if not missed:
            drafts = self.drafter.propose(sampled, lengths, self.input_batch.token_ids_cpu, slot_mappings=None)
            assert not self.drafter.failed
            assert len(drafts) == len(requests)
            for request, draft, new in zip(requests, drafts, sampled, strict=True):
                assert len(draft) <= DEPTH
                assert new or not draft
                assert len(request.text) + len(draft) < LONGEST
                self.drafts[request.name] = draft
        self.check(requests, prefilling, missed)

    def check(self, requests, prefilling, missed):
        """No text here is a mixture of two requests'."""
        known = [self.drafter.guest.get_tokens(key).tolist() for key in self.drafter.guest]
        everything = [request.prompt + request.output for request in self.ever.values()]
        assert all(any(whole[: len(text)] == text for whole in everything) for text in known)
        if not missed:
            for request in requests:
                assert request in prefilling or request.silent or request.text in known

    def finish(self, request):
        del self.requests[request.name]


def request(i, n=60, **params):
    rng = np.random.default_rng(i)
    pattern = rng.integers(0, VOCAB, 12).tolist()
    return Request(f"r{i}", [i % VOCAB, *pattern, *pattern], (pattern * 9)[:n], **params)


both = pytest.mark.parametrize("known", [True, False], ids=["ids", "mirrors"])


@both
def test_texts_that_repeat_are_drafted(known):
    runner = Runner(proposer(), known=known)
    requests = [request(i) for i in range(4)]
    while requests[0].done < 50:
        runner.step(requests)
    assert runner.accepted > 100
    stats = runner.drafter.stats
    assert stats.accepted == runner.accepted
    assert stats.tokens == sum(r.done for r in requests) - 4, "the first token of each comes with its prompt"


@both
def test_rows_swap_condense_and_vanish(known):
    rng = np.random.default_rng(0)
    runner = Runner(proposer(), known=known)
    requests = [request(i, 100) for i in range(6)]
    for _ in range(60):
        scheduled = [r for r in requests if r.done < 90 and rng.random() < 0.8]
        rng.shuffle(scheduled)
        if scheduled:
            runner.step(scheduled)
    assert runner.accepted > 60
    assert len(runner.drafter.guest) == 6


@both
def test_missed_steps_and_parts_of_prompts(known):
    rng = np.random.default_rng(1)
    runner = Runner(proposer(), known=known)
    requests, late = [request(i, 100) for i in range(3)], request(9, 100)
    for step in range(40):
        scheduled = [*requests, late] if step > 5 else requests
        runner.step([r for r in scheduled if r.done < 95], missed=rng.random() < 0.3, prefilling=[late] if step < 9 else [])
    assert late.done > 0
    assert runner.accepted > 30


@both
def test_a_preempted_request_comes_back_where_it_was(known):
    runner = Runner(proposer(), known=known)
    a, b = request(1, 100), request(2, 100)
    for _ in range(4):
        runner.step([a, b])
    begun = list(runner.drafter.guest)
    for _ in range(5):
        runner.step([b])
    runner.step([b, a], prefilling=[a])
    runner.step([b, a])
    assert list(runner.drafter.guest) == begun


def test_a_row_of_another_text_is_another_text():
    """The same row, as long, and begun alike: nothing is drafted from who was there before."""
    runner = Runner(proposer(), known=False)
    first = Request("a", [1, 2, 3, 4], [10, 11, 12, 13, 14, 15])
    other = Request("b", [1, 2, 99, 4, 10], [21, 22, 23])
    runner.step([first])
    runner.step([other])
    assert len(runner.drafter.guest) == 2


@both
@pytest.mark.parametrize("at", [-1, 0, -20], ids=["all of it", "its beginning", "its end"])
def test_a_row_whose_text_was_replaced_by_one_of_equal_length(known, at):
    """The same row and name, and as many tokens: what was there before drafts nothing for it."""
    runner = Runner(proposer(), known=known)
    old = request(1, 100)
    while old.done < 30:
        runner.step([old])
    new = Request("r1", old.prompt, old.output)
    new.done = old.done
    if at == -1:
        new = request(2, 100)
        new.name, new.done = "r1", old.done
    elif at == 0:
        new.prompt[0] += 1
    else:
        new.output[old.done - 5] += 1
    runner.ever = {"old": old}
    runner.requests.clear()
    runner.drafts = {}
    runner.step([new])
    assert runner.drafter.guest.get_tokens(list(runner.drafter.guest)[-1]).tolist() == new.text


def test_a_row_whose_end_was_replaced_under_the_same_request():
    """Even where the runner says that it is the same request."""
    runner = Runner(proposer())
    old = request(1, 100)
    while old.done < 30:
        runner.step([old])
    old.output[old.done - 5] = (old.output[old.done - 5] + 1) % VOCAB
    runner.drafts = {}
    runner.step([old])
    assert runner.drafter.guest.get_tokens("r1").tolist() == old.text


def test_a_request_that_sits_where_it_sat_is_not_compared_as_a_whole(monkeypatch):
    runner = Runner(proposer())
    requests = [request(i, 100) for i in range(3)]
    runner.step(requests)
    compared, follows = [], runner.drafter.guest.find_continuation
    monkeypatch.setattr(runner.drafter.guest, "find_continuation", lambda key, *rest: compared.append(key) or follows(key, *rest))
    runner.step(requests)
    assert compared == []
    runner.step([requests[0], requests[2]])
    assert compared == ["r2"], "its row is another one"


class Sampling(Runner):
    """Its samplers are modules, as vLLM's are, and its model holds likely what a table says: of each token what follows, then others."""

    def __init__(self, drafter, **options):
        self.sampler, self.rejection_sampler = torch.nn.Module(), torch.nn.Module()
        self.sampler.forward = lambda **_: None
        self.rejection_sampler.forward = self.verify
        first = (5 * np.arange(VOCAB) + 7) % VOCAB  # one circle through all tokens
        self.follows = (first[:, None] + np.arange(vllm_logits.KEPT) ** 2) % VOCAB
        super().__init__(drafter, **options)

    def verify(self, metadata, draft_probs, logits, sampling_metadata):
        """vLLM's own one asks the other, and writes to the logits."""
        self.sampler(logits=logits[:1], predict_bonus_token=True)
        logits.zero_()

    def text(self, first, n):
        tokens = [first]
        while len(tokens) < n:
            tokens.append(int(self.follows[tokens[-1], 0]))
        return tokens

    def step(self, requests, missed=False, prefilling=()):
        drafts = [self.drafts.get(request.name, []) if request not in prefilling else [] for request in requests]
        behind = [token for request, draft in zip(requests, drafts, strict=True) for token in (request.text[-1], *draft)]
        logits = torch.full((len(behind), VOCAB + 3), -20.0)
        logits[:, VOCAB:] = 50.0  # no tokens: filled up to a round number
        logits[torch.arange(len(behind))[:, None], torch.from_numpy(self.follows[behind])] = torch.arange(8.0, 0.0, -1.0)
        if any(drafts):
            metadata = types.SimpleNamespace(
                num_draft_tokens=[len(draft) for draft in drafts], draft_token_ids=torch.tensor([*itertools.chain(*drafts)])
            )
            self.rejection_sampler(metadata, None, logits, None)
        else:
            self.sampler(logits=logits, sampling_metadata=None)
        super().step(requests, missed, prefilling)


def test_what_the_model_holds_likely_is_drafted_in_other_requests():
    drafted = {}
    for recycle in (False, True):
        runner = Sampling(proposer(recycle=recycle, answers=0))
        text = runner.text(7, 60)
        assert len(set(text)) > 50, "nothing to be known from the text itself"
        for i in range(2):
            request = Request(f"r{i}", text[:1], text[1:], extra_args={"tenant": str(i)})
            while request.done < 58:
                runner.step([request])
            runner.finish(request)
        drafted[recycle] = runner.accepted
        assert ("recycled" in runner.drafter.stats.accepted_by_source) == recycle
    assert drafted[True] > drafted[False] + 30


def test_likely_tokens_are_kept_behind_the_tokens_that_they_follow(monkeypatch):
    rng = np.random.default_rng(2)
    runner = Sampling(proposer(slope=0.0))
    kept, keep = [], runner.drafter.guest.record_topk
    monkeypatch.setattr(runner.drafter.guest, "record_topk", lambda key, *given: kept.append(given) or keep(key, *given))
    requests = []
    for i in range(5):
        text = runner.text(i, 100)
        requests.append(Request(f"r{i}", text[:3], text[3:]))
    late, n_rows = requests[-1], 0
    for step in range(40):
        scheduled = [r for r in requests if r.done < 90 and rng.random() < 0.8]
        rng.shuffle(scheduled)
        if scheduled:
            n_rows += sum(1 + len(runner.drafts.get(r.name, [])) for r in scheduled if r is not late or step >= 9)
            runner.step(scheduled, prefilling=[late] if step < 9 else [])
    assert sum(len(last) for _, last, _, _ in kept) == n_rows
    assert runner.accepted > 60
    for before, last, tokens, logits in kept:
        assert (tokens == runner.follows[last]).all()
        assert (logits == np.arange(8.0, 0.0, -1.0)).all()
        assert (runner.follows[before] == last[:, None]).any(1)[before >= 0].all()


def test_logits_that_cannot_be_read_end_nothing(caplog):
    runner = Sampling(proposer())
    a = Request("r0", runner.text(0, 3), runner.text(0, 60)[3:])
    runner.step([a])
    for _ in range(2):
        assert runner.sampler(logits=None, sampling_metadata=None) is None
    runner.step([a])
    assert len(runner.drafter.guest) == 1
    assert [record.message for record in caplog.records if "not drafted any more" in record.message] == [
        "what the model holds likely cannot be seen, and is not drafted any more"
    ]


def test_what_is_likely_in_another_pass_is_not_kept(monkeypatch):
    """A pass that nobody was asked after, of another number of rows."""
    runner = Sampling(proposer())
    a, b = (Request(f"r{i}", runner.text(i, 3), runner.text(i, 60)[3:]) for i in range(2))
    monkeypatch.setattr(runner.drafter.guest, "record_topk", lambda *_: pytest.fail("kept"))
    runner.sampler(logits=torch.zeros(3, VOCAB), sampling_metadata=None)
    Runner.step(runner, [a, b])
    Runner.step(runner, [a])


def test_what_stays_away_is_remembered_as_an_answer():
    runner = Runner(proposer(), known=False)
    answer = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()
    old = Request("old", [7, 8], answer)
    while old.done < 40:
        runner.step([old])
    for i in range(vllm.PATIENCE + 2):
        runner.step([request(50 + i // 20, 60)])
    new = Request("new", [9, *answer[:6]], answer[6:])
    while new.done < 34:
        runner.step([new])
    assert runner.drafter.stats.accepted_by_source.get("answers", 0) > 10


def test_a_request_that_the_runner_forgot_is_remembered_at_once():
    runner = Runner(proposer())
    answer = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()
    old, other = Request("old", [7, 8], answer), Request("other", [7, 8], answer, extra_args={"tenant": "b"})
    for each in (old, other):
        while each.done < 40:
            runner.step([each])
        runner.finish(each)
    new = Request("new", [9, *answer[:6]], answer[6:], extra_args={"tenant": "c"})
    while new.done < 34:
        runner.step([new])
    assert runner.drafter.stats.accepted_by_source.get("answers", 0) == 0, "of another tenant"
    runner.finish(new)
    new = Request("new2", [9, *answer[:6]], answer[6:])
    while new.done < 34:
        runner.step([new])
    assert runner.drafter.stats.accepted_by_source["answers"] > 10


@both
def test_a_thousand_requests_leave_nothing_behind(known):
    rng = np.random.default_rng(2)
    runner = Runner(proposer(answers=2000), known=known)
    waiting = [request(i, 8) for i in range(1000)]
    running, n_done = [], 0
    while waiting or running:
        while waiting and len(running) < 8:
            running.insert(int(rng.integers(0, len(running) + 1)), waiting.pop())
        runner.step(running)
        for each in [r for r in running if r.done >= 8 or rng.random() < 0.02]:  # done, or aborted
            running.remove(each)
            runner.finish(each)
            n_done += 1
    assert n_done == 1000
    guest = runner.drafter.guest
    for _ in range(vllm.PATIENCE + 2):
        runner.drafter.propose([], np.zeros(8, np.int32), runner.input_batch.token_ids_cpu)
    assert len(guest) == 0
    assert len(guest._free) == 16
    assert guest._drafts._buffers == [None] * 16
    assert not runner.drafter._away


def test_never_past_the_limits():
    runner = Runner(proposer())
    short = request(1, 5)
    while short.done < 5:
        runner.step([short])
        assert short.done + len(runner.drafts["r1"]) < 5 or short.done == 5
    assert runner.accepted > 0
    long = Request("long", ([3, 4, 5] * 200)[: LONGEST - 4], [3, 4, 5])
    runner.step([long])
    assert len(runner.drafts["long"]) <= 2


def test_hints_of_requests():
    runner = Runner(proposer())
    output = np.random.default_rng(5).integers(0, VOCAB, 30).tolist()
    foreseen = Request("a", [1, 2], output, extra_args={"prediction": output})
    silent = request(1, extra_args={"speculation": 0})
    wrong = request(2, extra_args={"prediction": [999], "datastore": "none", "tenant": 3, "speculation": "no"})
    while foreseen.done < 28:
        runner.step([foreseen, silent, wrong])
        assert runner.drafts["r1"] == []
    assert runner.drafter.stats.accepted_by_source["prediction"] > 15
    assert "r2" in runner.drafter.guest
    stopping = Request("s", [1, 2], output, all_stop_token_ids={output[2]}, extra_args={"prediction": output})
    runner.step([stopping])
    assert runner.drafts["s"] in ([output[1], output[2]], [output[1]])


def test_ranks_draft_the_same():
    """Each worker has its own proposer, and no clock."""
    ranks = [vllm.Proposer(config(ranks=2)) for _ in range(2)]
    assert all(rank.guest.step_timer.steady for rank in ranks)
    runners = [Runner(rank) for rank in ranks]
    requests = [[request(i, 90) for i in range(4)] for _ in ranks]
    for _ in range(20):
        for runner, each in zip(runners, requests, strict=True):
            runner.step(each)
        assert runners[0].drafts == runners[1].drafts
    assert runners[0].accepted > 50


def test_a_datastore_must_fit(tmp_path, monkeypatch):
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(vllm.Proposer, "tokenizer", tokenizer)
    text = np.random.default_rng(8).integers(0, 250, 80).tolist()
    tiny_store.write_store(tmp_path / "other", [[text]], VOCAB)
    with pytest.raises(TokenizerMismatchError):
        proposer(datastore=str(tmp_path / "other"))
    monkeypatch.setattr(tiny_store, "FINGERPRINT", Encoding(tokenizer, VOCAB).fingerprint)
    tiny_store.write_store(tmp_path / "fitting", [[text]], VOCAB)
    runner = Runner(proposer(datastore=str(tmp_path / "fitting")))
    mine = Request("a", text[:10], text[10:])
    theirs = Request("b", text[:10], text[10:], extra_args={"datastore": []})
    while mine.done < 50:
        runner.step([mine])
    assert runner.drafter.stats.accepted_by_source["datastore"] > 20
    before = runner.drafter.stats.accepted_by_source["datastore"]
    runner.step([theirs])
    runner.step([theirs])
    assert runner.drafter.stats.accepted_by_source["datastore"] == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"datastores": "x"}, "no setting 'datastores'"),
        ({"answers": "many"}, "answers must be int"),
        ({"answers": True}, "answers must be int"),
        ({"steady": 1}, "steady must be bool"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(InvalidInputError, match=message):
        vllm.Proposer(config(**settings))


def test_settings_from_the_environment(monkeypatch):
    monkeypatch.setenv(vllm.SETTINGS, '{"steady": true}')
    assert vllm.Proposer(config()).guest.step_timer.steady
    monkeypatch.setenv(vllm.SETTINGS, "[")
    with pytest.raises(InvalidInputError, match="must be a JSON object"):
        vllm.Proposer(config())


def test_what_goes_wrong_ends_no_request(caplog):
    runner = Runner(proposer())
    runner.step([request(1)])
    runner.drafter.guest.chains = None
    lengths = np.full(8, 30, np.int32)
    assert runner.drafter.propose([[1]], lengths, runner.input_batch.token_ids_cpu) == [[]]
    assert "switched off" in caplog.text
    assert runner.drafter.propose([[1], [2]], lengths, runner.input_batch.token_ids_cpu) == [[], []]


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1"])
def test_tested_versions_are_taken(monkeypatch, version):
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__=version))
    assert proposer().depth == DEPTH


def test_an_untested_version_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.99.1"))
    with pytest.raises(HostVersionError, match=r"vLLM 0\.99\.1 was not tested; 0\.32 to 0\.33 were"):
        proposer()


HYBRIDS = {
    "is_hybrid": {"is_hybrid": True},
    "is_attention_free": {"is_attention_free": True},
    "has_inner_state": {"has_inner_state": True},
    "layer_types: linear_attention": {"hf_text_config": types.SimpleNamespace(layer_types=["linear_attention", "full_attention"])},
    "layer_types: conv": {"hf_config": types.SimpleNamespace(layer_types=["conv", "full_attention"])},
    "layers_block_type: mamba": {
        "hf_config": types.SimpleNamespace(text_config=types.SimpleNamespace(layers_block_type=["mamba", "attention", "moe"]))
    },
    "attn_type_list: 0": {"hf_config": types.SimpleNamespace(attn_type_list=[0, 1])},
    "linear_attn_config": {"hf_config": types.SimpleNamespace(linear_attn_config={"kda_layers": [1]})},
}


@pytest.mark.parametrize("reason", HYBRIDS)
def test_models_with_a_recurrent_state_are_refused(reason):
    of = config()
    vars(of.model_config).update(HYBRIDS[reason])
    with pytest.raises(UnsupportedModelError, match=rf"tiny keeps a recurrent state \({reason}\).*vllm#52942"):
        vllm.Proposer(of)


def test_models_with_attention_alone_are_taken():
    of = config()
    layer_types = ["full_attention", "sliding_attention", "chunked_attention"]
    vars(of.model_config).update(is_hybrid=False, is_attention_free=False, hf_config=types.SimpleNamespace(layer_types=layer_types))
    assert vllm.Proposer(of).depth == DEPTH
