"""Long work for somebody who has a lease to renew."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from muster.storage.store.patient import start_thread

_T = TypeVar("_T")
#: So often, in seconds: a lease lasts 10 s, and is one object, of which a bucket takes one change a second.
BETWEEN_S = 2.0


def meanwhile(work: Callable[[], _T], between: Callable[[], None] | None) -> _T:
    """What ``work`` returns or raises, however long it takes; ``between`` is called in this thread every 2 s meanwhile.

    What ``between`` raises is raised at once: ``work`` is not stopped then. None: nothing is called.
    """
    if between is None:
        return work()
    answer: Future[_T] = Future()

    def do() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised where it was asked for)
            answer.set_exception(error)

    start_thread(do, "work")
    while not wait([answer], timeout=BETWEEN_S).done:
        between()
    return answer.result()
