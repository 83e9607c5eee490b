"""Values out of a pickle without unpickling: dictionaries, lists, tuples, texts, numbers, and nothing else.

A pickle is a program; Python's own machine for it can import and call. This one knows only the instructions that build
plain values, as ``pickletools`` names them, so there is nothing that a file could call.
"""

from __future__ import annotations

import pickletools

from muster.core.typed_json import Json, JsonObject, Unreadable

_CONSTANTS: dict[str, Json] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = (
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
)  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Mark:
    """Where a list, a tuple or the pairs of a dictionary begin on the stack."""


_Value = Json | _Mark


def read_plain(data: bytes) -> JsonObject:
    """The dictionary that ``data`` builds; tuples come as lists.

    Raises:
        Unreadable: it is cut, asks for a class or function, or builds something else.
    """
    stack: list[_Value] = []
    memo: dict[int, _Value] = {}
    try:
        for code, argument, _ in pickletools.genops(data):
            _obey(code.name, argument, stack, memo)
    except Unreadable:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"the pickle is cut or damaged: {error}") from None
    if len(stack) != 1 or not isinstance(stack[0], dict):
        raise Unreadable(
            f"the pickle holds no dictionary but {' and '.join(type(one).__name__ for one in stack) or 'nothing'}"
        )
    return stack[0]


def _obey(name: str, argument: object, stack: list[_Value], memo: dict[int, _Value]) -> None:
    if name in _LITERALS:
        assert isinstance(argument, int | float | str)
        stack.append(argument)
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name == "EMPTY_DICT":
        stack.append({})
    elif name in ("EMPTY_LIST", "EMPTY_TUPLE"):
        stack.append([])
    elif name == "MARK":
        stack.append(_Mark())
    elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
        memo[argument if isinstance(argument, int) else len(memo)] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        assert isinstance(argument, int)
        stack.append(memo[argument])
    elif name in _TUPLES:
        stack[-_TUPLES[name] :] = [_plain(stack[-_TUPLES[name] :])]
    elif name == "TUPLE":
        stack.append(_plain(_since_mark(stack)))
    elif name in ("APPENDS", "APPEND"):
        values = _plain(_since_mark(stack) if name == "APPENDS" else [stack.pop()])
        _list(stack[-1]).extend(values)
    elif name in ("SETITEMS", "SETITEM"):
        pairs = _plain(_since_mark(stack) if name == "SETITEMS" else [stack.pop(-2), stack.pop()])
        _dictionary(stack[-1]).update({str(key): value for key, value in zip(pairs[::2], pairs[1::2], strict=True)})
    elif name not in ("PROTO", "FRAME", "STOP"):
        raise Unreadable(f"the pickle asks for {name} ({argument}), and only plain values are read")


def _since_mark(stack: list[_Value]) -> list[_Value]:
    at = max(number for number, value in enumerate(stack) if isinstance(value, _Mark))
    taken = stack[at + 1 :]
    del stack[at:]
    return taken


def _plain(values: list[_Value]) -> list[Json]:
    plain = [value for value in values if not isinstance(value, _Mark)]
    if len(plain) != len(values):
        raise Unreadable("the pickle is damaged: a mark inside a value")
    return plain


def _list(value: _Value) -> list[Json]:
    if not isinstance(value, list):
        raise Unreadable("the pickle is damaged: it adds to what is no list")
    return value


def _dictionary(value: _Value) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise Unreadable("the pickle is damaged: it adds to what is no dictionary")
    return value
