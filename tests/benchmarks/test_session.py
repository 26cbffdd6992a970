from __future__ import annotations

from pathlib import Path

from benchmarks.session import Ring, find_accepted, find_edits, find_new_functions

OLD = "def keep(text):\n    return text.strip()\n"
NEW_BODY = """\
    'Say it.'
    words = [word for word in text.split() if word != text]
    joined = "-".join(words)
    print(joined, len(words), text)
    return joined
"""


def test_functions_that_the_old_release_does_not_have(tmp_path: Path) -> None:
    for name, text in (("old", OLD), ("new", OLD + "\n\ndef say(text):\n" + NEW_BODY)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text(text)
    (found,) = find_new_functions(tmp_path / "old", tmp_path / "new", 5)
    assert found.name == "a.py:say"
    assert found.before + found.body + found.after == OLD + "\n\ndef say(text):\n" + NEW_BODY
    assert found.body == NEW_BODY.partition("\n")[2]


def test_what_a_writer_takes_from_a_suggestion() -> None:
    assert find_accepted("a = 1\nb = 2", "a = 1\nb = 2\nc = 3") == len("a = 1\nb = 2")
    assert find_accepted("a = 1\nb = 3", "a = 1\nb = 2\nc = 3") == len("a = 1")
    assert find_accepted("a = ", "a = 1\nb = 2") == len("a =")
    assert find_accepted("a = 2", "a = 1\nb = 2") == 0
    assert find_accepted("  \n", "a = 1\nb = 2") == 0


def test_edits_are_of_files_of_50_to_500_lines(tmp_path: Path) -> None:
    text = "def say(self, words, other):\n    return words\n\n\ndef tell(words):\n    return words\n"
    (tmp_path / "short.py").write_text(text)
    (tmp_path / "long.py").write_text(text + "# more\n" * 60)
    (tmp_path / "wrong.py").write_text("def (:\n" * 60)
    assert find_edits(tmp_path, 5) == [(text + "# more\n" * 60, "words")]


def test_a_ring_keeps_the_latest_chunks_and_none_like_the_lines_at_the_cursor() -> None:
    ring = Ring(4, seed=0)
    texts = [[f"{name} = {i}" for i in range(40)] for name in "abcdef"]
    for text in texts:
        ring.pick("a.py", text, replaces=True)
        ring.pick("a.py", text, replaces=True)
        assert ring.update()
        assert not ring.update()
    assert [chunk["text"] for chunk in ring.get_extra()] == ["\n".join(text) + "\n" for text in texts[-4:]]
    assert [chunk["text"][0] for chunk in ring.get_extra(texts[4])] == ["c", "d", "f"]
