"""The tables that nccl-tests print (``all_reduce_perf`` and its like), old and new forms."""

from __future__ import annotations

import re
from dataclasses import dataclass

from muster.health.verdicts import Finding, Verdict

_COLLECTIVE = re.compile(r"Collective test starting: (\w+?)_perf|\b([a-z_]+?)_perf(?:_mpi)?(?:\s+-|\s*$)", re.MULTILINE)
_RANGE = re.compile(r"minBytes (\d{1,18}) maxBytes (\d{1,18})")
_RANK = re.compile(r"^#\s+Rank +(\d{1,6}) .*?\bon +(\S+) device +(\d{1,6}) \[\w+(?::\w+)*\] (.*)$", re.MULTILINE)
_HEAD = re.compile(r"^#\s+size\s+count", re.MULTILINE)
_ROW = re.compile(r"^\s*(\d{1,18})\s+(\d{1,18})\s+([a-z]\w*)((?:\s+\S+){8,10})\s*$")
_AVERAGE = re.compile(r"^# Avg bus bandwidth\s*:\s*([\d.]{1,20}) *$", re.MULTILINE)
_BOUNDS = re.compile(r"^# Out of bounds values\s*:\s*(\d{1,18}) (OK|FAILED)", re.MULTILINE)
_UNCHECKED = re.compile(r"\bvalidation: 0\b")  # then "0 OK" means nothing
_FAILURE = re.compile(r"^.*(?:Test (?:NCCL|CUDA) failure|NCCL WARN|unhandled (?:system|cuda) error).*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One message size. Bandwidths in GB/s (1e9), times in microseconds; ``wrong``: None where it was not checked."""

    size_bytes: int
    busbw: float
    busbw_in_place: float
    time_us: float
    time_us_in_place: float
    wrong: int | None


@dataclass(frozen=True, kw_only=True)
class NcclTable:
    collective: str
    """``all_reduce``, ``all_gather``...; inferred from the figures if the output does not name it; empty: unknown."""
    rows: tuple[Row, ...]
    hosts: tuple[str, ...]
    gpus: int
    device: str
    wrong_values: int | None = None
    failure: str = ""
    missing: str = ""

    @property
    def largest(self) -> Row | None:
        """The row that says how fast the network is: an average over sizes says little (58 GB/s for 223 at 8 GiB)."""
        return max(self.rows, key=lambda row: row.size_bytes, default=None)


def is_nccl_tests(text: str) -> bool:
    return _HEAD.search(text) is not None and "busbw" in text


def read_nccl_tests(text: str) -> NcclTable:
    """Never raises. Lines that NCCL itself or a launcher wrote between the rows are passed over."""
    rows, cells = [], list[str]()
    for line in text.splitlines():
        if (match := _ROW.match(line)) and (row := _row(int(match[1]), match[4].split())) is not None:
            rows.append(row)
            cells = match[4].split()
    ranks = _RANK.findall(text)
    bounds, failure, named = _BOUNDS.search(text), _FAILURE.search(text), _COLLECTIVE.search(text)
    collective = named[1] or named[2] if named else _told_from(rows, len(ranks), cells)
    return NcclTable(
        collective=collective,
        rows=tuple(rows),
        hosts=tuple(dict.fromkeys(host for _, host, _, _ in ranks)),
        gpus=len(ranks),
        device=ranks[0][3].strip() if ranks else "",
        wrong_values=int(bounds[1]) if bounds and not _UNCHECKED.search(text) else None,
        failure=failure[0].strip() if failure else "",
        missing=_missing(text, rows),
    )


def _missing(text: str, rows: list[Row]) -> str:
    limits = _RANGE.search(text)
    if not _AVERAGE.search(text):
        return "it has no last line (average bus bandwidth)"
    if limits and not any(row.size_bytes * 2 > int(limits[2]) for row in rows):
        return f"it should go to {limits[2]} bytes and goes to {max((row.size_bytes for row in rows), default=0)}"
    return "" if rows else "there is no row in it"


def judge_nccl_tests(table: NcclTable) -> list[Finding]:
    """Wrong values and failures. What the bandwidth should be depends on the machine: ``largest`` is noted with it."""
    out = []
    if table.failure:
        message = "the collective test failed: nothing is known of the network from it"
        out.append(
            Finding(check="net.busbw", verdict=Verdict.INCOMPLETE, message=message, evidence=table.failure[:300])
        )
    elif table.missing:
        out.append(Finding("net.busbw", Verdict.INCOMPLETE, f"the output of nccl-tests is not whole: {table.missing}"))
    wrong = table.wrong_values or sum(row.wrong or 0 for row in table.rows)
    if wrong:
        message = f"{wrong} wrong values in {table.collective or 'a collective'}: a GPU or link corrupts data silently"
        out.append(
            Finding(
                check="net.values", verdict=Verdict.REPLACE, message=message, value=str(wrong), expected="0",
                host=table.hosts[0] if len(table.hosts) == 1 else "", source="nccl-tests' own check of results",
            )
        )  # fmt: skip
    largest = table.largest
    if largest is not None:
        size = f"{largest.size_bytes / (1 << 20):g} MiB"
        message = (
            f"{table.collective or 'collective'} of {size} on {table.gpus} GPUs: bus bandwidth {largest.busbw:g} GB/s"
        )
        unchecked = table.wrong_values is None and all(row.wrong is None for row in table.rows)
        if unchecked:
            message += ", results not checked"
        verdict = Verdict.NOTE if out else Verdict.HEALTHY
        out.append(Finding(check="net.busbw", verdict=verdict, message=message, value=f"{largest.busbw:g}"))
    return out


def _row(size: int, cells: list[str]) -> Row | None:
    """The last eight cells are two times (time, algbw, busbw, wrong); before them: redop, root, where there are any."""
    try:
        time_us, _, busbw, wrong, in_place_us, _, in_place, wrong_too = cells[-8:]
        if time_us == busbw == "N/A":  # measured in place only, as torch reduces
            time_us, busbw = in_place_us, in_place
        if in_place_us == in_place == "N/A":
            in_place_us, in_place = time_us, busbw
        counts = [int(float(cell)) for cell in (wrong, wrong_too) if cell != "N/A"]
        return Row(
            size_bytes=size, busbw=float(busbw), busbw_in_place=float(in_place), time_us=float(time_us),
            time_us_in_place=float(in_place_us), wrong=sum(counts) if counts else None,
        )  # fmt: skip
    except (ValueError, OverflowError):
        return None


def _told_from(rows: list[Row], gpus: int, cells: list[str]) -> str:
    """By the last row (nccl-tests, doc/PERFORMANCE.md, src/*.cu at 2.17): the ratio of bus to algorithm bandwidth is
    2(n-1)/n, (n-1)/n or 1 of size/time; an operation is named where it reduces; only where one rank is the root its
    number stands there; what has no form in place does not check it (N/A)."""
    largest = max(rows, key=lambda row: row.size_bytes, default=None)
    algorithm_gb_s = largest.size_bytes / largest.time_us / 1e3 if largest is not None and largest.time_us > 0 else 0.0
    if largest is None or gpus < 2 or not algorithm_gb_s > 0:
        return ""
    before, checked = cells[:-8], (cells[-5] != "N/A", cells[-1] != "N/A")
    reduces, rooted = before[:1] not in ([], ["none"]), len(before) > 1 and before[1] != "-1"
    ratio, in_place = largest.busbw / algorithm_gb_s, checked != (True, False)
    if abs(ratio - 2 * (gpus - 1) / gpus) < 0.02 and (reduces or not before) and gpus > 2:
        return "all_reduce"
    if abs(ratio - (gpus - 1) / gpus) < 0.02:
        if reduces:
            return "reduce_scatter"
        if rooted:
            return "gather or scatter"
        return "alltoall" if not in_place else "all_gather" if checked[1] or not before else "all_gather or alltoall"
    if abs(ratio - 1) < 0.02:
        if rooted or (gpus == 2 and reduces):
            return ("reduce" if rooted else "all_reduce") if reduces else "broadcast"
        return "sendrecv" if not in_place else ""
    return ""
