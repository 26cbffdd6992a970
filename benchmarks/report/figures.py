"""Figures of the report from measured cells: rates, ratios, who is best where. Cells enter, plain rows leave; nothing is run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.peers import LLAMA_LOOKUP, NAMES
from benchmarks.report.measure import CURVE_ROUNDS, CURVES, MERGED, NO_STORE, OFF, PREDICTED, REJECTION, Cell

Row = dict[str, Any]

DEPTHS = 8
(FLAT,) = (name for name, slope in CURVES.items() if slope == 0.005)


def is_single(name: str) -> bool:
    """Return whether this is one drafter alone, whose drafts are accepted by the walk."""
    return name not in (OFF, MERGED, NO_STORE, PREDICTED, *CURVES, *NAMES) and not name.endswith(REJECTION)


def find(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def place_of(row: Row) -> Row:
    """Return the block of a row."""
    return {"category": row["category"], "temperature": row["temperature"]}


def rows_of(cells: Iterable[Cell], n_prompts: int | None = None) -> list[Row]:
    """Return one row per cell, of its first prompts or of all of them."""
    return [row_of(cell, n_prompts) for cell in cells]


def row_of(cell: Cell, n_prompts: int | None = None) -> Row:
    tokens, seconds, passes, drafted = (cell[name][:n_prompts] for name in ("tokens", "seconds", "passes", "drafted"))
    row = {name: cell[name] for name in ("category", "temperature", "contender")} | {
        "prompts": len(tokens),
        "tokens": sum(tokens),
        "tok_s": round(sum(tokens) / sum(seconds), 2),
        "speedup": round(statistics.median(compute_speedups(cell)[:n_prompts]), 3),
        "identical": None if cell["same"] is None else sum(cell["same"][:n_prompts]),
    }
    if sum(passes):
        row |= {"tokens_per_pass": round(sum(tokens) / sum(passes), 3), "rows_per_pass": round(sum(drafted) / sum(passes), 3)}
        row |= {"passes": sum(passes), "acceptance": acceptance_by_depth([cell])}
    return row


def compute_speedups(cell: Cell) -> list[float]:
    """Return for each prompt tokens per second over those of speculation off, beside it."""
    columns = (cell[name] for name in ("tokens", "seconds", "off_tokens", "off_seconds"))
    return [tokens / seconds * off_seconds / off_tokens for tokens, seconds, off_tokens, off_seconds in zip(*columns, strict=True)]


def acceptance_by_depth(cells: Sequence[Cell]) -> list[float | None]:
    """Return accepted over drafted nodes at depths 1, 2, …; None where none was drafted."""

    def count_nodes(name: str, depth: int) -> int:
        return sum(cell[name][depth] for cell in cells if depth < len(cell[name]))

    counts = [(count_nodes("accepted_by_depth", d), count_nodes("drafted_by_depth", d)) for d in range(DEPTHS)]
    return [round(accepted / drafted, 3) if drafted else None for accepted, drafted in counts]


def pool_rows(cells: Sequence[Cell], n_prompts: int | None = None) -> list[Row]:
    """Return one row per contender and temperature over all categories that it was in; speedups by their geometric mean."""
    result = []
    for temperature, name in sorted({(cell["temperature"], cell["contender"]) for cell in cells}):
        some = find(cells, temperature=temperature, contender=name)
        rows = rows_of(some, n_prompts)
        row: Row = {
            "contender": name,
            "temperature": temperature,
            "categories": len(rows),
            "prompts": sum(row["prompts"] for row in rows),
            "speedup": round(statistics.geometric_mean(row["speedup"] for row in rows), 3),
            "identical": None if rows[0]["identical"] is None else sum(row["identical"] for row in rows),
        }
        if passes := sum(row.get("passes", 0) for row in rows):
            row["tokens_per_pass"] = round(sum(row["tokens"] for row in rows) / passes, 3)
            row["rows_per_pass"] = round(sum(row["rows_per_pass"] * row["passes"] for row in rows) / passes, 3)
            row["acceptance"] = acceptance_by_depth(some)
        result.append(row)
    return result


def against_best(cells: Sequence[Cell]) -> list[Row]:
    """Return all drafters together over the best one alone, which is chosen for each category and measure when all is known.

    Each pair is compared on the prompts that both were measured on: `speed` by the clock, the geometric mean over prompts; `cost` by what
    the passes cost, `tokens` by their number, over all prompts together; `flat` like `tokens`, with drafts that are told that rows cost
    almost nothing. Of each measure, `best_by_` says who is the best one alone, `ratio_` how many times as good all together are.
    """
    measures = {
        "speed": (MERGED, lambda a, b: statistics.geometric_mean(compare_speeds(a, b))),
        "cost": (MERGED, lambda a, b: compare_tokens(a, b, "plain_passes")),
        "tokens": (MERGED, lambda a, b: compare_tokens(a, b, "passes")),
        "flat": (FLAT, lambda a, b: compare_tokens(a, b, "passes")),
    }
    result = []
    for merged in find(cells, contender=MERGED):
        row = place_of(merged)
        singles = [cell for cell in find(cells, **row) if is_single(cell["contender"])]
        for name, (whose, ratio) in measures.items():
            ratios = {single["contender"]: ratio(a, single) for a in find(cells, **place_of(merged), contender=whose) for single in singles}
            row[f"best_by_{name}"] = best = min(ratios, key=lambda single: ratios[single], default=None)
            row[f"ratio_{name}"] = round(ratios[best], 3) if best is not None else None
        if singles:
            result.append(row)
    return result


def against_best_followed(rows: Sequence[Row]) -> list[Row]:
    """Return the same of the drafts that were followed, by what the passes cost."""
    result = []
    for merged in find(rows, contender=MERGED):
        best = max((row for row in find(rows, **place_of(merged)) if is_single(row["contender"])), key=lambda row: row["speed"])
        row = {"best": best["contender"], "ratio": round(merged["speed"] / best["speed"], 3), "speed": merged["speed"]}
        result.append(place_of(merged) | {"prompts": merged["prompts"]} | row)
    return result


def compare_speeds(a: Cell, b: Cell) -> list[float]:
    """Return how many times as fast a is, for each prompt that both were measured on."""
    return [ours / theirs for ours, theirs in zip(compute_speedups(a), compute_speedups(b), strict=False)]


def compare_tokens(a: Cell, b: Cell, what: str) -> float:
    """Return how many times as many tokens a has for each of `what`, on the prompts that both were measured on."""
    n = min(len(a["tokens"]), len(b["tokens"]))
    ours, theirs = (sum(cell["tokens"][:n]) / sum(cell[what][:n]) for cell in (a, b))
    return ours / theirs


def against_peers(cells: Sequence[Cell]) -> list[Row]:
    """Return by category and peer how many times as fast the merged engine is: the median over the peer's prompts."""
    result = []
    for cell in cells:
        for merged in find(cells, contender=MERGED, **place_of(cell)) if cell["contender"] in NAMES else ():
            ratios = compare_speeds(merged, cell)
            row = {"category": cell["category"], "peer": cell["contender"], "prompts": len(ratios)}
            result.append(row | {"ratio": round(statistics.median(ratios), 3)})
    return result


