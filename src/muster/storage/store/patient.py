"""A store that asks again where the service is busy, until a stated time has passed."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from muster.core.errors import BusyError, ConflictError
from muster.core.protocols import Store, Stored

_T = TypeVar("_T")
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 2.0
#: What the first request may take, which gets a token and connects.
FIRST_ANSWER_S = 15.0


@dataclass(frozen=True)
class Patient:
    """``store``, whose BusyError (429, 503, a connection that was reset, no answer) is met by asking again.

    Waits grow from 0.2 s to 2 s, each shortened by chance to as little as half of it; after ``deadline_s`` the last
    BusyError is raised. A conditional write may have been done although its answer was lost: where a later try is
    refused and the object holds exactly our bytes, it is ours, and its generation is the answer.

    ``answer_s``: one request is given up after this time even where the library below waits longer (a name server that
    is gone), as a BusyError. The request may still be carried out later, like one whose answer was lost. Until one has
    succeeded the limit is 15 s.
    """

    store: Store
    deadline_s: float = 5.0
    answer_s: float | None = None
    sleep: Callable[[float], None] = time.sleep
    now_s: Callable[[], float] = time.monotonic
    _answered: threading.Event = field(default_factory=threading.Event)

    def get(self, uri: str, *, start: int = 0) -> Stored:
        return self._ask(lambda: self.store.get(uri, start=start), uri)[0]

    def put(self, uri: str, data: bytes) -> str:
        return self._ask(lambda: self.store.put(uri, data), uri)[0]

    def put_if_absent(self, uri: str, data: bytes) -> str:
        return self._write(lambda: self.store.put_if_absent(uri, data), uri, data)

    def put_if(self, uri: str, data: bytes, generation: str) -> str:
        return self._write(lambda: self.store.put_if(uri, data, generation), uri, data)

    def list(self, prefix: str) -> dict[str, int]:
        return self._ask(lambda: self.store.list(prefix), prefix)[0]

    def delete(self, uri: str) -> None:
        self._ask(lambda: self.store.delete(uri), uri)

    def _write(self, call: Callable[[], str], uri: str, data: bytes) -> str:
        until_s = self._until_s()
        result, asked_again = self._ask(lambda: _conflict_as_value(call), uri, until_s)
        if not isinstance(result, ConflictError):
            return result
        if asked_again:
            try:
                stored, _ = self._ask(lambda: self.store.get(uri), uri, until_s)
            except FileNotFoundError:
                raise result from None
            if stored.data == data:
                return stored.generation
        raise result

    def _ask(self, call: Callable[[], _T], uri: str, until_s: float | None = None) -> tuple[_T, bool]:
        """Its result, and whether an earlier try had no answer."""
        until_s = self._until_s() if until_s is None else until_s
        wait_s, again = FIRST_WAIT_S, False
        while True:
            try:
                return self._in_time(call, until_s, uri), again
            except BusyError:
                again = True
                pause_s = wait_s * random.uniform(0.5, 1.0)
                if self.now_s() + pause_s >= until_s:
                    raise
                self.sleep(pause_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _until_s(self) -> float:
        first = self.answer_s is not None and not self._answered.is_set()
        return self.now_s() + max(self.deadline_s, FIRST_ANSWER_S if first else 0.0)

    def _in_time(self, call: Callable[[], _T], until_s: float, uri: str) -> _T:
        if self.answer_s is None:
            return call()
        longest_s = self.answer_s if self._answered.is_set() else FIRST_ANSWER_S
        try:
            result = in_time(call, min(longest_s, max(0.05, until_s - self.now_s())), uri)
        except FileNotFoundError:
            self._answered.set()
            raise
        self._answered.set()
        return result


def _conflict_as_value(call: Callable[[], str]) -> str | ConflictError:
    try:
        return call()
    except ConflictError as error:
        return error


@dataclass
class _Answer(Generic[_T]):
    value: _T | None = None
    error: BaseException | None = None


def in_time(call: Callable[[], _T], timeout_s: float, what: str) -> _T:
    """What ``call`` returns or raises, or BusyError where it takes longer; it is not stopped then."""
    answer: _Answer[_T] = _Answer()
    done = threading.Event()

    def ask() -> None:
        try:
            answer.value = call()
        except BaseException as error:  # noqa: BLE001 (raised where it was asked for)
            answer.error = error
        done.set()

    start_thread(ask, "request")
    if not done.wait(timeout_s):
        raise BusyError(f"{what}: no answer within {timeout_s:.1f} s")
    if answer.error is not None:
        try:
            raise answer.error
        finally:
            answer.error = None  # else it and this frame refer to each other, and what its frames hold stays open
    return answer.value  # type: ignore[return-value]


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """A thread that dies with the process and catches no signals: one it took would not wake the main thread."""
    thread = threading.Thread(target=target, name=f"home-{name}", daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread
