"""`ngramspec build-datastore` and `ngramspec datastore ...`: arguments enter, calls of `ngramspec.datastore` and an exit code leave.

Answers go to standard output (with --json one document), progress and summaries to standard error. What they look like is
`screen_datastore`'s business. Everything that takes time to import is imported when a command runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import typer

from ngramspec import __version__
from ngramspec.cli.common import BadInputError, option, parse_size, read_prompt, to_printable
from ngramspec.cli.flags import with_options

TERMINATED = 143
_WRITER = f"ngramspec {__version__}"
_CORPUS, _OUTPUT = "Corpus", "Output"

app = typer.Typer(
    name="datastore",
    help="Inspect, search, merge, prune and update datastores.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _split_names(given: str) -> tuple[str, ...] | None:
    return tuple(name.strip() for name in given.split(",") if name.strip()) or None


def _parse_file_size(given: str) -> int | None:
    return parse_size(given, "--max-file-size")


def _keep_true(given: bool) -> bool | None:
    return given or None


StoreArgument = Annotated[Path, typer.Argument(help="The folder of the datastore.", show_default=False)]
Json = Annotated[bool, option(_OUTPUT, "Print one JSON document.", "--json")]
Memory = Annotated[
    str | None,
    typer.Option("--max-memory", metavar="SIZE", help="Most memory for sorting, such as 800M or 4G. Default: half of the free memory."),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        "-t",
        metavar="M",
        help="The model that is to draft from it, for its tokenizer: a folder, a .gguf file, a hub name, or smollm2. An existing datastore "
        "carries its tokenizer.",
    ),
]


class CorpusFlags(TypedDict, total=False):
    """Options by the field of `corpus.CorpusOptions` that each sets; those that were given."""

    include: Annotated[
        list[str],
        option(_CORPUS, "Take only files that match this pattern, as in .gitignore, whatever their type. May be repeated."),
        tuple,
    ]
    exclude: Annotated[list[str], option(_CORPUS, "Leave out files that match this pattern, as in .gitignore. May be repeated."), tuple]
    languages: Annotated[
        str,
        option(
            _CORPUS,
            "Take only files of these languages, such as python,rust or py,rs. Default: all known source and text.",
            "--language",
            "-l",
        ),
        _split_names,
    ]
    max_file_size: Annotated[
        str, option(_CORPUS, "Leave out larger files, also within archives. Default: 1M.", metavar="SIZE"), _parse_file_size
    ]
    text_fields: Annotated[
        list[str],
        option(
            _CORPUS,
            "The field of .jsonl rows that holds the text; of several the first that a row has. Default: text, content, code.",
            "--text-field",
        ),
        tuple,
    ]
    untracked: Annotated[
        bool,
        option(
            _CORPUS,
            "In a git repository, also take files that git neither tracks nor ignores.",
            "--untracked/--no-untracked",
        ),
        _keep_true,
    ]


@with_options("build-datastore", corpus_options=CorpusFlags)
def build_datastore(
    *,
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Folders, files, .jsonl(.gz), .zip, .whl, .tar.gz. With --update: further ones to add.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="STORE", help="The folder to write: new, empty, or a datastore, which is replaced."),
    ] = None,
    tokenizer: Tokenizer = None,
    update: Annotated[
        bool, typer.Option("--update", "-u", help="Update an existing datastore: read and tokenize only what changed.")
    ] = False,
    router: Annotated[
        bool | None,
        typer.Option(
            "--router/--no-router",
            help="Also store vectors that find the files most like a prompt (0.3 bytes per token). Default: yes; with --update: as before.",
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Threads that tokenize. Default: all cores.")] = None,
    corpus_options: CorpusFlags,
    max_memory: Memory = None,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Build on several machines with Ray: on the running cluster, or a local one. Needs the extra `ray`."),
    ] = False,
    blocks: Annotated[int | None, typer.Option(min=1, help="With --ray: number of segments, each built by one task.")] = None,
    as_json: Json = False,
    quiet: Annotated[bool, option(_OUTPUT, "Print neither progress nor a summary.", "--quiet", "-q")] = False,
) -> None:
    """Build a datastore, a searchable folder of text from which a model drafts: your code, packages, documents.

    In a git repository it takes the files that git tracks, elsewhere all that no .gitignore excludes. The summary counts what it leaves
    out: binaries, generated and minified files, duplicates, files with secrets (keys, tokens, passwords), links, and what is not text.
    An existing datastore is replaced when the new one is complete; Ctrl-C leaves it as it was.

    Examples:

      ngramspec build-datastore . -o ~/.stores/project --tokenizer smollm2

      ngramspec build-datastore src/ wheels/ notes.jsonl -o store -t ./model --language python --exclude 'tests/'

      ngramspec build-datastore --update -o store
    """
    if output is None:
        raise BadInputError("name the folder of the datastore: -o STORE")
    if not update and not paths:
        raise BadInputError("there is no corpus: give folders or files, as in `ngramspec build-datastore . -o STORE`")
    if ray and update:
        raise BadInputError("--ray builds a store anew; leave out either --ray or --update")
    if router is not None and update:
        raise BadInputError("an update keeps the router that the store was built with or without; leave out --update to change it")
    routed = router is not False
    if jobs is not None:
        os.environ["RAYON_NUM_THREADS"] = str(jobs)  # read by `tokenizers` when it first runs in parallel
    with _exit_on_sigterm():
        from ngramspec.cli import screen, screen_datastore
        from ngramspec.datastore import build, corpus
        from ngramspec.datastore import update as updating
        from ngramspec.datastore.manifest import read_manifest

        memory = parse_size(max_memory, "--max-memory")
        if update:
            manifest = read_manifest(output)
            options = corpus.CorpusOptions(**{**dataclasses.asdict(updating.parse_options(manifest)), **corpus_options})
            name = tokenizer or manifest.tokenizer_name
        elif tokenizer is None:
            raise BadInputError("name the model that the datastore is for: --tokenizer M, such as --tokenizer smollm2")
        else:
            options, name = corpus.CorpusOptions(**corpus_options), tokenizer
        with screen.show_progress(quiet) as progress:
            if tokenizer is not None:
                progress(f"reading the tokenizer of {tokenizer}")
            backend = load_tokenizer_backend(tokenizer)
        with screen_datastore.show_progress(quiet) as on_progress:
            how: dict[str, Any] = {"options": options, "writer": _WRITER, "on_progress": on_progress}
            if update:
                summary = updating.update(output, backend, name, paths or (), jobs=jobs, max_memory=memory, **how)
            elif ray:
                from ngramspec.datastore import ray as distributed

                summary = distributed.build(paths or (), output, backend, name, blocks=blocks, router=routed, **how)
            else:
                summary = build.build(paths or (), output, backend, name, router=routed, jobs=jobs, max_memory=memory, **how)
    if as_json:
        print(json.dumps({"store": str(output), **summary.as_json()}))
    if not quiet:
        screen_datastore.print_summary(summary)


@app.command()
def info(store: StoreArgument, as_json: Json = False) -> None:
    """Show what a datastore holds, and what it was made from."""
    from ngramspec.datastore.reader import Datastore

    with Datastore.open(store) as opened:
        found = opened.info()
    if as_json:
        print(json.dumps(found))
    else:
        from ngramspec.cli import screen_datastore

        screen_datastore.print_info(found)


@app.command()
def verify(
    store: StoreArgument,
    headers: Annotated[bool, typer.Option("--headers", help="Only what every opening checks; takes milliseconds.")] = False,
) -> None:
    """Check every byte of a datastore: checksums, the order of the suffixes, documents and paths. Exit code 1 if it is damaged."""
    from ngramspec.datastore.reader import Datastore

    with Datastore.open(store, verify="header" if headers else "full") as opened:
        found = opened.info()
    print(
        f"{to_printable(store)} is whole: {found['documents']} documents in {found['segments']} segments, generation {found['generation']}"
    )


@app.command()
def lookup(
    store: StoreArgument,
    text: Annotated[str | None, typer.Argument(help="What was written last; - reads it from standard input.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Take the text from this file: its end counts.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Most continuations and places to show.")] = 10,
    max_match: Annotated[int, typer.Option(min=1, help="Longest end of the text that is looked for, in tokens.")] = 64,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
) -> None:
    """Find the longest end of a text that occurs in a datastore: what follows it, how often, and where it stands."""
    written = read_prompt(text, file)

    from ngramspec.datastore.file_filters import normalize_line_ends
    from ngramspec.datastore.reader import Datastore
    from ngramspec.datastore.update import get_encoder

    with Datastore.open(store) as opened:
        encoder = get_encoder(store, opened.snapshot.manifest, load_tokenizer_backend(tokenizer), tokenizer)
        tokens, lengths = encoder.encode([normalize_line_ends(written)])
        found = opened.lookup(tokens[: int(lengths[0])].tolist(), max_match=max_match, limit=limit)
        matched = tokens[int(lengths[0]) - found.length : int(lengths[0])].tolist()
    document = {
        "match": {"tokens": found.length, "text": encoder.decode(matched)},
        "count": found.count,
        "complete": found.complete,
        "continuations": [{"token": token, "text": encoder.decode([token]), "count": count} for token, count in found.continuations],
        "locations": [{"path": place.path, "line": place.line} for place in found.locations],
    }
    if as_json:
        print(json.dumps(document))
    else:
        from ngramspec.cli import screen_datastore

        screen_datastore.print_match(document)


@app.command()
def merge(
    store: StoreArgument,
    tiered: Annotated[
        bool, typer.Option("--tiered", help="Only what an update would merge: many small segments, many dead documents.")
    ] = False,
    max_memory: Memory = None,
    as_json: Json = False,
) -> None:
    """Merge a datastore's segments and drop its dead documents: look-ups become quicker, the store smaller."""
    with _exit_on_sigterm():
        from ngramspec.datastore import update as updating

        summary = updating.merge(store, "tiered" if tiered else "all", max_memory=parse_size(max_memory, "--max-memory"), writer=_WRITER)
    _print_summary(summary, store, as_json)


