"""The pictures of the report: its document enters, SVG files leave, the same bytes for the same figures.

They are read on light and on dark pages: no background, text in a grey between. Text stays text, so the files are small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.report.figures import Row, find, is_single
from benchmarks.report.measure import CURVES, MERGED, STORE
from benchmarks.report.text import TITLES

GREY, OURS, OTHERS = "#808080", "#2f81f7", "#9a9a9a"
# Colours of drafters.
COLOURS = ("#e5534b", "#d29922", "#57ab5a", "#a371f7", "#39c5cf", "#db61a2", "#b08800", "#6e7681", "#8b5e3c", "#1f9e89")
STYLE: dict[str, Any] = {
    "svg.hashsalt": "ngramspec",
    "svg.fonttype": "none",
    "font.size": 10,
    "font.family": "sans-serif",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
}
# Fewest nodes of a dot of the reliability diagram.
LEAST_NODES = 20
RATE = "tokens per second; plain decoding = 1"


def draw(folder: Path, document: dict[str, Any]) -> None:
    """Draw all that the report shows. Those of temperature 0 only where it was measured."""
    greedy = find(document["rows"], temperature=0)
    _draw_drafters(folder / "drafters.svg", greedy, document["categories"])
    if 0 in document["settings"]["temperatures"]:
        _draw_speed(folder / "speed.svg", greedy, document["fastest_peers"])
        _draw_frontier(folder / "frontier.svg", document["frontier"])
        _draw_reliability(folder / "reliability.svg", document["reliability"])
        _draw_acceptance(folder / "acceptance.svg", [row for row in find(document["pooled"], temperature=0) if "acceptance" in row])


@contextmanager
def _open_picture(path: Path, width: float, height: float) -> Iterator[Axes]:
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
        yield axes
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        plt.close(figure)


def _draw_speed(path: Path, rows: Sequence[Row], fastest: dict[str, Row]) -> None:
    """Draw two bars per category: the engine, and the fastest other tool, by name; plain decoding is 1."""
    merged = sorted(find(rows, contender=MERGED), key=lambda row: row["speedup"])
    with _open_picture(path, 7.2, 0.46 * len(merged) + 0.9) as axes:
        for y, row in enumerate(merged):
            axes.barh(y + 0.18, row["speedup"], 0.36, color=OURS, label="ngramspec" if y == 0 else None)
            axes.text(row["speedup"] + 0.03, y + 0.18, f"{row['speedup']:.1f}×", va="center", color=OURS, fontweight="bold")
            if row["category"] in fastest:
                other = fastest[row["category"]]
                axes.barh(y - 0.2, other["speedup"], 0.26, color=OTHERS, label="fastest other tool, here" if y == 0 else None)
                name = TITLES.get(other["contender"], other["contender"])
                axes.text(other["speedup"] + 0.03, y - 0.2, f"{other['speedup']:.1f}× {name}", va="center", fontsize=8)
        axes.axvline(1, color=GREY, linewidth=1, linestyle=":")
        axes.set_yticks(range(len(merged)), [row["category"] for row in merged])
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, 1.25 * max(row["speedup"] for row in [*merged, *fastest.values()]))
        axes.set_xlabel(RATE)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)


def _draw_frontier(path: Path, rows: Sequence[Row]) -> None:
    """Draw tokens per pass over rows per pass: a point per drafter, a curve for all together by what they are told a row costs."""
    with _open_picture(path, 7.2, 4.2) as axes:

        def plot(some: Sequence[Row], **look: Any) -> None:
            axes.plot([row["rows_per_pass"] for row in some], [row["tokens_per_pass"] for row in some], **look)

        curve = sorted((row for row in rows if row["contender"] in CURVES), key=lambda row: row["rows_per_pass"])
        plot(curve, color=OURS, marker=".", label="all together, by what a row costs")
        for row in find(rows, contender=MERGED):
            plot([row], color=OURS, marker="o", markersize=9, linestyle="", label="all together, cost as measured")
        for name, colour in _choose_colours(rows).items():
            (row,) = find(rows, contender=name)
            plot([row], color=colour, marker="o", linestyle="")
            axes.annotate(name, (row["rows_per_pass"], row["tokens_per_pass"]), (5, -10), textcoords="offset points", fontsize=8)
        axes.set_xlabel("draft rows per pass")
        axes.set_ylabel("tokens per pass")
        axes.set_xscale("symlog", linthresh=4)
        ticks = [0, 1, 2, 4, 8, 16, 32, 64]
        axes.set_xticks(ticks, list(map(str, ticks)))
        axes.minorticks_off()
        axes.legend(loc="upper left")


def _draw_drafters(path: Path, rows: Sequence[Row], categories: Sequence[str]) -> None:
    """Draw speedups at temperature 0, per category: a dot per drafter, all together as a bar across."""
    with _open_picture(path, 7.2, 3.8) as axes:
        for x, category in enumerate(categories):
            for row in find(rows, category=category, contender=MERGED):
                axes.plot([x - 0.35, x + 0.35], [row["speedup"]] * 2, color=OURS, linewidth=3, label="all together" if x == 0 else None)
        for name, colour in _choose_colours(rows).items():
            dots = [(categories.index(row["category"]), row["speedup"]) for row in find(rows, contender=name)]
            axes.plot(*zip(*dots, strict=True), color=colour, marker="o", markersize=5, linestyle="", label=name)
        axes.axhline(1, color=GREY, linewidth=1, linestyle=":")
        axes.set_xticks(range(len(categories)), categories, rotation=30, ha="right")
        axes.set_ylabel(RATE)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)


def _draw_acceptance(path: Path, rows: Sequence[Row]) -> None:
    """Draw accepted over drafted nodes by depth, over all categories."""
    with _open_picture(path, 7.2, 3.6) as axes:
        for name, colour in ({MERGED: OURS} | _choose_colours(rows)).items():
            (row,) = find(rows, contender=name)
            depths = [(d, share) for d, share in enumerate(row["acceptance"], 1) if share is not None]
            if depths:
                label, width = ("all together", 3) if name == MERGED else (name, 1.2)
                axes.plot(*zip(*depths, strict=True), color=colour, marker=".", linewidth=width, label=label)
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("accepted / drafted nodes")
        axes.set_ylim(0)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)


def _draw_reliability(path: Path, rows: Sequence[Row]) -> None:
    """Draw accepted over verified nodes against what they were believed to be, a dot for each source and level, full at temperature 0; its
    area is the number of nodes."""
    with _open_picture(path, 5.2, 4.6) as axes:
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
        for name, colour in zip(sorted({row["source"] for row in rows}), COLOURS, strict=False):
            for temperature in sorted({row["temperature"] for row in rows}):
                some = [row for row in find(rows, source=name, temperature=temperature) if row["nodes"] >= LEAST_NODES]
                if some:
                    axes.scatter(
                        [row["expected"] / row["nodes"] for row in some],
                        [row["made"] / row["nodes"] for row in some],
                        [min(4 + row["nodes"] ** 0.5 * 3, 160) for row in some],
                        edgecolors=colour,
                        facecolors="none" if temperature else colour,
                        label=f"{name} at {temperature:g}",
                    )
        axes.set_xlabel("probability that a node was believed to have")
        axes.set_ylabel("accepted / verified nodes")
        if axes.collections:
            axes.legend(loc="upper left", fontsize=8)


def _choose_colours(rows: Sequence[Row]) -> dict[str, str]:
    """Return colours of the drafters alone, in every picture the same."""
    names = sorted({row["contender"] for row in rows if is_single(row["contender"])}, key=lambda name: (name == STORE, name))
    return dict(zip(names, COLOURS * len(names), strict=False))
