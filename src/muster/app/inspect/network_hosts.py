"""The hosts of ``muster check --network``: how they are named and reached, and their programs, which get orders to
measure and send what they measured (``probe.network``)."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import selectors
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from muster import backends
from muster.app.inspect.status import spec_of
from muster.app.inspect.supervisor_client import request
from muster.catalog.rows import table
from muster.core.errors import UsageError
from muster.core.processes import read_plain
from muster.core.typed_json import Unreadable, decode, encode
from muster.health.hang.analysis import analyse
from muster.health.hang.evidence import Evidence, RankEvidence
from muster.health.network.figures import Hello, HostLine, Measured, Order, SizeResult, size_results
from muster.probe.programs import conversation, network_command
from muster.probe.stuck import LIMIT_S
from muster.protocol.client import AskStatus
from muster.protocol.lease import read_lease
from muster.storage import run_registry

HELLO_S = 120.0
START_S = 30.0
LEAVE_S = 5.0
#: A name or address becomes an argument of ssh or kubectl, and of a shell there: nothing that either takes for more.
_NAME = re.compile(r"[\w\[][\w.:%\[\]-]*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A host and where others reach it; no address: what its own name leads to."""

    name: str
    address: str = ""


def places(hosts: Sequence[str]) -> list[Place]:
    """``NAME`` or ``NAME=ADDRESS``.

    Raises:
        UsageError: fewer than two, one twice, or what is no name.
    """
    found = [Place(name=name, address=address) for name, _, address in (one.partition("=") for one in hosts)]
    names = [one.name for one in found]
    if len(names) < 2:
        raise UsageError("a network needs two hosts or more", hint="--host NAME[=ADDRESS], once for each")
    texts = (text for one in found for text in (one.name, one.address or "x"))
    if (wrong := next((text for text in texts if not _NAME.fullmatch(text)), None)) is not None:
        raise UsageError(f"{wrong!r} is no name or address of a host", hint="--host NAME[=ADDRESS]")
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise UsageError(f"host {twice} is named twice", hint="--host, once for each")
    return found


def reaching(backend: str, words: str = "") -> Callable[[Place], list[str]]:
    """How a host's program is started: ``words`` before it (``{host}`` is its name), or what the back end's row says.

    Raises:
        UsageError: neither is known.
    """
    row = table("reach.yaml", "health")["reach"].get(backend, {}) if not words else {}
    template = words or row.get("command", "")
    if not template:
        raise UsageError("how are the hosts reached?", hint='--reach "ssh {host}", or a run file of Slurm or GKE')
    parts = shlex.split(template)
    return lambda place: [
        *(part.replace("{host}", place.name) for part in parts),
        *network_command(place.address, python=row.get("python", "")),
    ]


def of_run(reference: str, wanted: Sequence[str]) -> tuple[list[Place], Callable[[Place], list[str]], str]:
    """(the hosts of a live run, how their programs are started, why its GPUs are not free; empty: they are).

    ``wanted``: of them only these; none: all.

    Raises:
        UsageError: no such run or host, nothing of it runs, fewer than two, or a back end that does not tell them.
        SupervisorUnreachable: no supervisor holds the run.
    """
    run = run_registry.find(reference)
    backend = backends.get(spec_of(run).backend)
    status = request(run, AskStatus())
    steps, peer = backends.load(backend.name).steps, ""
    if steps is not None:  # names of nodes often lead to loopback there: where the supervisor is reached from says it
        held = read_lease(read_plain(run.lease), me="this command").address
        words, address, peer = steps(run.run_id), "", held[0] if held is not None else ""
    elif backend.capabilities.uses_this_machine:  # its hosts are processes here
        words, address = {name: list[str]() for name, host in status.hosts.items() if host.connected}, "127.0.0.1"
    else:
        raise UsageError(f"the back end {backend.name!r} does not tell a run's hosts", hint="--host, once for each")
    for name in wanted:
        if name not in words:
            raise UsageError(f"{run.run_id} has no host {name}", hint=f"hosts: {', '.join(sorted(words))}")
    found = [Place(name=name, address=address) for name in words if name in wanted or not wanted]
    if len(found) < 2:
        raise UsageError(f"{run.run_id} has {len(found)} host to be measured, and a network needs two", hint="--host")
    busy = f"{run.run_id} is {status.phase}" if any(host.active for host in status.hosts.values()) else ""
    return found, lambda place: [*words[place.name], *network_command(place.address, peer=peer)], busy


