"""Finding secrets in text: keys, tokens and passwords, by the rules of gitleaks (gitleaks.toml) and a few of our own.

The bytes of a text and its file's name enter, the name of the first rule that finds a secret leaves. Opens nothing but its own rules.
All keywords are looked for in one pass, and only the rules whose keyword occurs are matched. RE2 does both in time that is linear in the
text's length, whatever is in it (Python's `re` would backtrack on hostile files).
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import re2

_BEGIN = r"-----BEGIN[ A-Z0-9_-]{0,100}PRIVATE KEY(?: BLOCK)?-----"
_OWN_RULES: tuple[dict[str, Any], ...] = (
    # A private key that is cut off, or whose header begins a line: gitleaks wants all of it, up to the line that ends it.
    {
        "id": "private-key",
        "regex": rf"(?m)^[ \t]*{_BEGIN}"
        rf"""|{_BEGIN}(?:[\s>|\\-]|\\[nr]|["'`]\s*[+,.]?\s*["'`])*(?:[A-Za-z0-9+/]{{12}}|(?:Proc-Type|DEK-Info|Version|Comment):)""",
        "keywords": ["private key"],
    },
    {"id": "putty-private-key", "regex": r"(?m)^[ \t]*PuTTY-User-Key-File-\d: \S", "keywords": ["putty-user-key-file"]},
    # Keys of OpenAI and of services that took its form over, without the marker in the middle that gitleaks wants.
    {
        "id": "sk-api-key",
        "regex": r"\b(sk-(?:(?:proj|svcacct|admin|or|ant|lf|live|test)-)?(?:v\d-|api\d\d-)?[A-Za-z0-9]{20}[A-Za-z0-9_-]{0,200})",
        "entropy": 3.8,
        "keywords": ["sk-"],
        "with_digit": True,
    },
    # gitleaks takes only the letters and digits of base32 after it; all that AWS documents is that they are upper case.
    {
        "id": "aws-access-key-id",
        "regex": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
        "entropy": 2.8,
        "keywords": ["akia", "asia"],
        "allowlists": [{"stopwords": ["example"]}],
    },
    # Tokens of other services, known by what they begin with.
    {
        "id": "prefixed-token",
        "regex": r"\b((?:gsk|figd|sbp|pcsk|dckr_pat|r8|rpa|nvapi|pplx|tvly|xai|whsec|secret|sq0csp|sq0atp)[_-][A-Za-z0-9_-]{30,200}"
        r"|ya29\.[A-Za-z0-9_-]{40,400}|key-[0-9a-f]{32}|\d{8,10}:AA[A-Za-z0-9_-]{33}|[MNO][A-Za-z0-9_-]{23,25}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,38})\b",
        "entropy": 3.5,
        "keywords": [
            *("gsk_", "figd_", "sbp_", "pcsk_", "dckr_pat_", "r8_", "rpa_", "nvapi-", "pplx-", "tvly-", "xai-", "whsec_", "secret_"),
            *("sq0csp-", "sq0atp-", "ya29.", "key-", ":aa", "discord", "client.run"),
        ],
        "with_digit": True,
        "allowlists": [{"regexes": [r"^(?:[a-z]+\d{0,2}[_-])+[a-z]*\d{0,2}$"]}],  # words
    },
    {
        "id": "authorization-header",
        "regex": r"(?i)authorization['\"]?[ \t]{0,3}[:=,][ \t]{0,3}['\"]?(?:basic|bearer|token)[ \t]{1,3}([a-z0-9+/_.~-]{20,500}={0,2})",
        "entropy": 3.5,
        "keywords": ["authorization"],
        "with_digit": True,
        "allowlists": [{"stopwords": ["token", "secret", "example", "xxxx", "1234"]}],
    },
    {
        "id": "secret-key-setting",
        "regex": r"SECRET_KEY['\"]?[ \t]{0,3}[:=][ \t]{0,3}['\"]([!-~]{32,128}?)['\"]",
        "entropy": 4.2,
        "keywords": ["secret_key"],
        "with_digit": True,
    },
    # postgres://user:password@host and the like; what is no password but a placeholder has no digit or one of these words.
    {
        "id": "url-with-password",
        "regex": r"\b[a-zA-Z][a-zA-Z0-9+.-]{1,20}://[^\s:/@'\"<>{}$()]{0,64}:([^\s:/@'\"<>{}$()*]{6,128})@[\w.-]+",
        "entropy": 2.3,
        "keywords": ["://"],
        "with_digit": True,
        "allowlists": [{"stopwords": ["passw", "secret", "example", "xxxx", "1234"]}],
    },
    # 40 or 88 letters of base64, as AWS and Azure make their keys; gitleaks' rule for any key wants a letter or a digit first.
    {
        "id": "base64-key",
        "regex": r"(?i)(?:secret_?(?:access_?)?key|account_?key|shared_?access_?key)['\"]?[ \t]{0,3}(?::=|=>|[:=])[ \t]{0,3}['\"]?"
        r"((?-i:[A-Za-z0-9+/]{40}|[A-Za-z0-9+/]{86}==|[A-Za-z0-9+/]{43}=))(?:[^A-Za-z0-9+/=]|$)",
        "entropy": 4.2,
        "keywords": ["key"],
        "with_digit": True,
    },
    {"id": "netrc-password", "regex": r"\bmachine\s+\S+\s+login\s+\S+\s+password\s+([^\s<>{}$]{6,128})", "keywords": ["machine"]},
    # A password with letters, digits and others, which gitleaks' rule for any key passes over: quoted, or a line's end.
    {
        "id": "password",
        "regex": r"(?im)(?:passw(?:or)?d|passphrase|pwd)(?:['\"]?[ \t]{0,3}(?::=|=>|[:=,])[ \t]{0,3}['\"]([!-~]{8,64}?)['\"]"
        r"|[ \t]{0,3}[:=][ \t]{0,3}"
        r"([!-~]*(?:[a-z][!-~]*\d[!-~]*[!#%&*+?@^~]|[!#%&*+?@^~][!-~]*[a-z][!-~]*\d|\d[!-~]*[!#%&*+?@^~])[!-~]*)[ \t]*$)",
        "entropy": 2.7,
        "keywords": ["passw", "passphrase", "pwd"],
        "with_digit": True,
        "allowlists": [
            {"regexes": [r"[{}()<>\[\]$\\/ ,;'\"]|%[sd(]|^.{0,7}$|.{65}"], "stopwords": ["passw", "secret", "example", "xxxx", "1234"]}
        ],
    },
)
_CODE_NAMES = {  # what gitleaks' rule for any key takes for one: `AutoTokenizer, LongT5ForCausalLM`, `key.dtype == torch.bfloat16`
    "generic-api-key": [{"regexes": [r"^(?:[A-Z][a-z]{2,}\d{0,2}|[A-Z]{1,2}\d{0,2}){2,8}$", r"^[a-z_]{2,}(?:\.[a-z_]{2,}\d{0,3})+$"]}]
}
# Stop words of fewer letters excuse no secret of so many bits per byte: two of five random texts of 40 letters have one in them
RANDOM, LONG_WORD = 4.3, 5
LONGEST_LINE = 1000  # bytes before and after a match that allow lists about lines look at
_DIGITS = frozenset(b"0123456789")