@app.command()
def prune(
    store: StoreArgument,
    patterns: Annotated[list[str] | None, typer.Argument(help="Patterns as in .gitignore; what matches is dropped.")] = None,
    dead: Annotated[bool, typer.Option("--dead", help="Only drop documents that updates have marked dead.")] = False,
    max_memory: Memory = None,
    as_json: Json = False,
) -> None:
    """Drop documents for good. Patterns also keep later updates from bringing them back."""
    if bool(patterns) == dead:
        raise BadInputError("say what to drop: either patterns, such as 'tests/' '*.md', or --dead")
    with _exit_on_sigterm():
        from ngramspec.datastore import update as updating

        summary = updating.prune(store, patterns or (), max_memory=parse_size(max_memory, "--max-memory"), writer=_WRITER)
    _print_summary(summary, store, as_json)


@app.command()
def watch(
    store: StoreArgument,
    paths: Annotated[list[Path] | None, typer.Argument(help="Folders or files to add to what the store was built from.")] = None,
    tokenizer: Tokenizer = None,
    max_memory: Memory = None,
) -> None:
    """Keep a datastore up to date while its files change, until Ctrl-C. A running engine picks the changes up."""
    with _exit_on_sigterm():
        from ngramspec.cli import screen_datastore
        from ngramspec.datastore.watch import watch as watching

        with contextlib.suppress(KeyboardInterrupt):
            watching(
                store,
                load_tokenizer_backend(tokenizer),
                tokenizer,
                paths or (),
                max_memory=parse_size(max_memory, "--max-memory"),
                writer=_WRITER,
                on_ready=screen_datastore.print_watched,
                on_outcome=screen_datastore.print_outcome,
            )
    print(f"ngramspec: {to_printable(store)} is no longer watched", file=sys.stderr)


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does, so that what it has begun to write is deleted."""

    def end(signum: int, frame: Any) -> None:
        raise SystemExit(TERMINATED)

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def load_tokenizer_backend(name: str | None) -> Any:
    """Return the `tokenizers.Tokenizer` of a model, which takes seconds to import and load; None if none is named."""
    if name is None:
        return None
    from ngramspec.models import gguf, vocabulary
    from ngramspec.models.names import RANDOM, locate_gguf, resolve

    if not name.startswith(RANDOM) and isinstance(path := resolve(locate_gguf(name)), Path) and path.is_file():
        return vocabulary.read_backend(gguf.read(path))
    from ngramspec.models.loader import load_tokenizer

    tokenizer = load_tokenizer(name)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise BadInputError(f"the tokenizer of {name!r} is not one of the tokenizers library; a tokenizer.json is needed")
    return backend


def _print_summary(summary: Any, store: Path, as_json: bool) -> None:
    from ngramspec.cli import screen_datastore

    if as_json:
        print(json.dumps({"store": str(store), **summary.as_json()}))
    else:
        screen_datastore.print_summary(summary)
