"""`ngramspec build-datastore` and `ngramspec datastore`: what is printed where, with which exit code, and what a signal leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from rich.console import Console

from ngramspec import __version__
from ngramspec.cli import common, screen, screen_datastore
from ngramspec.cli import main as cli
from ngramspec.cli.common import format_size, parse_size
from ngramspec.datastore import Datastore, DatastoreCorruptError, DatastoreLockedError, Progress, Summary, progress
from ngramspec.datastore.commit import lock_for_writing
from ngramspec.datastore.manifest import read_manifest

TEXT = "def f(x):\n    return x\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.byte_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text(TEXT)
    (tmp_path / "src/b.py").write_text("import os\n\n" + TEXT)
    (tmp_path / "src/.env").write_text("SECRET=1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "src"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["ngramspec", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def build(monkeypatch: pytest.MonkeyPatch, model: Path, *more: object) -> None:
    assert run(monkeypatch, "build-datastore", "src", "-o", "store", "-t", model, "-q", *more) == 0


def test_build_and_update(corpus: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "build-datastore", "src", "-o", "store", "-t", model, "--json", "--jobs", 1, "--max-memory", "1G") == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert (document["store"], document["files"], document["skipped"]) == ("store", 2, {"secret": 1})
    assert "left out" in err
    assert "1 secret" in err
    assert read_manifest(Path("store")).writer == f"ngramspec {__version__}"
    (corpus / "c.py").write_text("c = 1\n")
    assert run(monkeypatch, "build-datastore", "--update", "-o", "store") == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "1 added, 0 removed, 2 unchanged" in err
    assert run(monkeypatch, "build-datastore", "-u", "-o", "store", "--exclude", "c.py", "-q") == 0
    assert capsys.readouterr() == ("", "")
    assert Datastore.open("store").info()["options"]["exclude"] == ["c.py"]
    assert Datastore.open("store").info()["documents"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["src", "-t", "M"], "-o STORE"),
        (["-o", "new", "-t", "M"], "there is no corpus"),
        (["src", "-o", "new"], "--tokenizer M"),
        (["src", "-o", "new", "-t", "M", "-l", "klingon"], "'klingon' is not known; accepted: ada"),
        (["src", "-o", "new", "-t", "M", "--max-file-size", "huge"], "--max-file-size must be a size such as 500K"),
        (["src", "-o", "new", "-t", "M", "--max-memory", "0"], "--max-memory must be a size"),
        (["src", "-o", "new", "-t", "no/such/model"], "'no/such/model'"),
        (["nowhere", "-o", "new", "-t", "M"], "'nowhere' cannot be read"),
        (["src", "-o", "src", "-t", "M"], "holds other files"),
        (["src/.env", "-o", "new", "-t", "M"], "there is no text in src/.env; left out: 1 secret"),
        (["src", "-o", "new", "-t", "M", "--max-file-size", "1"], "2 too large (max_file_size is 1 bytes), 1 secret"),
        (["-u", "-o", "new"], "new is not a datastore"),
    ],
)
def test_bad_input(
    corpus: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert run(monkeypatch, "build-datastore", *(model if argument == "M" else argument for argument in arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    assert not Path("new").exists()


def test_questions_to_a_store(corpus: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    build(monkeypatch, model)
    assert run(monkeypatch, "datastore", "info", "store", "--json") == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 2
    assert run(monkeypatch, "datastore", "info", "store") == 0
    assert "2, and 0 dead" in capsys.readouterr().out
    assert run(monkeypatch, "datastore", "verify", "store") == 0
    assert "store is whole: 2 documents" in capsys.readouterr().out
    assert run(monkeypatch, "datastore", "lookup", "store", "(x):\n    return", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["match"] == {"tokens": 15, "text": "(x):\n    return"}
    assert found["continuations"] == [{"token": ord(" "), "text": " ", "count": 2}]
    assert sorted((place["path"], place["line"]) for place in found["locations"]) == [("src/a.py", 2), ("src/b.py", 4)]
    assert run(monkeypatch, "datastore", "lookup", "store", "--file", corpus / "b.py", "--limit", 1) == 0
    assert "31 tokens" not in capsys.readouterr().out, "nothing follows the end of a document"
    assert run(monkeypatch, "datastore", "lookup", "store", "import") == 0
    assert "src/b.py:1" in capsys.readouterr().out
    assert run(monkeypatch, "datastore", "lookup", "store", "日") == 0
    assert "no end of this text occurs" in capsys.readouterr().out


def test_changing_a_store(corpus: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    build(monkeypatch, model)
    (corpus / "c.py").write_text("c = 1\n")
    build(monkeypatch, model, "-u")
    assert run(monkeypatch, "datastore", "merge", "store", "--tiered", "--json") == 0
    assert json.loads(capsys.readouterr().out)["committed"] is False
    assert run(monkeypatch, "datastore", "merge", "store") == 0
    assert "2 segments merged" in capsys.readouterr().err
    assert run(monkeypatch, "datastore", "prune", "store", "c.*") == 0
    assert "1 removed" in capsys.readouterr().err
    assert run(monkeypatch, "datastore", "prune", "store", "--dead", "--json") == 0
    assert json.loads(capsys.readouterr().out)["committed"] is False
    assert run(monkeypatch, "datastore", "prune", "store") == 2
    assert "either patterns" in capsys.readouterr().err


def test_what_failed_and_is_not_the_users_fault(
    corpus: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build(monkeypatch, model)
    with lock_for_writing(Path("store")):
        assert run(monkeypatch, "datastore", "merge", "store") == 1
    assert "another process writes to store" in capsys.readouterr().err
    segment = Path("store") / read_manifest(Path("store")).segments[0].name
    raw = bytearray(segment.read_bytes())
    raw[400] ^= 1
    segment.write_bytes(raw)
    assert run(monkeypatch, "datastore", "verify", "store", "--headers") == 0
    capsys.readouterr()
    assert run(monkeypatch, "datastore", "verify", "store") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "checksum" in err
    assert "Traceback" not in err


def test_another_models_tokenizer(
    corpus: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build(monkeypatch, model)
    other = tmp_path / "other"
    tiny.word_tokenizer().save_pretrained(other)
    (other / "config.json").write_text("{}")
    for command in (["build-datastore", "-u", "-o", "store"], ["datastore", "lookup", "store", "x"], ["datastore", "watch", "store"]):
        assert run(monkeypatch, *command, "-t", other) == 2
        err = capsys.readouterr().err
        assert str(model) in err
        assert str(other) in err


def test_help_helps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(monkeypatch, "build-datastore", "--help") == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("--update", "--exclude", "--language", "--max-memory", "Examples"))
    assert run(monkeypatch, "datastore", "--help") == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("info", "verify", "lookup", "merge", "prune", "watch"))


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("500K", 500 << 10), ("1.5g", 3 << 29), ("2GiB", 2 << 30), ("8MB", 8 << 20), (" 3 T ", 3 << 40)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--x") == size


@pytest.mark.parametrize(
    ("size", "text"), [(4 << 30, "4G"), (800 << 20, "800M"), (3 << 40, "3T"), ((1 << 30) + 1024, "1048577K"), (1025, "1025")]
)
def test_sizes_are_shown_as_they_are_given(size: int, text: str) -> None:
    assert format_size(size) == text
    assert parse_size(text, "--x") == size


class Clock:
    """Time that passes when a test says so, for the modules that tell how far they are alone.

    Event loops of servers of other tests in this process would sleep for hours if `time.monotonic` itself stepped back.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        clock = SimpleNamespace(**vars(time) | {"monotonic": lambda: self.now})
        for module in (common, progress, screen_datastore):
            monkeypatch.setattr(module, "time", clock)


