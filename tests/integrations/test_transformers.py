"""transformers: the same text with drafts and without, greedy and sampled; streamers and criteria see what they would see without."""

import threading

import pytest
import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from ngramspec import HostVersionError, InvalidInputError, TokenizerError, UnsupportedModelError
from ngramspec.datastore.errors import TokenizerMismatchError
from ngramspec.integrations import compat
from ngramspec.integrations.transformers import Assistant, assistant, generate
from ngramspec.tokenizer.encode import Encoding
from tests import tiny_store
from tests.tiny import EOS, VOCAB, byte_tokenizer, tiny_model, word_tokenizer


@pytest.fixture
def model():
    return steady("llama")


def steady(arch, **settings):
    """A flat model, which repeats itself, and a guest that looks at no time."""
    model = tiny_model(arch, std=0.06)
    assistant(model, steady=True, **settings)
    return model


PROMPT = [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]]


def complete(model, drafts=True, prompt=PROMPT, seed=0, **options):
    options = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": EOS} | options
    torch.manual_seed(seed)
    ours = {"custom_generate": generate} if drafts else {}
    return model.generate(torch.tensor(prompt), **ours, **options)


def accepted(model) -> int:
    return assistant(model).stats.accepted


@pytest.mark.parametrize("arch", ["llama", "gpt2", "mistral", "gemma3_text"])
def test_greedy_texts_are_the_same_and_sooner(arch):
    model = steady(arch)
    assert torch.equal(complete(model), complete(model, drafts=False))
    stats = assistant(model).stats
    assert stats.tokens == 60
    assert stats.passes == 60 - stats.accepted < 60


@pytest.mark.parametrize("options", [{}, {"temperature": 0.3, "top_k": 20}, {"repetition_penalty": 1.3}, {"top_p": 0.8}], ids=str)
def test_sampled_texts_are_the_same(model, options):
    before = accepted(model)
    for seed in range(6):
        ours, plain = (complete(model, drafts, seed=seed, do_sample=True, **options) for drafts in (True, False))
        assert torch.equal(ours, plain)
    assert accepted(model) > before or options.get("temperature", 1.0) == 1.0
    torch.manual_seed(0)
    following = [complete(model, drafts, do_sample=True) is not None and torch.rand(1).item() for drafts in (True, False)]
    assert following[0] == following[1], "the generator stands where plain sampling leaves it"


def test_processors_see_each_row_once_and_in_order(model):
    class Counting(LogitsProcessor):
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores):
            self.seen.append(input_ids.tolist())
            return scores + torch.nn.functional.one_hot(torch.tensor([len(self.seen) % 7]), VOCAB) * 0.01

    ours, plain = Counting(), Counting()
    a = complete(model, logits_processor=LogitsProcessorList([ours]))
    b = complete(model, drafts=False, logits_processor=LogitsProcessorList([plain]))
    assert torch.equal(a, b)
    assert ours.seen == plain.seen


def test_scores_are_those_of_plain_decoding(model):
    for options in ({"do_sample": True}, {"do_sample": False}, {"do_sample": False, "repetition_penalty": 1.2}):
        ours, plain = (complete(model, d, return_dict_in_generate=True, output_scores=True, **options) for d in (True, False))
        assert torch.equal(ours.sequences, plain.sequences)
        assert len(ours.scores) == len(plain.scores)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours.scores, plain.scores, strict=True))


class Streamer:
    def __init__(self):
        self.tokens, self.n_puts, self.ended = [], 0, False

    def put(self, value):
        self.tokens.extend(value.flatten().tolist())
        self.n_puts += 1

    def end(self):
        self.ended = True


def test_a_streamer_hears_the_text_and_its_end(model):
    streamer = Streamer()
    text = complete(model, streamer=streamer)
    assert streamer.tokens == text[0].tolist()
    assert streamer.ended
    assert 2 < streamer.n_puts < 61, "several tokens at a time"


@pytest.mark.parametrize("n", [14, 17, 21, 30, 44])
def test_a_criterion_ends_the_text_where_it_holds(model, n):
    class Length(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= n)

    streamer = Streamer()
    criteria = StoppingCriteriaList([Length()])
    ours = complete(model, stopping_criteria=criteria, streamer=streamer, return_dict_in_generate=True)
    plain = complete(model, drafts=False, stopping_criteria=criteria)
    assert torch.equal(ours.sequences, plain)
    assert streamer.tokens == plain[0].tolist()
    assert ours.past_key_values.get_seq_length() <= n


