"""The language of the code: names, docstrings and words follow docs/glossary.md and CONTRIBUTING.md.

Some rules do not hold everywhere yet. Each of these has a limit, the number of places that still break it: a limit may only fall.

    python -m tests.test_language      prints the figures and the places behind each

Reads sources with `ast`; imports nothing of the package.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tools.commits import find_fault

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("ngramspec", "datastore", "benchmarks", "tools")
OLD_NAMES = ("guests", "drafting", "drafters", "model")  # packages of `ngramspec` that only forward to the new names of modules
GLOSSARY = ROOT / "docs" / "glossary.md"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(path for path in sorted((ROOT / "docs").glob("*.md")) if path != GLOSSARY)]

LIMITS = {  # a limit may only fall
    "class names with two meanings": 0,
    "file names with two meanings": 0,
    "bare-word function names, percent": 14,
    "bare-word function names that are no listed verb": 26,
    "functions with more than 9 arguments": 24,
    "modules over 500 lines": 0,
    "docstrings that begin with a preposition": 0,
    "function docstrings without a sentence": 15,
    "module constants explained below": 0,
    "replaced words in docstrings": 0,
    "replaced words in pages": 0,
    "replaced names in code": 1,
}

SHARED_FILE_NAMES = {"__init__.py", "__main__.py", "errors.py", "schemas.py", "routes.py"}  # the same thing in each package


def words(text: str) -> set[str]:
    return set(text.split())


# Verbs that a reader of the field knows on sight: a function may be called by one of them alone.
NAME_VERBS = words(
    """
    accept achat aclose acomplete acquire add admit adopt ainfill allocate answer append apply ask assemble astream attach attack attend
    attribute await backup begin bind build calibrate call cancel capture chat check choose clear clone close collect colour commit
    compare compile complete compute concatenate configure connect convert copy count cut decide decode decorate decrypt delete
    deliver dequantise derive describe detach detect detokenize digest disable discard dispatch download draft drain draw drop
    dump embed emit enable encode encrypt end enqueue enter escape estimate evaluate evict exclude execute exit exp expect
    expose extend fail fetch fill filter find finish fit fix flatten flush fma fold follow forbid forget fork format forward
    free freeze fsync fuse gather generate get grow halve handle hash hide identify import index infill init insert inspect
    install invalidate iterate join judge jump kill launch learn lex link list listen load locate lock log loop lower lstat main mark
    mask match measure merge mix move multiply njit normalise normalize note number observe open pack parse patch pause peek
    permute pick place plan plot poll pool pop post predict preempt prefetch prepare prepend print probe process profile propose
    prove prune push put quantile quantise quantize quit raise rank rate read readable readinto recall receive record recover
    reduce refresh refuse register reject release reload remember remove rename render repeat replace replay report request
    require reserve reset resize resolve respond restart restore resume retry return reverse rewrite rollback rotate round route
    run sample save scale scan schedule score search seek select send serve set shift show shuffle shut silu skip sleep slice
    smooth softmax solve sort spawn split spread start steal step stop store stream strip submit subscribe sum summarise
    summarize swap switch sync synchronize tabulate take tell time token tokenize touch trace train translate transpose trim
    truncate try tune undo union unlink unload unlock unpack update upload use validate verify visit wait walk want warm warmup
    watch widen wrap write yield zip
    """
)
# Verbs that a sentence may have besides.
OTHER_VERBS = words(
    """
    advance allow appear arrange arrive assign assume become believe belong bound break bring carry cast cause change
    combine come consist contain continue convolve cost cover create declare define depend differ divide do drive ensure
    equal exceed exist explain express fall feed forbid give go guess happen have hold ignore include increment invert
    keep kill know lack last lead leave let lie limit live look lose make map mean name need note obey occupy occur
    offer own pass pay point prefer produce promise protect queue reach rest satisfy say see seem serve share sit stack
    stage stand state stay succeed support teach tell test think treat turn understand unroll vary work
    """
)
FINITE = words(
    """
    am are aren't be became been began broke brought came can can't cannot chose comes cost could cut did do does doesn't don't
    drew fell felt found gave gets gives goes grew had has have held holds is isn't keeps kept knew knows led left lies lost
    made makes may means meant met might must paid put ran read said saw says sees sent set shall should stood takes thought
    told took understood was went were will won would wrote
    """
)


def third_person(verb: str) -> str:
    if re.search(r"(s|x|z|ch|sh)$", verb):
        return verb + "es"
    return verb[:-1] + "ies" if re.search(r"[^aeiou]y$", verb) else verb + "s"


VERBS = NAME_VERBS | OTHER_VERBS
PLURALS = words("numbers ranks scores steps texts times tokens")  # of nouns, although also verbs
FINITE_VERBS = (FINITE | {third_person(verb) for verb in VERBS}) - PLURALS
PREPOSITIONS = words(
    """
    above after against along among as at before behind below beside besides between beyond by during for from in into of on
    onto over per since than through to under until upon via where with within without
    """
)
RELATIVES = {"what", "whether", "how", "who", "which", "why", "that", "whose", "whatever", "whoever", "when", "so", "because"}


# ------------------------------------------------------------------ reading the sources


@cache
def sources(*folders: str) -> list[tuple[str, str, ast.Module]]:
    """Return path, text and tree of every module in these folders."""
    found = []
    for folder in folders or FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text("utf-8")
            found.append((path.relative_to(ROOT).as_posix(), text, ast.parse(text)))
    return found


def forwards(path: str) -> bool:
    return path.startswith(tuple(f"ngramspec/{name}/" for name in OLD_NAMES))


def functions(*folders: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, _, tree in sources(*folders):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is read as an attribute, so that its name and docstring may be a noun."""
    decorators = [ast.unparse(each) for each in node.decorator_list]
    return any(each.split("(")[0].split(".")[-1] in ("property", "cached_property", "setter") for each in decorators)


