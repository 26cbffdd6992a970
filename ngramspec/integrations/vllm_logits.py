"""What vLLM's model holds likely, seen where its runner samples: drafts are made of it in the next steps.

The runner's two samplers are modules, and before each of their calls the logits are looked at: [R, V], for each row of the batch in turn
those after its last known token and after each token of its draft. Nothing is changed, and nothing is looked at where a runner has no such
samplers. Knows no text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ngramspec.outputs import KEPT
from ngramspec.sampling.topk import find_topk

log = logging.getLogger(__name__)


class Likely(NamedTuple):
    """The model's top-k in a pass over B rows of the batch, whose logits have R rows."""

    lengths: np.ndarray
    """[B] int64: the logits rows of each, 1 + those of its draft."""
    drafted: np.ndarray
    """[R - B] int32: the drafts, one after the other."""
    tokens: np.ndarray
    """[R, KEPT] int32, most likely first."""
    logits: np.ndarray
    """[R, KEPT] float32: their logits."""


class Watch:
    """Hooks on the samplers of a runner that see its logits."""

    def __init__(self, runner: Any, vocab_size: int) -> None:
        """Register the hooks. Raises AttributeError if the runner has no samplers."""
        self._vocab_size = vocab_size
        self._last: tuple[Any, Any, Any] | None = None
        samplers = (runner.sampler, self._record_sampled), (runner.rejection_sampler, self._record_verified)
        self._hooks = [sampler.register_forward_pre_hook(look, with_kwargs=True) for sampler, look in samplers]

    def take(self) -> Likely | None:
        """Return the top-k of the last pass once, None if there is none."""
        last, self._last = self._last, None
        if last is None:
            return None
        lengths, drafted, (tokens, logits) = last
        if lengths is None:
            lengths = np.ones(len(tokens), np.int64)
        ids = np.empty(0, np.int32) if drafted is None else drafted.cpu().numpy().astype(np.int32)
        return Likely(np.asarray(lengths, np.int64), ids, _on_host(tokens), _on_host(logits))

    def _record_sampled(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._remove_hooks_on_error():
            if not kwargs.get("predict_bonus_token"):  # else a part of what `_record_verified` saw
                self._last = None, None, self._select_topk(args[0] if args else kwargs["logits"])

    def _record_verified(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._remove_hooks_on_error():
            metadata = args[0] if args else kwargs["metadata"]
            logits = args[2] if len(args) > 2 else kwargs["logits"]
            self._last = [n + 1 for n in metadata.num_draft_tokens], metadata.draft_token_ids, self._select_topk(logits)

    @contextmanager
    def _remove_hooks_on_error(self) -> Iterator[None]:
        """Remove the hooks after an exception, so that it ends no request."""
        try:
            yield
        except Exception:
            self._last = None
            for hook in self._hooks:
                hook.remove()
            log.exception("what the model holds likely cannot be seen, and is not drafted any more")

    def _select_topk(self, logits: Any) -> tuple[Any, Any]:
        """Return top tokens and logits, asynchronously on a device; the samplers may write to the logits afterwards."""
        logits = logits[:, : self._vocab_size]
        if logits.device.type == "cpu":
            return find_topk(logits.detach().float().numpy())
        values, tokens = logits.topk(KEPT)
        return tokens.int(), values.float()


def _on_host(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.cpu().numpy()