def fastest_peers(cells: Iterable[Cell], precision: str) -> dict[str, Row]:
    """Return, by category, the fastest of the peers with the same weights.

    llama.cpp has those of the file, which are those of `precision` int8.
    """
    others = () if precision == "int8" else LLAMA_LOOKUP
    peers = [row for row in rows_of(cells) if row["contender"] in NAMES and row["contender"] not in others]
    return {name: max(find(peers, category=name), key=lambda row: row["speedup"]) for name in {row["category"] for row in peers}}


def sum_reliability(cells: Iterable[Cell]) -> list[Row]:
    """Return a row per temperature, source and level of probability, of all drafters together.

    Verified nodes, the sum of their probabilities, and how many were accepted.
    """
    found: dict[tuple[Any, ...], list[float]] = {}
    for cell in find(cells, contender=MERGED):
        for source, low, high, *counts in cell["reliability"]:
            sums = found.setdefault((cell["temperature"], source, low, high), [0, 0.0, 0])
            sums[:] = map(sum, zip(sums, counts, strict=True))
    names = ("temperature", "source", "low", "high")
    return [
        dict(zip(names, key, strict=True)) | {"nodes": int(nodes), "expected": round(expected, 2), "made": int(made)}
        for key, (nodes, expected, made) in sorted(found.items())
    ]


def rejection_rows(cells: Iterable[Cell]) -> list[Row]:
    """Return tokens per pass of the same drafter under both ways to accept, per category."""
    rows, result = rows_of(cells), []
    for row in rows:
        name = row["contender"].removesuffix(REJECTION)
        for walk in find(rows, **place_of(row), contender=name) if name != row["contender"] else ():
            by_tokens = {"walk": walk["tokens_per_pass"], "rejection": row["tokens_per_pass"]}
            by_speed = {"speed_walk": walk["speedup"], "speed_rejection": row["speedup"]}
            result.append({"category": row["category"], "drafter": name} | by_tokens | by_speed)
    return result


def select_frontier(cells: Iterable[Cell]) -> list[Row]:
    """Return rows at temperature 0 of the contenders that were in all categories, pooled over them.

    The prompts are those that the curve was measured on.
    """
    greedy = find(cells, temperature=0)
    n = len({cell["category"] for cell in greedy})
    rows = [row for row in pool_rows(greedy, CURVE_ROUNDS) if row["categories"] == n and "tokens_per_pass" in row]
    return [row for row in rows if is_single(row["contender"]) or row["contender"] in (MERGED, *CURVES)]
