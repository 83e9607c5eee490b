"""Whether Google's own services are spoken with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from muster.backends.google.http import Http


class _OverHttp(Protocol):
    http: Http


def stand_in(launcher: object) -> str | None:
    """What plays Google's services for this launcher of ours, for a record; None: they are its own."""
    from muster.backends.google.http import GoogleHttp

    http = cast(_OverHttp, launcher).http
    return None if type(http) is GoogleHttp else f"{type(http).__name__} in place of Google's services"
