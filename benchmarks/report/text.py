"""The words of the report: the document's figures enter, Markdown leaves. The prose stands in REPORT.md.jinja; measures nothing."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.peers import LLAMA_LOOKUP, NAMES
from benchmarks.report.categories import CATEGORIES, HELD_OUT
from benchmarks.report.figures import Row, find, is_single
from benchmarks.report.measure import CURVES, MERGED, NO_STORE, PREDICTED, ROUNDS

TEMPLATE = Path(__file__).with_name("REPORT.md.jinja")
WORDS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
TITLES, WHAT = WORDS["titles"], WORDS["what"]


def write_report(document: dict[str, Any]) -> str:
    """Return the whole text."""
    rows, peers = document["rows"], document["against_peers"]
    names = list(dict.fromkeys(row["contender"] for row in rows))
    replayed = [row | {"contender": row["drafter"]} for row in document["replayed"]]

    def mean_over(peer: str) -> float:
        """Return how many times as fast the engine is, over all categories."""
        return statistics.geometric_mean(row["ratio"] for row in find(peers, peer=peer))

    def write_table(names: Sequence[str], rows: Sequence[Row], cell: str, titles: Mapping[str, str] | None = None) -> str:
        """Return a table of contenders by categories."""
        table = [["", *document["categories"]], ["---", *["---:"] * len(document["categories"])]]
        for name in names:
            found = [find(rows, contender=name, category=category) for category in document["categories"]]
            if any(found):
                table.append([(titles or {}).get(name, name), *(cell % each[0] if each else "–" for each in found)])
        return "\n".join("| " + " | ".join(row) + " |" for row in table)

    def over_best(source: str, figure: str) -> dict[str, float]:
        return {f"{row['category']} at {row['temperature']:g}": row[figure] for row in document[source]}

    def over_walk(drafter: str) -> dict[str, float]:
        return {row["category"]: row["rejection"] / row["walk"] for row in find(document["rejection"], drafter=drafter)}

    fastest = document["fastest_peers"].items()
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        document,
        find=find,
        crossed=write_table,
        mean=_compute_mean,
        mean_over=mean_over,
        listed=_format_ratios,
        below=_format_losses,
        ratio=_format_ratio,
        share=lambda value: "–" if value is None else f"{value:.0%}",
        what=lambda name: WHAT.get(name) or WHAT.get(name.partition(":")[0]),
        tools=[name for name in NAMES if find(rows, contender=name, temperature=0)],
        drafters=[name for name in names if is_single(name) or name in (MERGED, NO_STORE, PREDICTED)],
        others=list(dict.fromkeys(row["contender"] for row in replayed)),
        replayed=replayed,
        promised=[sum_levels(document["reliability"], t, name) for t, name in kinds_of(document["reliability"])],
        over_fastest={name: find(peers, category=name, peer=row["contender"])[0]["ratio"] for name, row in fastest},
        quantised={TITLES[name]: mean_over(name) for name in LLAMA_LOOKUP if find(rows, contender=name)},
        over_best={
            "in the cost of passes along more texts": over_best("against_best_followed", "ratio"),
            "in speed by the clock": over_best("against_best", "ratio_speed"),
            "in the cost of passes": over_best("against_best", "ratio_cost"),
            "in tokens per pass": over_best("against_best", "ratio_tokens"),
        },
        rejected={name: over_walk(name) for name in dict.fromkeys(row["drafter"] for row in document["rejection"])},
        curve=[row for row in document["frontier"] if row["contender"] in CURVES],
        titles=TITLES,
        kinds=CATEGORIES,
        slow=ROUNDS,
        held_out=HELD_OUT,
    )


def kinds_of(rows: Sequence[Row]) -> list[tuple[float, str]]:
    return sorted({(row["temperature"], row["source"]) for row in rows})


def sum_levels(rows: Sequence[Row], temperature: float, source: str) -> Row:
    """Return the sums of all levels together."""
    some = find(rows, temperature=temperature, source=source)
    totals = {name: sum(row[name] for row in some) for name in ("nodes", "expected", "made")}
    return {"temperature": temperature, "source": source} | totals


def _compute_mean(ratios: Mapping[str, float]) -> float:
    return statistics.geometric_mean(ratios.values())


def _format_ratios(ratios: Mapping[str, float]) -> str:
    return ", ".join(f"{name} ({ratio:.2f})" for name, ratio in sorted(ratios.items(), key=lambda item: item[1]))


def _format_losses(ratios: Mapping[str, float]) -> str:
    """Return the ratios below 1, in which the first one loses, as text."""
    return _format_ratios({name: ratio for name, ratio in ratios.items() if ratio < 1})


def _format_ratio(value: float | None) -> str:
    return "–" if value is None else f"**{value:.2f}**" if value < 1 else f"{value:.2f}"
