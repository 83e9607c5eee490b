"""From what was captured of all ranks to the one that holds the others up. Pure.

Rules, the surest first; the first that names a rank decides:

1. a process that is gone or stopped;
2. members of a group that called different collectives at the same number;
3. whom the others wait for, by the flight recorders (``wait_graph``), and why, by its own stack and findings;
4. without recorders: whose stack is not in a collective while others' are;
5. a rank that NCCL's own report cannot reach; a host with faulty hardware.

Of captures that people send, a rank of which there is nothing is the first suspect: what it would show lowers the
confidence in the others, unless they were seen stopped or gone. Of a run that is asked, its hosts are looked after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from muster.health.hang.evidence import Analysis, Confidence, Culprit, Evidence, Kind, RankEvidence
from muster.health.hang.stacks import Thread, main_thread
from muster.health.hang.wait_graph import Mismatch, Wait, WaitGraph, describe, ranks_text, shape


def analyse(evidence: Evidence) -> Analysis:
    """Who holds the run up, and why; never an error."""
    ranks = {one.rank: one for one in evidence.ranks}
    recorders = {rank: one.recorder for rank, one in ranks.items() if one.recorder is not None}
    members = {rank for rec in recorders.values() for group in rec.groups.values() for rank in group.members}
    numbered = max(ranks, default=-1) + 1 if len(ranks) > 1 else 0  # a gap in the numbers of files
    everybody = sorted({*ranks, *members, *range(numbered if evidence.world is None else evidence.world)})
    waiting = {rank for rank, one in ranks.items() if one.recorder is None and _in_collective(one)}
    silent = tuple(rank for rank in everybody if rank not in recorders and rank not in waiting)
    graph = WaitGraph(recorders, silent)
    culprits = (
        _not_running(ranks)
        or _mismatched(ranks, graph)
        or _awaited(ranks, graph)
        or _outside_collectives(ranks)
        or _unreachable(evidence, ranks)
        or _faulty(ranks)
    )
    order = list(Confidence)
    culprits = sorted(culprits, key=lambda one: (order.index(one.confidence), one.rank))
    absent = [rank for rank in everybody if rank not in ranks]
    if evidence.world is None and absent and not any(one.kind in (Kind.STOPPED, Kind.DEAD) for one in culprits):
        culprits = _suspects(absent, ranks, graph) + [_less_sure(one) for one in culprits if one.rank not in absent]
    named = {one.rank for one in culprits}
    return Analysis(
        culprits=tuple(culprits),
        victims=len([rank for rank in everybody if rank not in named]) if culprits else 0,
        summary="" if culprits else _nobody(ranks, graph),
        missing=_missing(evidence, everybody, ranks),
    )


def _suspects(absent: list[int], ranks: Mapping[int, RankEvidence], graph: WaitGraph) -> list[Culprit]:
    """None where less was captured than is missing: then it was not collected."""
    found = []
    for rank in absent if len(absent) <= len(ranks) else ():
        wait = graph.awaited_in(rank)
        waits = f", and others wait for it in {_text(wait)}" if wait is not None else ""
        one = _culprit(
            RankEvidence(rank=rank), Kind.UNKNOWN, Confidence.LOW, f"has left nothing that can be read{waits}"
        )
        found.append(one if wait is None else replace(one, group=wait.group.words, operation=wait.operation.name))
    return found


def _less_sure(one: Culprit) -> Culprit:
    return replace(one, confidence=Confidence.MEDIUM if one.confidence is Confidence.HIGH else Confidence.LOW)


def _not_running(ranks: Mapping[int, RankEvidence]) -> list[Culprit]:
    found = []
    for one in ranks.values():
        if one.process is not None and one.process.dead:
            oom = one.cgroup is not None and (one.cgroup.oom_kills or 0) > 0
            why = "is gone" + ("; the kernel has killed for memory in its cgroup" if oom else "")
            faulty = _of_hardware(one, why)
            found.append(faulty or _culprit(one, Kind.DEAD, Confidence.HIGH, why))
        elif one.process is not None and one.process.stopped:
            found.append(_culprit(one, Kind.STOPPED, Confidence.HIGH, one.process.words, place=_place(one)))
    return found


def _mismatched(ranks: Mapping[int, RankEvidence], graph: WaitGraph) -> list[Culprit]:
    found = graph.mismatch()
    if found is None:
        return []
    others = [rank for rank in sorted(found.called) if rank not in found.odd or found.even_split]
    return [_odd_one(rank, ranks, found, [other for other in others if other != rank]) for rank in found.odd]


def _odd_one(rank: int, ranks: Mapping[int, RankEvidence], found: Mismatch, others: list[int]) -> Culprit:
    mine, theirs = found.called[rank], found.called[others[0]]
    place, other = _place(ranks[rank]), _place(ranks[others[0]])
    confidence = Confidence.HIGH if place and other and not found.even_split else Confidence.MEDIUM
    called = theirs.name if theirs.name != mine.name else shape(theirs)
    why = f"called {describe(mine, found.group)} where {ranks_text(others)} called {called}"
    return replace(
        _culprit(ranks[rank], Kind.MISMATCH, confidence, why, place=place),
        group=found.group.words,
        operation=mine.name,
        other_place=other,
    )


def _awaited(ranks: Mapping[int, RankEvidence], graph: WaitGraph) -> list[Culprit]:
    last, ring = graph.holding_up()
    known = [rank for rank in last if rank in ranks]
    found = []
    for rank in known or last:  # a rank without any capture may wait itself
        wait = graph.awaited_in(rank)
        assert wait is not None  # it is one that others wait for
        one = ranks.get(rank, RankEvidence(rank=rank))
        if ring:
            why = f"is in a ring of ranks that wait for each other ({ranks_text(last)}), in {_text(wait)}"
            culprit = _culprit(one, Kind.MISMATCH, Confidence.LOW, why, place=_place(one))
        else:
            culprit = _why(one, graph, wait)
        group, operation = wait.group, wait.operation
        if rank in graph.recorders and graph.recorders[rank].unfinished:
            operation = graph.recorders[rank].unfinished[0]
            group = graph.recorders[rank].groups[operation.group]
        found.append(replace(culprit, group=group.words, operation=operation.name))
    return found


def _why(one: RankEvidence, graph: WaitGraph, wait: Wait) -> Culprit:
    """What keeps a rank that others wait for."""
    recorder = graph.recorders.get(one.rank)
    by = f" (behind by {wait.behind})" if wait.behind is not None and wait.behind > 1 else ""
    late = f"has not come to {_text(wait)}{by}"
    faulty = _of_hardware(one, late)
    if faulty is not None:
        return faulty
    within = recorder is not None and bool(recorder.unfinished)
    if within and recorder is not None:
        first = recorder.unfinished[0]
        late = f"does not finish {describe(first, recorder.groups[first.group])}{by}"
    main = main_thread(one.threads or ())
    if main is None and one.answers is False:
        why = f"{late}; its process lives and no thread of Python answers: code in C keeps Python's lock"
        return _culprit(one, Kind.GIL, Confidence.MEDIUM, why)
    if main is None:
        if within and recorder is not None and recorder.unfinished[0].backend.startswith("nccl"):
            return _culprit(one, Kind.GPU, Confidence.MEDIUM, f"{late}: called, but its GPU does not complete it")
        return _culprit(one, Kind.UNKNOWN, Confidence.MEDIUM, late)
    if within and recorder is not None and main.in_collective and not main.blocked_in_c:
        kind = Kind.GPU if recorder.unfinished[0].backend.startswith("nccl") else Kind.UNKNOWN
        return _culprit(one, kind, Confidence.MEDIUM, late, place=_place(one))
    mute = recorder is None and bool(graph.recorders)
    confidence = Confidence.MEDIUM if wait.behind is None and not mute else Confidence.HIGH
    return _by_stack(one, main, late, mute=mute, confidence=confidence)


def _by_stack(one: RankEvidence, main: Thread, late: str, *, mute: bool, confidence: Confidence) -> Culprit:
    """``mute``: its recorder does not answer where others' do."""
    place = _place(one)
    if main.blocked_in_c or (main.owns_gil and mute):
        return _culprit(one, Kind.GIL, confidence, f"keeps Python's lock in C code; it {late}", place=place)
    device = f" in {one.process.wchan}" if one.process is not None and one.process.wchan else ""
    stuck = f", {one.process.words}{device}" if one.process is not None and one.process.state == "D" else ""
    if main.in_loader:
        return _culprit(one, Kind.LOADER, confidence, f"waits for data{stuck}; it {late}", place=place)
    return _culprit(one, Kind.CODE, confidence, f"{late}{stuck}; it is", place=place)