def docstrings(*folders: str) -> Iterator[tuple[str, int, str]]:
    """Yield (path, line, text) of every string that stands as a statement: docstrings, and strings that explain an attribute."""
    for path, _, tree in sources(*folders):
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                yield path, node.lineno, node.value.value


def first_word(text: str) -> str:
    found = re.match(r"[\s\"'(]*([A-Za-z']+)\b", text)
    return found[1].lower() if found else ""


def has_sentence(text: str) -> bool:
    """Return whether a docstring begins with an imperative, or with a subject and its verb."""
    sentence = re.split(r"[.:;](?:\s|$)", " ".join(text.split("\n\n")[0].split()))[0]
    first = first_word(sentence)
    if first in PREPOSITIONS | RELATIVES:
        return False
    if first in VERBS or first in FINITE_VERBS:
        return True
    main = re.sub(r"\b(that|which|who|whose|what|where|when|if|unless|until|because|whether|how|than|as)\b[^,]*", "", sentence)
    return any(word in FINITE_VERBS for word in re.findall(r"[a-z']+", main))


# ------------------------------------------------------------------ the glossary


def replaced(kind: str) -> list[tuple[str, str]]:
    """Return what the glossary's comment lists under `words` (of prose) or `names` (of code): (old, new)."""
    (comment,) = re.findall(rf"<!-- replaced {kind}\n(.*?)\n-->", GLOSSARY.read_text("utf-8"), re.DOTALL)
    return [(old.strip(), new.strip()) for old, new in (line.split("->") for line in comment.splitlines())]


def pattern(entries: list[tuple[str, str]]) -> re.Pattern[str]:
    return re.compile(r"(?<![\w.-])(" + "|".join(re.escape(old) for old, _ in entries) + r")(?![\w])", re.IGNORECASE)


def plain_prose(path: Path) -> str:
    """Return a page with its fenced blocks, generated tables, code in backticks and link targets blanked, line for line."""
    text = path.read_text("utf-8")
    for blanked in (r"^```.*?^```$", r"<!-- generated: .*?<!-- end -->", r"<!--.*?-->"):
        text = re.sub(blanked, lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`\n]*`", "", text))


# ------------------------------------------------------------------ what is counted


def class_names() -> list[str]:
    homes = defaultdict(set)
    for path, _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(path)
    return [f"{name}: {', '.join(sorted(paths))}" for name, paths in sorted(homes.items()) if len(paths) > 1]


def file_names() -> list[str]:
    homes = defaultdict(set)
    for path, _, _ in sources("ngramspec", "datastore"):
        if not forwards(path) and Path(path).name not in SHARED_FILE_NAMES:
            homes[Path(path).name].add(path)
    return [f"{name}: {', '.join(sorted(paths))}" for name, paths in sorted(homes.items()) if len(paths) > 1]


def bare_share() -> int:
    """Return how many of a hundred function names of the package are one word, dunders and properties included."""
    names = {node.name for _, node in functions("ngramspec", "datastore")}
    return 100 * sum(bool(re.fullmatch(r"_{0,2}[a-z0-9]+_{0,2}", name)) for name in names) // len(names)


def bare_names() -> list[str]:
    homes = defaultdict(set)
    for path, node in functions():
        bare = node.name.strip("_")
        if not node.name.startswith("__") and "_" not in bare and bare not in NAME_VERBS and bare.isalpha() and not is_property(node):
            homes[bare].add(path)
    return [f"{name}: {', '.join(sorted(paths))}" for name, paths in sorted(homes.items())]


def wide_signatures() -> list[str]:
    return [
        f"{path}:{node.lineno} {node.name}"
        for path, node in functions("ngramspec", "datastore")
        if len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) > 9
    ]


