"""What may be shown: no secrets, found by the name of a key, by their form, or by a known value; no
control characters."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import cache
from urllib.parse import unquote

HIDDEN = "[hidden]"
# Characters. Hiding shorter values everywhere would also hide parts of ordinary words.
SHORTEST = 8

SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)
HARMLESS = re.compile(
    r"tokenizer|(?:num|max|new|special)_tokens|tokens_per|per_token$|(?:pad|eos|bos|unk|mask)_token|token_dispatcher|^(?:chosen|rejected)_key$"
    r"|(?:path|file|dir)$",  # says where a secret is, not what it is
    re.IGNORECASE,
)
_PATTERNS = re.compile(
    r"(?<![0-9A-Za-z])(?:hf_[A-Za-z0-9]{16,}|sk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{16,}|wandb_v1_\w{16,}"
    r"|[0-9a-f]{40}(?![0-9A-Za-z]))"  # Hugging Face, OpenAI and others, W&B; older W&B keys look like a git commit
    # User and password in an address, also in one that was read as a path; a password may hold an
    # @.
    r"|(?:(?<=://)|(?<=:/))[^\s/@]+(?:@[^\s/@\"]*)*(?=@)"
    r"|(?<![^\s\"'=(])[^\s/@:\"'=(]{1,100}:[^\s/\"']{1,200}(?=@)"  # without a scheme
)
_IN_QUERY = re.compile(
    r"(?<=[?&])([\w.-]*(?:token|key|secret|password)=)[^\s&#\"']+", re.IGNORECASE
)
_SCHEME = re.compile(r"[a-z][a-z\d+.-]*:/+", re.IGNORECASE)
_PORT = re.compile(r"[^/]*:\d")
# Terminals obey these: they could rewrite what was printed, or fill the clipboard.
_CONTROL = {
    number: f"\\x{number:02x}"
    for number in (*range(32), *range(127, 160))
    if chr(number) not in "\t\n"
}
_hidden: set[str] = set()


@cache
def looks_secret(name: str) -> bool:
    """HF_TOKEN, WANDB_API_KEY, dbPassword: yes. pad_token, chosen_key, TOKENIZERS_PARALLELISM,
    KEY_FILE: no."""
    return bool(SECRET.search(name)) and not HARMLESS.search(name)


def hide(values: Iterable[str]) -> None:
    """Make `redact` remove these values from every text."""
    _hidden.update(values)


def without_known(text: str) -> str:
    """Return the text without registered secrets and the values of secret variables.

    A library may show one stripped, or as repr writes it.
    """
    secrets = _hidden | {os.environ.get(name, "") for name in os.environ if looks_secret(name)}
    forms = {form for text in secrets for form in (text, text.strip(), repr(text)[1:-1])}
    for form in sorted(forms, key=len, reverse=True):
        if len(form) >= SHORTEST:
            text = text.replace(form, HIDDEN)
    return text


def redact(text: str) -> str:
    """Return the text without known secrets and what looks like one."""
    return _IN_QUERY.sub(rf"\g<1>{HIDDEN}", _PATTERNS.sub(HIDDEN, without_known(text)))


def _split(name: str) -> tuple[str, str, str, str]:
    """Return scheme, user with password, host with path, and query of an address.

    Another name is returned as a path. A path may hold an @, too: without a scheme, user and
    password have a colon between them, or precede a port.
    """
    match = _SCHEME.match(name)
    scheme = match[0] if match else ""
    address, _, query = name.removeprefix(scheme).partition("#")[0].partition("?")
    login, at, place = address.rpartition("@")
    if scheme or (at and (":" in login.partition("/")[0] or _PORT.match(place))):
        return scheme, login, place, query
    return ("", "", address, query) if "=" in query else ("", "", name, "")


def public_url(name: str) -> str:
    """Return an address without user, password, query and fragment; another name as it is."""
    scheme, _, place, _ = _split(name)
    return scheme + place


def url_secrets(name: str) -> set[str]:
    """Return user, password and the values of the query, as they are written and as they are read.

    Names of parameters are public, and words in messages.
    """
    _, login, _, query = _split(name)
    values = [part.partition("=")[2] if "=" in part else part for part in query.split("&")]
    secrets = {login, *login.split(":", 1), *values} - {""}
    return secrets | set(map(unquote, secrets))


def printable(text: str) -> str:
    """Return a text that may come from strangers with its control characters as `\\x1b`."""
    return text.translate(_CONTROL)