def find_secret(data: bytes, name: str) -> str | None:
    """Return the name of a rule that finds a secret in a text, or None. `name`: the path of its file, which some rules are about."""
    known = _load_rules()
    return next((rule.id for rule in known.find_candidates(data) if rule.finds_secret(data, name, known.allowed)), None)


def get_rules() -> Sequence[SecretRule]:
    """Return all rules, in the order in which they are tried."""
    return _load_rules().rules


def _compile_pattern(text: str) -> Any:
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1  # bytes as they are; the rules are ASCII
    options.log_errors = False
    return re2.compile(text.encode(), options)


@dataclass
class _AllowList:
    """What is no secret although a rule matches it: an allow list, of one rule or of all."""

    paths: Sequence[str] = ()
    regexes: Sequence[str] = ()
    target: str = "secret"
    """What `regexes` are about: the secret, the match it lies in, or the lines of that."""
    stopwords: Sequence[str] = ()
    all_must: bool = False
    """Only what every one of them allows is allowed."""

    @cached_property
    def _paths(self) -> list[Any]:
        return [_compile_pattern(text) for text in self.paths]

    @cached_property
    def _regexes(self) -> list[Any]:
        return [_compile_pattern(text) for text in self.regexes]

    @cached_property
    def _stopwords(self) -> list[bytes]:
        return [word.lower().encode() for word in self.stopwords]

    def is_allowed(self, name: bytes, texts: dict[str, bytes]) -> bool:
        verdicts = []
        if self.paths:
            verdicts.append(any(pattern.search(name) for pattern in self._paths))
        if self.regexes:
            verdicts.append(any(pattern.search(texts[self.target]) for pattern in self._regexes))
        if self.stopwords:
            secret = texts["secret"].lower()
            shortest = 1 if compute_entropy(texts["secret"]) < RANDOM else LONG_WORD
            verdicts.append(any(word in secret for word in self._stopwords if len(word) >= shortest))
        return all(verdicts) if self.all_must else any(verdicts)


