"""Captured outputs, each known by its content, not by its file's name: findings, and what could not be read.

One table (``FORMS``) has a row for each form: how it is known, and who judges it. A file may hold several, one after
the other or between other text; every one that is there is judged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from muster.health.hang.analysis import analyse
from muster.health.hang.captures import evidence_of
from muster.health.hang.evidence import Analysis
from muster.health.hardware import (
    dcgm,
    fabric_manager,
    infiniband,
    kernel_events,
    kernel_log,
    nccl_tests,
    node_condition,
    nvidia_smi,
    nvlink,
)
from muster.health.hardware.driver_errors import judge_kernel_log
from muster.health.hardware.error_table import OwnNumbers
from muster.health.hardware.gpu_judge import judge_gpus
from muster.health.hardware.readings import GpuReport
from muster.health.machine.expected import Expected
from muster.health.verdicts import Finding, Verdict

_NO_NUMBERS = OwnNumbers()
_SETTINGS = ("gpu.mig", "gpu.compute_mode")


@dataclass(frozen=True, kw_only=True)
class Recognised:
    """What was in the files."""

    findings: tuple[Finding, ...]
    kinds: Mapping[str, str]
    """File -> what it is, in words; "" for what is of no known form."""
    analysis: Analysis | None = None
    """Of captures of a hang, where there were any."""


@dataclass
class Host:
    """One host: what its captures say of each other, what its machine should have, and the run file's numbers."""

    expected: Expected = field(default_factory=Expected)
    own: OwnNumbers = _NO_NUMBERS
    gpus: dict[str, int] = field(default_factory=dict)
    driver: str = ""


@dataclass(frozen=True)
class Form:
    """``judge``: None for captures of a hang, which are judged together. ``gpus``: of a report of GPUs, its reader."""

    name: str
    fits: Callable[[str], bool]
    judge: Callable[[str, Host], list[Finding]] | None
    gpus: Callable[[str], GpuReport] | None = None


def _of_gpus(name: str, fits: Callable[[str], bool], read: Callable[[str], GpuReport]) -> Form:
    def judge(text: str, host: Host) -> list[Finding]:
        found = judge_gpus(read(text), expected_count=host.expected.gpus, expected_source=host.expected.source)
        mild = _SETTINGS if host.expected.gpus is None else ()  # no fault of a machine that may be meant for other work
        return [replace(one, verdict=Verdict.NOTE) if one.check in mild else one for one in found]

    return Form(name, fits, judge, read)


def _ports(ports: infiniband.Ports, host: Host) -> list[Finding]:
    wanted = host.expected
    return infiniband.judge_ports(ports, expected=wanted.ports, rate=wanted.port_gbps, source=wanted.source)


def _sysfs(text: str, host: Host) -> list[Finding]:
    found = infiniband.read_sysfs(infiniband.files_of_listing(text))
    return _ports(found if text.endswith("\n") else replace(found, missing="the last line is cut"), host)


def _kernel_log(text: str, host: Host) -> list[Finding]:
    return judge_kernel_log(kernel_log.read_kernel_log(text), gpus=host.gpus, own=host.own)


