"""Rules of GBNF as a grammar in llguidance's dialect of Lark.

Rules of `gbnf` enter, a text leaves (`to_lark`). In GBNF rules derive characters. llguidance first cuts a text into lexemes, each the
longest that some terminal allowed there matches, and so misses texts in which a shorter one would do: `[a-z]+ "x"`, as two terminals,
matches nothing. So whatever needs no recursion becomes one terminal, as long as that is, and a terminal that could run on where another
one, or itself, may have ended is divided into its parts. Terminals of one character can always be told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ngramspec.errors import GrammarError
from ngramspec.grammar.gbnf import ANY, EMPTY, Alt, Chars, Node, Ref, Repeat, Seq, Token

MAX_POSITIONS = 30_000
"""Characters of a grammar when rules without recursion stand in the place of their names, about as many as fit into its text."""
MAX_PAIRS = 20_000
"""Pairs of positions of two terminals that are looked at before one is divided for good measure (about 20 ms)."""
MAX_ROUNDS = 200
"""Times that terminals are divided. Each takes away one level of parentheses, and in most grammars there are none to three."""


def to_lark(rules: dict[str, Node], special: Mapping[str, int]) -> str:
    """Return the grammar whose rule `start` matches what `root` does. `special`: ids of the tokens that may be named as `<…>`.

    Raises GrammarError if it is too large, matches nothing or names another token.
    """
    if "root" not in (rules := _without_empty_classes(rules)):
        raise GrammarError("GBNF grammar: rule 'root' matches nothing: one of its classes has no character")
    rules = {name: _loop(name, node) for name, node in _reachable(rules).items()}
    return _Translation(rules, special).write()


def _without_empty_classes(rules: dict[str, Node]) -> dict[str, Node]:
    """Return the rules without options that need a class without characters, such as `[z-a]`."""
    while True:
        kept = {name: made for name, node in rules.items() if (made := _without_empty(node, rules)) is not None}
        if len(kept) == len(rules):
            return kept
        rules = kept


def _without_empty(node: Node, rules: dict[str, Node]) -> Node | None:
    match node:
        case Chars():
            return node if node.ranges else None
        case Ref():
            return node if node.name in rules else None
        case Repeat(item, least, most):
            made = _without_empty(item, rules)
            return Repeat(made, least, most) if made is not None else None if least else EMPTY
        case Seq(items):
            parts = [_without_empty(item, rules) for item in items]
            return None if None in parts else Seq(tuple(part for part in parts if part is not None))
        case Alt(options):
            kept = tuple(part for option in options if (part := _without_empty(option, rules)) is not None)
            return Alt(kept) if kept else None
    return node


def _reachable(rules: dict[str, Node]) -> dict[str, Node]:
    found: dict[str, Node] = {}
    pending = ["root"]
    while pending:
        if (name := pending.pop()) not in found:
            found[name] = rules[name]
            pending += _references(rules[name])
    return found


def _references(node: Node) -> list[str]:
    match node:
        case Ref():
            return [node.name]
        case Repeat():
            return _references(node.item)
        case Seq(parts) | Alt(parts):
            return [name for part in parts for name in _references(part)]
    return []


def _loop(name: str, node: Node) -> Node:
    """Return a rule that refers to itself only at the end of its options, `ws ::= " " ws | ""`, as a repetition."""
    again, ends = list[Node](), list[Node]()
    for option in _options(node):
        items = option.items if isinstance(option, Seq) else (option,)
        last = items[-1] if items else EMPTY
        if isinstance(last, Ref) and last.name == name:
            again.append(Seq(items[:-1]))
        else:
            ends.append(option)
    if not again or not ends or any(name in _references(part) for part in (*again, *ends)):
        return node
    return Seq((Repeat(Alt(tuple(again)), 0, None), Alt(tuple(ends))))


def _options(node: Node) -> list[Node]:
    match node:
        case Alt():
            return [option for each in node.options for option in _options(each)]
        case Repeat(item, 0, 1):
            return [*_options(item), EMPTY]
        case Seq((item,)):
            return _options(item)
    return [node]


@dataclass(slots=True)
class _Terminal:
    """What a lexeme matches, as an automaton over positions, the characters of its expression. Sets of positions and of classes of
    characters are integers with a bit for each."""

    chars: list[int] = field(default_factory=list)
    """Of each position, its classes of characters."""
    follow: list[int] = field(default_factory=list)
    """Of each position, those that may come next."""
    first: int = 0
    last: int = 0
    nullable: bool = True

    def begins_with(self) -> int:
        return self.chars_of(self.first)

    def chars_of(self, positions: int) -> int:
        found = 0
        for position in _bits(positions):
            found |= self.chars[position]
        return found

    def following(self, positions: int) -> int:
        found = 0
        for position in _bits(positions):
            found |= self.follow[position]
        return found


Lowered = tuple[Any, ...]
"""A rule over terminals: ("term", its regular expression), ("rule", name), ("token", text), ("seq", [Lowered …]), ("alt", [Lowered …]) or
("repeat", Lowered, least, most)."""


class _Translation:
    def __init__(self, rules: dict[str, Node], special: Mapping[str, int]) -> None:
        self._rules, self._special = rules, special
        self._sizes = dict.fromkeys(_regular_rules(rules), 0)
        for name in _in_order(rules, self._sizes):
            self._sizes[name] = self._size(rules[name])
            if self._sizes[name] > MAX_POSITIONS:
                del self._sizes[name]
        self._classes = _classes(rules)
        self._divided: set[str] = set()
        self._texts: dict[int, str] = {}
        self._automata: dict[str, _Terminal] = {}
        self._joined: dict[tuple[int, ...], Node] = {}
        """Parts beside each other as one node, by what they are."""

    def write(self) -> str:
        for _ in range(MAX_ROUNDS):
            lowered, terminals = self._lower_all()
            if not (wrong := self._ambiguous(lowered, terminals)):
                return self._text(lowered, terminals)
            self._divided |= wrong
        raise GrammarError(
            f"GBNF grammar: expected rules that {MAX_ROUNDS} divisions make unambiguous to a lexer; a simpler grammar may do"
        )

    # -------------------------------------------------------------- terminals

    def _size(self, node: Node) -> int:
        """How many characters it has; more than MAX_POSITIONS for what is no terminal."""
        match node:
            case Chars():
                return 1
            case Ref():
                return self._sizes.get(node.name, MAX_POSITIONS + 1)
            case Repeat():
                return self._size(node.item)
            case Seq(parts) | Alt(parts):
                return sum(map(self._size, parts))
        return MAX_POSITIONS + 1

    def _regex(self, node: Node) -> str:
        """The regular expression of what is a terminal."""
        if (known := self._texts.get(id(node))) is not None:
            return known
        match node:
            case Chars():
                made = _class_regex(node)
            case Ref():
                made = self._regex(self._rules[node.name])
            case Repeat(item, least, most):
                made = (
                    f"(?:{self._regex(item)}){_times(least, most)}"
                    if not isinstance(item, Chars)
                    else _class_regex(item) + _times(least, most)
                )
            case Seq(items):
                made = "".join(
                    f"(?:{text})" if "|" in (text := self._regex(item)) and not isinstance(item, Chars) else text for item in items
                )
            case Alt(options):
                made = "|".join(map(self._regex, options))
        self._texts[id(node)] = made
        return made

    def _automaton(self, node: Node) -> _Terminal:
        made = _Terminal()
        made.first, made.last, made.nullable = self._build(node, made)
        return made

    def _build(self, node: Node, made: _Terminal) -> tuple[int, int, bool]:
        """Add the node's positions (Glushkov's construction); return its first and last ones, and whether it matches the empty text."""
        match node:
            case Chars():
                made.chars.append(self._classes[node.ranges])
                made.follow.append(0)
                bit = 1 << (len(made.chars) - 1)
                return bit, bit, False
            case Ref():
                return self._build(self._rules[node.name], made)
            case Alt(options):
                first = last = 0
                nullable = False
                for option in options:
                    begin, end, empty = self._build(option, made)
                    first, last, nullable = first | begin, last | end, nullable or empty
                return first, last, nullable
            case Seq(items):
                first, last, nullable = 0, 0, True
                for item in items:
                    begin, end, empty = self._build(item, made)
                    _connect(made, last, begin)
                    first = first | begin if nullable else first
                    last = last | end if empty else end
                    nullable = nullable and empty
                return first, last, nullable
            case Repeat(item, least, most):
                if most == 0:
                    return 0, 0, True
                first, last, nullable = self._build(item, made)
                if most != 1:  # of several times it is only looked at that they follow each other
                    _connect(made, last, first)
                return first, last, nullable or least == 0
        raise AssertionError(node)

    # -------------------------------------------------------------- rules over terminals

    def _lower_all(self) -> tuple[dict[str, Lowered], dict[str, Node]]:
        """The rules that are reached, and the terminals by their text."""
        terminals: dict[str, Node] = {}
        lowered: dict[str, Lowered] = {}
        pending = ["root"]
        while pending:
            name = pending.pop()
            if name not in lowered:
                lowered[name] = self._lower(self._rules[name], terminals, pending)
        return lowered, terminals

    def _lower(self, node: Node, terminals: dict[str, Node], names: list[str]) -> Lowered:
        if self._size(node) <= MAX_POSITIONS:
            text = self._regex(node)
            if text not in self._divided or isinstance(node, Chars):
                terminals.setdefault(text, node)
                return "term", text
        match node:
            case Ref():
                names.append(node.name)
                return "rule", node.name
            case Token():
                return "token", self._token(node)
            case Repeat(item, least, most):
                return "repeat", self._lower(item, terminals, names), least, most
            case Seq(items):
                return "seq", [self._lower(item, terminals, names) for item in self._grouped(items, Seq)]
            case Alt(options):
                return "alt", [self._lower(option, terminals, names) for option in self._grouped(options, Alt)]
        raise AssertionError(node)

    def _token(self, node: Token) -> str:
        number = node.token if isinstance(node.token, int) else self._special.get(node.token)
        if number is None:
            raise GrammarError(
                f"GBNF: expected a control token of the vocabulary or a token's id, such as <[1000]>, got {node.token!r:.60}"
            )
        return f"<[^{number}]>" if node.negated else f"<[{number}]>"

    def _grouped(self, parts: tuple[Node, ...], kind: type[Seq] | type[Alt]) -> list[Node]:
        """Parts that make a terminal together as one; of options all that do, of a sequence those beside each other."""
        runs: list[list[Node]] = []
        for part in parts:
            regular = self._size(part) <= MAX_POSITIONS
            beside = runs[-1:] if kind is Seq else runs
            run = next((run for run in beside if regular and self._size(run[0]) <= MAX_POSITIONS), None)
            if run is None:
                runs.append([part])
            else:
                run.append(part)
        if len(runs) == 1 and len(runs[0]) == len(parts):  # all of it was tried, and divided
            return list(parts)
        found: list[Node] = []
        for run in runs:
            whole = self._joined.setdefault(tuple(map(id, run)), kind(tuple(run))) if len(run) > 1 else run[0]
            found += run if len(run) > 1 and self._regex(whole) in self._divided else [whole]
        return found

    # -------------------------------------------------------------- what a lexer cannot tell apart

    def _ambiguous(self, lowered: dict[str, Lowered], terminals: dict[str, Node]) -> set[str]:
        """The terminals that may run on behind a place where a terminal ends and another one begins."""
        for text, node in terminals.items():
            if text not in self._automata:
                self._automata[text] = self._automaton(node)
        automata = {text: self._automata[text] for text in terminals}
        after = _Follow(lowered, automata).terminals
        wrong: set[str] = set()
        for longer, automaton in automata.items():
            if not any(automaton.follow):
                continue
            if any(_runs_on(automata[shorter], automaton, after.get(shorter, 0)) for shorter in automata):
                wrong.add(longer)
        return wrong

    # -------------------------------------------------------------- text

    def _text(self, lowered: dict[str, Lowered], terminals: dict[str, Node]) -> str:
        names = {name: "start" if name == "root" else f"rule_{i}" for i, name in enumerate(lowered)}
        symbols = {text: f"T{i}" for i, text in enumerate(terminals)}
        lines = [f"{names[name]}: {_write(body, names, symbols)}" for name, body in lowered.items()]
        lines += [f"{symbol}: /{text}/" if text else f'{symbol}: ""' for text, symbol in symbols.items()]
        return "\n".join(lines)


def _regular_rules(rules: dict[str, Node]) -> set[str]:
    """The rules without recursion and tokens."""
    found: set[str] = set()
    while new := {name for name, node in rules.items() if name not in found and _is_regular(node, found)}:
        found |= new
    return found


def _is_regular(node: Node, regular: set[str]) -> bool:
    match node:
        case Token():
            return False
        case Ref():
            return node.name in regular
        case Repeat():
            return _is_regular(node.item, regular)
        case Seq(parts) | Alt(parts):
            return all(_is_regular(part, regular) for part in parts)
    return True


def _in_order(rules: dict[str, Node], regular: Iterable[str]) -> list[str]:
    """Regular rules, each after those that it refers to."""
    found: dict[str, None] = {}
    names = set(regular)
    while len(found) < len(names):
        found |= {name: None for name in names if name not in found and all(ref in found for ref in _references(rules[name]))}
    return list(found)


def _classes(rules: dict[str, Node]) -> dict[tuple[tuple[int, int], ...], int]:
    """The sets of characters of a grammar as bits, one for all characters that none of them tells apart."""
    sets = {ranges for node in rules.values() for ranges in _sets(node)}
    starts = sorted({edge for ranges in sets for low, high in ranges for edge in (low, high + 1)})
    index = {start: i for i, start in enumerate(starts)}
    return {ranges: sum((1 << index[high + 1]) - (1 << index[low]) for low, high in ranges) for ranges in sets}


def _sets(node: Node) -> list[tuple[tuple[int, int], ...]]:
    match node:
        case Chars():
            return [node.ranges]
        case Repeat():
            return _sets(node.item)
        case Seq(parts) | Alt(parts):
            return [ranges for part in parts for ranges in _sets(part)]
    return []


def _connect(made: _Terminal, before: int, after: int) -> None:
    for position in _bits(before):
        made.follow[position] |= after


def _bits(number: int) -> Iterable[int]:
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


def _runs_on(shorter: _Terminal, longer: _Terminal, after: int) -> bool:
    """Whether a text that is all of `shorter`, behind which one of the characters `after` may come, goes on with that in `longer`.

    Looks at the positions that both may have reached by the same text.
    """
    if not after:
        return False
    overlapping: dict[int, int] = {}

    def overlap(chars: int) -> int:
        if chars not in overlapping:
            overlapping[chars] = sum(1 << position for position, each in enumerate(longer.chars) if each & chars)
        return overlapping[chars]

    reached: dict[int, int] = {}
    pending = {position: found for position in _bits(shorter.first) if (found := longer.first & overlap(shorter.chars[position]))}
    n_pairs = 0
    while pending:
        position, new = pending.popitem()
        new &= ~reached.get(position, 0)
        if not new:
            continue
        reached[position] = reached.get(position, 0) | new
        next_longer = longer.following(new)
        if shorter.last >> position & 1 and next_longer & overlap(after):
            return True
        if (n_pairs := n_pairs + new.bit_count()) > MAX_PAIRS:
            return True
        for next_shorter in _bits(shorter.follow[position] if next_longer else 0):
            if found := next_longer & overlap(shorter.chars[next_shorter]):
                pending[next_shorter] = pending.get(next_shorter, 0) | found
    return False


class _Follow:
    """The characters with which the text may go on behind each terminal."""

    def __init__(self, lowered: dict[str, Lowered], automata: dict[str, _Terminal]) -> None:
        self._automata = automata
        self._begins: dict[str, tuple[int, bool]] = dict.fromkeys(lowered, (0, False))
        """Of each rule, the characters it begins with, and whether it matches the empty text."""
        while any(self._set_begin(name, body) for name, body in lowered.items()):
            pass
        self._rules: dict[str, int] = dict.fromkeys(lowered, 0)
        self.terminals: dict[str, int] = {}
        self._changed = True
        while self._changed:
            self._changed = False
            for name, body in lowered.items():
                self._visit(body, self._rules[name])

    def _set_begin(self, name: str, body: Lowered) -> bool:
        before, self._begins[name] = self._begins[name], self._begin(body)
        return before != self._begins[name]

    def _begin(self, node: Lowered) -> tuple[int, bool]:
        match node:
            case "term", text:
                return self._automata[text].begins_with(), self._automata[text].nullable
            case "rule", name:
                return self._begins[name]
            case "token", _:
                return 0, False
            case "repeat", item, least, _:
                chars, nullable = self._begin(item)
                return chars, nullable or least == 0
            case "alt", options:
                begins = [self._begin(option) for option in options]
                return _union(chars for chars, _ in begins), any(nullable for _, nullable in begins)
        chars = 0
        for item in node[1]:
            more, nullable = self._begin(item)
            chars |= more
            if not nullable:
                return chars, False
        return chars, True

    def _visit(self, node: Lowered, after: int) -> None:
        match node:
            case "term", text:
                self._add(self.terminals, text, after)
            case "rule", name:
                self._add(self._rules, name, after)
            case "repeat", item, _, most:
                self._visit(item, after | (self._begin(item)[0] if most != 1 else 0))
            case "alt", options:
                for option in options:
                    self._visit(option, after)
            case "seq", items:
                for item in reversed(items):
                    self._visit(item, after)
                    chars, nullable = self._begin(item)
                    after = chars | after if nullable else chars

    def _add(self, known: dict[str, int], name: str, chars: int) -> None:
        if chars & ~known.get(name, 0):
            known[name] = known.get(name, 0) | chars
            self._changed = True


def _union(sets: Iterable[int]) -> int:
    found = 0
    for each in sets:
        found |= each
    return found


def _write(node: Lowered, names: dict[str, str], symbols: dict[str, str]) -> str:
    match node:
        case "term", text:
            return symbols[text]
        case "rule", name:
            return names[name]
        case "token", text:
            return text
        case "repeat", item, least, most:
            return f"({_write(item, names, symbols)}){_times(least, most)}"
        case "alt", options:
            return "(" + " | ".join(_write(option, names, symbols) for option in options) + ")"
    return " ".join(_write(item, names, symbols) for item in node[1]) or '""'


def _times(least: int, most: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    return short or (f"{{{least},{'' if most is None else most}}}" if least != most else f"{{{least}}}")


def _class_regex(node: Chars) -> str:
    if node.ranges == ANY.ranges:
        return "(?s:.)"
    if len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]:
        return _char(node.ranges[0][0])
    return "[" + "".join(_char(low) if low == high else f"{_char(low)}-{_char(high)}" for low, high in node.ranges) + "]"


def _char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\u{{{code:x}}}"
