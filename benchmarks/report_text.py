"""The words of `benchmarks.report`: the document's figures enter, Markdown leaves. Knows what the figures mean, and measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import SLOPES
from benchmarks.peers import LLAMA_LOOKUP, NAMES
from benchmarks.report_data import HELD_OUT, SOURCES
from benchmarks.report_figures import CURVES, Row, find, is_single
from benchmarks.report_measure import LOOKED_UP, LOOKUP, MERGED, NO_STORE, OFF, PREDICTED, ROUNDS, STORE, TABLES

PEERS = {
    "hf": "transformers",
    "hf-pld": "transformers, prompt lookup",
    "hf-assisted": "transformers, assistant",
    "vllm-none": "vLLM",
    "vllm-ngram": "vLLM, n-gram",
    "vllm-suffix": "vLLM, suffix",
    "llama-none": "llama.cpp",
    "llama-pld": "llama.cpp, prompt lookup",
}
WHAT = {
    MERGED: "all that an engine has by default, weighed against each other and against what a row costs",
    NO_STORE: "the same without the repository's datastore",
    PREDICTED: "the same, and the text to be edited as the expected output",
    TABLES: "n-grams of prompt and output, mixed; no earlier answers, no candidates of the model",
    LOOKUP: f"{LOOKED_UP} tokens behind the longest known context, whether that pays or not",
    STORE: "a suffix datastore of the repository's other files, and nothing else",
    "recycling": "the model's own earlier candidates in a static tree (Luo et al.)",
    "lookahead": "n-grams from parallel Jacobi iteration (Fu et al.)",
    "layers": "the first layers of the model, not trained for it, with its own head",
    "counts": "chains from n-gram counts of the text with back-off, n being the number (Leviathan et al., section 3.6)",
}
COMMAND = "make report"

RATIOS = """
All figures are ratios to what ran in turns with it, on the same prompts and the same machine. What they rest on stands at the end."""
ASSISTED = "transformers' assistant is the model's own first third of layers (`assistant_early_exit`), which nobody trained for it."
QUANTISED = "llama.cpp computes with the quantised weights of the GGUF file, a fraction of the bytes; all others with the same in float32."
BEST = """
The best single one is chosen for each category and each measure after the fact, so chance is on its side. Below 1 it wins.
**Speed** is by the clock, prompt included, the geometric mean over prompts; it carries what disturbs the machine. **Cost of
passes** is what the same passes cost by the engine's measure at its start, a pass with one row being 1, so that nothing
disturbs it; the prompt and the time of drafting are not in it. **Tokens per pass**: the engine drafts what pays on this machine,
where a row is dear; a drafter that drafts more than pays can have more of them and be slower. **Rows nearly free** tells the
engine that a row costs {slope:g} of a pass, as on a large GPU, and compares tokens per pass again, on the prompts that were
measured for the curve below.
"""
FOLLOWING = """
The same along more texts than the clock has time for: drafts follow what the model writes for all {prompts} prompts, and pay for each
pass what the engine has measured (`benchmarks/report_follow.py`). **Speed** is tokens over the cost of passes, plain decoding
being 1; the single one is the best of n-gram tables, prompt lookup, counts and the datastore.
"""
ALONE = """All categories together, at temperature {temperature:g} unless said otherwise. A position's share is that of its drafted
nodes that were accepted, which in a tree is lower than in a chain. What needs a datastore or a prediction was in the one
category that has it."""
FRONTIER = """Up and to the left is better: a row is work, a token is what it is for. The curve is the merged engine, told different
costs of a row (rows → tokens: {curve})."""
REJECTED = """Rejection sampling (Leviathan et al., algorithm 1) draws drafts from q and takes a token with min(1, p/q): the text is
distributed as without drafts, but is another one. The walk picks as without drafts and takes what was guessed right; the text
is the same."""
FOLLOWED = """
Arctic's suffix decoding and REST's retriever have no engine here: their drafts are followed along the texts that plain decoding
wrote above (`benchmarks/replay.py`), which counts passes and rows, not time. Tokens per pass / rows per pass:
"""
FOLLOWERS = """
pld-hf is transformers' prompt lookup, ngram-vllm is vLLM's rule; "+cache" remembers earlier answers, as the merged engine does;
rest-N retrieves at most N rows from the datastore that the merged engine has in that category."""
METHOD = """
Up to {max_tokens} tokens for each of so many prompts of at most {max_prompt} tokens, one at a time; for want of time
{slow} of each category.
Prompts are drawn once and for all; how many fit was decided by the time there was. Contenders take each prompt in turns, and
begin each category knowing nothing of earlier ones. Time is from the prompt to the last token; a speedup is the median over
prompts of (tokens per second / tokens per second of plain decoding on the same prompt), and over categories the geometric
mean. With so few prompts a difference of a few per cent means nothing.
"""


def write_report(document: dict[str, Any]) -> str:
    """The whole text."""
    parts = [_head(document), _peers(document), _merged(document), _drafters(document), _rejection(document), _replayed(document)]
    return "\n\n".join([*filter(None, parts), _measured(document)]) + "\n"


def _head(document: dict[str, Any]) -> str:
    rows, pooled = document["rows"], document["pooled"]
    lines = ["# What drafting brings, and which drafts", ""]
    for temperature in document["settings"]["temperatures"]:
        merged = find(rows, contender=MERGED, temperature=temperature)
        (all_of_it,) = find(pooled, contender=MERGED, temperature=temperature)
        slow, fast = (pick(merged, key=lambda row: row["speedup"]) for pick in (min, max))
        lines.append(
            f"- **Temperature {temperature:g}: {all_of_it['speedup']:.2f} times as fast as plain decoding**, from {slow['speedup']:.2f} "
            f"({slow['category']}) to {fast['speedup']:.2f} ({fast['category']}), with {all_of_it['tokens_per_pass']:.2f} tokens and "
            f"{all_of_it['rows_per_pass']:.1f} draft rows a pass. {_same(all_of_it)}"
        )
    fastest = document["fastest_peers"]
    if fastest:
        ratios = {name: find(document["against_peers"], category=name, peer=row["contender"])[0]["ratio"] for name, row in fastest.items()}
        mean, behind = statistics.geometric_mean(ratios.values()), {name: ratio for name, ratio in ratios.items() if ratio < 1}
        lines.append(
            f"- **{mean:.2f} times as fast as the fastest other tool** with the same weights, which is chosen for each category. "
            + (f"It loses on {_list(behind)}." if behind else "It is ahead in every category.")
        )
    quantised = [name for name in LLAMA_LOOKUP if find(rows, contender=name)]
    if quantised:
        ratios = {PEERS[name]: _mean_over(document, name) for name in quantised}
        lines.append(f"- Against other weights, the GGUF file's own quantised ones, which are fewer bytes to read: {_list(ratios)}.")
    if document["against_best_followed"]:
        ratios = {f"{r['category']} at {r['temperature']:g}": r["ratio"] for r in document["against_best_followed"]}
        lines.append(_over_best("in the cost of passes along more texts", ratios))
    for what, key in (
        ("in speed by the clock", "ratio_speed"),
        ("in the cost of passes", "ratio_cost"),
        ("in tokens per pass", "ratio_tokens"),
    ):
        ratios = {f"{r['category']} at {r['temperature']:g}": r[key] for r in document["against_best"]}
        if ratios:
            lines.append(_over_best(what, ratios))
    lines += ["", "![tokens per second by category](plots/speed.svg)"]
    lines.append(RATIOS)
    return "\n".join(lines)


def _over_best(what: str, ratios: dict[str, float]) -> str:
    behind = {name: ratio for name, ratio in ratios.items() if ratio < 1}
    return (
        f"- **All drafters together over the best single one, {what}: {statistics.geometric_mean(ratios.values()):.2f}**, "
        f"and at least 1 in {len(ratios) - len(behind)} of {len(ratios)} cases." + (f" Below: {_list(behind)}." if behind else "")
    )


def _peers(document: dict[str, Any]) -> str:
    rows = find(document["rows"], temperature=0)
    names = [name for name in (OFF, MERGED, *NAMES) if find(rows, contender=name)]
    lines = ["## Against other tools", ""]
    if len(names) > 2:
        titles = {OFF: "plain decoding", MERGED: "ngramspec"} | PEERS
        lines += [
            "Tokens per second at temperature 0, prompt included, one prompt at a time; plain decoding of ngramspec is 1.",
            "",
            _crossed(document, names, rows, lambda row: f"{row['speedup']:.2f}", lambda name: titles[name]),
            "",
        ]
        same = {name: find(document["pooled"], contender=name, temperature=0)[0] for name in names if name in NAMES}
        lines.append(
            "Texts like plain decoding's: " + ", ".join(f"{PEERS[n]} {r['identical']} of {r['prompts']}" for n, r in same.items()) + "."
        )
        means = [f"{PEERS[name]} {_mean_over(document, name):.2f}" for name in same]
        lines += ["", f"ngramspec over each, prompt by prompt, geometric mean over categories: {', '.join(means)}."]
        lines += ["", ASSISTED] * ("hf-assisted" in names) + ["", QUANTISED] * bool(set(LLAMA_LOOKUP) & set(names))
    if document["absent"]:
        lines += ["", "Not here: " + "; ".join(f"{PEERS.get(name, name)} ({why})" for name, why in document["absent"].items()) + "."]
    return "\n".join(lines) if len(lines) > 2 else ""


def _merged(document: dict[str, Any]) -> str:
    table = [
        [
            r["category"],
            f"{r['temperature']:g}",
            *(part for name in ("speed", "cost", "tokens", "flat") for part in (_ratio(r[f"ratio_{name}"]), r[f"best_by_{name}"] or "–")),
        ]
        for r in document["against_best"]
    ]
    if not table:
        return ""
    return "\n".join(
        [
            "## Merged against the best single drafter, every category",
            BEST.format(slope=SLOPES["flat"]),
            _table(
                ["category", "temperature"]
                + [part for name in ("speed", "cost of passes", "tokens per pass", "rows nearly free") for part in (name, "over")],
                table,
            ),
            FOLLOWING.format(prompts=document["settings"]["prompts"]),
            _table(
                ["category", "temperature", "texts", "speed", "best single one", "ratio"],
                [
                    [r["category"], f"{r['temperature']:g}", str(r["prompts"]), f"{r['speed']:.2f}", r["best"], _ratio(r["ratio"])]
                    for r in document["against_best_followed"]
                ],
            ),
        ]
    )


def _drafters(document: dict[str, Any]) -> str:
    rows, pooled = document["rows"], document["pooled"]
    temperatures = document["settings"]["temperatures"]
    names = list(
        dict.fromkeys(r["contender"] for r in rows if is_single(r["contender"]) or r["contender"] in (MERGED, NO_STORE, PREDICTED))
    )
    table = []
    for name in names:
        at = {t: found[0] for t in temperatures if (found := find(pooled, contender=name, temperature=t))}
        first = next(iter(at.values()))
        shares = [f"{first['acceptance'][d]:.0%}" if first["acceptance"][d] is not None else "–" for d in (0, 1, 2, 3, 7)]
        speeds = [f"{at[t]['speedup']:.2f}" if t in at else "–" for t in temperatures]
        same = [f"{at[t]['identical']}/{at[t]['prompts']}" if t in at else "–" for t in temperatures]
        table.append([name, f"{first['tokens_per_pass']:.2f}", f"{first['rows_per_pass']:.1f}", *shares, *speeds, *same])
    header = ["drafter", "tokens per pass", "rows per pass", *(f"position {d}" for d in (1, 2, 3, 4, 8))]
    header += [f"speedup at {t:g}" for t in temperatures] + [f"same text at {t:g}" for t in temperatures]
    parts = [
        "## Every drafter alone, and all together",
        "\n".join(f"- **{name}**: {text}." for name in names if (text := WHAT.get(name) or WHAT.get(name.partition(":")[0]))),
        ALONE.format(temperature=temperatures[0]),
        _table(header, table),
        "![speedup of each drafter by category](plots/drafters.svg)",
    ]
    for title, temperature, key in [(f"Speedup at temperature {t:g}", t, "speedup") for t in temperatures] + [
        (f"Tokens per pass at temperature {t:g}", t, "tokens_per_pass") for t in temperatures
    ]:
        parts += [f"### {title}", _crossed(document, names, find(rows, temperature=temperature), lambda row, key=key: f"{row[key]:.2f}")]
    if 0 in temperatures:
        curve = ", ".join(
            f"{row['rows_per_pass']:.1f} → {row['tokens_per_pass']:.2f}" for row in document["frontier"] if row["contender"] in CURVES
        )
        parts += [
            "### Tokens per pass against rows per pass",
            FRONTIER.format(curve=curve),
            "![tokens per pass against rows per pass](plots/frontier.svg)",
            "![acceptance by position](plots/acceptance.svg)",
        ]
    return "\n\n".join(parts)


def _rejection(document: dict[str, Any]) -> str:
    table = document["rejection"]
    if not table:
        return ""
    names = list(dict.fromkeys(row["drafter"] for row in table))
    lines = []
    for name in names:
        some = find(table, drafter=name)
        better = sum(row["rejection"] > row["walk"] for row in some)
        mean = statistics.geometric_mean(row["rejection"] / row["walk"] for row in some)
        lines.append(
            f"- **{name}**: rejection makes {mean:.2f} times the tokens per pass of the walk, more in {better} of {len(some)} categories."
        )
    body = [[r["category"], r["drafter"], *(f"{r[k]:.2f}" for k in ("walk", "rejection", "speed_walk", "speed_rejection"))] for r in table]
    return "\n\n".join(
        [
            f"## Rejection against the walk, temperature {max(document['settings']['temperatures']):g}",
            REJECTED,
            "\n".join(lines),
            _table(["category", "drafter", "tokens per pass, walk", "rejection", "speedup, walk", "rejection"], body),
        ]
    )


def _replayed(document: dict[str, Any]) -> str:
    some = document["replayed"]
    if not some:
        return ""
    merged = find(document["rows"], contender=MERGED, temperature=0)
    names = list(dict.fromkeys(row["drafter"] for row in some))
    cells = [row | {"contender": row["drafter"]} for row in some] + merged
    lines = [
        "## Drafters of other projects, on the same texts",
        FOLLOWED,
        _crossed(document, [MERGED, *names], cells, lambda row: f"{row['tokens_per_pass']:.2f} / {row['rows_per_pass']:.1f}"),
        FOLLOWERS,
    ]
    return "\n".join(lines)


def _measured(document: dict[str, Any]) -> str:
    settings, rows = document["settings"], document["rows"]
    counts = [
        [
            category,
            SOURCES[category],
            *(str(find(rows, category=category, temperature=t, contender=OFF)[0]["prompts"]) for t in settings["temperatures"]),
        ]
        for category in document["categories"]
    ]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    slow = ", ".join(f"{PEERS.get(name, name)} on {n}" for name, n in ROUNDS.items())
    return "\n".join(
        [
            "## What was measured",
            "",
            f"{document['date']}, {document['model']} in {settings['dtype']}, exactness {document['exactness']}; {document['device']}, "
            f"{document['threads']} threads, {document['platform']}; {versions}; commit {document['commit']}, code {settings['code']}.",
            METHOD.format(slow=slow, **settings),
            _table(["category", "from", *(f"prompts at {t:g}" for t in settings["temperatures"])], counts),
            "",
            f"The repository is {settings['package']}: functions of every {HELD_OUT}th file, and a datastore of the others.",
            "",
            f"`{COMMAND}` writes this file and its pictures anew; stopped, it goes on where it was.",
        ]
    )


def _same(row: Row) -> str:
    if row["identical"] == row["prompts"]:
        return f"All {row['prompts']} texts are token for token the same."
    return f"**{row['prompts'] - row['identical']} of {row['prompts']} texts are not the same.**"


def _list(ratios: dict[str, float]) -> str:
    return ", ".join(f"{name} ({ratio:.2f})" for name, ratio in sorted(ratios.items(), key=lambda item: item[1]))


def _mean_over(document: dict[str, Any], peer: str) -> float:
    """How many times as fast the engine is, over all categories."""
    return statistics.geometric_mean(row["ratio"] for row in find(document["against_peers"], peer=peer))


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"**{value:.2f}**" if value < 1 else f"{value:.2f}"


def _crossed(
    document: dict[str, Any],
    names: Sequence[str],
    rows: Sequence[Row],
    show: Callable[[Row], str],
    title: Callable[[str], str] = str,
) -> str:
    """Contenders by categories."""
    categories = document["categories"]
    found = {name: [find(rows, contender=name, category=category) for category in categories] for name in names}
    body = [[title(name), *(show(cell[0]) if cell else "–" for cell in cells)] for name, cells in found.items() if any(cells)]
    return _table(["", *categories], body)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] + ["---:"] * (len(header) - 1), *rows])