NODES = Form(
    "nodes of Kubernetes", node_condition.is_nodes, lambda text, host: node_condition.judge_nodes(text, host.own)
)
QUERY = _of_gpus("nvidia-smi -q", nvidia_smi.is_query, nvidia_smi.read_query)
XML = _of_gpus("nvidia-smi -q -x", nvidia_smi.is_xml, nvidia_smi.read_xml)
CSV = _of_gpus("nvidia-smi --query-gpu", nvidia_smi.is_csv, nvidia_smi.read_csv)
TABLE = _of_gpus("nvidia-smi", nvidia_smi.is_table, nvidia_smi.read_table)
NVLINK = Form("nvidia-smi nvlink", nvlink.is_nvlink, lambda text, host: nvlink.judge_links(nvlink.read_nvlink(text)))
DCGM = Form("dcgmi", dcgm.is_dcgm, lambda text, host: dcgm.judge_dcgm(text))
IBSTAT = Form("ibstat", infiniband.is_ibstat, lambda text, host: _ports(infiniband.read_ibstat(text), host))
SYSFS = Form("files of /sys/class/infiniband", infiniband.is_sysfs, _sysfs)
NCCL_TESTS = Form(
    "nccl-tests",
    nccl_tests.is_nccl_tests,
    lambda text, host: nccl_tests.judge_nccl_tests(nccl_tests.read_nccl_tests(text)),
)
FABRIC_MANAGER = Form(
    "fabric manager",
    fabric_manager.is_fabric_manager,
    lambda text, host: fabric_manager.judge_fabric_manager(text, driver=host.driver),
)
#: Known by ``health.hang`` itself, which names what it does not know.
HANG = Form("capture of a hang", lambda text: False, None)
#: Tried last, since its lines are of many kinds.
KERNEL_LOG = Form("kernel log", kernel_events.is_kernel_log, _kernel_log)
FORMS = (NODES, QUERY, XML, CSV, TABLE, NVLINK, DCGM, IBSTAT, SYSFS, NCCL_TESTS, FABRIC_MANAGER)


def recognise(
    files: Iterable[tuple[str, bytes]], *, expected: Expected | None = None, own: OwnNumbers = _NO_NUMBERS
) -> Recognised:
    """From (name, content) of files. A name's folder names the host (``node-3/dmesg``); the rest of it means nothing.

    Never raises: what is cut, empty or of no known form is an INCOMPLETE finding.
    """
    decoded = [(name, content, text_of(content)) for name, content in files]
    named = [(name, content, text, _forms(text, content)) for name, content, text in decoded]
    hosts = {_host_of(name): Host(expected=expected or Expected(), own=own) for name, *_ in named}
    for name, _, text, forms in named:  # first, since other files need to know which GPU has which address
        host = hosts[_host_of(name)]
        for report in [form.gpus(text) for form in forms if form.gpus is not None]:
            host.gpus |= {gpu.address: gpu.index for gpu in report.gpus if gpu.address and gpu.index is not None}
            host.driver = host.driver or report.driver
    findings: list[Finding] = []
    for name, content, text, forms in named:
        for form in forms:
            found = form.judge(text, hosts[_host_of(name)]) if form.judge is not None else []
            findings += [replace(one, host=one.host or _host_of(name)) for one in found]
        if not forms:
            what = "is empty" if not content.strip() else "is of no known form"
            message = f"{name} {what}: nothing was learned from it"
            findings.append(Finding(check="capture", verdict=Verdict.INCOMPLETE, host=_host_of(name), message=message))
    hang = [(name, content) for name, content, _, forms in named if HANG in forms]
    analysis = analyse(evidence_of(hang)) if hang else None
    if analysis is not None:
        findings += _of_hang(analysis)
    kinds = {name: _in_words(forms) for name, *_, forms in named}
    return Recognised(findings=tuple(findings), kinds=kinds, analysis=analysis)


def _forms(text: str, content: bytes) -> tuple[Form, ...]:
    """The forms that are in ``content``, which is ``text``; none for what is of no known form."""
    found = [form for form in FORMS if form.fits(text)]
    if (
        not found
        and content.strip()
        and not any("no known form" in one for one in evidence_of([("0", content)]).missing)
    ):
        return (HANG,)
    return (*found, *([KERNEL_LOG] if KERNEL_LOG.fits(text) else []))


def kind_of(content: bytes) -> str:
    """The forms in words; "" for no known form."""
    return _in_words(_forms(text_of(content), content))


def _in_words(forms: Iterable[Form]) -> str:
    return ", ".join(form.name for form in forms)


def _of_hang(analysis: Analysis) -> list[Finding]:
    """A culprit is noted: a hang's place in a program accuses no hardware (``muster why`` says more)."""
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


def text_of(content: bytes) -> str:
    """As text: without colours of a terminal, with lines that end as Linux ends them."""
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", content.decode(encoding, errors="replace")).replace("\r\n", "\n")
