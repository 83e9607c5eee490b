"""Captured outputs, each known by its content whatever its file is called: findings, and what could not be read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from muster.health.hang.analysis import analyse
from muster.health.hang.captures import evidence_of
from muster.health.hang.evidence import Analysis
from muster.health.hardware import (
    fabric_manager,
    infiniband,
    kernel_log,
    nccl_tests,
    node_condition,
    nvidia_smi,
    nvlink,
)
from muster.health.hardware.driver_errors import judge_kernel_log
from muster.health.hardware.error_table import OwnNumbers
from muster.health.hardware.gpu_judge import judge_gpus
from muster.health.machine.expected import Expected
from muster.health.verdicts import Finding, Verdict

_NO_NUMBERS = OwnNumbers()


@dataclass(frozen=True, kw_only=True)
class Recognised:
    """What was in the files."""

    findings: tuple[Finding, ...]
    kinds: Mapping[str, str]
    """File -> what it is, in words; "" for what is of no known form."""
    analysis: Analysis | None = None
    """Of captures of a hang, where there were any."""


@dataclass
class _Host:
    """One host's captures."""

    gpus: dict[str, int] = field(default_factory=dict)
    driver: str = ""


def recognise(
    files: Iterable[tuple[str, bytes]], *, expected: Expected | None = None, own: OwnNumbers = _NO_NUMBERS
) -> Recognised:
    """From (name, content) of files. A name's folder names the host (``node-3/dmesg``); the rest of it means nothing.

    Never raises: what is cut, empty or of no known form is an INCOMPLETE finding.
    """
    wanted = expected or Expected()
    named = [(name, content, kind_of(content)) for name, content in files]
    hosts: dict[str, _Host] = {}
    for name, content, kind in named:  # first, since other files need to know which GPU has which address
        if kind in (QUERY, CSV):
            report = (nvidia_smi.read_query if kind == QUERY else nvidia_smi.read_csv)(_text(content))
            host = hosts.setdefault(_host_of(name), _Host())
            host.gpus |= {gpu.address: gpu.index for gpu in report.gpus if gpu.address and gpu.index is not None}
            host.driver = host.driver or report.driver
    findings: list[Finding] = []
    for name, content, kind in named:
        if kind in _JUDGES:
            host = hosts.get(_host_of(name), _Host())
            found = _JUDGES[kind](_text(content), host, wanted, own)
            findings += [replace(one, host=one.host or _host_of(name)) for one in found]
        elif not kind:
            what = "is empty" if not content.strip() else "is of no known form"
            message = f"{name} {what}: nothing was learned from it"
            findings.append(Finding(check="capture", verdict=Verdict.INCOMPLETE, host=_host_of(name), message=message))
    hang = [(name, content) for name, content, kind in named if kind == HANG]
    analysis = analyse(evidence_of(hang)) if hang else None
    if analysis is not None:
        findings += _of_hang(analysis)
    return Recognised(findings=tuple(findings), kinds={name: kind for name, _, kind in named}, analysis=analysis)


QUERY, CSV, KERNEL_LOG = "nvidia-smi -q", "nvidia-smi --query-gpu", "kernel log"
NVLINK, IBSTAT, SYSFS = "nvidia-smi nvlink", "ibstat", "files of /sys/class/infiniband"
NODES = "nodes of Kubernetes"
NCCL_TESTS, FABRIC_MANAGER, HANG = "nccl-tests", "status of the fabric manager", "capture of a hang"


def kind_of(content: bytes) -> str:
    """What ``content`` is, in words; "" for no known form."""
    text = _text(content)
    for kind, fits in (
        (NODES, node_condition.is_nodes), (QUERY, nvidia_smi.is_query),
        (NVLINK, nvlink.is_nvlink), (IBSTAT, infiniband.is_ibstat),
        (SYSFS, infiniband.is_sysfs), (NCCL_TESTS, nccl_tests.is_nccl_tests), (CSV, nvidia_smi.is_csv),
        (FABRIC_MANAGER, fabric_manager.is_fabric_manager),
    ):  # fmt: skip
        if fits(text):
            return kind
    if _is_hang(content):
        return HANG
    return KERNEL_LOG if kernel_log.is_kernel_log(text) else ""


def _is_hang(content: bytes) -> bool:
    """Known by ``health.hang`` itself, which names what it does not know."""
    missing = evidence_of([("rank-0", content)]).missing
    return bool(content.strip()) and not any("of no known form" in one for one in missing)


def _query(text: str, host: _Host, wanted: Expected, own: OwnNumbers) -> list[Finding]:
    return judge_gpus(nvidia_smi.read_query(text), expected_count=wanted.gpus, expected_source=wanted.source)


def _csv(text: str, host: _Host, wanted: Expected, own: OwnNumbers) -> list[Finding]:
    return judge_gpus(nvidia_smi.read_csv(text), expected_count=wanted.gpus, expected_source=wanted.source)


def _ports(ports: infiniband.Ports, wanted: Expected) -> list[Finding]:
    return infiniband.judge_ports(ports, expected=wanted.ports, rate=wanted.port_gbps, source=wanted.source)


def _sysfs(text: str, host: _Host, wanted: Expected, own: OwnNumbers) -> list[Finding]:
    found = infiniband.read_sysfs(infiniband.files_of_listing(text))
    if not text.endswith("\n"):
        found = replace(found, missing="the last line is cut")
    return _ports(found, wanted)


def _kernel_log(text: str, host: _Host, wanted: Expected, own: OwnNumbers) -> list[Finding]:
    return judge_kernel_log(kernel_log.read_kernel_log(text), gpus=host.gpus, own=own)


_JUDGES: Mapping[str, Callable[[str, _Host, Expected, OwnNumbers], list[Finding]]] = {
    QUERY: _query,
    CSV: _csv,
    SYSFS: _sysfs,
    KERNEL_LOG: _kernel_log,
    NODES: lambda text, host, wanted, own: node_condition.judge_nodes(text, own),
    IBSTAT: lambda text, host, wanted, own: _ports(infiniband.read_ibstat(text), wanted),
    NVLINK: lambda text, host, wanted, own: nvlink.judge_links(nvlink.read_nvlink(text)),
    NCCL_TESTS: lambda text, host, wanted, own: nccl_tests.judge_nccl_tests(nccl_tests.read_nccl_tests(text)),
    FABRIC_MANAGER: lambda text, host, wanted, own: [fabric_manager.judge_fabric_manager(text, driver=host.driver)],
}


def _of_hang(analysis: Analysis) -> list[Finding]:
    """A culprit is noted: a hang's place in a program is nobody's hardware (``muster why`` says more)."""
    found = [
        Finding(
            check="hang", verdict=Verdict.NOTE, host=one.host, gpu=one.gpu, value=one.kind.value,
            message=f"rank {one.rank} {one.because}", command="muster why --from ...",
        )
        for one in analysis.culprits
    ]  # fmt: skip
    return found + [Finding(check="hang", verdict=Verdict.INCOMPLETE, message=text) for text in analysis.missing]


def _host_of(name: str) -> str:
    parts = re.split(r"[/\\]", name)
    return parts[-2] if len(parts) > 1 and parts[-2] not in (".", "..") else ""


def _text(content: bytes) -> str:
    return content.decode(errors="replace")
