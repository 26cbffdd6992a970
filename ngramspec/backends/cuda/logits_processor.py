"""Apply logit bias, the stops that `min_tokens` holds back, and penalties on a CUDA device: what `Sampler.adjust_logits` does to a row.

Samplers' entries (each token once, and what is done to it) go in; logits are changed in place before tokens are sampled. An entry carries
how often its token occurs in the text so far; occurrences in the draft above a row are counted here. Lists that do not fit into the room
stay on the host, and so does the sampling of their sequences. Knows rows and parents, no text.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from ngramspec.backends.cuda.upload import Upload
from ngramspec.sampling.batch import Batch
from ngramspec.sampling.sampler import ENTRY, Sampler

ROOM = 1 << 16  # Most entries of all sequences of a pass.
BLOCK = 512
WORDS = ENTRY.itemsize // 4
_BIASED, _HELD, _PROMPT = tl.constexpr(Sampler.BIASED), tl.constexpr(Sampler.HELD), tl.constexpr(Sampler.PROMPT)


class PenaltyEntries:
    """Penalty and bias entries of the sequences of one pass."""

    def __init__(self, device: torch.device, room: int = ROOM) -> None:
        self._staged = torch.zeros(room, WORDS, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host = self._staged.numpy().view(ENTRY)[:, 0]
        self.entries = torch.zeros(room, WORDS, dtype=torch.int32, device=device)
        self._upload = Upload(device)

    def stage_entries(self, batch: Batch, rows: dict[str, np.ndarray]) -> list[bool]:
        """Send the entries of the batch's sequences and write for each of their rows where its entries lie.

        Returns per sequence whether its tokens can be sampled within the pass.
        """
        picked, n = [], 0
        rows["n_entries"].fill(0)
        for s, span in enumerate(batch.spans):
            sampler = span.sampler
            plain = sampler is not None and (sampler.needs_only_logits or sampler.scores_few)
            if sampler is None or plain or not sampler.by_entries:
                picked.append(plain)
                continue
            entries = sampler.list_entries(None if span.tree is None else span.tree.tokens)
            picked.append(n + len(entries) <= len(self._host))
            if picked[s] and len(entries):
                if n == 0:
                    self._upload.wait()
                self._host[n : n + len(entries)] = entries
                mine, p = slice(int(batch.roots[s]), int(batch.ends[s])), sampler.params
                rows["entries"][mine], rows["n_entries"][mine] = n, len(entries)
                rows["repetition"][mine] = p.repetition_penalty
                rows["presence"][mine], rows["frequency"][mine] = p.presence_penalty, p.frequency_penalty
                rows["held"][mine] = batch.positions[mine] + 1 - span.n_prompt - sampler.n_spelled < p.min_tokens
                n += len(entries)
        if n:
            self._upload.copy(self.entries[:n], self._staged[:n])
        return picked


@triton.jit
def _adjust_logits(
    logits, stride, wanted, entries, starts, counts, held, repetition, presence, frequency, ids, parents,
    WANTED: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    row = tl.load(wanted + i).to(tl.int32) if WANTED else i
    n = tl.load(counts + row)
    if n > 0:
        start, holds = tl.load(starts + row), tl.load(held + row) != 0
        factor, once, each = tl.load(repetition + row), tl.load(presence + row), tl.load(frequency + row)
        for first in range(0, n, BLOCK):
            e = first + tl.arange(0, BLOCK)
            at = entries + (start + e) * WORDS
            token = tl.load(at, mask=e < n, other=-1)
            bias = tl.load(at + 1, mask=e < n, other=0).to(tl.float32, bitcast=True)
            count = tl.load(at + 2, mask=e < n, other=0)
            flags = tl.load(at + 3, mask=e < n, other=0)
            node = row
            above = tl.load(parents + node)
            while above >= 0:
                count += (token == tl.load(ids + node)).to(tl.int32)
                node = above
                above = tl.load(parents + node)
            x_at = logits + i.to(tl.int64) * stride + token
            x = tl.load(x_at, mask=e < n, other=0.0)
            x = tl.where((flags & _BIASED) != 0, x + bias, x)
            x = tl.where(((flags & _HELD) != 0) & holds, float("-inf"), x)
            x = tl.where((count > 0) | ((flags & _PROMPT) != 0), tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
            x = tl.where(count > 0, x - (once + each * count.to(tl.float32)), x)
            tl.store(x_at, x, mask=e < n)


def adjust_logits(
    logits: torch.Tensor,
    wanted: torch.Tensor | None,
    entries: torch.Tensor,
    rows: dict[str, torch.Tensor],
    block: int = BLOCK,
) -> None:
    """Change logits [N, V] float32 in place: those after the rows `wanted` [N] of a pass, or after its first N.

    `rows` holds, for all rows, where their entries begin and how many there are: "entries" and "n_entries" [R] int32; whether stops are
    "held" back [R] int32; "repetition", "presence", "frequency" [R] float32; "ids" and "parents" [R] int32.
    """
    names = ("entries", "n_entries", "held", "repetition", "presence", "frequency", "ids", "parents")
    if len(logits):
        _adjust_logits[len(logits),](
            logits, logits.stride(0), logits if wanted is None else wanted, entries, *(rows[name] for name in names),
            WANTED=wanted is not None, BLOCK=block, WORDS=WORDS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
