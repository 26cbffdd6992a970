"""Translates the rules of GBNF into a grammar in llguidance's dialect of Lark.

Rules of `gbnf` enter, a text leaves (`to_lark`). In GBNF rules derive characters. llguidance first cuts a text into lexemes, each the
longest that some terminal allowed there matches, and so misses texts in which a shorter one would do: `[a-z]+ "x"`, as two terminals,
matches nothing. So whatever needs no recursion becomes one terminal, as long as that is, and a terminal that could run on where another
one, or itself, may have ended (`gbnf_terminals`) is divided into its parts. Terminals of one character can always be told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ngramspec.errors import GrammarError
from ngramspec.grammar.gbnf import ANY, EMPTY, Alt, Chars, Node, Ref, Repeat, Seq, Token, find_rules
from ngramspec.grammar.gbnf_terminals import FollowSets, Lowered, Terminal, can_run_on

# Characters of a grammar after its rules without recursion are written out, about as many as fit into the largest grammar's text.
MAX_POSITIONS = 30_000
MAX_ROUNDS = 200  # times that terminals are divided; each removes one level of parentheses, and most grammars need none to three


def to_lark(rules: dict[str, Node], special: Mapping[str, int]) -> str:
    """Return the grammar whose rule `start` matches what `root` does. `special`: ids of the tokens that may be named as `<…>`.

    Raises GrammarError if it is too large, matches nothing or names another token.
    """
    if "root" not in (rules := _without_empty_classes(rules)):
        raise GrammarError("GBNF grammar: rule 'root' matches nothing: one of its classes has no character")
    rules = {name: _turn_into_loop(name, node) for name, node in _keep_reachable(rules).items()}
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


def _keep_reachable(rules: dict[str, Node]) -> dict[str, Node]:
    found: dict[str, Node] = {}
    pending = ["root"]
    while pending:
        if (name := pending.pop()) not in found:
            found[name] = rules[name]
            pending += _find_references(rules[name])
    return found


def _find_references(node: Node) -> list[str]:
    return [each.name for each in _walk(node) if isinstance(each, Ref)]


def _walk(node: Node) -> Iterator[Node]:
    """Yield a node and all that it is made of, from left to right."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        match node:
            case Repeat():
                pending.append(node.item)
            case Seq(parts) | Alt(parts):
                pending += reversed(parts)


def _turn_into_loop(name: str, node: Node) -> Node:
    """Return a rule that refers to itself only at the end of its options, `ws ::= " " ws | ""`, as a repetition."""
    again, ends = list[Node](), list[Node]()
    for option in _list_options(node):
        items = option.items if isinstance(option, Seq) else (option,)
        last = items[-1] if items else EMPTY
        if isinstance(last, Ref) and last.name == name:
            again.append(Seq(items[:-1]))
        else:
            ends.append(option)
    if not again or not ends or any(name in _find_references(part) for part in (*again, *ends)):
        return node
    return Seq((Repeat(Alt(tuple(again)), 0, None), Alt(tuple(ends))))


def _list_options(node: Node) -> list[Node]:
    match node:
        case Alt():
            return [option for each in node.options for option in _list_options(each)]
        case Repeat(item, 0, 1):
            return [*_list_options(item), EMPTY]
        case Seq((item,)):
            return _list_options(item)
    return [node]


