"""Detect secrets: by the names of files, and by the forms of private keys and tokens.

A false alarm costs a document, so a token must have its prefix, its full length and the randomness of a real one: an example that is cut
short, such as "-----BEGIN PRIVATE KEY----- ...", or filled with one letter does not count.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from fnmatch import fnmatchcase
from itertools import islice
from typing import NamedTuple

_KEY_FILES = """
    *.pem *.key *.p8 *.pk8 *.p12 *.pfx *.jks *.jceks *.bks *.keystore *.kdb *.kdbx *.ppk *.keychain *.1pux
    id_rsa* id_dsa* id_ecdsa* id_ed25519* secring.*
    *.env .env.* .envrc *.tfstate *.tfstate.* *.tfvars *.tfvars.json
    *htpasswd .netrc _netrc .npmrc .pypirc .pgpass pgpass.conf .my.cnf .dockercfg .git-credentials .vault-token .s3cfg .boto
    shadow shadow- gshadow gshadow- kubeconfig kubeconfig.* *.kubeconfig rootkey.csv *accesskeys.csv
    """.split()  # noqa: SIM905  # a word list reads better as words
_STEMS = "credential credentials secret secrets password passwords client_secret* service-account* service_account* serviceaccount*".split()  # noqa: SIM905
_SETTINGS = frozenset(["", *".json .yaml .yml .toml .ini .cfg .conf .properties .xml .csv .txt .enc .bak".split()])  # noqa: SIM905
"""Endings of files of settings: secrets.yaml is one, secrets.md and secrets.py are about them."""
_EXAMPLES = frozenset({"example", "examples", "sample", "template", "dist", "schema"})


def is_secret_name(name: str) -> bool:
    """Whether files of this name usually hold keys, passwords or tokens: prod.env does, env.example does not."""
    name = name.lower()
    if not _EXAMPLES.isdisjoint(re.split(r"[._-]", name)):
        return False
    stem, dot, suffix = name.rpartition(".")
    stem, suffix = (stem, dot + suffix) if stem else (name, "")
    is_settings = suffix in _SETTINGS and any(fnmatchcase(stem, pattern) for pattern in _STEMS)
    return is_settings or any(fnmatchcase(name, pattern) for pattern in _KEY_FILES)


class _Token(NamedTuple):
    kind: str
    hint: str
    """The pattern is tried only on texts with this substring."""
    pattern: re.Pattern[str]


def _token(kind: str, hint: str, pattern: str) -> _Token:
    return _Token(kind, hint, re.compile(pattern, re.ASCII))


_TOKENS = (  # no repetition without a bound: the time stays in proportion to the text
    _token("an AWS secret key", "ecret", r"(?i:secret_?access_?key|aws_?secret_?key)[\"']?\s{0,5}[:=]\s{0,5}[\"']?([\w/+]{40})(?![\w/+=])"),
    _token("a GitHub token", "gh", r"\bgh[oprsu]_([A-Za-z0-9]{36})\b"),
    _token("a GitHub token", "github_pat_", r"\bgithub_pat_(\w{82})\b"),
    _token("a GitLab token", "glpat-", r"\bglpat-([\w-]{20})(?![\w-])"),
    _token("a Slack token", "xox", r"\bxox[abeoprs]-(?:\d{6,14}-){1,3}([A-Za-z0-9]{20,64})\b"),
    _token("a Slack token", "xapp-", r"\bxapp-\d-[A-Z0-9]{8,14}-\d{8,16}-([a-f0-9]{40,80})\b"),
    _token("a Slack webhook", "hooks.slack.com", r"hooks\.slack\.com/services/T\w{8,12}/B\w{8,12}/(\w{24})\b"),
    _token("an OpenAI key", "T3BlbkFJ", r"\bsk-((?:[a-z]{4,8}-)?[\w-]{20,80}?T3BlbkFJ[\w-]{20,80})"),
    _token("an Anthropic key", "sk-ant-", r"\bsk-ant-[a-z]{3,8}\d\d-([\w-]{80,110})"),
    _token("a Google API key", "AIza", r"\bAIza([\w-]{35})(?![\w-])"),
    _token("a Google client secret", "GOCSPX-", r"\bGOCSPX-([\w-]{28})(?![\w-])"),
    _token("a Stripe key", "k_live_", r"\b[rs]k_live_([A-Za-z0-9]{24,120})\b"),
    _token("a Hugging Face token", "hf_", r"\bhf_([A-Za-z]{34})\b"),
    _token("an npm token", "npm_", r"\bnpm_([A-Za-z0-9]{36})\b"),
    _token("a PyPI token", "pypi-", r"\bpypi-AgEIcHlwaS5vcmc([\w-]{50,250})"),
    _token("a SendGrid key", "SG.", r"\bSG\.([\w-]{22}\.[\w-]{43})(?![\w-])"),
    _token("a DigitalOcean token", "_v1_", r"\bdo[opr]_v1_([a-f0-9]{64})\b"),
    _token("an Azure storage key", "AccountKey=", r"\bAccountKey=([A-Za-z0-9+/]{86})=="),
    _token("an age key", "AGE-SECRET-KEY-1", r"\bAGE-SECRET-KEY-1([02-9AC-HJ-NP-Z]{58})\b"),
)
_PRIVATE_KEY = re.compile(r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_PUTTY_KEY = re.compile(r"^Private-Lines: \d{1,4}\s", re.MULTILINE)
_HEADER_LINE = re.compile(r"^[\s>|*#/]{0,20}[A-Za-z][A-Za-z-]{2,30}: [^\n]{0,200}$", re.MULTILINE)  # Proc-Type, DEK-Info, Version …
_BETWEEN = re.compile(r"\\r|\\n|[\s\"'`>|*#\\,;]|(?<=[\"'`])\s{0,40}\+")  # what parts the lines of a key in JSON, code, quoted mail
_BASE64 = re.compile(r"[A-Za-z0-9+/]{60}")
_LOOKED_AT = 2_000  # characters from where a key begins
_MAX_KEYS = 1_000  # openings that are looked at
_MIN_BITS = 3.0  # a character, of a token; a random one of 20 has 3.7 or more
_MIN_KEY_BITS = 4.0
_PLACEHOLDERS = ("example", "xxxx", "0123456789", "1234567890", "abcdefgh", "your", "....")


def found_secret(text: str) -> str:
    """The kind of secret in a text, such as "a private key"; "" if there is none."""
    if "PRIVATE KEY" in text and _has_key(text, _PRIVATE_KEY):
        return "a private key"
    if "PuTTY-User-Key-File" in text and _has_key(text, _PUTTY_KEY):
        return "a private key"
    return next((token.kind for token in _TOKENS if token.hint in text and any(map(_is_real, token.pattern.findall(text)))), "")


def _has_key(text: str, opening: re.Pattern[str]) -> bool:
    return any(_is_key(text, found.end()) for found in islice(opening.finditer(text), _MAX_KEYS))


def _is_key(text: str, start: int) -> bool:
    body = _BETWEEN.sub("", _HEADER_LINE.sub("", text[start : start + _LOOKED_AT]))
    found = _BASE64.match(body)
    return found is not None and _bits(found[0]) > _MIN_KEY_BITS


def _is_real(token: str) -> bool:
    """Whether a token is random enough; those in documentation are not."""
    return _bits(token) > _MIN_BITS and not any(word in token.lower() for word in _PLACEHOLDERS)


def _bits(text: str) -> float:
    """The entropy of a text in bits for each character."""
    return -sum(num / len(text) * math.log2(num / len(text)) for num in Counter(text).values())
