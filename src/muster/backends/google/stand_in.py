"""Whether Google's own services are spoken with."""

from __future__ import annotations


def stand_in(launcher: object) -> str | None:
    """What plays Google's services for this launcher, for a record; None: they are its own."""
    from muster.backends.google.http import GoogleHttp

    http = getattr(launcher, "http", None)
    return None if type(http) is GoogleHttp else f"{type(http).__name__} in place of Google's services"
