"""Several hosts side by side: the odd one named, and the command that takes a faulty one out."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from muster.catalog.rows import table
from muster.health.machine.judge import FAULTY, FEWEST, SUSPECT
from muster.health.machine.report import MachineReport
from muster.health.verdicts import Finding, Verdict, worst


def compare_hosts(reports: Sequence[MachineReport]) -> list[Finding]:
    """What differs between hosts that should be alike: driver, firmware, count of GPUs, median speeds."""
    found = [
        *_odd(reports, "driver", lambda report: report.gpus.driver if report.gpus else ""),
        *_odd(reports, "VBIOS", _vbios),
        *_odd(reports, "number of GPUs", lambda report: str(len(report.gpus.gpus)) if report.gpus else ""),
    ]
    for what in sorted({speed.what for report in reports for speed in report.speeds}):
        found += _slow_hosts(reports, what)
    return found


def _vbios(report: MachineReport) -> str:
    return ", ".join(sorted({gpu.vbios for gpu in report.gpus.gpus if gpu.vbios})) if report.gpus else ""


def _odd(reports: Sequence[MachineReport], name: str, value: Callable[[MachineReport], str]) -> Iterator[Finding]:
    values = {report.host: value(report) for report in reports if value(report)}
    counts = Counter(values.values())
    if len(counts) < 2:
        return
    common, most = counts.most_common(1)[0]
    if 2 * most <= len(values):
        text = f"hosts differ in {name}: " + ", ".join(f"{host} {one}" for host, one in sorted(values.items()))
        yield Finding(check="fleet.version", verdict=Verdict.NOTE, message=text, expected="equal on all hosts")
        return
    for host, one in values.items():
        if one != common:
            yield Finding(
                check="fleet.version", verdict=Verdict.NOTE, host=host, value=one, expected=common,
                message=f"{name} {one}, and {most} of {len(values)} hosts have {common}",
            )  # fmt: skip


def _slow_hosts(reports: Sequence[MachineReport], what: str) -> Iterator[Finding]:
    medians: dict[str, float] = {}
    unit = ""
    for report in reports:
        speeds = [speed for speed in report.speeds if speed.what == what and not speed.failed]
        if speeds:
            medians[report.host], unit = median(speed.value for speed in speeds), speeds[0].unit
    if len(medians) < FEWEST:
        return
    middle = median(medians.values())
    for host, value in medians.items():
        lack = 1 - value / middle if middle > 0 else 0.0
        if lack > SUSPECT:
            yield Finding(
                check=f"fleet.{what}",
                verdict=Verdict.DRAIN if lack > FAULTY else Verdict.NOTE,
                host=host,
                message=f"{what} {lack:.0%} slower than the median of {len(medians)} hosts",
                value=f"{value:,.1f} {unit}",
                expected=f"> {middle * (1 - SUSPECT):,.1f} {unit}",
                source="compared with the other hosts",
            )


def commands(findings: Iterable[Finding], *, backend: str, reserved: bool = False, zone: str = "") -> dict[str, str]:
    """Faulty host -> the command that takes it out, by where it runs; none where no scheduler takes such a command.

    Google takes a report of a faulty host for machines that a reservation holds alone (``reserved``): for Spot and
    flex-start it answers INSTANCES_WITHOUT_RESERVATION_NOT_SUPPORTED (Compute Engine, "Report faulty hosts").
    """
    by_host: dict[str, list[Finding]] = {}
    for one in findings:
        if one.host and one.verdict.faulty:
            by_host.setdefault(one.host, []).append(one)
    result = {}
    for host, here in by_host.items():
        gravest = max(here, key=lambda one: (one.verdict is Verdict.REPLACE, one.verdict is Verdict.DRAIN))
        text = f"muster: {gravest.message}"[:200]
        reason, name = shlex.quote(text), shlex.quote(host)
        if (typed := taking_out(backend, host, text)) is not None:
            result[host] = typed
        if typed is not None and reserved and _row(backend).get("on_google") and worst(here) is Verdict.REPLACE:
            behaviour = "SILENT_DATA_CORRUPTION" if gravest.check == "gpu.bits" else "UNRECOVERABLE_GPU_ERROR"
            where = f" --zone {shlex.quote(zone)}" if zone else ""
            result[host] += (
                f" && gcloud compute instances report-host-as-faulty {name}{where}"
                f" --disruption-schedule=IMMEDIATE --fault-reasons=behavior={behaviour},description={reason}"
            )
    return result


def taking_out(backend: str, machine: str, reason: str) -> str | None:
    """The command that keeps new work from a machine, to be typed; None: no scheduler places work there."""
    command = _row(backend).get("command")
    return command.format(host=shlex.quote(machine), reason=shlex.quote(reason)) if command else None


def _row(backend: str) -> dict[str, Any]:
    found: dict[str, Any] = table("take_out.yaml", "health")["take_out"].get(backend, {})
    return found
