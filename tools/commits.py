"""Check the subjects of new commits: `area: what changed`, at most 72 characters.

    python -m tools.commits              commits since the rule began
    python -m tools.commits main..HEAD   commits of a branch

Exit status 1 if a subject breaks the rule; it is printed with the reason. Merges are left out. Nothing is checked, which is said, where
git cannot read the history: outside a repository, or in one that belongs to another user.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

BEGAN = "2026-11-25 12:00 +0000"  # the rule holds for commits made after this
MOST_CHARACTERS = 72  # `git log --oneline` and most hosts cut a longer subject


def find_fault(subject: str) -> str | None:
    """Return what is wrong with a subject, or None."""
    if len(subject) > MOST_CHARACTERS:
        return f"{len(subject)} characters, at most {MOST_CHARACTERS}"
    if not re.match(r"\w[\w ./,+-]*: \S", subject):
        return 'must be "area: what changed"'
    if subject.endswith("."):
        return "ends with a full stop"
    return None


def main(arguments: Sequence[str]) -> int:
    selected = list(arguments) or [f"--since-as-filter={BEGAN}"]
    if shutil.which("git") is None:
        print("subjects of commits are not checked: git is not installed")
        return 0
    listed = subprocess.run(["git", "log", "--no-merges", "--format=%h %s", *selected, "--"], capture_output=True, text=True)
    if listed.returncode:
        print(f"subjects of commits are not checked: {listed.stderr.strip() or 'git failed'}")
        return 0
    faults = 0
    for line in listed.stdout.splitlines():
        commit, _, subject = line.partition(" ")
        if fault := find_fault(subject):
            print(f"{commit}: {fault}: {subject}")
            faults += 1
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
