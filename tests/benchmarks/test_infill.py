"""Where cursors are put, and what counts as filled in."""

from pathlib import Path

from benchmarks.infill import Score, put_cursors, read_cursors, score_text


def test_cursors_are_put_inside_of_new_lines(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    body = "".join(f"    value_{i} = compute(first, {i}) + second\n" for i in range(8))
    for folder, text in ((old, ""), (new, f"import os\n\n\ndef f(first, second):\n{body}\n\nx = 1\n")):
        folder.mkdir()
        (folder / "a.py").write_text(text)
    (cursor,) = put_cursors(old, new, 4)
    line = cursor.prefix.split("\n")[-1] + cursor.reference
    assert line + "\n" in body
    assert cursor.prefix.startswith("import os\n\n\ndef f(first, second):\n")
    assert cursor.suffix.strip() == "x = 1"
    assert cursor.reference
    assert cursor.prefix.split("\n")[-1].strip()


def test_a_row_may_have_several_references(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "suffix": "b", "reference": ["c", "d"]}\n')
    (cursor,) = read_cursors(tmp_path / "rows.jsonl", 4)
    assert (cursor.prefix, cursor.reference, cursor.suffix) == ("a", "c", "b")


def test_what_counts_as_written() -> None:
    assert score_text("ab\ncd\n", "ab\ncd") == Score(True, True, 5 / 6)
    assert score_text("ab\ncd", "ab\nce") == Score(True, False, 4 / 5)
    assert score_text("ab", "b") == Score(False, False, 0)
