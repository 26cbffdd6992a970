"""Secrets in text stay out of a store. They are made up when a test runs: nothing in this file is one, or looks like one to a scanner."""

from __future__ import annotations

import json
import random
import string
import time
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import tiny_store

from ngramspec.datastore import file_filters, secret_scan
from ngramspec.datastore.build import build
from ngramspec.datastore.corpus import Skipped

BASE62 = string.ascii_letters + string.digits
UPPER = string.ascii_uppercase + string.digits
BASE32 = string.ascii_uppercase + "234567"
HEX = "0123456789abcdef"
DASHES = "-" * 5


class Maker:
    """Makes secrets that look as their issuers make them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def text(self, alphabet: str, length: int) -> str:
        return "".join(self.random.choices(alphabet, k=length))

    def base64(self, n_bytes: int) -> str:
        return b64encode(self.random.randbytes(n_bytes)).decode()

    def key(self, kind: str, indent: str = "", line_end: str = "\n") -> str:
        body = self.base64(600)
        lines = [body[at : at + 64] for at in range(0, len(body), 64)]
        return line_end.join(indent + line for line in [f"{DASHES}BEGIN {kind}{DASHES}", *lines, f"{DASHES}END {kind}{DASHES}"])

    def jwt(self) -> str:
        parts = (b'{"alg":"HS256","typ":"JWT"}', b'{"sub":"1234567890","name":"' + self.text(BASE62, 9).encode() + b'"}')
        return ".".join([*(b64encode(part).decode().rstrip("=") for part in parts), self.text(BASE62, 43)])


SECRETS: dict[str, tuple[str, Callable[[Maker], str]]] = {
    "RSA key in YAML": ("secret.yaml", lambda m: "data:\n  tls.key: |\n" + m.key("RSA PRIVATE KEY", "    ") + "\n"),
    "OpenSSH key": ("a.txt", lambda m: m.key("OPENSSH PRIVATE KEY") + "\n"),
    "EC key with CRLF": ("a.md", lambda m: "key:\r\n" + m.key("EC PRIVATE KEY", "", "\r\n") + "\r\n"),
    "PGP key": ("a.txt", lambda m: f"{DASHES}BEGIN PGP PRIVATE KEY BLOCK{DASHES}\nVersion: 2\n\n{m.base64(90)}\n"),
    "PuTTY key": ("a.txt", lambda m: f"PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\nPublic-Lines: 2\n{m.base64(60)}\n"),
    "key in a literal, cut off": ("a.py", lambda m: f'KEY = "{DASHES}BEGIN RSA PRIVATE KEY{DASHES}\\n{m.base64(40)}\\n"\n'),
    "key in joined literals": ("a.js", lambda m: f'const k = "{DASHES}BEGIN PRIVATE KEY{DASHES}\\n" +\n  "{m.base64(48)}\\n";\n'),
    "service account": (
        "account.json",
        lambda m: json.dumps({"type": "service_account", "private_key_id": m.text(HEX, 40), "private_key": m.key("PRIVATE KEY")}, indent=2),
    ),
    "GitHub token": ("a.py", lambda m: 'login("ghp' + f'_{m.text(BASE62, 36)}")\n'),
    "GitHub fine-grained": ("ci.yml", lambda m: f"  run: curl github_pat_{m.text(BASE62, 22)}_{m.text(BASE62, 59)}\n"),
    "GitLab token": ("a.sh", lambda m: f"clone https://oauth2:glpat-{m.text(BASE62, 20)}@gitlab.com/a/b\n"),
    "AWS access key": ("a.ini", lambda m: "[default]\nid = AK" + f"IA{m.text(BASE32, 16)}\n"),
    "AWS secret key": ("a.cfg", lambda m: f"aws_secret_access_key = {m.base64(30)}\n"),
    "OpenAI key": ("a.py", lambda m: f'openai.api_key = "sk-{m.text(BASE62, 48)}"\n'),
    "OpenAI project key": ("a.ts", lambda m: f'new OpenAI("sk-proj-{m.text(BASE62, 74)}T3BlbkFJ{m.text(BASE62, 74)}")\n'),
    "Anthropic key": ("a.py", lambda m: f'Client("sk-ant-api03-{m.text(BASE62, 93)}AA")\n'),
    "Slack bot token": ("a.rb", lambda m: f'client("xoxb-{m.text(string.digits, 12)}-{m.text(string.digits, 12)}-{m.text(BASE62, 24)}")\n'),
    "Slack webhook": (
        "a.md",
        lambda m: f"post to https://hooks.slack.com/services/T{m.text(UPPER, 8)}/B{m.text(UPPER, 10)}/{m.text(BASE62, 24)}\n",
    ),
    "Stripe key": ("a.go", lambda m: f'stripe("sk_live_{m.text(BASE62, 24)}")\n'),
    "Google key": ("a.kt", lambda m: f'maps("AIza{m.text(BASE62, 35)}")\n'),
    "Hugging Face token": ("a.py", lambda m: f'login("hf_{m.text(string.ascii_letters, 34)}")\n'),
    "npm token": ("a.conf", lambda m: f"//registry.example.org/:_authToken=npm_{m.text(BASE62, 36)}\n"),
    "PyPI token": ("a.toml", lambda m: f'password = "pypi-AgEIcHlwaS5vcmc{m.text(BASE62, 80)}"\n'),
    "SendGrid key": ("a.php", lambda m: f'mail("SG.{m.text(BASE62, 22)}.{m.text(BASE62, 43)}");\n'),
    "Twilio key": ("a.cs", lambda m: f'new Twilio("SK{m.text(HEX, 32)}");\n'),
    "JSON web token": ("a.txt", lambda m: f"Authorization: Bearer {m.jwt()}\n"),
    "database address": ("settings.py", lambda m: f'DB = "postgresql://app:{m.text(BASE62, 14)}9@db.internal:5432/app"\n'),
    "Azure storage": ("a.config.txt", lambda m: f"AccountName=a;AccountKey={m.base64(64)};EndpointSuffix=core\n"),
    "netrc in a text": ("a.txt", lambda m: f"machine git.internal login me password {m.text(BASE62, 12)}\n"),
    "quoted password": ("a.yaml", lambda m: f'db:\n  password: "{m.text(BASE62, 6)}7#{m.text(BASE62, 6)}!"\n'),
    "any token": ("a.env.txt", lambda m: f"SESSION_TOKEN={m.text(BASE62, 40)}\n"),
    "age key": ("a.txt", lambda m: f"AGE-SECRET-KEY-1{m.text('QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L', 58)}\n"),
}

NO_SECRETS = {
    "documented example": 'key_id = "AK' + 'IAIOSFODNN7EXAMPLE"\n',
    "from the environment": 'api_key = os.environ["OPENAI_API_KEY"]\ntoken = getenv("SESSION_TOKEN_FOR_TESTS")\n',
    "placeholders": "password = ${DB_PASSWORD}\nAPI_KEY=<your-api-key>\ntoken: {{ secrets.TOKEN }}\npassword: changeme\n",
    "placeholder in an address": 'URL = "postgresql://user:password@localhost/db"\nAT = f"https://{user}:{password}@host/"\n',
    "code about keys": 'if b"' + DASHES + "BEGIN RSA PRIVATE KEY" + DASHES + '" in data:\n    key = load_pem_private_key(data)\n',
    "names of classes": "from transformers import AutoTokenizer, LongT5ForConditionalGeneration\n",
    "expressions": "assert key.dtype == torch.bfloat16\nkey = self.attention_key_projection(hidden)\n",
    "style sheet": ".sk-estimator-doc-link-container-for-all { color: red }\n",
    "public key": f"{DASHES}BEGIN PUBLIC KEY{DASHES}\nMIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8A\n{DASHES}END PUBLIC KEY{DASHES}\n",
}


def left_out(root: Path) -> tuple[set[str], Skipped]:
    documents, skipped = tiny_store.read_documents(root)
    texts = {Path(document.path).name for document in documents}
    return {path.name for path in root.iterdir()} - texts, skipped


@pytest.mark.parametrize("kind", SECRETS)
def test_a_secret_is_left_out_and_counted_by_its_rule(kind: str, tmp_path: Path) -> None:
    name, make = SECRETS[kind]
    made = [make(Maker(seed)) for seed in range(5)]
    for n, text in enumerate(made):
        (tmp_path / f"{n}{name}").write_bytes(b"the first line\n" + text.encode())
    found, skipped = left_out(tmp_path)
    assert len(found) == len(made), [text for n, text in enumerate(made) if f"{n}{name}" not in found]
    assert skipped.counts == {file_filters.SECRET: len(made)}
    assert skipped.secrets.total() == len(made)


@pytest.mark.parametrize("kind", NO_SECRETS)
def test_what_is_no_secret_stays(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(NO_SECRETS[kind])
    assert left_out(tmp_path)[1].secrets == {}


def test_every_rule_can_be_matched() -> None:
    """RE2 accepts each of them, and none is passed over without a keyword."""
    everything = " ".join(keyword for rule in secret_scan.get_rules() for keyword in rule.keywords)
    assert secret_scan.find_secret(everything.encode(), "nuget.config.tf.yaml.php") is None
    assert len(secret_scan.get_rules()) > 200


def test_a_hostile_text_takes_linear_time() -> None:
    keywords = " ".join(keyword for rule in secret_scan.get_rules() for keyword in rule.keywords)
    for line in (keywords, keywords + "\n" + "key = aaaaaaaaaaaa", "key=" + "a1" * 2000 + keywords, DASHES + "BEGIN A" + keywords):
        data = ((line + "\n") * (500_000 // len(line))).encode()
        started = time.process_time()
        secret_scan.find_secret(data, "a.yaml")
        assert time.process_time() - started < 20


def test_the_summary_counts_by_rule(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for kind in ("GitHub token", "RSA key in YAML", "any token"):
        name, make = SECRETS[kind]
        (tmp_path / "in" / f"{len(kind)}{name}").write_text(make(Maker(1)))
    (tmp_path / "in" / "good.py").write_text("x = 1\n")
    (tmp_path / "in" / ".env").write_text("A=1\n")
    done = build([tmp_path / "in"], tmp_path / "store", tiny.byte_tokenizer().backend_tokenizer, "bytes")
    assert (done.files, done.skipped[file_filters.SECRET]) == (1, 4)
    assert done.as_json()["secrets"] == {"github-pat": 1, "private-key": 1, "generic-api-key": 1}
