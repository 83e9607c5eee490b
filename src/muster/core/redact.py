"""Keeps secrets out of messages, logs and records: by the name of the key, and by the look of the value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from muster.core.typed_json import Json

HIDDEN = "***"
# `token` but not `tokens` or `tokenizer`: max_new_tokens is not a secret.
_KEY = re.compile(
    r"(?:^|[._\-/])(?:\w*_)?(?:token|secret|password|passwd|passphrase|credentials?"
    r"|api[_-]?key|access[_-]?key|private[_-]?key)(?:$|[._\-/=])",
    re.IGNORECASE,
)
_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_\-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}"
    r"|AKIA[A-Z0-9]{12,}|AIza[\w\-]{30,}|ya29\.[\w\-.]{20,}|xox[abpr]-[\w\-]{10,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*|eyJ[\w\-]{10,}\.eyJ[\w\-]{10,}\S*",
    re.DOTALL,
)
#: What holds a secret and is none: ``--token-file``, ``--credentials-path``, ``--api-key-env``.
_HOLDER = re.compile(r"[._\-](?:file|path|dir|env|name|id|uri)$", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]*(?=@)")


def is_secret(key: str) -> bool:
    """Does the name say that its value is a secret?"""
    return _KEY.search(key) is not None


def redact(text: str) -> str:
    """``text`` with whatever looks like a secret hidden."""
    return _USERINFO.sub(HIDDEN, _VALUE.sub(HIDDEN, text))


def redact_value(key: str, value: Json) -> Json:
    """``value`` of ``key``, hidden where the key or the value looks secret; containers are gone through."""
    if is_secret(key) and value is not None:
        return HIDDEN
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {name: redact_value(str(name), item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_value(key, item) for item in value]
    return value


def secret_word(argv: Sequence[str]) -> int | None:
    """Index of the first word that gives a secret away; None: none does. The name of a file that holds one does not."""
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        key, given = (name, value) if equals else (argv[index - 1] if index else "", word)
        named = key.startswith("-") or bool(equals)
        if redact(word) != word or (
            named and given and not given.startswith("-") and is_secret(key.lstrip("-")) and not _HOLDER.search(key)
        ):
            return index
    return None


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line fit for a record: ``--token X``, ``token=X`` and secret-looking words are hidden."""
    result: list[str] = []
    hide = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if hide:
            result.append(HIDDEN)
        elif equals and is_secret(name.lstrip("-")):
            result.append(f"{name}={HIDDEN}")
        else:
            result.append(redact(word))
        hide = not equals and word.startswith("-") and is_secret(word.lstrip("-"))
    return result