def test_progress_in_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(screen_datastore, "Console", lambda **more: Console(**more, force_terminal=True, width=120))
    with screen_datastore.show_progress(quiet=False) as tell:
        p = Progress()
        tell(p)
        p.start_reading(10, 20_000_000)
        p.count_read(1, 1_000_000)
        clock.now += 4
        p.count_read(2, 4_000_000)
        p.tokens = 1_500_000
        tell(p)
    text = capsys.readouterr().err
    assert "3 of 10 files, 5.0 of 20.0 MB, 1.2 MB/s, about 15 s left" in text


@pytest.mark.parametrize("seconds", [1, 20, 95])
def test_progress_without_a_terminal_is_a_few_lines(
    seconds: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A build of 1,000 files, of which the first comes late: every estimate is about right, and there is a line every ten seconds."""
    clock = Clock(monkeypatch)
    with screen_datastore.show_progress(quiet=False) as tell:
        p = Progress()
        tell(p)
        p.start_reading(1000, 10_000_000)
        tell(p)
        for n in range(1, 1001):
            clock.now += seconds / 5 if n == 1 else seconds * 0.8 / 999
            p.count_read(1, 10_000)
            tell(p)
        p.stage = "sorting"
        tell(p)
        p.stage = "done"
        tell(p)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 4 + seconds // 10
    assert lines[:2] == ["ngramspec: looking for files", "ngramspec: reading 1,000 files, 10.0 MB"]
    assert lines[-1].startswith("ngramspec: sorting, 1,000 of 1,000 files")
    left = [line.split("about ")[1] for line in lines if "about " in line]
    assert all(text.endswith(" s left") and int(text.split()[0]) <= 1.25 * seconds for text in left)
    assert (seconds < 20) == (not left)


def test_loading_without_a_terminal_is_a_line_a_stage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(monkeypatch)
    with screen.show_progress(quiet=False) as show:
        for percent in range(100):
            show(f"packing weights, {percent} %")
            clock.now += 0.25
        for i in range(0, 40, 8):
            show(f"capturing passes ({i} of 40)")
        show("measuring what a pass costs")
    lines = [line.removeprefix("ngramspec: ") for line in capsys.readouterr().err.splitlines()]
    assert lines == [*(f"packing weights, {n} %" for n in (0, 40, 80)), "capturing passes (0 of 40)", "measuring what a pass costs"]


def test_names_with_control_characters_are_printed_escaped(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s\x1b[2J[b]\n").mkdir()
    Path("s\x1b[2J[b]\n/a\n\x1b.py").write_text(TEXT)

    def told(*arguments: object, code: int = 0) -> str:
        assert run(monkeypatch, *arguments) == code
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err
        return out + err

    told("build-datastore", "s\x1b[2J[b]\n", "-o", "st\x1b[i]\n", "-t", model, "--exclude", "x\x1b[2J")
    info = told("datastore", "info", "st\x1b[i]\n")
    assert "st\\x1b[i]\\n, generation" in info
    assert any(line.rstrip().endswith("s\\x1b[2J[b]\\n") for line in info.splitlines())
    assert "exclude x\\x1b[2J" in info
    assert "a\\n\\x1b.py:1" in told("datastore", "lookup", "st\x1b[i]\n", "def f")
    assert told("datastore", "verify", "st\x1b[i]\n").startswith("st\\x1b[i]\\n is whole")
    real = screen_datastore.print_watched
    monkeypatch.setattr(screen_datastore, "print_watched", lambda sources: (real(sources), signal.raise_signal(signal.SIGINT)))
    watched = told("datastore", "watch", "st\x1b[i]\n").splitlines()
    assert "s\\x1b[2J[b]\\n; Ctrl-C ends it" in watched[0]
    assert watched[1] == "ngramspec: st\\x1b[i]\\n is no longer watched"
    assert told("datastore", "info", "no\x1b\n", code=2).count("\n") == 1


def test_what_could_not_be_read_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["[x]0", "\x1b\n", *(f"[x]{n}" for n in range(2, 12))]
    screen_datastore.print_summary(Summary(3, True, named=[(f"{name}.py", "Permission denied") for name in names]))
    text = capsys.readouterr().err
    assert "could not be read: [x]0.py: Permission denied" in text
    assert "could not be read: \\x1b\\n.py: Permission denied" in text
    assert "and 2 more" in text


def test_watching_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    screen_datastore.print_outcome(Summary(4, True, added=1, removed=2, merged=3, seconds={"total": 0.25}))
    screen_datastore.print_outcome(DatastoreCorruptError("it is broken"))
    screen_datastore.print_outcome(DatastoreCorruptError("a\n\x1b is broken"))
    screen_datastore.print_outcome(DatastoreLockedError("a\nstore"))
    first, second, third, fourth = capsys.readouterr().err.splitlines()
    assert first.endswith("1 documents added, 2 removed, 3 segments merged: generation 4 after 0.25 s")
    assert second.endswith("failed, will be tried again: it is broken")
    assert third.endswith("again: a\\n\\x1b is broken")
    assert fourth.endswith(" another process writes to a\\nstore: waiting for it")


WITHOUT_A_MODEL = """
import sys
import time
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "huggingface_hub", "safetensors", "faiss", *sys.argv[1].split(",")):
            raise ImportError(f"{name} is not to be imported")
