"""The contract between a device and the step: a `Runner` computes one pass over any mix of rows, `Batch` in, `Output` out.

Also what is the same on every device: which models are refused, the check against transformers' own logits, the proof that rows do not
depend on each other on this machine, the measurement of what a pass costs. A device's runner replaces a loaded
model's attention and linear layers by its own. Nothing here knows requests, drafting or stopping.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from ngramspec.errors import OutOfMemoryError, UnsupportedModelError
from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.models import refusals
from ngramspec.models.latent_weights import list_latent_attention
from ngramspec.outputs import BLOCK, DraftTree, TokenLogprob
from ngramspec.sampling.batch import ROWS_PER_ITEM, Batch, Span, pack
from ngramspec.sampling.verify import Match

if TYPE_CHECKING:  # whoever binds a model has imported them; a runner that needs neither should not wait for them
    import torch
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

SINGLES = 4  # last tokens of the self-test's prompt that are computed one by one, as its tree's nodes are: a pass each
COST_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # row counts at which the cost of a pass is measured


@dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """What a runner is made for, on every device."""

    max_len: int
    """Positions that a sequence may need: the tokens of its text, and room for drafts after them."""
    longest: int | None = None
    """Tokens of the longest text, if `max_len` has room for drafts, too."""
    max_seqs: int
    max_rows: int
    kv_bytes: int | None
    """Memory for the pool of keys, values and states. None on CUDA: what the largest pass leaves of the device's memory."""
    max_blocks: int | None = None
    """Upper bound of the pool."""
    progress: Callable[[str], None] = lambda _: None
    """Called with a line of text at each stage of loading."""


class LinearPolicy(Protocol):
    """How matrix products with one shape of weight are computed; `str` describes it."""

    @property
    def bitwise(self) -> bool:
        """Whether a row's result was proved independent of how many rows the pass has."""


# (b, start, path): the KV that a batch's b-th sequence has at positions `path` [n] is moved to start, start + 1, …
Kept: TypeAlias = tuple[int, int, np.ndarray]


