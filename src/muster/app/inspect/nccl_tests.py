"""``muster check --network --nccl-tests``: all hosts together as NVIDIA's own programs measure them."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Sequence
from typing import TypeAlias

from muster.app.inspect.network_hosts import Place, Result
from muster.catalog.rows import table
from muster.health.hardware.nccl_tests import NcclTable, read_nccl_tests
from muster.health.network.figures import SizeResult
from muster.probe.programs import output_of

#: The program of each collective (nccl-tests, README).
_PROGRAMS = {
    "all_gather": "all_gather_perf",
    "all_reduce": "all_reduce_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "all_to_all": "alltoall_perf",
}
#: A row is printed when it is measured. For NCCL to find its network before the first: as long as ours may take.
_START_S = 30.0
_NOT_THERE = re.compile(r"not found|No such file|unable to find|not installed|invalid option", re.IGNORECASE)
_LINE = re.compile(r"#|\s*\d+\s+\d+\s+[a-z]")

Ranks: TypeAlias = Sequence[tuple[Place, int]]
"""Hosts with how many ranks each has: one for each GPU."""
Launch: TypeAlias = Callable[[Ranks, int], list[str]]
"""(hosts, seconds) -> what comes before a program that is started once for each rank, and ended after these seconds."""


def launching(backend: str, reach: str) -> Launch:
    """By the back end's row, on this machine; else by ``mpirun`` on the first host, which ``reach`` leads to."""
    rows = table("reach.yaml", "health")
    here = backend in rows["nccl_tests"] and not reach
    template = rows["nccl_tests"][backend if here else "others"]
    before = "" if here else reach or rows["reach"][backend]["command"]

    def argv(hosts: Ranks, limit_s: int) -> list[str]:
        facts = {
            "host": hosts[0][0].name, "hosts": len(hosts), "names": ",".join(place.name for place, _ in hosts),
            "slots": ",".join(f"{place.address or place.name}:{count}" for place, count in hosts),
            "ranks": sum(count for _, count in hosts), "per_host": max(count for _, count in hosts), "limit": limit_s,
        }  # fmt: skip
        words = shlex.split(f"{before} {template}")
        return [re.sub(r"\{(\w+)\}", lambda found: str(facts.get(found[1], found[0])), word) for word in words]

    return argv


def measured_by_nccl_tests(
    hosts: Ranks,
    launch: Launch,
    *,
    collectives: Sequence[str],
    sizes: Sequence[int],
    limit_s: float,
    say: Callable[[str], object],
) -> tuple[Result, list[str]]:
    """(all figures, each program's table). ``sizes``: each twice the one before. ``limit_s``: of each row.

    After a program that printed no row at all, or that hung, the others are not tried: they would do the same.
    """
    results, tables, failed = list[SizeResult](), list[str](), ""
    for collective in collectives:
        name = _PROGRAMS[collective]
        say(f"{name} on {len(hosts)} hosts")
        # The limit there holds where ending the program here does not end it on the hosts (ssh without a terminal).
        total = math.ceil(_START_S + limit_s * (len(sizes) + 1))
        bounds = ["-b", str(sizes[0]), "-e", str(sizes[-1]), "-f", "2", "-g", "1", "-w", "1", "-n", "5"]
        argv = [*launch(hosts, total), name, *bounds]
        try:
            output, code = output_of(argv, limit_s=total + 20, silence_s=_START_S + limit_s, errors=True)
        except OSError as error:
            return Result(results, f"{argv[0]} cannot be started: {error.strerror}"), tables
        text = output.decode(errors="replace")
        seen = read_nccl_tests(text)
        here = [
            SizeResult(
                collective=collective, size_bytes=row.size_bytes, ranks=seen.gpus, seconds=row.time_us / 1e6,
                spread=0.0, wrong=row.wrong or 0,
            )
            for row in seen.rows if row.size_bytes and row.time_us > 0 and not _alone(text)
        ]  # fmt: skip
        results += here
        if here:
            tables.append("\n".join(line for line in text.splitlines() if _LINE.match(line)))
        failed = failed or _why(name, seen, text, code, _START_S + limit_s)
        if code is None or not here:
            break
    return Result(results, failed), tables


def _alone(text: str) -> bool:
    """Several programs that each believe to be the only one: so ``mpirun`` runs what knows no MPI."""
    return len(re.findall(r"^#\s+Rank +0 ", text, re.MULTILINE)) > 1


def _why(name: str, seen: NcclTable, text: str, code: int | None, silence_s: float) -> str:
    """Why there are not all figures; empty: there are."""
    said = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    last = said[-1][:300] if said else "nothing"
    if code is None:
        after = f"after {seen.largest.size_bytes >> 20} MiB" if seen.largest is not None else "from the start"
        return f"{name} hangs {after}: no row within {silence_s:g} s (last: {last})"
    if seen.failure:
        return f"{name}: {seen.failure[:300]}"
    if _alone(text):
        return f"{name} is not built with MPI=1: each of its ranks has measured by itself"
    if code or seen.missing:
        first = next((line for line in said if _NOT_THERE.search(line)), last)
        return f"{name} ended with exit code {code}: {first[:300]}"
    return ""