def long_modules() -> list[str]:
    return [f"{path}: {text.count(chr(10))} lines" for path, text, _ in sources() if text.count("\n") > 500]


def prepositions() -> list[str]:
    return [f"{path}:{line} {text[:80]!r}" for path, line, text in docstrings() if first_word(text) in PREPOSITIONS]


def fragments() -> list[str]:
    found = []
    for path, node in functions():
        text = ast.get_docstring(node)
        if text and not is_property(node) and not has_sentence(text):
            found.append(f"{path}:{node.lineno} {text[:80]!r}")
    return found


def constants_explained_below() -> list[str]:
    found = []
    for path, _, tree in sources():
        for before, node in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                found.append(f"{path}:{node.lineno} {str(node.value.value)[:80]!r}")
    return found


def replaced_words() -> list[str]:
    banned = pattern(replaced("words"))
    found = []
    for path, line, text in docstrings():
        for match in banned.finditer(re.sub(r"`[^`]*`", "", text)):
            found.append(f"{path}:{line} {match[0]!r}")
    return found


def replaced_words_in_pages() -> list[str]:
    meant = {old.lower(): new for old, new in replaced("words")}
    return [
        f"{document.name}:{number} {match[0]!r}; write {meant[match[0].lower()]!r}"
        for document in DOCUMENTS
        for number, line in enumerate(plain_prose(document).splitlines(), 1)
        for match in pattern(replaced("words")).finditer(line)
    ]


def replaced_names() -> list[str]:
    banned = {old for old, _ in replaced("names")}
    found = []
    for path, _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name.lstrip("_") in banned:
                found.append(f"{path}:{node.lineno} {node.name}")
    return found


COUNTED = {
    "class names with two meanings": class_names,
    "file names with two meanings": file_names,
    "bare-word function names that are no listed verb": bare_names,
    "functions with more than 9 arguments": wide_signatures,
    "modules over 500 lines": long_modules,
    "docstrings that begin with a preposition": prepositions,
    "function docstrings without a sentence": fragments,
    "module constants explained below": constants_explained_below,
    "replaced words in docstrings": replaced_words,
    "replaced words in pages": replaced_words_in_pages,
    "replaced names in code": replaced_names,
}


# ------------------------------------------------------------------ the tests


@pytest.mark.parametrize("what", COUNTED)
def test_a_rule_is_broken_no_more_often_than_before(what: str) -> None:
    places = COUNTED[what]()
    assert len(places) <= LIMITS[what], f"{what}: {len(places)}, at most {LIMITS[what]}\n  " + "\n  ".join(places)


def test_functions_are_called_by_verb_and_object() -> None:
    share = bare_share()
    assert share <= LIMITS["bare-word function names, percent"], f"{share} % of function names are one word"


def test_few_file_names_mean_two_things() -> None:
    assert len(SHARED_FILE_NAMES) <= 6


def test_no_term_of_the_glossary_is_a_replaced_word() -> None:
    terms = re.findall(r"^\| \*\*(.+?)\*\*", GLOSSARY.read_text("utf-8"), re.MULTILINE)
    assert len(terms) > 60
    assert len(set(terms)) == len(terms), "a term is explained twice"
    assert not {term.lower() for term in terms} & {old.lower() for old, _ in replaced("words")}


@pytest.mark.parametrize(
    ("subject", "fits"),
    [
        ("cost model: let stale knots yield to fresh ones", True),
        ("server, datastore: say which file is missing", True),
        ("Fix a bug", False),
        ("server: say which file is missing.", False),
        ("server: " + "x" * 65, False),
    ],
)
def test_a_commit_s_subject(subject: str, fits: bool) -> None:
    assert (find_fault(subject) is None) is fits


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("Return the packed rows of one batch.", True),
        ("Returns None if the file is gone.", True),
        ("The scheduler gives every sequence one row.", True),
        ("Of a layer.", False),
        ("Any number of times.", False),
        ("Whether to ask it in this step.", False),
        ("The rows that a sequence has.", False),
        ("What it took.", False),
    ],
)
def test_a_sentence_has_a_verb(text: str, is_one: bool) -> None:
    assert has_sentence(text) is is_one


def main() -> None:
    for what, find in COUNTED.items():
        places = find()
        print(f"\n{what}: {len(places)} (limit {LIMITS[what]})", *places, sep="\n  ")
    print(f"\nbare-word function names: {bare_share()} % (limit {LIMITS['bare-word function names, percent']} %)")
    print(*(f"{len(find()):6} {what}" for what, find in COUNTED.items()), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
