"""Our drafts in llama-cpp-python: `ngramspec.integrations.llama_cpp.Draft(...).attach(Llama(path))`.

llama-cpp-python calls its draft model with the whole text, after every step, and takes a chain; what it took is seen in the next text. It
says neither when a text begins nor when it ends: a text that does not go on from the last one is another, and the last one is then
remembered as an answer. A `Llama` that is opened with a draft model makes logits of every token of a prompt and keeps them all; one that is
attached makes those that it samples from. One that was opened with a `Draft` is read, never changed. What cannot be drafted for safely is
refused, then at its first call.
"""

from __future__ import annotations

import importlib
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ngramspec.defaults import ANSWERS
from ngramspec.errors import InvalidInputError, UnsupportedModelError
from ngramspec.integrations.compat import check_version, compile_drafting, open_host_syntax, open_stores, prediction_ids
from ngramspec.integrations.draft_session import Guest
from ngramspec.outputs import Stats
from ngramspec.speculative.open_datastores import Store
from ngramspec.tokenizer.encode import Prompt

TESTED = ("0.3.36", "0.3.36")
DEPTH = 16
# Initial estimate of a row's time as a share of a step: llama.cpp on a CPU of few cores, with weights of 4 bits.
SLOPE = 0.4
_TEXT = "text"


class Draft:
    """Drafts for one `Llama`. Not thread-safe, like `Llama`."""

    def __init__(
        self,
        *,
        tokenizer: Any = None,
        datastore: Store | Sequence[Store] | Mapping[str, Store] = (),
        depth: int = DEPTH,
        answers: int = ANSWERS,
        steady: bool = False,
        slope: float = SLOPE,
    ) -> None:
        """Prepare drafts of at most `depth` tokens.

        `datastore`: folders or open stores, made with `tokenizer`, which is the model's own from transformers or the `tokenizers` library
        and is also needed for predictions that are text and for the syntax table. `answers`: size of the output cache in tokens; `steady`:
        ignore timings; `slope`: initial estimate of a row's time as a share of a step.

        Raises HostVersionError. Other errors are raised at the first call, when the model is known.
        """
        self._host = importlib.import_module("llama_cpp")
        check_version("llama-cpp-python", self._host.__version__, TESTED)
        compile_drafting()
        self._settings: dict[str, Any] = {"depth": depth, "answers": answers, "steady": steady, "slope": slope}
        Guest(vocab_size=1, max_seqs=1, **self._settings)  # raises what is wrong with them
        self._tokenizer, self._datastore = tokenizer, datastore
        self._guest: Guest | None = None
        self._llama: weakref.ref[Any] = lambda: None  # type: ignore[assignment]
        self._prediction: Prompt | None = None
        self._asked_s: float | None = None
        self._chain: list[int] = []

    @property
    def stats(self) -> Stats:
        """What drafts did."""
        return Stats() if self._guest is None else self._guest.stats

    def attach(self, llama: Any) -> None:
        """Draft for this `Llama`, which was opened without a draft model. Of a step with drafts, and of no other, all rows get logits; one
        that was opened with `logits_all=True`, which `logprobs` need, goes on making and keeping them all.

        Raises InvalidInputError, UnsupportedModelError, DatastoreError, TokenizerMismatchError.
        """
        if getattr(llama, "draft_model", None) is not None:
            raise InvalidInputError("this Llama has a draft model: open it without, or with this Draft as its draft_model")
        self._bind(llama)
        if not llama._logits_all:
            llama._batch.set_batch = partial(self._set_batch, llama._batch.set_batch)
        llama.draft_model = self

    def _set_batch(self, set_batch: Callable[..., None], *, batch: Sequence[int], n_past: int, logits_all: bool) -> None:
        """Call `Llama`'s own `set_batch`, with logits of all rows if all tokens after the first are drafts."""
        n = len(batch) - 1
        drafted = 0 < n <= len(self._chain) and list(batch[1:]) == self._chain[:n]
        set_batch(batch=batch, n_past=n_past, logits_all=logits_all or drafted)

    def predict(self, prediction: Prompt | None) -> None:
        """Set the predicted output of the next text, as text or token ids; None: none. Raises TokenizerError."""
        if isinstance(prediction, str):
            prediction = prediction_ids(prediction, self._tokenizer, 2**31 - 1).tolist()  # type: ignore[union-attr]
        self._prediction = prediction

    def finish(self) -> None:
        """End the text and add its output to the output cache; otherwise this happens when another text begins."""
        if self._guest is not None:
            self._guest.end(_TEXT, finished=True)

    def __call__(self, input_ids: np.ndarray, /, **kwargs: Any) -> np.ndarray:
        """Return the draft [k] intc after input_ids [n] intc, whose last token is not computed yet."""
        now = time.perf_counter()
        llama: Any = sys._getframe(1).f_locals.get("self")
        if self._guest is None or llama is not self._llama():
            self._bind(llama)
        guest = self._guest
        assert guest is not None
        began = guest.sync(_TEXT, input_ids, n_output=1, prediction=self._prediction)
        if began:
            self._prediction = None
        elif self._asked_s is not None:
            guest.took(1 + len(self._chain), (now - self._asked_s) * 1e3)
        room = min(llama._n_ctx - len(input_ids), llama.n_batch - 1)
        (self._chain,) = guest.chains([_TEXT], [room], 1)
        self._asked_s = now
        return np.array(self._chain, np.intc)

    def _bind(self, llama: Any) -> None:
        """This is what is drafted for. Raises InvalidInputError, UnsupportedModelError, DatastoreError, TokenizerMismatchError."""
        if not isinstance(llama, self._host.Llama):
            raise InvalidInputError(f"a Draft drafts for the Llama that it is the draft_model of, not for {type(llama).__name__}")
        if llama._is_recurrent or llama._is_hybrid:
            raise UnsupportedModelError(
                "the model is recurrent or has recurrent layers: llama-cpp-python cannot take rejected drafts out of its state again, and "
                "would go on from a wrong text. Open it without draft_model"
            )
        if llama._logits_all and len(llama.scores) < llama._n_ctx:
            raise InvalidInputError(
                f"opened with a draft model, llama-cpp-python wants the logits of all n_ctx={llama._n_ctx} tokens and keeps those of "
                f"n_batch={len(llama.scores)}: it would fail when a text grows beyond. Open the model without draft_model and attach the "
                "Draft to it, or with logits_all=True"
            )
        vocab_size = llama.n_vocab()
        stores = open_stores(self._datastore, self._tokenizer, llama.model_path, vocab_size) if self._datastore else {}
        stop = llama.token_eos()
        syntax = open_host_syntax(self._tokenizer, vocab_size)
        self._guest = Guest(
            vocab_size=vocab_size, max_seqs=1, stops=[stop] if stop >= 0 else [], stores=stores, syntax=syntax, **self._settings
        )
        self._llama = weakref.ref(llama)