@dataclass(frozen=True)
class Result:
    """Of a group. ``failed``: why figures are missing, and who is the culprit where that is seen."""

    sizes: Sequence[SizeResult] = ()
    failed: str = ""


class _Member:
    """A host's program."""

    def __init__(self, place: Place, argv: Sequence[str]) -> None:
        self.place, self.failed = place, ""
        self.hello: Hello | None = None
        self.rest = b""
        self.child: subprocess.Popen[bytes] | None = None
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the program)
        try:
            self.child = conversation(argv, errors=self.errors)
        except OSError as error:
            self.failed = f"{argv[0]} cannot be started: {error.strerror}"

    @property
    def on_gpus(self) -> bool:
        return self.hello is not None and bool(self.hello.device)

    def lines(self) -> Iterator[HostLine]:
        """What there is to read; at its end ``failed`` is set. Noise of a login (a banner) is passed over."""
        assert self.child is not None and self.child.stdout is not None
        part = os.read(self.child.stdout.fileno(), 1 << 16)
        if not part:
            self.failed = self.failed or self._ended()
        *whole, self.rest = (self.rest + part).split(b"\n")
        for line in whole:
            with contextlib.suppress(Unreadable):
                yield decode(HostLine, line)

    def tell(self, order: Order) -> None:
        assert self.child is not None and self.child.stdin is not None
        try:
            self.child.stdin.write(encode(order) + b"\n")
        except OSError:
            self.failed = self.failed or self._ended()

    def _ended(self) -> str:
        """With the last that it, or what led to it, had to say (ssh: no such host)."""
        self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, self.errors.tell() - 4096))
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        words = "".join(one if one.isprintable() else " " for one in lines[-1].strip()[:300]) if lines else ""
        return f"its program ended: {words}" if words else "its program ended without a word"

    def hang_up(self) -> None:
        """Its input ends, and so does it."""
        if self.child is not None and self.child.stdin is not None:
            with contextlib.suppress(OSError):
                self.child.stdin.close()

    def end(self, until: float) -> None:
        """One that has not ended by then is killed here (its host ends it with the connection)."""
        if self.child is not None and self.child.stdout is not None:
            try:
                self.child.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.child.pid, signal.SIGKILL)
                self.child.wait()
            self.child.stdout.close()
        self.errors.close()


