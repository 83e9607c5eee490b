"""Keeps secrets out of messages, logs and records, by the name of the key and by the look of the value; and keeps what
terminals obey out of text of others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from muster.core.typed_json import Json

HIDDEN = "***"
# `token` but not `tokens` or `tokenizer`: max_new_tokens is not a secret.
_OTHER_NAMES = r"secret|password|passwd|passphrase|credentials?|api[_-]?key|access[_-]?key|private[_-]?key"
_KEY = re.compile(rf"(?:^|[._\-/])(?:\w*_)?(?:token|{_OTHER_NAMES})(?:$|[._\-/=])", re.IGNORECASE)
_OTHER_KEY = re.compile(rf"(?:^|[._\-/])(?:\w*_)?(?:{_OTHER_NAMES})(?:$|[._\-/=])", re.IGNORECASE)
#: Before ``token`` at the end of a key: a token of text.
_OF_TEXT = re.compile(
    "pad|padding|eos|bos|unk|sep|cls|mask|special|image|video|audio|start|begin|end|stop|fim|per|max|min|num|new"
)
#: A key begins here: not within a word (``disk-usage``), but after an escape (``%3D``, ``\n``) in a URL or a repr.
_BEGINS = r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f]{2})|(?<=\\[nrt]))"
#: Words joined by hyphens are none: a key has a piece that is no word, or all three kinds of characters, or is a UUID.
_SK = (
    r"sk-(?=[\w\-]{0,200}(?:[A-Za-z0-9]{24}|(?=[a-z]{0,15}[A-Z0-9])[A-Za-z0-9]{16}|[0-9a-f]{8}-[0-9a-f]{4}-)"
    r"|(?=[\w\-]{0,200}[A-Z])(?=[\w\-]{0,200}[a-z])[\w\-]{0,200}\d)[A-Za-z0-9_\-]{16,}"
)
_VALUE = re.compile(
    rf"{_BEGINS}(?:hf_[A-Za-z0-9]{{16,}}|{_SK}"
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}"
    r"|AKIA[A-Z0-9]{12,}|AIza[\w\-]{30,}|ya29\.[\w\-.]{20,}|xox[abpr]-[\w\-]{10,}"
    r"|eyJ[\w\-]{10,}\.eyJ[\w\-]{10,}\S*)|-----BEGIN [A-Z ]*PRIVATE KEY-----.*",
    re.DOTALL,
)
#: A number, a flag or a special token of text is no secret under any key.
_HARMLESS = re.compile(r"[-+]?\d[\d_]*(?:\.\d*)?(?:e[-+]?\d+)?|true|false|yes|no|on|off|none|null|<.*>", re.IGNORECASE)
#: What holds a secret and is none: ``--token-file``, ``--credentials-path``, ``--api-key-env``.
_HOLDER = re.compile(r"[._\-](?:file|path|dir|env|name|id|uri)$", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]*(?=@)")


#: Secrets that this process was given; hidden in any form.
_GIVEN: set[str] = set()
#: A shorter one would hide ordinary words.
_LEAST = 6


def hide_values(values: Iterable[str]) -> None:
    """From here on ``redact`` hides these too, in this process."""
    _GIVEN.update(value for value in values if len(value) >= _LEAST)


def is_secret(key: str) -> bool:
    """Does the name say that its value is a secret?"""
    return _KEY.search(key) is not None


def redact(text: str) -> str:
    """``text`` with everything hidden that looks like a secret or was registered as one."""
    for value in _GIVEN:
        text = text.replace(value, HIDDEN)
    return _USERINFO.sub(HIDDEN, _VALUE.sub(HIDDEN, text))


#: What a terminal obeys (C0 but tab and newline, DEL, C1), what turns text around (bidirectional marks, by Unicode's
#: TR 36), what other programs take for a line's end, and what no encoding can write (surrogates).
OBEYED = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
_OBEYED = re.compile(OBEYED)


def printable(text: str) -> str:
    """``text`` of others for a terminal or a log: characters that are obeyed instead of shown as ``\\u001b``.

    Within the strings of a JSON document the result stands for the same characters.
    """
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


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
        if redact(word) != word or (named and _is_secret_argument(key.lstrip("-"), given)):
            return index
    return None


def gives_away(name: str, value: str) -> bool:
    """Does a variable's name or value say that it is a secret? Stricter than ``is_secret``, as for arguments."""
    return redact(value) != value or _is_secret_argument(name, value)


def _is_secret_argument(key: str, value: str) -> bool:
    """Stricter than ``is_secret``, which only hides: this refuses a command. ``--moe-token-dispatcher-type``,
    ``pad_token`` and ``max_token_len=4096`` are everyday arguments of training programs."""
    if not value or value.startswith("-") or _HARMLESS.fullmatch(value) or _HOLDER.search(key):
        return False
    *before, last = re.split(r"[._\-/]", key.lower())
    if last == "token":
        return not before or _OF_TEXT.fullmatch(before[-1]) is None
    return _OTHER_KEY.search(key) is not None


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
