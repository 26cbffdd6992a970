"""What speculation did for a request, in the words that clients know: vLLM's per-request metrics and llama.cpp's timings.

Completions enter, plain dicts for an answer leave. Who may see how much is decided by the routes. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from ngramspec.outputs import Completion, Stats

# The source of drafts that a request's prediction is.
PREDICTION = "prediction"


def describe_speculation(completions: Sequence[Completion], level: Literal["summary", "detailed"]) -> dict[str, Any]:
    """Return `metrics.speculative_decoding` as vLLM has it, over all choices.

    `acceptance_histogram[k]`: passes with a draft that accepted k tokens of it, up to `num_spec_tokens`, the deepest draft. Drafts are
    trees, so a pass may verify more tokens than it can accept. `detailed` adds counts by source and by position in the draft.
    """
    stats = Stats.sum(each.stats for each in completions)
    deepest = max(len(stats.drafted_by_depth), len(stats.accepted_lengths) - 1, 0)
    metrics: dict[str, Any] = {
        "mean_acceptance_length": 1.0 + stats.accepted / stats.drafts if stats.drafts else 1.0,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": stats.accepted_lengths + [0] * (deepest + 1 - len(stats.accepted_lengths)),
        "num_spec_steps": stats.drafts,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": deepest,
    }
    if level == "detailed":
        metrics["by_source"] = {
            source: _describe_counts(n, stats.accepted_by_source.get(source, 0))
            | {"num_expected_draft_tokens": round(stats.expected_by_source.get(source, 0.0), 3)}
            for source, n in sorted(stats.drafted_by_source.items())
        }
        accepted = stats.accepted_by_depth + [0] * (deepest - len(stats.accepted_by_depth))
        metrics["by_position"] = [_describe_counts(n, accepted[depth]) for depth, n in enumerate(stats.drafted_by_depth)]
    return metrics


def _describe_counts(drafted: int, accepted: int) -> dict[str, int]:
    return {"num_draft_tokens": drafted, "num_accepted_draft_tokens": accepted}


def count_predicted(completions: Sequence[Completion]) -> tuple[int, int]:
    """Return how many draft tokens of the request's prediction the text took, and how many it did not."""
    accepted = sum(choice.draft_sources.count(PREDICTION) for completion in completions for choice in completion.choices)
    drafted = sum(each.stats.drafted_by_source.get(PREDICTION, 0) for each in completions)
    return accepted, max(drafted - accepted, 0)


def list_token_sources(texts: Iterable[str], sources: Iterable[str | None]) -> list[dict[str, str | None]]:
    """Return each token's text, and who drafted it; None: the model wrote it unaided."""
    return [{"text": text, "source": source} for text, source in zip(texts, sources, strict=True)]


def describe_timings(completion: Completion, elapsed_s: float | None = None) -> dict[str, float]:
    """Return llama.cpp's `timings`: the prompt until the first token, the text after it, drafts where there were any.

    The pace of the text is that of the tokens after the first one, which the prompt's last pass wrote.
    `prompt_n` counts what was computed, `cache_n` what the prefix cache had. Waiting in the queue is in neither. `elapsed_s`: since the
    start of a request that is not done yet.
    """
    stats = completion.stats
    prompt_n = len(completion.prompt_token_ids) - completion.cached_tokens
    prompt_s, text_s = completion.split_time(elapsed_s)
    found: dict[str, float] = {"cache_n": completion.cached_tokens}
    found |= _describe_pace("prompt", prompt_n, prompt_s)
    found |= _describe_pace("predicted", max(stats.tokens - 1, 0), text_s) | {"predicted_n": stats.tokens}
    if stats.drafts:
        found |= {"draft_n": stats.drafted, "draft_n_accepted": stats.accepted}
    return found


def describe_request_times(completion: Completion) -> dict[str, float]:
    """Return vLLM's times of a request with one choice, in milliseconds, and its tokens per second."""
    n_tokens, whole_s = completion.stats.tokens, max(completion.duration_s - completion.queued_s, 0.0)
    writing_s = max(completion.duration_s - completion.ttft_s, 0.0)
    found = {
        "time_to_first_token_ms": completion.ttft_s * 1e3,
        "generation_time_ms": writing_s * 1e3,
        "queue_time_ms": completion.queued_s * 1e3,
        "tokens_per_second": n_tokens / whole_s if whole_s else 0.0,
    }
    return found | ({"mean_itl_ms": writing_s * 1e3 / (n_tokens - 1)} if n_tokens > 1 else {})


def describe_prompt_timings(cached: int, processed: int, seconds: float) -> dict[str, float]:
    """Return llama.cpp's `timings` while `processed` tokens of a prompt are computed, `cached` of which the prefix cache had."""
    n = processed - cached
    return {"cache_n": cached} | _describe_pace("prompt", n, seconds if n else 0.0) | _describe_pace("predicted", 0, 0.0)


def _describe_pace(name: str, n: int, seconds: float) -> dict[str, float]:
    """Return llama.cpp's figures of n tokens in these seconds; 0 stands for what cannot be said of no tokens or no time."""
    return {
        f"{name}_n": n,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / n if n else 0.0,
        f"{name}_per_second": n / seconds if seconds else 0.0,
    }
