"""What may be shown: no secrets, found by the name of a key, by their form, or by a known value; no
control characters."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import cache

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
)
_IN_QUERY = re.compile(
    r"(?<=[?&])([\w.-]*(?:token|key|secret|password)=)[^\s&#\"']+", re.IGNORECASE
)
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
    _hidden.update(secret for secret in values if len(secret) >= SHORTEST)


def redact(text: str) -> str:
    """Return the text without registered secrets, values of secret variables and lookalikes."""
    variables = {os.environ.get(name, "") for name in os.environ if looks_secret(name)}
    secrets = _hidden | {secret for secret in variables if len(secret) >= SHORTEST}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _IN_QUERY.sub(rf"\g<1>{HIDDEN}", _PATTERNS.sub(HIDDEN, text))


def printable(text: str) -> str:
    """Return a text that may come from strangers with its control characters as `\\x1b`."""
    return text.translate(_CONTROL)
