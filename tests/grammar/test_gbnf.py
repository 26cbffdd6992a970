"""GBNF means what it means to llama.cpp: compared with a recogniser that takes rules as rules about characters."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.errors import GrammarError
from ngramspec.grammar import compiling
from ngramspec.grammar.constraint import Grammar
from ngramspec.grammar.gbnf import Alt, Chars, Node, Ref, Repeat, Seq, Token, parse

JSON = r"""
# a value, with blanks behind it
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value   # the first member
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [0-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
CODE = r"""
root ::= (declaration)*
declaration ::= type name "(" parameter? ")" "{" statement* "}"
type  ::= "int" ws | "float" ws | "char" ws
name ::= [a-zA-Z_] [a-zA-Z_0-9]*
parameter ::= type name
statement ::=
    ( type name ws "=" ws expression ";" ) |
    ( name ws "=" ws expression ";" ) |
    ( name ws "(" arguments? ")" ";" ) |
    ( "return" ws expression ";" ) |
    ( "while" "(" condition ")" "{" statement* "}" ) |
    ( "//" [^\n]* "\n" )
condition ::= expression ("<=" | "<" | "==" | "!=" | ">=" | ">") expression
expression ::= term (("+" | "-") term)*
term ::= factor(("*" | "/") factor)*
factor ::= name | number | "-" factor | "(" expression ")" | name "(" arguments? ")"
arguments ::= expression ("," ws expression)*
number ::= [0-9]+
ws ::= ([ \t\n]+)
"""
MEANT: dict[str, tuple[str, list[str], list[str]]] = {
    "a class of everything has newlines": ("root ::= .+", ["a\nb", "é\n"], [""]),
    "no operators in literals": ('root ::= "a&&b~c/d"', ["a&&b~c/d"], ["a"]),
    "nor in comments": ('root ::= "a" # &&&&&&&&&&\n# "\n', ["a"], ["&"]),
    "escapes in literals": (r'root ::= "caf\u00e9\x41\U0001F600\n\t\r\\\"\[\]"', ['caféA😀\n\t\r\\"[]'], ["cafe"]),
    "escapes in classes": (r"root ::= [\u00e0-\u00ff] [\]\[\\^\-x-z/]+", ["é]", "ÿ[\\^-y/"], ["e]", "éa"]),
    "a rule of any name": ('root ::= start | ROOT-2\nstart ::= "s"\nROOT-2 ::= "t" start', ["s", "ts"], ["t"]),
    "a letter that also ends what is before": ('root ::= [a-z]+ "x" | "(" root ")"', ["ax", "xx", "(axx)"], ["x", "ay", "(x)"]),
    "one word begins another": ('root ::= ("a" r | "ab" "c" r | "")\nr ::= "bd" root | "-" root', ["abd", "abc-", "a-abd"], ["abc", "ab"]),
    "recursion to the right": ('root ::= "[" ws "]"\nws ::= ([ \\t\\n] ws)?', ["[]", "[ \n]"], ["[x]"]),
    "recursion in the middle": ('root ::= "(" root ")" | "."', ["((.))"], ["((.)", "()"]),
    "counts": (
        'root ::= "ab"{2} "c"{1,} ("d" | "e"){0,2} [f]{3,4} "g"{0}',
        ["ababcfff", "ababccdefff", "ababcffff"],
        ["abcfff", "ababcff"],
    ),
    "a count of counts": ('root ::= (("a"{2}){2} ",")+', ["aaaa,", "aaaa,aaaa,"], ["aaaa"]),
    "options over several lines": ('root ::= "a" |\n  "b" |\n\n  # third\n  ( "c"\n    "d" )\nother ::= "e"', ["a", "b", "cd"], ["e"]),
    "nothing as an option": ('root ::= ( | "a") ("b" | ) "" []', ["", "a", "ab", "b"], ["ba"]),
    "negation": (r"root ::= [^a-y\n]+ [^^]", ["z\u4e2dx", "zza"], ["z^", "a", "z"]),
    "the last definition counts": ('root ::= "a"\nroot ::= "b"', ["b"], ["a"]),
    "an empty range": ('root ::= [z-a] | "c"', ["c"], ["z"]),
    "letters of Japan": (
        "root ::= jp+ ([ \\t\\n] jp+)*\njp ::= [ぁ-ゟ] | [ァ-ヿ] | [、-〾] | [一-鿿]",
        ["こんにちは 世界"],
        ["abc", "こ "],
    ),
    "moves of chess": (
        'root ::= (\n  "1. " move " " move "\\n"\n  ([1-9] [0-9]? ". " move " " move "\\n")+\n)\nmove ::= (pawn | piece | castle) [+#]?\n'
        'piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]\npawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?\ncastle ::= "O-O" "-O"?',
        ["1. e4 e5\n2. Nf3 Nc6\n3. O-O exd5+\n"],
        ["1. e4 e5\n", "1. e9 e5\n2. Nf3 Nc6\n"],
    ),
    "arithmetic": (
        'root ::= (expr "=" term "\\n")+\nexpr ::= term ([-+*/] term)*\nterm ::= ident | num | "(" ws expr ")" ws\n'
        "ident ::= [a-z] [a-z0-9_]* ws\nnum ::= [0-9]+ ws\nws ::= [ \\t\\n]*",
        ["a +(3 -b1)*2=x\n", "1=1\n\n"],
        ["1=\n", "(1=1\n"],
    ),
    "a list": ('root ::= item+\nitem ::= "- " [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ "\\n"', ["- a\n- b c\n"], ["- a", "a\n"]),
    "JSON": (JSON, ['{"a": [1, -2.5e3, "x\\n\\u00e9"], "b":{}, "c": null}'], ['{"a" 1}', "[1]", '{"a": tru}']),
    "code": (CODE, ["int f(int a){b = a;return (a+1)*g(b, 2);//x\n}"], ["int f(int a){returna;}", "int f(a){}"]),
}


def accepts(grammar: str, *texts: str) -> list[bool]:
    begins = compiling.make_matcher(compiling.get_byte_tokenizer(), compiling.translate_grammar(Grammar.gbnf(grammar))[0])
    found = []
    for text in texts:
        matcher, data = begins.deep_copy(), list(text.encode())
        found.append(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())
    return found


@pytest.mark.parametrize("name", MEANT)
def test_a_grammar_means_what_it_means_to_llama_cpp(name: str) -> None:
    grammar, good, bad = MEANT[name]
    assert accepts(grammar, *good) == [True] * len(good)
    assert accepts(grammar, *bad) == [False] * len(bad)


def test_tokens_by_id_and_by_name() -> None:
    grammar = Grammar.gbnf('root ::= <think> !</think>* </think> <[65]> "b"')
    source, _ = compiling.translate_grammar(grammar, {"<think>": 7, "</think>": 8})
    matcher = compiling.make_matcher(compiling.get_byte_tokenizer(), source)
    assert matcher.try_consume_tokens([7, 100, 200, 8, 65, ord("b")]) == 6
    assert matcher.is_accepting()
    assert compiling.make_matcher(compiling.get_byte_tokenizer(), source).try_consume_tokens([7, 100, 8, 66]) == 3
    with pytest.raises(GrammarError, match=r"a token's id, such as <\[1000\]>, got '<other>'"):
        compiling.translate_grammar(Grammar.gbnf("root ::= <other>"), {"<think>": 7})


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        ('root ::= "a', "line 1, column 10: expected '\"'"),
        ('root ::= "b"\nx ::= [a', "line 2, column 7: expected ']'"),
        ('root ::= ("a"', "line 1, column 10: expected ')'"),
        ('root = "a"', "line 1, column 6: expected '::=' after 'root', got '= \"a\"'"),
        ('root ::= "a" thing', "line 1, column 14: rule 'thing' is not defined"),
        ('root ::= "a"\nnever ::= gone', "line 2, column 11: rule 'gone' is not defined"),
        ('x ::= "a"', "no rule 'root'; the rules are 'x'"),
        (r'root ::= "\q"', r"column 11: expected one of the escapes"),
        (r'root ::= "\u12"', r"expected 4 hexadecimal digits after \u"),
        ('root ::= * "a"', "column 10: expected an item before '*'"),
        ('root ::= ""+', "expected an item before '+'"),
        ('root ::= "a"{', "expected a number of repetitions, got the end"),
        ('root ::= "a"{3,2}', "repetitions of 3 or more, got 2"),
        ('root ::= "a"{2001}', "at most 2000 required repetitions, got 2001"),
        ('root ::= "a"{99999999999999999999}', "at most nine digits"),
        ('root ::= "a" & "b"', "column 14: expected an item"),
        ('root ::= "a"\n | "b"', "line 2, column 2: expected the name of a rule"),
        ("root ::= )", "expected an item, '|' or the end of the line"),
        ('root ::= root "a" | "b"', "'root' is left-recursive (root -> root)"),
        ('root ::= x\nx ::= "a"? y\ny ::= x | "b"', "line 2, column 1: rule 'x' is left-recursive (x -> y -> x)"),
        ("root ::= [z-a]", "matches nothing"),
        ("root ::= !x", r"expected a token"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "at most 120 parentheses"),
    ],
)
def test_an_error_says_where_and_what_was_expected(grammar: str, told: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiling.translate_grammar(Grammar.gbnf(grammar))
    assert told in str(caught.value)


# ------------------------------------------------------------------ any grammar


def derives(rules: dict[str, Node], text: str) -> bool:
    """Whether the rules derive the text, tried from each place of it to each other one."""

    @cache
    def ends(node: Node, start: int) -> frozenset[int]:
        match node:
            case Chars(ranges):
                fits = start < len(text) and any(low <= ord(text[start]) <= high for low, high in ranges)
                return frozenset({start + 1} if fits else ())
            case Seq(items):
                reached = frozenset({start})
                for item in items:
                    reached = frozenset(end for at in reached for end in ends(item, at))
                return reached
            case Alt(options):
                return frozenset(end for option in options for end in ends(option, start))
            case Ref(name):
                return ends(rules[name], start)
            case Repeat(item, least, most):
                reached, found = frozenset({start}), frozenset({start} if least == 0 else ())
                for times in range(1, (len(text) + 1 + least if most is None else most) + 1):
                    reached = frozenset(end for at in reached for end in ends(item, at))
                    found |= reached if times >= least else frozenset()
                return found
        raise AssertionError(node)

    return len(text) in ends(rules["root"], 0)


ATOMS = st.sampled_from(
    ['"a"', '"b"', '"ab"', '"abc"', "[ab]", "[^a]", "[b-c]", ".", "r3", '"c" r2', '"a" root', '"b" r1', '""', "( | r3)"]
)
TIMES = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{0,2}", "{1,}"])


def _joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    sequence = st.lists(inner, min_size=1, max_size=3).map(" ".join)
    return st.tuples(st.lists(sequence, min_size=1, max_size=3), TIMES).map(lambda each: f"({' | '.join(each[0])}){each[1]}")


BODIES = st.lists(st.recursive(ATOMS, _joined, max_leaves=5), min_size=1, max_size=3).map(" | ".join)


@settings(deadline=None, max_examples=150)
@given(st.tuples(BODIES, BODIES, BODIES, BODIES), st.lists(st.text("abc", max_size=6), min_size=8, max_size=8))
def test_a_translation_matches_what_the_rules_derive(bodies: tuple[str, ...], texts: list[str]) -> None:
    grammar = "\n".join(f"{name} ::= {body}" for name, body in zip(("root", "r1", "r2", "r3"), bodies, strict=True))
    try:
        rules = parse(grammar)
        found = accepts(grammar, *texts)
    except GrammarError as error:  # left recursion, an item that is not there, or nothing to derive
        if "left-recursive" in str(error) or "expected an item before" in str(error):
            return
        raise
    assert found == [derives(rules, text) for text in texts], grammar


def test_tokens_are_parsed_as_tokens() -> None:
    rules = parse("root ::= <[12]> | !<end>")
    assert isinstance(rules["root"], Alt)
    first, second = rules["root"].options
    assert isinstance(first, Token)
    assert isinstance(second, Token)
    assert (first.token, first.negated, second.token, second.negated) == (12, False, "<end>", True)