class Output(Protocol):
    """What a pass computed, for the N rows whose logits were wanted, in their order. A device may still be at work on it: reading waits."""

    def wait(self) -> float:
        """Wait until the pass is done and return the milliseconds that it took, whatever the host did meanwhile."""
        ...

    def get_matches(self) -> list[Match | None]:
        """Return what `verify.match_draft` accepts of each sequence whose sampler the device serves; None for the others."""
        ...

    def get_logits(self, first: int, end: int) -> np.ndarray:
        """Return logits rows [end - first, V] float32."""

    def get_topk(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the top-k tokens after each row [end - first, KEPT] int32 and their logits float32; None if they were not computed."""

    def get_logprobs(self, rows: np.ndarray, n: int) -> list[TokenLogprob]:
        """Return log-probabilities of the tokens that the device picked after these rows [m], and of the n most likely.

        Only for sequences that have a match in `get_matches` and whose log-probabilities are wanted.
        """
        ...

    def get_hidden_states(self, rows: np.ndarray) -> np.ndarray:
        """Return the last hidden states [n, H] float32 of rows [n] of the batch, as the language-model head sees them.

        Only if `Runner.keep_hidden_states` was called.
        """

    def commit(self, kept: Sequence[Kept]) -> None:
        """Keep accepted paths."""


class NativeForward(Protocol):
    """A forward pass whose rows compiled code packs and whose results it reads, so that no Python is needed between two passes.

    `inputs` is a numba structref. Compiled code sets its fields `input_ids positions wanted items owners tables bases paths blocks offsets
    parents roots ends` (`wanted` is `Batch.logits_rows`, the others are named as in `Batch`), gives it room for the results in `logits
    tokens values fine greedy`, and sets `state` to 0. After `run`, `greedy` [N] has the most likely token after each of the N rows whose
    logits were wanted, tokens[0] and values[0] [N, n_best] the top-k, and logits [N, :vocab_size] the logits.
    """

    inputs: Any
    logits: np.ndarray
    """[rows, at least V] float32: room for the logits."""
    n_threads: int
    n_best: int
    rows_per_item: int

    def reserve(self, n_rows: int, n_positions: int) -> None:
        """Allocate memory for passes of `n_rows` rows over positions below `n_positions`. Raises MemoryError."""

    def run(self) -> None:
        """Compute the pass that was packed into `inputs`."""

    def keep_paths(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, positions: np.ndarray) -> None:
        """Move keys and values at positions[ends[i - 1]:ends[i]] of the sequence at slots[i] to starts[i], starts[i] + 1, ….

        All int64; each sequence's positions rise and lie at their targets or after them.
        """


class HeadRows(NamedTuple):
    """Rows of one sequence that a head reads."""

    slot: int
    first: int
    """How many rows of the sequence the head has read before these, whose keys and values it still has."""
    tokens: np.ndarray  # [n] int32
    states: np.ndarray  # [n, H] float32: the model's last hidden state of the position before each token's, or what the head made of that


class Predicted(NamedTuple):
    """What a head predicts after the last row of each of the B sequences."""

    tokens: np.ndarray  # [B, k] int32, most likely first
    probs: np.ndarray  # [B, k] float32
    states: np.ndarray  # [B, H] float32, to predict further from


class PredictionHead(Protocol):
    """A model's own head that predicts further tokens, with keys and values of its own for every slot. It changes nothing of the model's.

    Rows that are read again replace those after them, so drafts are undone by reading on from where they began.
    """

    most_rows: int
    """Most rows of one sequence in a call."""
    step_ms: float
    """Milliseconds of a call for one row, measured at the start."""

    def predict(self, rows: Sequence[HeadRows]) -> Predicted:
        """Read the rows of some sequences, and predict what follows their last ones."""


class Runner(ABC):
    """A bound model with its pool. Single-threaded: one caller at a time."""

    model: PreTrainedModel
    pool: BlockTables
    max_rows: int
    vocab_size: int
    shapes: list[tuple[int, int]]
    """(n_kv_heads, head_dim) of each layer."""
    exactness: str
    precision: str
    """Precision of products with the model's weights: "int8" or a dtype."""
    kv_dtype: str
    """Dtype of keys and values."""
    violations: list[str]
    """What `self_test` found to depend on something else than a row, in words: which kernel, in which shape."""
    policies: Mapping[tuple[int, int], LinearPolicy]
    """How matrix products with a weight [N, K] are computed, by (N, K)."""
    unproven: Sequence[str] = ()
    """Paths of modules whose rows may depend on their number, whatever the self-test finds."""
    tokenizer: Any = None
    """The model's own, if it has one. Set by the engine, as is `max_model_len`, for those that compare another model with this one."""
    max_model_len: int
    """Longest text, prompt and output together."""
    asynchronous = False
    """`forward` returns before the device is done; reading its output waits."""
    has_experts = False
    """Whether further rows need further weights, so that the first ones add more to the time of a pass than later ones."""
    is_recurrent = False
    """Whether layers keep a state, so that a sequence goes on only where its last pass or a snapshot ends."""
    max_nodes = sys.maxsize
    """Most nodes of one sequence's draft tree."""
    head: PredictionHead | None = None
    """The model's own head that predicts further tokens, if it has one and it is to be used."""
    rows_per_item = ROWS_PER_ITEM
    cost_rows: tuple[int, ...] = COST_ROWS

    @property
    @abstractmethod
    def device(self) -> str: ...

    @property
    @abstractmethod
    def dtype(self) -> str: ...

    @abstractmethod
    def forward(self, batch: Batch) -> Output:
        """Compute a pass over the rows [T] and write their KV to its positions."""

    def early_exit(self, n_layers: int) -> Callable[[Batch], Output]:
        """Return `forward` through the first layers, the final norm and the head. It writes KV to the same positions of the same pool.

        Raises ValueError where there are fewer layers, UnsupportedModelError where they cannot be run by themselves.
        """
        raise UnsupportedModelError(f"drafts from the first layers are not made on {self.device}")

    def keep_hidden_states(self, wanted: bool) -> None:
        """Set whether outputs from now on have hidden states. Raises UnsupportedModelError on a device that does not provide them."""
        if wanted:
            raise UnsupportedModelError(f"drafts from hidden states are not made on {self.device}")

    def keep_candidates(self, wanted: bool) -> None:  # noqa: B027  # a device that does not tell has them computed by whoever wants them
        """Set whether outputs from now on should have candidates."""

    def enlarge_page(self) -> bool:
        """Make later passes read some weights faster, while nothing else is to do; return whether more is left. Takes milliseconds."""
        return False

    def describe_model(self) -> str:
        """Return what keys and values depend on beside weights and code, such as windows, as JSON: the same at each start of a model."""
        config = self.model.config.get_text_config().to_dict()
        config.pop("_name_or_path", None)
        return json.dumps(config, sort_keys=True, default=str)

    def native_forward(self) -> NativeForward | None:
        """Return the forward pass for compiled code; None: this runner makes passes through `forward` alone."""
        return None

    def run(self, spans: list[Span]) -> torch.Tensor:
        """Run a pass over these spans; return logits [N, V] float32 on the host, which no other pass writes."""
        import torch

        return torch.from_numpy(self._logits_of(spans))

    def _logits_of(self, spans: list[Span]) -> np.ndarray:
        batch = pack(spans, self.pool, self.rows_per_item)
        return self.forward(batch).get_logits(0, len(batch.logits_rows)).copy()

    # ------------------------------------------------------------------ proofs and measurements

    def reserve_free_slot(self, n_tokens: int) -> int:
        """Return a free slot with room for `n_tokens`, for a check or a measurement, which then releases it. Raises OutOfMemoryError."""
        slot = int(np.flatnonzero(self.pool.n_blocks_of == 0)[0])
        if not self.pool.reserve(slot, n_tokens):
            raise OutOfMemoryError(f"the KV pool of {self.pool.n_blocks * BLOCK} tokens is too small for {n_tokens} tokens")
        return slot

    def adopt(self, model: PreTrainedModel) -> None:
        """Route a model's attention to ours, and set `vocab_size` and `shapes`."""
        from ngramspec.models import masks

        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        model.config._attn_implementation = model.config.get_text_config()._attn_implementation = masks.NAME
        self.shapes = kv_shapes(model, model.device)

    def prove(self) -> None:
        """Set `exactness`: "bitwise" where the policies and `self_test` prove rows independent of each other, else "numerical"."""
        doubted = [f"{shape}: {policy}" for shape, policy in self.policies.items() if not policy.bitwise]
        doubted += [f"{path}: transformers' own" for path in self.unproven]
        self.violations = []
        self.exactness = "bitwise" if not doubted and self.self_test() else "numerical"
        if self.exactness == "numerical":
            what = ", ".join([*doubted, *self.violations]) or "attention or small operations"
            log.warning("exactness: numerical (rows depend on their number: %s)", what)

    def make_mismatch_error(self, error: float) -> UnsupportedModelError:
        """Return the error to raise for logits that are this far from transformers' own."""
        return UnsupportedModelError(f"{type(self.model).__name__}: logits differ from transformers' own by {error:.2g} of their size")

    def self_test(self) -> bool:
        """Test whether logits of a prompt in chunks, a chain and a tree are bitwise those of the same tokens in other chunks and one by
        one."""
        return self.rows_are_independent(self._logits_of, 20)

    def rows_are_independent(self, compute: Callable[[list[Span]], np.ndarray], n_prompt: int) -> bool:
        """Test whether rows of a prompt in chunks, a chain and a tree are bitwise those of the same tokens in other chunks and one by one.

        `compute` makes a pass over spans and returns rows [N, any], the last of which belong to the root and the nodes of the last span.
        """
        rng = np.random.default_rng(0)
        n = min(n_prompt, self.pool.max_blocks * BLOCK - 12)
        tokens = rng.integers(0, self.vocab_size, n + 8).astype(np.int32)
        parents = np.array([-1, -1, 0, 0, 3, 2, 1, 6], np.int32)  # the root and node 0 have two children with children
        tree = DraftTree(tokens[n:], parents, np.ones(8, np.float32), np.zeros(8, np.uint8))
        slot = self.reserve_free_slot(n + 8)
        try:
            compute([Span(slot, tokens[: n // 2], 0, logits=0)])
            whole = compute([Span(slot, tokens[n // 2 : n], n // 2, tree)])[-9:]
            if alone := max(0, n - SINGLES):
                compute([Span(slot, tokens[:alone], 0, logits=0)])
            for i in range(alone, n):
                last = compute([Span(slot, tokens[i : i + 1], i)])
            same = bool((last[-1] == whole[0]).all())
            for leaf in sorted(set(range(8)) - set(parents.tolist())):
                if self.is_recurrent:  # a state that has advanced does not go back
                    compute([Span(slot, tokens[:n], 0, logits=0)])
                path = [leaf]
                while parents[path[0]] >= 0:
                    path.insert(0, int(parents[path[0]]))
                for depth, node in enumerate(path):
                    last = compute([Span(slot, tree.tokens[node : node + 1], n + depth)])
                    same = same and bool((last[-1] == whole[1 + node]).all())
            return same
        finally:
            self.pool.release(slot)

    def time_pass(self, rows: int, context: int) -> float:
        """Return milliseconds of one pass that carries `rows` rows of one sequence (a root and a chain) behind `context` tokens."""
        slot = self.reserve_free_slot(context + rows)
        try:
            tokens = np.random.default_rng(0).integers(0, self.vocab_size, rows).astype(np.int32)  # equal ones would go to the same experts
            draft = make_chain_tree(rows - 1)
            spans = [Span(slot, tokens[:1], context - 1, replace(draft, tokens=tokens[1:]))]
            self.pool.skip_to(slot, context - 1)
            start = time.perf_counter()
            self.forward(pack(spans, self.pool, self.rows_per_item)).get_logits(0, 0)
            return (time.perf_counter() - start) * 1e3
        finally:
            self.pool.release(slot)

    def measure(self, counts: list[int], rounds: int = 4, budget_s: float = 1.0) -> list[float]:
        """Milliseconds of passes with the first of these row counts, as many as there is time for and half of them at least: the least of
        interleaved rounds, since what disturbs a pass only adds to it.
        """
        context, started = max(1, min(256, (self.pool.max_blocks * BLOCK - counts[-1]) // 2)), time.perf_counter()
        times: list[float] = []
        self.time_pass(counts[0], context)  # the first pass behind so many tokens
        for rows in counts:
            if time.perf_counter() - started < budget_s / 2 or 2 * len(times) < len(counts):
                times.append(self.time_pass(rows, context))
        for _ in range(rounds - 1):
            for i, rows in enumerate(counts[: len(times)]):
                if time.perf_counter() - started < budget_s:
                    times[i] = min(times[i], self.time_pass(rows, context))
        return times


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a pass failed for want of memory, the host's or a device's."""
    if isinstance(error, RuntimeError) and "out of memory" in str(error):  # Triton's own, and torch's where it is not the allocator's
        return True
    torch = sys.modules.get("torch")
    return isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError))


def make_chain_tree(n: int) -> DraftTree:
    """A draft of n nodes, for tests and measurements."""
    return DraftTree(np.full(n, 11, np.int32), np.arange(-1, n - 1, dtype=np.int32), np.ones(n, np.float32), np.zeros(n, np.uint8))


def kv_shapes(model: PreTrainedModel, device: torch.device) -> list[tuple[int, int]]:
    """Return (n_kv_heads, head_dim) of each layer, as the layers hand them to their attention function. Raises UnsupportedModelError."""
    import torch

    from ngramspec.models import masks

    masks.hand_keywords_on(model)
    probe = masks.ShapeProbe()
    one = torch.zeros(1, 1, dtype=torch.int64, device=device)
    try:
        with torch.inference_mode():
            model.base_model(input_ids=one, position_ids=one, use_cache=False, ngramspec=probe)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be computed with this attention and packed weights: {type(error).__name__}: {error}"
        ) from error
    if not probe.seen or (sorted(probe.seen) != list(range(len(probe.seen))) and not has_recurrent_layers(model)):
        raise UnsupportedModelError(
            f"{type(model).__name__}: attention in layers {sorted(probe.seen)}; every layer from 0 on must have one"
        )
    for _, head_dim in probe.seen.values():
        if head_dim % 8:
            raise UnsupportedModelError(f"{type(model).__name__}: head size {head_dim} is not a multiple of 8")
    return [probe.seen[layer] for layer in sorted(probe.seen)]


# What a configuration calls layers that can be computed.
ATTENTION_LAYERS = ("full_attention", "sliding_attention", "attention")


def _get_layer_types(model: PreTrainedModel) -> list[str]:
    config = model.config.get_text_config()
    return [str(each) for each in getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()]


# What a configuration calls recurrent layers: of several kinds, short convolutions, and Mamba-2 beside attention.
RECURRENT_LAYERS = ("linear_attention", "conv", "hybrid")
# Ends of the names of modules that the CPU computes in place of attention: Gated DeltaNet, short convolutions, Mamba-2.
CPU_RECURRENT_MODULES = ("GatedDeltaNet", "ShortConv", "MambaLayer", "Mamba2Mixer", "BambaMixer", "FalconH1Mixer")


def has_recurrent_layers(model: PreTrainedModel) -> bool:
    return not set(RECURRENT_LAYERS).isdisjoint(_get_layer_types(model))


def _check_layers(model: PreTrainedModel, recurrent: Sequence[str]) -> None:
    """Refuse layers of other types than attention and what `recurrent` names, and other attention. Raises UnsupportedModelError."""
    name, config, types = type(model).__name__, model.config.get_text_config(), _get_layer_types(model)
    is_computed, on_cpu = (
        any(type(module).__name__.endswith(tuple(ends)) for module in model.modules()) for ends in (recurrent, CPU_RECURRENT_MODULES)
    )
    accepted = (*ATTENTION_LAYERS, *RECURRENT_LAYERS, "mlp", "moe") if is_computed else ATTENTION_LAYERS
    is_refused_here = on_cpu and not is_computed
    hint = "; the CPU computes them (device='cpu')" if is_refused_here else ""
    for other in sorted(set(types) - set(accepted)):
        where = ", ".join(str(i) for i, each in enumerate(types) if each == other)
        told = "" if is_refused_here else refusals.describe_layer_refusal(other)
        reason = f" ({told})" if told else ""
        raise UnsupportedModelError(f"{name}: layers {where} are of type {other!r}{reason}; accepted: {', '.join(accepted)}{hint}")
    if getattr(model, "_is_stateful", False) and not is_computed and not types:
        raise UnsupportedModelError(f"{name} keeps a state: {refusals.OTHER_RECURRENCE.text}")
    if any(getattr(module, "time_step_limit", ()) is None for module in model.modules()):
        raise UnsupportedModelError(f"{name}: time_step_limit is null by its config; accepted: two numbers")
    if getattr(config, "attn_temperature_tuning", False):
        raise UnsupportedModelError(
            f"{name} scales attention by a token's place in the pass (attn_temperature_tuning), which is not its position in the text here"
        )


def check_supported(model: PreTrainedModel, recurrent: Sequence[str] = (), *, latent: bool = False) -> None:
    """Refuse, with the reason, what a pass over packed rows cannot compute. Raises UnsupportedModelError.

    `recurrent`: ends of the names of modules that the device computes instead of attention. `latent`: whether it computes latent attention.
    """
    from ngramspec.models import masks

    name = type(model).__name__
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name}: {refusals.ENCODER_DECODER.text}; accepted: decoders")
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no language-model head")
    if not latent and any(list_latent_attention(model)):
        raise UnsupportedModelError(f"{name}: its attention is latent (MLA), which only the CPU computes (device='cpu')")
    _check_layers(model, recurrent)
    if not masks.is_replaceable(model) and not has_recurrent_layers(model):
        raise UnsupportedModelError(f"{name}: {refusals.NO_REPLACEABLE_ATTENTION.text} (_supports_attention_backend is not set)")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer = {v.get("rope_type") for v in rope.values() if isinstance(v, dict)}
    is_fixed = any(getattr(module, "rope_type", None) == "ntk_alpha" for module in model.modules())  # Hunyuan's "dynamic" with an alpha
    for kind in ({rope.get("rope_type")} & (set() if is_fixed else {"dynamic"})) | (
        by_layer & {"dynamic", "longrope"}
    ):  # "longrope" for all: `fix_angles`
        raise UnsupportedModelError(
            f"{name} uses {kind!r} rotary embeddings, whose angles depend on the whole batch, so that rows would not be independent"
        )