def test_an_end_token_inside_a_draft_ends_the_text(model):
    plain = complete(model, drafts=False)[0, 13:].tolist()
    stop = plain[20]
    ours, plain = (complete(model, drafts, eos_token_id=stop) for drafts in (True, False))
    assert torch.equal(ours, plain)


def test_predictions_and_answers(model):
    plain = complete(model, drafts=False, prompt=[[40, 41, 42]])
    output = plain[0, 3:].tolist()
    mine = steady("llama")
    assert torch.equal(complete(mine, prompt=[[40, 41, 42]], prediction=output, tenant=None), plain)
    assert assistant(mine).stats.accepted_by_source.get("prediction", 0) > 10
    assert torch.equal(complete(mine, prompt=[[40, 41, 42]]), plain)
    assert torch.equal(complete(mine, prompt=[[40, 41, 42]], speculation=False), plain)


def test_a_datastore_is_drafted_from_and_must_fit(tmp_path, model, monkeypatch):
    prompt = [[40, 41, 42]]
    plain = complete(model, drafts=False, prompt=prompt)
    tokenizer = byte_tokenizer()
    store = tmp_path / "store"
    tiny_store.write_store(store, [[plain[0].tolist()] * 2], VOCAB)
    mine = tiny_model("llama", std=0.06)
    with pytest.raises(TokenizerError, match="tokenizer="):
        complete(mine, datastore=store)
    assistant(mine, tokenizer=tokenizer, steady=True)
    with pytest.raises(TokenizerMismatchError):
        complete(mine, datastore=store)
    monkeypatch.setattr(tiny_store, "FINGERPRINT", Encoding(tokenizer, VOCAB).fingerprint)
    store = tmp_path / "fitting"
    tiny_store.write_store(store, [[plain[0].tolist()] * 2], VOCAB)
    assert torch.equal(complete(mine, prompt=prompt, datastore=store), plain)
    assert list(assistant(mine).guest.stores) == [str(store)]
    assert assistant(mine).stats.accepted_by_source.get("datastore", 0) > 10
    assistant(mine, tokenizer=word_tokenizer())
    with pytest.raises(TokenizerMismatchError):
        complete(mine, datastore=store)


def test_what_cannot_be_drafted_for_is_refused(model, monkeypatch):
    with pytest.raises(InvalidInputError, match="one text at a time"):
        complete(model, prompt=[[5, 6], [7, 8]])
    with pytest.raises(InvalidInputError, match="without beams"):
        complete(model, num_beams=2)
    with pytest.raises(InvalidInputError, match="token ids must be 0 to 255, got 256"):
        complete(model, prediction=[VOCAB])
    with pytest.raises(InvalidInputError, match="depth"):
        Assistant(model, depth=0)
    monkeypatch.setattr(transformers, "__version__", "5.99.0")
    with pytest.raises(HostVersionError, match=r"transformers 5\.99\.0 was not tested"):
        Assistant(model)
    monkeypatch.setenv(compat.ANYWAY, "1")
    Assistant(model)
    monkeypatch.setattr(model, "_is_stateful", True)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        Assistant(model)


def test_texts_in_threads_and_failed_ones_leave_nothing(model):
    plain = complete(model, drafts=False)
    found = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: complete(model)})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(text, plain) for text in found.values())
    assert len(found) == 4

    class Broken(StoppingCriteria):
        def __call__(self, *args, **kwargs):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        complete(model, stopping_criteria=StoppingCriteriaList([Broken()]))
    assert len(assistant(model).guest) == 0


def test_versions_are_compared_by_numbers():
    compat.check_version("h", "5.9.1rc1", ("5.2", "5.10"))
    compat.check_version("h", "5.10.4+cpu", ("5.2", "5.10"))
    for version in ("5.11.0", "5.1", "6.0", "4.9"):
        with pytest.raises(HostVersionError):
            compat.check_version("h", version, ("5.2", "5.10"))
