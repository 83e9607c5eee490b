"""Wrong bytes made of right ones: a few edits, drawn from a seed, so that a case is found again by its number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

#: Values at which programs go wrong, as they stand in text: numbers out of range, other types, depth, half characters.
WORDS = tuple(
    word if isinstance(word, bytes) else word.encode("utf-8", "surrogatepass")
    for word in (
        *("0", "-1", "1e999", "-0.0", "NaN", "Infinity", "9223372036854775808", "-9223372036854775809", "1" * 5000),
        *("null", "true", '""', "[]", "{}", '"\\ud800"', "\ud800", "\u2028", "\x00", "\r\n", "\n", "\x1e", "\x1f"),
        *('{"a":' * 30, "[" * 2000, "../" * 10, "/etc/passwd", "%s%n", "é" * 10, "- " * 300, "&a [*a]"),
        *("? ", "!!python/object/apply:os.system [x]", "${HOME}", "%(a)s"),
        *(b"\xff", b"\xff" * 8, b"\x00" * 16, b"\xfe\xff", b"\x80" * 4, b"\xef\xbb\xbf"),
    )
)  # fmt: skip


def _flip(data: bytearray, rng: Random, _: bytes) -> None:
    at = rng.randrange(len(data))
    data[at] ^= 1 << rng.randrange(8)


def _byte(data: bytearray, rng: Random, _: bytes) -> None:
    data[rng.randrange(len(data))] = rng.randrange(256)


def _cut_off(data: bytearray, rng: Random, _: bytes) -> None:
    del data[rng.randrange(len(data)) :]


def _cut_out(data: bytearray, rng: Random, _: bytes) -> None:
    start = rng.randrange(len(data))
    del data[start : start + 1 + rng.randrange(1 + len(data) // 4)]


def _twice(data: bytearray, rng: Random, _: bytes) -> None:
    start = rng.randrange(len(data))
    piece = data[start : start + 1 + rng.randrange(64)]
    at = rng.randrange(len(data) + 1)
    data[at:at] = piece * rng.choice((1, 2, 50))


def _swap(data: bytearray, rng: Random, _: bytes) -> None:
    a, b = rng.randrange(len(data)), rng.randrange(len(data))
    data[a], data[b] = data[b], data[a]


def _word(data: bytearray, rng: Random, _: bytes) -> None:
    at = rng.randrange(len(data) + 1)
    data[at : at + rng.choice((0, 1, 4, 8))] = rng.choice(WORDS)


def _value(data: bytearray, rng: Random, _: bytes) -> None:
    """A whole number or a quoted text of the data becomes another value."""
    starts = [at for at in range(len(data)) if data[at : at + 1].isdigit() or data[at : at + 1] == b'"']
    if starts:
        at = rng.choice(starts)
        end = data.find(b'"', at + 1) + 1 if data[at : at + 1] == b'"' else at + 1
        while end < len(data) and data[at : at + 1].isdigit() and data[end : end + 1].isdigit():
            end += 1
        data[at : max(end, at + 1)] = rng.choice(WORDS)


def _splice(data: bytearray, rng: Random, other: bytes) -> None:
    """The tail of another sample."""
    data[rng.randrange(len(data)) :] = other[rng.randrange(len(other) + 1) :]


EDITS: tuple[Callable[[bytearray, Random, bytes], None], ...] = (
    _flip, _byte, _cut_off, _cut_out, _twice, _swap, _word, _word, _value, _value, _splice,
)  # fmt: skip


def mutated(samples: Sequence[bytes], rng: Random) -> bytes:
    """One of the samples after one to four edits."""
    data = bytearray(rng.choice(samples))
    for _ in range(rng.choice((1, 1, 2, 4))):
        if data:
            rng.choice(EDITS)(data, rng, rng.choice(samples))
        else:
            data += rng.choice(WORDS)
    return bytes(data)