class _Translation:
    def __init__(self, rules: dict[str, Node], special: Mapping[str, int]) -> None:
        self._rules, self._special = rules, special
        self._sizes = dict.fromkeys(find_rules(rules, _is_regular), 0)
        for name in _sort_rules(rules, self._sizes):
            self._sizes[name] = self._count_positions(rules[name])
            if self._sizes[name] > MAX_POSITIONS:
                del self._sizes[name]
        self._classes = _number_classes(rules)
        self._divided: set[str] = set()
        self._texts: dict[int, str] = {}
        self._automata: dict[str, Terminal] = {}
        self._joined: dict[tuple[int, ...], Node] = {}
        """Neighbouring parts joined to one node, by the parts' ids."""

    def write(self) -> str:
        for _ in range(MAX_ROUNDS):
            lowered, terminals = self._lower_all()
            if not (wrong := self._find_ambiguous(lowered, terminals)):
                return self._write_text(lowered, terminals)
            self._divided |= wrong
        raise GrammarError(
            f"GBNF grammar: expected rules that {MAX_ROUNDS} divisions make unambiguous to a lexer; a simpler grammar may do"
        )

    # -------------------------------------------------------------- terminals

    def _count_positions(self, node: Node) -> int:
        """Return the number of a node's characters; more than MAX_POSITIONS if it cannot be a terminal."""
        match node:
            case Chars():
                return 1
            case Ref():
                return self._sizes.get(node.name, MAX_POSITIONS + 1)
            case Repeat():
                return self._count_positions(node.item)
            case Seq(parts) | Alt(parts):
                return sum(map(self._count_positions, parts))
        return MAX_POSITIONS + 1

    def _write_regex(self, node: Node) -> str:
        """Return the regular expression of a node that can be a terminal."""
        if (known := self._texts.get(id(node))) is not None:
            return known
        match node:
            case Chars():
                made = _write_class(node)
            case Ref():
                made = self._write_regex(self._rules[node.name])
            case Repeat(item, least, most):
                made = (
                    f"(?:{self._write_regex(item)}){_write_times(least, most)}"
                    if not isinstance(item, Chars)
                    else _write_class(item) + _write_times(least, most)
                )
            case Seq(items):
                made = "".join(
                    f"(?:{text})" if "|" in (text := self._write_regex(item)) and not isinstance(item, Chars) else text for item in items
                )
            case Alt(options):
                made = "|".join(map(self._write_regex, options))
        self._texts[id(node)] = made
        return made

    def _make_automaton(self, node: Node) -> Terminal:
        made = Terminal()
        made.first, made.last, made.nullable = self._add_positions(node, made)
        return made

    def _add_positions(self, node: Node, made: Terminal) -> tuple[int, int, bool]:
        """Add the node's positions (Glushkov's construction); return its first and last ones, and whether it matches the empty text."""
        match node:
            case Chars():
                made.chars.append(self._classes[node.ranges])
                made.follow.append(0)
                bit = 1 << (len(made.chars) - 1)
                return bit, bit, False
            case Ref():
                return self._add_positions(self._rules[node.name], made)
            case Alt(options):
                first = last = 0
                nullable = False
                for option in options:
                    begin, end, empty = self._add_positions(option, made)
                    first, last, nullable = first | begin, last | end, nullable or empty
                return first, last, nullable
            case Seq(items):
                first, last, nullable = 0, 0, True
                for item in items:
                    begin, end, empty = self._add_positions(item, made)
                    made.connect(last, begin)
                    first = first | begin if nullable else first
                    last = last | end if empty else end
                    nullable = nullable and empty
                return first, last, nullable
            case Repeat(item, least, most):
                if most == 0:
                    return 0, 0, True
                first, last, nullable = self._add_positions(item, made)
                if most != 1:  # of several times it is only looked at that they follow each other
                    made.connect(last, first)
                return first, last, nullable or least == 0
        raise AssertionError(node)

    # -------------------------------------------------------------- rules over terminals

    def _lower_all(self) -> tuple[dict[str, Lowered], dict[str, Node]]:
        """Return the rules that are reached, over terminals, and the terminals by their regular expression."""
        terminals: dict[str, Node] = {}
        lowered: dict[str, Lowered] = {}
        pending = ["root"]
        while pending:
            name = pending.pop()
            if name not in lowered:
                lowered[name] = self._lower_node(self._rules[name], terminals, pending)
        return lowered, terminals

    def _lower_node(self, node: Node, terminals: dict[str, Node], names: list[str]) -> Lowered:
        if self._count_positions(node) <= MAX_POSITIONS:
            text = self._write_regex(node)
            if text not in self._divided or isinstance(node, Chars):
                terminals.setdefault(text, node)
                return "term", text
        match node:
            case Ref():
                names.append(node.name)
                return "rule", node.name
            case Token():
                return "token", self._write_token(node)
            case Repeat(item, least, most):
                return "repeat", self._lower_node(item, terminals, names), least, most
            case Seq(items):
                return "seq", [self._lower_node(item, terminals, names) for item in self._group_parts(items, Seq)]
            case Alt(options):
                return "alt", [self._lower_node(option, terminals, names) for option in self._group_parts(options, Alt)]
        raise AssertionError(node)

    def _write_token(self, node: Token) -> str:
        number = node.token if isinstance(node.token, int) else self._special.get(node.token)
        if number is None:
            raise GrammarError(
                f"GBNF: expected a control token of the vocabulary or a token's id, such as <[1000]>, got {node.token!r:.60}"
            )
        return f"<[^{number}]>" if node.negated else f"<[{number}]>"

    def _group_parts(self, parts: tuple[Node, ...], kind: type[Seq] | type[Alt]) -> list[Node]:
        """Join the parts that can be one terminal: all such options of an alternative, neighbours of a sequence."""
        runs: list[list[Node]] = []
        for part in parts:
            regular = self._count_positions(part) <= MAX_POSITIONS
            beside = runs[-1:] if kind is Seq else runs
            run = next((run for run in beside if regular and self._count_positions(run[0]) <= MAX_POSITIONS), None)
            if run is None:
                runs.append([part])
            else:
                run.append(part)
        if len(runs) == 1 and len(runs[0]) == len(parts):  # all of it was tried, and divided
            return list(parts)
        found: list[Node] = []
        for run in runs:
            whole = self._joined.setdefault(tuple(map(id, run)), kind(tuple(run))) if len(run) > 1 else run[0]
            found += run if len(run) > 1 and self._write_regex(whole) in self._divided else [whole]
        return found

    # -------------------------------------------------------------- what a lexer cannot tell apart

    def _find_ambiguous(self, lowered: dict[str, Lowered], terminals: dict[str, Node]) -> set[str]:
        """Return the terminals that can run on where a terminal ends and another one begins."""
        for text, node in terminals.items():
            if text not in self._automata:
                self._automata[text] = self._make_automaton(node)
        automata = {text: self._automata[text] for text in terminals}
        after = FollowSets(lowered, automata).terminals
        wrong: set[str] = set()
        for longer, automaton in automata.items():
            if not any(automaton.follow):
                continue
            if any(can_run_on(automata[shorter], automaton, after.get(shorter, 0)) for shorter in automata):
                wrong.add(longer)
        return wrong

    # -------------------------------------------------------------- text

    def _write_text(self, lowered: dict[str, Lowered], terminals: dict[str, Node]) -> str:
        names = {name: "start" if name == "root" else f"rule_{i}" for i, name in enumerate(lowered)}
        symbols = {text: f"T{i}" for i, text in enumerate(terminals)}
        lines = [f"{names[name]}: {_write_rule(body, names, symbols)}" for name, body in lowered.items()]
        lines += [f"{symbol}: /{text}/" if text else f'{symbol}: ""' for text, symbol in symbols.items()]
        return "\n".join(lines)