sys.meta_path.insert(0, Absent())
from ngramspec.cli import main as cli
if "watch" in sys.argv:
    import signal
    from ngramspec.cli import screen_datastore
    screen_datastore.print_watched = lambda sources: signal.raise_signal(signal.SIGINT)
sys.argv = ["ngramspec", *sys.argv[2:]]
cli.main()
"""


@pytest.mark.parametrize("router", ["--router", "--no-router"])
def test_a_store_needs_no_model(corpus: Path, model: Path, monkeypatch: pytest.MonkeyPatch, router: str) -> None:
    """All but building works where no model, and none of what loads one, is installed."""
    build(monkeypatch, model, router)
    model.rename(model.parent / "gone")

    def command(*arguments: str, absent: str = "") -> str:
        done = subprocess.run([sys.executable, "-c", WITHOUT_A_MODEL, absent, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        (corpus / "c.py").write_text("c = 1\n")
        # nothing is compiled where no record of the router is made
        updated = command("build-datastore", "-u", "-o", "store", "-q", "--json", absent="numba" if router == "--no-router" else "")
        assert json.loads(updated)["added"] == 1
        assert (Datastore.open("store").info()["vectors"] > 0) == (router == "--router")
        if router == "--no-router":
            return
        assert json.loads(command("datastore", "info", "store", "--json", absent="numba,tokenizers"))["documents"] == 3
        assert json.loads(command("datastore", "lookup", "store", "c =", "--json"))["continuations"][0]["text"] == " "
        (corpus / "c.py").write_text("c = 22\n")
        command("datastore", "watch", "store")
        assert json.loads(command("datastore", "merge", "store", "--json"))["segments"] == 1
        assert json.loads(command("datastore", "prune", "store", "b.py", "--json"))["removed"] == 1
        assert "build-datastore" in command("--help", absent="numba,tokenizers,numpy")
        assert "2 documents" in command("datastore", "verify", "store")
    finally:
        (model.parent / "gone").rename(model)


def test_a_damaged_tokenizer_is_named(
    corpus: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build(monkeypatch, model)
    path = Path("store") / read_manifest(Path("store")).tokenizer.name
    path.write_bytes(path.read_bytes()[:-1])
    assert run(monkeypatch, "datastore", "info", "store") == 0
    capsys.readouterr()
    for command in (["build-datastore", "-u", "-o", "store"], ["datastore", "lookup", "store", "x"], ["datastore", "verify", "store"]):
        assert run(monkeypatch, *command) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert path.name in err
    assert run(monkeypatch, "build-datastore", "-u", "-o", "store", "-t", model, "-q") == 0, "a model's own may stand in for it"


BUILD = """
import sys
import time
from ngramspec.cli import datastore
from ngramspec.cli import main as cli
from ngramspec.datastore import segment_writer
from tokenizers import Tokenizer
datastore.load_tokenizer_backend = lambda name: name and Tokenizer.from_file(name + "/tokenizer.json")
real = segment_writer.sort_suffixes
def slow(*arguments):
    print("sorting", flush=True)
    import time
    time.sleep(60)
    return real(*arguments)
segment_writer.sort_suffixes = slow
sys.argv = ["ngramspec", *sys.argv[1:]]
cli.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_no_rubbish(corpus: Path, model: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int) -> None:
    def interrupt(*arguments: str) -> None:
        command = [sys.executable, "-c", BUILD, "build-datastore", *arguments, "-q"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "sorting\n"
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        assert process.returncode == code
        assert "Traceback" not in err

    interrupt("src", "-o", "new", "-t", str(model))
    assert not Path("new").exists()
    build(monkeypatch, model)
    before = sorted(os.listdir("store"))  # noqa: PTH208
    (corpus / "c.py").write_text("c = 1\n")
    interrupt("-u", "-o", "store")
    assert sorted(os.listdir("store")) == before  # noqa: PTH208


def test_the_watch_command_ends_by_signal(
    corpus: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build(monkeypatch, model)

    def stop(sources: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(screen_datastore, "print_watched", stop)
    assert run(monkeypatch, "datastore", "watch", "store") == 0
    assert "no longer watched" in capsys.readouterr().err
