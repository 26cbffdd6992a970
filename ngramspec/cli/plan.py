"""`ngramspec plan`: numbers or the document of a run enter, a table (or JSON) of what speculation is worth leaves. See `papers.planner`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from ngramspec.cli.common import BadInputError, make_console, option, read_file

_DRAFTS, _RUN, _OUTPUT = "Drafts", "A run", "Output"


def plan(
    alpha: Annotated[float | None, option(_DRAFTS, "Probability that a draft token is accepted, if those before it were.")] = None,
    gamma: Annotated[int | None, option(_DRAFTS, "Length of a draft. Default: the best for alpha and c.")] = None,
    c: Annotated[
        float | None,
        option(_DRAFTS, "Time to draft one token, divided by the time of a pass of the model. Default: 0.", "--c"),
    ] = None,
    c_hat: Annotated[
        float, option(_DRAFTS, "Arithmetic operations to draft one token, divided by those of a pass for one token.", "--c-hat")
    ] = 0.0,
    max_gamma: Annotated[int, option(_DRAFTS, "Longest draft to consider.")] = 64,
    run: Annotated[
        Path | None,
        option(_RUN, "Compare expected with measured: the output of `ngramspec complete --json`, or a document of benchmarks.decode."),
    ] = None,
    baseline: Annotated[Path | None, option(_RUN, "The same text with `ngramspec complete --json --no-spec`, for the speedup.")] = None,
    as_json: Annotated[bool, option(_OUTPUT, "Print one JSON document.", "--json")] = False,
) -> None:
    """Compute what speculation is worth: tokens per pass, time and operations, and the best draft length.

    The formulas are those of Leviathan et al., "Fast Inference from Transformers via Speculative Decoding". They assume
    that verifying more tokens in a pass costs nothing, which is nearly true while reading the weights takes most of its time.

    Examples:

      ngramspec plan --alpha 0.8 --gamma 5 --c 0

      ngramspec plan --run on.json --baseline off.json
    """
    from ngramspec.papers import planner

    if (alpha is None) == (run is None):
        raise BadInputError("give either --alpha, or --run FILE to estimate it")
    if baseline is not None and run is None:
        raise BadInputError("--baseline goes with --run")
    try:
        if run is not None:
            document = _measure(run, baseline, c)
            alpha, c = document["alpha"], document["c"]
        else:
            document = {}
            c = c or 0.0
        assert alpha is not None
        best = planner.find_best_gamma(alpha, c, max_gamma)
        document["planned"] = [_make_row(alpha, length, c, c_hat) for length in dict.fromkeys([best if gamma is None else gamma, best])]
    except ValueError as error:
        raise BadInputError(str(error)) from error
    if as_json:
        print(json.dumps({"alpha": alpha, "c": c, "c_hat": c_hat, "best_gamma": best, **document}))
    else:
        _show(alpha, c, c_hat, max_gamma, best, document)


def _make_row(alpha: float, gamma: int, c: float, c_hat: float) -> dict[str, Any]:
    from ngramspec.papers import planner

    return {
        "gamma": gamma,
        "tokens_per_pass": planner.compute_expected_tokens(alpha, gamma),
        "walltime": planner.compute_walltime_factor(alpha, gamma, c),
        "operations": planner.compute_operations_factor(alpha, gamma, c_hat),
    }


def _measure(run: Path, baseline: Path | None, c: float | None) -> dict[str, Any]:
    """Return what a run was expected to be and what it was. Raises ValueError."""
    from ngramspec.papers import planner

    seen = planner.estimate_run(_read(run))
    speedup = seen.speedup
    if baseline is not None:
        plain = planner.estimate_run(_read(baseline))
        if not seen.seconds_per_token or not plain.seconds_per_token:
            raise ValueError("--run and --baseline must both say duration_s and tokens, as `ngramspec complete --json` does")
        speedup = plain.seconds_per_token / seen.seconds_per_token
    effective = seen.estimate_cost(speedup) if speedup is not None else None
    return {
        "alpha": seen.alpha,
        "c": c if c is not None else effective or 0.0,
        "effective_c": effective,
        "gamma": seen.gamma,
        "expected": {"tokens_per_pass": seen.expect_tokens(), "walltime": seen.predict_walltime_factor(c or 0.0)},
        "measured": {"tokens_per_pass": seen.tokens_per_pass, "walltime": speedup},
    }


def _read(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(read_file(file, "the run"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a JSON document: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{file} is not a JSON document of a run, but a {type(document).__name__}")
    return document


def _show(alpha: float, c: float, c_hat: float, max_gamma: int, best: int, document: dict[str, Any]) -> None:
    from rich.table import Table

    screen = make_console()
    if "measured" in document:
        table = Table("run", "expected", "measured", box=None)
        for name, title in (("tokens_per_pass", "tokens per pass"), ("walltime", "times as fast")):
            measured = document["measured"][name]
            table.add_row(title, f"{document['expected'][name]:.2f}", "-" if measured is None else f"{measured:.2f}")
        screen.print(f"alpha {alpha:.3f}, mean draft length {document['gamma']:.2f}: estimated from the run")
        screen.print(table)
        if document["effective_c"] is not None:
            screen.print(f"what was measured is that of c {document['effective_c']:.3f}: drafting, and the wider pass")
        screen.print()
    table = Table("", "draft length", "tokens per pass", "times as fast", "times the operations", box=None)
    for row in document["planned"]:
        figures = (f"{row[name]:.2f}" for name in ("tokens_per_pass", "walltime", "operations"))
        table.add_row("best" if row["gamma"] == best else "", f"{row['gamma']}", *figures)
    screen.print(table)
    screen.print(f"with alpha {alpha:.4g}, c {c:.3g}, c-hat {c_hat:.3g}; the best of lengths up to {max_gamma}")
