"""``muster check --network``: which host's network is slow, and how fast the whole is.

A program on every host is spoken with by its input and output (``probe.network``); pairs are measured all at once, in
rounds that the figures so far decide (``health.network.search``); then those that are sound are measured together.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster.app.inspect.nccl_tests import Launch, measured_by_nccl_tests
from muster.app.inspect.network_hosts import Crew, Place, Result
from muster.core.errors import UsageError
from muster.core.typed_json import Unreadable, decode, encode
from muster.health.network.expected import Past, judge_history, judge_level
from muster.health.network.figures import COLLECTIVES, Hello, SizeResult
from muster.health.network.judge import judge_pairs, judge_together, judge_values
from muster.health.network.search import Assessment, Figure, Pair, assess, next_round
from muster.health.network.table import nccl_table
from muster.health.verdicts import Finding, Verdict

_PAIR_LIMIT_S = 30.0
_REPEATS = 5
_LEAST = 1 << 20
#: Without GPUs gloo is measured: larger messages say no more, and take long.
_LARGEST, _LARGEST_GLOO = 8 << 30, 64 << 20
_PAIR, _PAIR_GLOO = 1 << 30, 16 << 20


@dataclass(frozen=True, kw_only=True)
class NetworkChecked:
    """``tables``: one for each collective, as nccl-tests print it."""

    findings: tuple[Finding, ...]
    assessment: Assessment
    rounds: int
    tables: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NetworkTest:
    """What is measured. ``limit_s``: of one figure with all its repeats. None: by whether there are GPUs."""

    pair_bytes: int | None = None
    largest_bytes: int | None = None
    limit_s: float = 60.0
    collectives: tuple[str, ...] = COLLECTIVES
    family: str = ""
    nccl_tests: Launch | None = None
    """All together by NVIDIA's programs, started so; None: by ours."""
    busy: str = ""
    """Why the hosts' GPUs are in use; processors are measured all the same."""
    history: Path | None = None
    """A file of former levels, compared with and added to."""
    say: Callable[[str], object] = field(default=lambda text: None)
    """Called with its progress, a line at a time."""


def check_network(hosts: Sequence[Place], argv: Callable[[Place], list[str]], test: NetworkTest) -> NetworkChecked:
    """Measure. Takes the GPUs whole: nothing may run there meanwhile.

    Raises:
        UsageError: the GPUs are in use (``test.busy``).
    """
    with contextlib.ExitStack() as stack:
        crew = Crew(hosts, argv)
        stack.callback(crew.end)
        crew.greet()
        return _measured(crew, test)


def _measured(crew: Crew, test: NetworkTest) -> NetworkChecked:
    test.say(f"{len(crew.ready)} of {len(crew.members)} hosts are ready")
    gloo = all(not one.on_gpus for one in crew.ready)
    if test.busy and not gloo:
        raise UsageError(
            f"{test.busy}: its GPUs are in use", hint="--network takes them whole: muster stop RUN, or later"
        )
    names = [one.place.name for one in crew.ready if gloo or one.on_gpus]
    absent = [
        Finding(
            check="net.reach",
            verdict=Verdict.INCOMPLETE,
            host=one.place.name,
            message=f"no part in it: {one.failed or 'it has no GPU, and others have'}",
        )
        for one in crew.members
        if one.place.name not in names
    ]
    absent += _unlike([one.hello for one in crew.ready if one.hello is not None])
    if len(names) < 2:
        return NetworkChecked(findings=tuple(absent), assessment=assess(names, ()), rounds=0)
    sizes = (test.pair_bytes or (_PAIR_GLOO if gloo else _PAIR),)
    figures: list[Figure] = []
    failures: dict[Pair, str] = {}
    wrong: dict[Pair, int] = {}
    number, limit_s = 0, min(test.limit_s, _PAIR_LIMIT_S)
    while pairs := next_round(names, figures, number):
        number += 1
        test.say(f"round {number}: {len(pairs)} pairs")
        for pair, result in zip(pairs, crew.carry(pairs, ("all_gather",), sizes, limit_s), strict=True):
            best = max(result.sizes, key=lambda one: one.size_bytes, default=None)
            if best is not None and best.wrong:
                wrong[pair] = wrong.get(pair, 0) + best.wrong
            figures.append(Figure(pair=pair, busbw=best.busbw if best else None, spread=best.spread if best else 0.0))
            if best is None:
                failures[pair] = result.failed
                test.say(f"  {pair[0]}, {pair[1]}: {result.failed}")
    seen = assess(names, figures)
    found = [*absent, *judge_pairs(names, figures, seen, failures=failures)]
    group = [name for name in names if name not in seen.slow]
    largest = test.largest_bytes or (_LARGEST_GLOO if gloo else _LARGEST)
    together, tables = Result(), list[str]()
    if len(group) > 1 and any(figure.busbw for figure in figures):
        test.say(f"{len(group)} hosts together")
        ladder = tuple(_doubling(_LEAST, largest))
        if test.nccl_tests is None:
            (together,) = crew.carry([tuple(group)], test.collectives, ladder, test.limit_s)
            tables = list(_tables(crew, group, together.sizes))
        else:
            ranks = [(one.place, one.hello.ranks) for one in crew.ready if one.hello and one.place.name in group]
            together, tables = measured_by_nccl_tests(
                ranks, test.nccl_tests, collectives=test.collectives, sizes=ladder, limit_s=test.limit_s, say=test.say
            )
        found += _of_group(together, len(group), test)
        if not gloo:  # a processor that serves several peers is slower on any network
            found += judge_together(together.sizes, seen, hosts=len(group), size_bytes=sizes[0])
        found += _beside_history(together, crew, len(group), test)
    found += judge_values(wrong, sum(one.wrong for one in together.sizes))
    return NetworkChecked(findings=tuple(found), assessment=seen, rounds=number, tables=tuple(tables))