def _outside_collectives(ranks: Mapping[int, RankEvidence]) -> list[Culprit]:
    seen = {rank: main for rank, one in ranks.items() if (main := main_thread(one.threads or ())) is not None}
    within = [rank for rank, main in seen.items() if main.in_collective]
    if not within:
        return []
    late = f"is not in a collective, and {ranks_text(within)} {'is' if len(within) == 1 else 'are'}"
    return [
        _by_stack(ranks[rank], main, late, mute=False, confidence=Confidence.LOW)
        for rank, main in seen.items()
        if rank not in within
    ]


def _unreachable(evidence: Evidence, ranks: Mapping[int, RankEvidence]) -> list[Culprit]:
    if evidence.ras is None:
        return []
    processes = {(one.host, one.pid): one for one in ranks.values()}
    by_pid = {one.pid: one for one in ranks.values() if one.pid is not None}
    alone = len(by_pid) == len(ranks)
    found = []
    for named in (*evidence.ras.silent, *evidence.ras.behind):
        one = processes.get((named.node, named.pid)) or (by_pid.get(named.pid) if alone else None)
        if one is None and named.rank is not None:
            one = ranks.get(named.rank, RankEvidence(rank=named.rank, host=named.node, pid=named.pid))
        if one is not None:
            says = "does not answer NCCL's RAS" if named.launched is None else "launched fewer collectives (NCCL's RAS)"
            found.append(_culprit(one, Kind.UNKNOWN, Confidence.LOW, says, place=_place(one)))
    return list({one.rank: one for one in found}.values())


