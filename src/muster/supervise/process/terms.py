"""Which terms supervisors of a run have had, by the event logs in its home: a lease that is lost has been theirs."""

from __future__ import annotations

import re

from muster.core.protocols import Store
from muster.storage import uris

#: ``supervisor.TERM.jsonl``, or ``supervisor.partN.TERM.jsonl`` where a damaged file was left and continued in another.
_LOG = re.compile(r"^supervisor\.(?:part\d+\.)?(\d+)\.jsonl$")


def newest_term(store: Store, lease_uri: str, *, at_least: int = 0) -> int:
    """The highest term that left a log beside the lease; ``at_least`` where none is higher. Raises as the store.

    In a bucket a log is a folder of segments, and each supervisor ends those of all earlier terms: where a term has
    none, no later one has. So a few short lists tell it, where one of all events would take seconds in a long run.
    """
    home = lease_uri.rpartition("/")[0]
    events = uris.join(home, "events")
    if uris.is_local(events):
        found = (_LOG.match(uris.name(uri)) for uri in store.list(events))
        return max([at_least, *(int(match.group(1)) for match in found if match is not None)])
    newest = max(at_least, _ended_up_to(store, home))
    while store.list(uris.join(events, f"supervisor.{newest + 1}")):
        newest += 1
    return newest


def _ended_up_to(store: Store, home: str) -> int:
    """What the last takeover noted (``BucketHome.end_earlier``); 0 where nobody did."""
    try:
        return int(store.get(uris.join(home, "ended", "supervisor")).data)
    except (FileNotFoundError, ValueError):
        return 0
