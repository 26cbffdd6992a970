"""Turn a prompt, its sampling parameters and its hints into sequences.

Whatever can be wrong with a request is found here, before the engine's thread sees it. Knows the tokenizer and the engine's limits; starts
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property

import numpy as np

from ngramspec.engine.request import Hints
from ngramspec.engine.sequence import Sequence, SequenceOptions
from ngramspec.errors import InvalidInputError, PromptTooLongError, make_datastore_error
from ngramspec.grammar.constraint import Constraint
from ngramspec.grammar.healing import Healing
from ngramspec.grammar.llguidance import Grammars
from ngramspec.kv_cache.blocks import BlockHashes
from ngramspec.outputs import Choice, Completion
from ngramspec.prompts.suggestions import Suggestions
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling_params import SamplingParams
from ngramspec.tokenizer.detokenizer import NoText, SpecialTokens, TextStream
from ngramspec.tokenizer.encode import Encoding, Prompt
from ngramspec.tokenizer.spelling import Spelling


class InputProcessor:
    """Makes the sequences of one engine's requests. For any thread."""

    def __init__(
        self, encoding: Encoding, grammars: Grammars, eos_token_ids: tuple[int, ...], max_model_len: int, prefix_cache: bool
    ) -> None:
        """Make what checks and encodes requests. `prefix_cache`: whether they may use it."""
        self._encoding, self._grammars, self._eos_token_ids = encoding, grammars, eos_token_ids
        self._max_model_len, self._prefix_cache = max_model_len, prefix_cache
        self._suggestions = Suggestions()

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Return the token ids [n] int32 of a prompt. Raises InvalidInputError, PromptTooLongError, TokenizerError."""
        ids, longest = self._encoding.encode(prompt, "prompt"), self._max_model_len
        if len(ids) == 0:
            raise InvalidInputError("the prompt is empty: at least one token is needed")
        if len(ids) >= longest:
            raise PromptTooLongError(f"the prompt has {len(ids)} tokens; with max_model_len {longest}, at most {longest - 1} fit")
        return ids

    def check(self, params: SamplingParams, hints: Hints, datastores: Collection[str]) -> None:
        """Raise InvalidInputError for a token id beyond the vocabulary, a hint of the wrong type, or a datastore that is not there."""
        vocab_size = self._encoding.vocab_size
        for name in ("logit_bias", "allowed_token_ids", "logprob_token_ids"):
            if (largest := max(getattr(params, name) or (), default=0)) >= vocab_size:
                raise InvalidInputError(f"{name} must be for token ids 0 to {vocab_size - 1} of {vocab_size}, got {largest}")
        for name in ("speculation", "prefix_cache"):
            if not isinstance(hints.get(name, True), bool):
                raise InvalidInputError(f"{name} must be True or False, got {hints[name]!r}")  # type: ignore[literal-required]
        tenant = hints.get("tenant")
        if tenant is not None and not isinstance(tenant, str):
            raise InvalidInputError(f"tenant must be text or None, got {tenant!r}")
        cursor = hints.get("cursor", ("", ""))
        if not (isinstance(cursor, tuple) and len(cursor) == 2 and all(isinstance(text, str) for text in cursor)):
            raise InvalidInputError(f"cursor must be a pair of texts, got {cursor!r:.80}")
        if not callable(hints.get("next_prompts", print)):
            raise InvalidInputError(f"next_prompts must be a function, got {hints['next_prompts']!r:.80}")
        if (chosen := hints.get("datastores")) is None:
            return
        several = isinstance(chosen, (list, tuple, set, frozenset))
        if wrong := [name for name in chosen if name not in datastores] if several else [chosen]:
            raise make_datastore_error("datastores", datastores, wrong if several else chosen)

    def shares_prefix(self, hints: Hints) -> bool:
        """Return whether a request uses the prefix cache."""
        return self._prefix_cache and hints.get("prefix_cache", True) and hints.get("tenant", "") is not None

    def recall_suggestion(self, hints: Hints) -> list[Callable[[Choice], None]]:
        """Let what is left of an earlier suggestion at the hints' cursor be the prediction, unless there is one.

        Return what is to be called with the choice once it has ended, so that it is remembered in turn.
        """
        if (cursor := hints.get("cursor")) is None:
            return []
        place, suggestions = (hints.get("tenant", ""), *cursor), self._suggestions
        if hints.get("prediction") is None and (rest := suggestions.find(*place)) is not None:
            hints["prediction"] = rest
        return [lambda choice: suggestions.add(*place, choice.text)]

    def make_sequences(self, ids: np.ndarray, params: SamplingParams, completion: Completion, hints: Hints) -> list[Sequence]:
        """Return a sequence for each of the `n` samples, whose choices become those of the completion."""
        expected, chosen, tenant = hints.get("prediction"), hints.get("datastores"), hints.get("tenant", "")
        prediction = None
        if expected is not None:
            if isinstance(expected, str):
                expected = params.healed + expected
            prediction = self._encoding.match_line_ends(ids, self._encoding.encode(expected, "prediction", add_special_tokens=False))
        bad_words = [ids for word in params.bad_words for ids in self._list_spellings(word)]
        constraint = self._make_constraint(params, tenant)
        special = self._encoding.special_tokens
        stop_tokens = {special[text]: text for text in params.stop if text in special}
        options = SequenceOptions(
            stop_ids=frozenset({*params.stop_token_ids, *stop_tokens, *(() if params.ignore_eos else self._eos_token_ids)}),
            stop_tokens=stop_tokens,
            max_len=self._max_model_len,
            speculation=hints.get("speculation", True),
            prediction=prediction,
            tenant=tenant,
            datastores=None if chosen is None else frozenset(chosen),
        )
        block_hashes = BlockHashes(tenant or "", ids) if self.shares_prefix(hints) else None
        special_tokens = SpecialTokens.from_params(params.skip_special_tokens, params.spaces_between_special_tokens)
        sampler = Sampler(
            params,
            index=0,
            seed=completion.seed,
            prompt=ids,
            vocab_size=self._encoding.vocab_size,
            stop_ids=options.stop_ids,
            constraint=constraint,
            bad_words=bad_words,
        )
        seqs = []
        for index in range(params.n):
            text: TextStream | NoText = NoText()
            if self._encoding.tokenizer is not None:
                stops = params.stop, params.min_tokens, params.include_stop_str_in_output
                hidden = len(params.healed)
                text = TextStream(self._encoding.tokenizer, completion.prompt_token_ids, *stops, special_tokens, n_hidden=hidden)
            hashes = block_hashes and block_hashes.copy()
            seqs.append(Sequence(ids, params, sampler.fork(index), text, options, index=index, block_hashes=hashes))
            completion.choices.append(seqs[-1].choice)
        completion.prompt_logprobs = seqs[0].prompt_logprobs
        return seqs

    def _make_constraint(self, params: SamplingParams, tenant: str | None) -> Constraint | None:
        """Return what the first output must follow, to be forked for each. Raises InvalidInputError, TokenizerError."""
        if params.grammar is not None:
            return self._grammars.compile(params.grammar, tenant)
        if not params.healed:
            return None
        letters = self._spelling.to_letters(params.healed)
        if letters is None:
            raise InvalidInputError(f"healed must be text that this tokenizer's tokens can spell, got {params.healed!r:.80}")
        constraint = Healing(self._spelling, letters)
        constraint.mask()  # the vocabulary is sorted here once, and not in the engine's thread
        return constraint

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self._encoding.get_backend("healed"), self._encoding.vocab_size)

    def _list_spellings(self, word: str) -> list[list[int]]:
        """Return the token ids by which a bad word can be written: as it is, and after a blank if that has as many tokens and another first
        one (vLLM's rule). The text of a control token is also that token."""
        bare, spaced = (self._encoding.encode_text(text) for text in (word, " " + word.lstrip()))
        spelled = [bare, spaced] if bare and len(spaced) == len(bare) and spaced[0] != bare[0] else [bare]
        number = self._encoding.special_tokens.get(word)
        return spelled if number is None else [*spelled, [number]]