def _faulty(ranks: Mapping[int, RankEvidence]) -> list[Culprit]:
    found = (_of_hardware(one, "") for one in ranks.values())
    return [replace(one, confidence=Confidence.LOW) for one in found if one is not None]


def _of_hardware(one: RankEvidence, late: str) -> Culprit | None:
    bad = next((finding for finding in one.findings if finding.verdict.faulty), None)
    if bad is None:
        return None
    kind = Kind.LINK if bad.check.startswith("net.") else Kind.GPU
    why = f"{late}: {bad.message}" if late else f"has a fault: {bad.message}"
    return replace(_culprit(one, kind, Confidence.HIGH, why), gpu=bad.gpu)


def _culprit(one: RankEvidence, kind: Kind, confidence: Confidence, why: str, place: str = "") -> Culprit:
    return Culprit(rank=one.rank, host=one.host, kind=kind, confidence=confidence, because=why, place=place)


def _place(one: RankEvidence) -> str:
    """The line of the program that its main thread is in; of one that waits for data, the line that gets it."""
    threads = one.threads or ()
    main = main_thread(threads)
    if main is None or not main.frames:
        return ""
    if main.in_loader:
        readers = [each for each in threads if each is not main and each.in_loader and each.user_line is not None]
        frame = (readers[0] if readers else main).user_line or main.frames[0]
    else:
        frame = main.user_line or main.frames[0]
    return frame.place


def _in_collective(one: RankEvidence) -> bool:
    main = main_thread(one.threads or ())
    return main is not None and main.in_collective


def _text(wait: Wait) -> str:
    return describe(wait.operation, wait.group)


def _nobody(ranks: Mapping[int, RankEvidence], graph: WaitGraph) -> str:
    within = [rank for rank, recorder in graph.recorders.items() if recorder.unfinished]
    if within:
        rank = within[0]
        first = graph.recorders[rank].unfinished[0]
        called = describe(first, graph.recorders[rank].groups[first.group])
        return (
            f"no culprit: {ranks_text(within)} {'is' if len(within) == 1 else 'are'} in {called}, "
            "and no rank is behind; suspect the link between them"
        )
    if not ranks:
        return "no culprit: nothing was captured"
    if all(_in_collective(one) for one in ranks.values()):
        return "no culprit: all ranks are in a collective, and none is stopped; suspect the link between them"
    return "no culprit: no rank waits for another in what was captured"


def _missing(evidence: Evidence, everybody: list[int], ranks: Mapping[int, RankEvidence]) -> tuple[str, ...]:
    found = list(evidence.missing)
    lacking = (
        ("nothing of", [rank for rank in everybody if rank not in ranks]),
        ("no flight recorder of", [rank for rank, one in ranks.items() if one.recorder is None]),
        ("no stack of", [rank for rank, one in ranks.items() if one.threads is None]),
    )
    found += [f"{words} {ranks_text(absent)}" for words, absent in lacking if absent]
    found += [f"rank {rank}: {sentence}" for rank, one in sorted(ranks.items()) for sentence in one.missing]
    return tuple(found)