class Crew:
    """All hosts' programs; ``end`` them."""

    def __init__(self, hosts: Sequence[Place], argv: Callable[[Place], list[str]]) -> None:
        self.members = [_Member(place, argv(place)) for place in hosts]
        self.of = {member.place.name: member for member in self.members}

    def greet(self) -> None:
        """Wait for them to be there."""
        self._listen(self.members, HELLO_S, lambda member: member.hello is not None, self._greet)
        for member in self.members:
            if member.hello is None and not member.failed:
                member.failed = f"it did not answer within {HELLO_S:g} s"

    def end(self) -> None:
        for member in self.members:
            member.hang_up()
        until = time.monotonic() + LEAVE_S
        for member in self.members:
            member.end(until)

    @property
    def ready(self) -> list[_Member]:
        return [member for member in self.members if member.hello is not None]

    @staticmethod
    def _greet(member: _Member, line: HostLine) -> None:
        member.hello, member.failed = line.hello, line.failed

    def _listen(
        self,
        members: Iterable[_Member],
        limit_s: float,
        done: Callable[[_Member], bool],
        take: Callable[[_Member, HostLine], None],
    ) -> None:
        """Take the members' lines until each is done or has failed, or for ``limit_s`` after the last line."""
        left = [member for member in members if not member.failed and not done(member)]
        until = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            for member in left:
                assert member.child is not None and member.child.stdout is not None
                selector.register(member.child.stdout, selectors.EVENT_READ, member)
            while selector.get_map() and (ready := selector.select(max(0.0, until - time.monotonic()))):
                for key, _ in ready:
                    member = key.data
                    for line in member.lines():
                        take(member, line)
                        until = time.monotonic() + limit_s
                    if member.failed or done(member):
                        selector.unregister(key.fileobj)

    def carry(
        self, groups: Sequence[Sequence[str]], collectives: tuple[str, ...], sizes: tuple[int, ...], limit_s: float
    ) -> list[Result]:
        """Each group (disjoint) measures, all at once. A pair has all its figures or none."""
        names, worlds, order_of = dict[str, int](), list[int](), list[str]()
        for place, group in enumerate(groups):
            names |= dict.fromkeys(group, place)
            order_of.append(secrets.token_hex(16))
            worlds.append(self._order(order_of[place], group, collectives, sizes, limit_s))
        measured: list[list[Measured]] = [[] for _ in groups]
        failed = [self._gone(group) for group in groups]
        stuck: list[list[RankEvidence]] = [[] for _ in groups]
        ended: set[str] = set()

        def take(member: _Member, line: HostLine) -> None:
            place = names[member.place.name]
            if line.order != order_of[place]:  # of one that it was late for
                return
            if line.measured is not None:
                measured[place].append(line.measured)
            stuck[place] += (replace(one, host=member.place.name) for one in line.ranks)
            if line.done:
                ended.add(member.place.name)
                failed[place] = failed[place] or line.failed

        waited = [self.of[name] for name in names if not failed[names[name]]]
        self._listen(waited, START_S + limit_s + LIMIT_S + LEAVE_S, lambda member: member.place.name in ended, take)
        for member in waited:
            if member.place.name not in ended:
                member.failed = member.failed or "its program does not answer any more"
                place = names[member.place.name]
                failed[place] = failed[place] or f"{member.place.name}: {member.failed}"
        return [
            Result(
                () if len(group) == 2 and failed[place] else size_results(measured[place], ranks=worlds[place]),
                _explained(failed[place], stuck[place], worlds[place]),
            )
            for place, group in enumerate(groups)
        ]

    def _gone(self, group: Sequence[str]) -> str:
        return next((f"{name}: {self.of[name].failed}" for name in group if self.of[name].failed), "")

    def _order(
        self, name: str, group: Sequence[str], collectives: tuple[str, ...], sizes: tuple[int, ...], limit_s: float
    ) -> int:
        """Tell the group's members, who meet at the first's store; the number of ranks."""
        greetings = {name: hello for name in group if (hello := self.of[name].hello) is not None}
        world = sum(hello.ranks for hello in greetings.values())
        leader, first = greetings[group[0]], 0
        if self._gone(group):
            return world
        for host, hello in greetings.items():
            self.of[host].tell(
                Order(
                    name=name, store=leader.address, port=leader.port, world=world, first=first,
                    collectives=collectives, sizes=sizes, limit_s=limit_s, start_s=START_S,
                )
            )  # fmt: skip
            first += hello.ranks
        return world


def _explained(failed: str, ranks: Sequence[RankEvidence], world: int) -> str:
    """A collective that hangs, with who holds it up."""
    if not ranks:
        return failed
    seen = analyse(Evidence(ranks=tuple(ranks), world=world))
    named = [one.sentence for one in seen.culprits[:3]]
    if len(seen.culprits) > 3:
        named.append(f"and {len(seen.culprits) - 3} more")
    without = next((text for one in ranks for text in one.missing), "")
    return f"{failed}: " + ("; ".join(named) or seen.summary) + (f" ({without})" if without and not named else "")