@dataclass
class SecretRule:
    """A rule: what matches is a secret if its file's name fits, it is random enough, and no allow list has it."""

    id: str
    regex: str
    keywords: tuple[str, ...]
    path: str | None
    group: int
    entropy: float
    with_digit: bool
    allowed: list[_AllowList]

    @cached_property
    def _regex(self) -> Any:
        return _compile_pattern(self.regex)

    @cached_property
    def _path(self) -> Any:
        return None if self.path is None else _compile_pattern(self.path)

    def finds_secret(self, data: bytes, name: str, allowed: Sequence[_AllowList]) -> bool:
        path = name.encode()
        if self._path is not None and not self._path.search(path):
            return False
        for match in self._regex.finditer(data):
            groups = match.groups()
            secret = match.group(self.group) if self.group else next((group for group in groups if group), match.group())
            if not secret or (self.entropy and compute_entropy(secret) <= self.entropy):
                continue
            if self.with_digit and _DIGITS.isdisjoint(secret):
                continue
            texts = {"secret": secret, "match": match.group(), "line": _lines_around(data, match.start(), match.end())}
            if not any(each.is_allowed(path, texts) for each in (*allowed, *self.allowed)):
                return True
        return False


def _lines_around(data: bytes, start: int, end: int) -> bytes:
    """Return the lines that a match lies in, LONGEST_LINE bytes before and after it at most."""
    before, after = max(start - LONGEST_LINE, 0), end + LONGEST_LINE
    first, last = data.rfind(b"\n", before, start), data.find(b"\n", end, after)
    return data[first + 1 if first >= 0 else before : last if last >= 0 else after]


@dataclass
class _RuleSet:
    rules: list[SecretRule]
    allowed: list[_AllowList]
    """What no rule finds."""

    def __post_init__(self) -> None:
        owners: dict[str, list[int]] = {}
        for number, rule in enumerate(self.rules):
            for keyword in rule.keywords:
                owners.setdefault(keyword.lower(), []).append(number)
        options = re2.Options()
        options.case_sensitive = False
        options.encoding = re2.Options.Encoding.LATIN1
        self._owners = list(owners.values())
        self._keywords = re2.Set.SearchSet(options)
        for keyword in owners:
            self._keywords.Add(re2.escape(keyword))
        self._keywords.Compile()

    def find_candidates(self, data: bytes) -> Iterable[SecretRule]:
        found = self._keywords.Match(data) or ()
        return [self.rules[number] for number in sorted({number for keyword in found for number in self._owners[keyword]})]


@cache
def _load_rules() -> _RuleSet:
    config = tomllib.loads(Path(__file__).with_name("gitleaks.toml").read_text("utf-8"))
    rules = [*config["rules"], *_OWN_RULES]
    paths_are_ours = {name: value for name, value in config["allowlist"].items() if name != "paths"}  # `filters` decides by names
    return _RuleSet([_make_rule(each) for each in rules if "regex" in each and each.get("keywords")], [_make_allow_list(paths_are_ours)])


def _make_rule(given: dict[str, Any]) -> SecretRule:
    return SecretRule(
        given["id"],
        given["regex"],
        tuple(given["keywords"]),
        given.get("path"),
        given.get("secretGroup", 0),
        given.get("entropy", 0.0),
        given.get("with_digit", False),
        [_make_allow_list(each) for each in (*given.get("allowlists", ()), *_CODE_NAMES.get(given["id"], ()))],
    )


def _make_allow_list(given: dict[str, Any]) -> _AllowList:
    return _AllowList(
        given.get("paths", ()),
        given.get("regexes", ()),
        given.get("regexTarget", "secret"),
        given.get("stopwords", ()),
        given.get("condition", "OR") in ("AND", "&&"),
    )


def compute_entropy(data: bytes) -> float:
    """Return bits per byte, by how often each byte occurs in the text itself."""
    return -sum(n / len(data) * math.log2(n / len(data)) for n in Counter(data).values())
