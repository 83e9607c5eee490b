"""The agent's parts know values and callables, not each other: none can do what is another's to do."""

import inspect
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from muster.agent.fork_server_process import ForkServer
from muster.agent.host_agent import HostAgent
from muster.agent.host_home import HostHome
from muster.agent.host_identity import HostIdentity
from muster.agent.memory_watch import MemoryWatch
from muster.agent.preemption import Preemption
from muster.agent.programs import Programs
from muster.agent.rank_pool import RankPool
from muster.agent.ranks.pool_calls import Forks, Snapshots
from muster.agent.readiness import Readiness
from muster.agent.replicator_process import ReplicatorProcess
from muster.agent.snapshot_store import SnapshotStore
from muster.agent.supervisor_link import SupervisorLink
from muster.agent.unsupervised_host import UnsupervisedHost

PARTS = (
    ForkServer,
    HostAgent,
    HostHome,
    MemoryWatch,
    Preemption,
    Programs,
    RankPool,
    Readiness,
    ReplicatorProcess,
    SnapshotStore,
    SupervisorLink,
    UnsupervisedHost,
)


def named(hint: Any) -> Iterator[Any]:
    """``hint``, and what it is made of."""
    yield hint
    for part in typing.get_args(hint):
        for each in part if isinstance(part, list) else [part]:
            yield from named(each)


@pytest.mark.parametrize("cls", [*PARTS, HostIdentity, Forks, Snapshots], ids=lambda cls: cls.__name__)
def test_no_part_is_given_another(cls: type) -> None:
    module = inspect.getmodule(cls)
    hints = typing.get_type_hints(cls.__init__, vars(module))
    given = {name: set(named(hint)) & set(PARTS) for name, hint in hints.items() if name != "return"}
    assert len(given) > 0 and not any(given.values()), given


def test_every_class_that_the_agent_makes_is_looked_at() -> None:
    source = inspect.getsource(HostAgent)
    made = {part.__name__ for part in PARTS if f"{part.__name__}(" in source}
    assert made == {part.__name__ for part in PARTS} - {"HostAgent"}