def _unlike(hellos: Sequence[Hello]) -> Iterator[Finding]:
    """Libraries that differ between the hosts."""
    for what, versions in (("NCCL", {one.nccl for one in hellos}), ("torch", {one.torch for one in hellos})):
        if len(versions) > 1:
            text = (
                f"the hosts have different versions of {what}: {', '.join(sorted(one or 'none' for one in versions))}"
            )
            yield Finding(check="net.versions", verdict=Verdict.NOTE, message=text)


def _of_group(result: Result, hosts: int, test: NetworkTest) -> Iterator[Finding]:
    if result.failed:
        text = f"{hosts} hosts together: {result.failed}"
        yield Finding(check="net.group", verdict=Verdict.INCOMPLETE, message=text, evidence=result.failed)
    for collective in test.collectives:
        here = [one for one in result.sizes if one.collective == collective]
        if here:
            yield judge_level(max(here, key=lambda one: one.size_bytes), hosts=hosts, family=test.family)


def _beside_history(result: Result, crew: Crew, hosts: int, test: NetworkTest) -> Iterator[Finding]:
    """Against former levels; the new one is added to them. One that cannot be kept costs nothing."""
    gathered = [one for one in result.sizes if one.collective == "all_gather"]
    hello = crew.ready[0].hello
    if test.history is None or not gathered or hello is None:
        return
    top = max(gathered, key=lambda one: one.size_bytes)
    library = f"NCCL {hello.nccl}" if hello.nccl else "gloo"
    now = Past(
        family=test.family, hosts=hosts, library="nccl-tests" if test.nccl_tests is not None else library,
        collective=top.collective, size_bytes=top.size_bytes, busbw=top.busbw, date=time.strftime("%Y-%m-%d"),
    )  # fmt: skip
    past: list[Past] = []
    with contextlib.suppress(OSError):
        for line in test.history.read_bytes().splitlines():
            with contextlib.suppress(Unreadable):  # torn by a crash, or of another version
                past.append(decode(Past, line))
    if (finding := judge_history(now, past)) is not None:
        yield finding
    with contextlib.suppress(OSError):
        test.history.parent.mkdir(parents=True, exist_ok=True)
        with test.history.open("ab") as file:
            file.write(encode(now) + b"\n")


def _tables(crew: Crew, group: Sequence[str], measured: Sequence[SizeResult]) -> Iterator[str]:
    ranks = [
        (member.place.name, device, member.hello.device)
        for member in crew.ready
        if member.place.name in group and member.hello is not None
        for device in range(member.hello.ranks)
    ]
    for collective in dict.fromkeys(one.collective for one in measured):
        yield nccl_table([one for one in measured if one.collective == collective], ranks, repeats=_REPEATS)


def _doubling(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2