def _is_regular(node: Node, regular: set[str]) -> bool:
    """Return whether a node has no tokens and, given the rules for which this is so, no recursion."""
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


def _sort_rules(rules: dict[str, Node], regular: Iterable[str]) -> list[str]:
    """Return the names of regular rules, each after those that it refers to."""
    found: dict[str, None] = {}
    names = set(regular)
    while len(found) < len(names):
        found |= {name: None for name in names if name not in found and all(ref in found for ref in _find_references(rules[name]))}
    return list(found)


def _number_classes(rules: dict[str, Node]) -> dict[tuple[tuple[int, int], ...], int]:
    """Return the sets of characters of a grammar as bits, with one bit for all characters that no set tells apart."""
    sets = {each.ranges for node in rules.values() for each in _walk(node) if isinstance(each, Chars)}
    starts = sorted({edge for ranges in sets for low, high in ranges for edge in (low, high + 1)})
    index = {start: i for i, start in enumerate(starts)}
    return {ranges: sum((1 << index[high + 1]) - (1 << index[low]) for low, high in ranges) for ranges in sets}


def _write_rule(node: Lowered, names: dict[str, str], symbols: dict[str, str]) -> str:
    match node:
        case "term", text:
            return symbols[text]
        case "rule", name:
            return names[name]
        case "token", text:
            return text
        case "repeat", item, least, most:
            return f"({_write_rule(item, names, symbols)}){_write_times(least, most)}"
        case "alt", options:
            return "(" + " | ".join(_write_rule(option, names, symbols) for option in options) + ")"
    return " ".join(_write_rule(item, names, symbols) for item in node[1]) or '""'


def _write_times(least: int, most: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    return short or (f"{{{least},{'' if most is None else most}}}" if least != most else f"{{{least}}}")


def _write_class(node: Chars) -> str:
    if node.ranges == ANY.ranges:
        return "(?s:.)"
    if len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]:
        return _write_char(node.ranges[0][0])
    return "[" + "".join(_write_char(low) if low == high else f"{_write_char(low)}-{_write_char(high)}" for low, high in node.ranges) + "]"


def _write_char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\u{{{code:x}}}"
