"""Show how a real model completes real code, without speculation and with it. `make demo` runs it.

Prints the text of every task as it comes, drafted tokens in colour, and what it cost both ways; exits with 1
should any text differ.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.table import Table

from ngramspec.cli import screen
from ngramspec.engine.llm_engine import Engine
from ngramspec.outputs import Stats
from ngramspec.sampling_params import SamplingParams

MODEL = "smollm2"
MAX_TOKENS = 160

_ACCOUNT = '''class Account:
    """A bank account with a history."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("insufficient funds")
        self.balance -= amount
        self.history.append(("withdraw", amount))
        return self.balance
'''

TASKS: dict[str, tuple[str, bool]] = {  # title → (prompt, whether it goes through the chat template)
    "go on with a class": (_ACCOUNT + "\n    def transfer(self, other, amount):\n", False),
    "edit a file": (
        f"Rewrite this code so that every method has a docstring. Answer with the whole code.\n\n```python\n{_ACCOUNT}```",
        True,
    ),
    "write tests": (f"```python\n{_ACCOUNT}```\n\nWrite unit tests for this class with unittest.", True),
}


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(prog="demo", description=__doc__).parse_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    with screen.show_progress(quiet=False) as progress:
        engine = Engine(MODEL, max_model_len=2048, progress=progress)
        engine.finish_compiling(progress)  # a first start drafts nothing before
    params = SamplingParams(max_tokens=MAX_TOKENS)
    table = Table("task", "tokens", "tok/s plain", "tok/s drafted", "sooner", "tokens a pass", "same tokens", title="The same text, sooner")
    seconds = {False: 0.0, True: 0.0}
    total, differing = Stats(), 0
    with engine:
        for speculation in (False, True):  # loads what each needs at its first use, which is not timed
            engine.complete(engine.encode("import os"), SamplingParams(max_tokens=16), speculation=speculation)
        for title, (prompt, chat) in TASKS.items():
            ids = engine.encode(prompt).tolist()
            if chat:
                message = [{"role": "user", "content": prompt}]
                ids = list(engine.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
            console.rule(title, align="left")
            view = screen.CompletionView(engine.tokenizer, ids, params, drafts=True, silent=False)
            for delta in engine.stream(ids, params, prefix_cache=False):  # each side computes the prompt
                view.add(delta)
                if delta.completion is not None:
                    on = delta.completion
            view.finish(on)
            if not console.is_terminal and on.text[-1:] not in ("", "\n"):
                console.print()  # a text that was cut ends within a line
            off = engine.complete(ids, params, speculation=False, prefix_cache=False)
            same = off.token_ids == on.token_ids
            differing += not same
            total.add(on.stats)
            for done in (off, on):
                seconds[done is on] += done.duration_s
            table.add_row(title, *_format_figures(on.stats, off.duration_s, on.duration_s), "yes" if same else "NO")
        table.add_section()
        table.add_row("all", *_format_figures(total, seconds[False], seconds[True]), "yes" if not differing else "NO")
        console.print()
        console.print(table)
        settings = f"{engine.precision}, {engine.threads} threads; exactness: {engine.exactness}"
        console.print(f"{engine.name}, {settings}. Coloured tokens were drafted.")
    return int(differing > 0)


def _format_figures(stats: Stats, off_s: float, on_s: float) -> list[str]:
    n = stats.tokens
    return [str(n), f"{n / off_s:.1f}", f"{n / on_s:.1f}", f"{off_s / on_s:.2f} x", f"{stats.tokens_per_pass:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
