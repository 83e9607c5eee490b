"""All channels, and the files that one process writes for another."""

from __future__ import annotations

from typing import TypeAlias

from muster.core.typed_json import Record
from muster.protocol.channel import Channel
from muster.protocol.client import FROM_CLIENT, TO_CLIENT
from muster.protocol.fork_server import FROM_FORK_SERVER, TO_FORK_SERVER
from muster.protocol.handover import FROM_WRITER, TO_WRITER
from muster.protocol.hello import MEETING, MET
from muster.protocol.lease import EndRecord, HomeStatus, LeaseRecord
from muster.protocol.pipes import (
    FROM_FAR,
    FROM_POD,
    FROM_STORE,
    NODE_CONDITIONS,
    PREEMPTION_NOTICES,
    PREPARATION,
    RUN_OVER,
    TO_FAR,
    TO_POD,
    TO_STORE,
    TRACKER_NOTES,
)
from muster.protocol.rank_agent import FROM_RANK, HOST_GREETING, TO_RANK
from muster.protocol.replicator_orders import FROM_REPLICATOR, TO_REPLICATOR, ReplicatorRecord
from muster.protocol.replicator_peers import REPLICATOR_PEERS
from muster.protocol.to_agent import TO_AGENT
from muster.protocol.to_supervisor import FROM_AGENT, FROM_WATCHDOG, GREETING, TO_WATCHDOG

AnyChannel: TypeAlias = Channel[Record]
CHANNELS: tuple[AnyChannel, ...] = (
    GREETING,
    TO_AGENT,
    FROM_AGENT,
    FROM_WATCHDOG,
    TO_WATCHDOG,
    FROM_CLIENT,
    TO_CLIENT,
    HOST_GREETING,
    TO_FORK_SERVER,
    FROM_FORK_SERVER,
    TO_RANK,
    FROM_RANK,
    TO_REPLICATOR,
    FROM_REPLICATOR,
    REPLICATOR_PEERS,
    TO_WRITER,
    FROM_WRITER,
    PREPARATION,
    PREEMPTION_NOTICES,
    NODE_CONDITIONS,
    TRACKER_NOTES,
    RUN_OVER,
    TO_POD,
    FROM_POD,
    MEETING,
    MET,
    TO_STORE,
    FROM_STORE,
    TO_FAR,
    FROM_FAR,
)
FILES: tuple[tuple[str, type[Record]], ...] = (
    ("lease.json in the run's folder", LeaseRecord),
    ("status.json in a home in a bucket", HomeStatus),
    ("end.json in a home in a bucket", EndRecord),
    ("replicator.json in the host's memory folder", ReplicatorRecord),
)
