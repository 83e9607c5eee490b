"""The fabric manager: ``systemctl status nvidia-fabricmanager``, its journal, and ``/var/log/fabricmanager.log``."""

from __future__ import annotations

import re

from muster.health.hardware.error_table import error_rows
from muster.health.hardware.kernel_log import Family
from muster.health.verdicts import Finding, Verdict

_ACTIVE = re.compile(r"^\s*Active: (\S+)(?: \((.*?)\))?(?= |$)(.*\n)?", re.MULTILINE)
_VERSION = re.compile(r"[Ff]abric ?[Mm]anager version(?: is)?(?: ?:)? ?(\d+(?:\.\d+)+)\b")
_BEGIN = re.compile(rf"{_VERSION.pattern}|: Starting .*fabric ?manager", re.IGNORECASE)
_LOG = re.compile(r"^\[\w{3} \d\d \d{4} [\d:]{8}\] \[[A-Z]+\]|\bnv-fabricmanager\[\d+\]:", re.MULTILINE)
_SWITCH = re.compile(r"detected NVSwitch (non-)?fatal error (\d{1,9})")
_SOURCE = "NVIDIA Fabric Manager user guide"
_RESTART = "systemctl restart nvidia-fabricmanager"
#: Of a switch's links: all GPUs of the host (user guide, D.5).
_RESET = f"nvidia-smi --gpu-reset; {_RESTART}"
#: (a line, what it means, its verdict), the first that fits; lines of the newest start (leptonai/gpud, fabric-manager).
_SEVERE = r"\[(?:ERROR|CRITICAL|FATAL)\].*"
_LINES = (
    (r"don't match with any supported system topology", "NVSwitches are missing", Verdict.REPLACE),
    (r"version.*(?:mismatch|don't match|doesn't match)", "its version is not the driver's", Verdict.DRAIN),
    (r"failed to find the GPU handle", "a GPU has left the NVLink fabric", Verdict.DRAIN),
    (r"detected GPU fatal error", "a GPU of the fabric has a fatal error", Verdict.RESET),
    (_SEVERE + r"(?i:nvlink|trunk|access link|training|lane)", "NVLinks of the fabric failed", Verdict.DRAIN),
    (_SEVERE + r"(?i:failed to initialize|abort|fatal|in a failed state)", "the fabric manager failed", Verdict.DRAIN),
    (r"NV_WARN_NOTHING_TO_DO", "it found no NVSwitch, and none may be needed here", Verdict.NOTE),
    (_SEVERE + r"|\[WARN(?:ING)?\]|failed! Exit code", "the fabric manager wrote errors or warnings", Verdict.NOTE),
    (r"(?i)fabric ?manager.*: Failed with|: Failed to start .*fabric ?manager", "it has failed", Verdict.DRAIN),
)


def is_fabric_manager(text: str) -> bool:
    named = r"unit nvidia-fabricmanager|NV_WARN_NOTHING_TO_DO|fabric ?manager(?:[. ]service| version)"
    return bool(_LOG.search(text) or re.search(named, text, re.IGNORECASE))


def judge_fabric_manager(text: str, *, driver: str = "") -> list[Finding]:
    """Whether it runs, of the driver's version exactly where both are known, and what it says of switches and links.

    Without it, GPUs behind NVSwitch answer CUDA error 802, "system not yet initialized" (NVIDIA Fabric Manager guide).
    """
    active, version = _ACTIVE.search(text), [*_VERSION.finditer(text)]
    newest = text[max((one.start() for one in _BEGIN.finditer(text)), default=0) :]
    idle = "NV_WARN_NOTHING_TO_DO" in newest
    found = [one for one in _of_log(newest) if not (idle and one.verdict.faulty)]
    if re.search(r"could not be found|Loaded: not-found", text):
        message = "no fabric manager is installed: none is needed without NVSwitch"
        found.append(_finding(Verdict.NOTE, message))
    elif active is not None and active[3] is None:
        found.append(_finding(Verdict.INCOMPLETE, "the status of the fabric manager is not whole"))
    elif active is not None and (active[1], active[2]) != ("active", "running") and not idle:
        message, line = "the fabric manager does not run", active[0].strip()
        found.append(_finding(Verdict.DRAIN, message, line, _RESTART, value=active[1], expected="active (running)"))
    elif active is None and not _LOG.search(text) and not found:
        found.append(_finding(Verdict.INCOMPLETE, "the status of the fabric manager is not whole"))
    if version and driver and version[-1][1] != driver:
        message = f"the fabric manager is {version[-1][1]} and the driver {driver}: they must be equal"
        found.append(_finding(Verdict.DRAIN, message, version[-1][0], value=version[-1][1], expected=driver))
    if not found and not text.endswith("\n") and active is None:
        found.append(_finding(Verdict.INCOMPLETE, "the last line of the fabric manager's log has no end"))
    line = active[0].strip() if active is not None else ""
    said = "the fabric manager runs" if line else "nothing is wrong in the fabric manager's log"
    return found or [_finding(Verdict.HEALTHY, said, line)]


def _of_log(text: str) -> list[Finding]:
    """One finding for each kind of line."""
    found: dict[tuple[Verdict, str], list[str]] = {}
    for line in text.splitlines():
        if match := _SWITCH.search(line):
            row = error_rows(Family.SXID).get(int(match[2]))
            verdict = Verdict.NOTE if match[1] else row.verdict if row and row.verdict.faulty else Verdict.RESET
            what = f"NVSwitch error {match[2]}, {match[1] or ''}fatal" + (f": {row.what}" if row else "")
            found.setdefault((verdict, what), []).append(line)
        elif row_ := next(((what, verdict) for pattern, what, verdict in _LINES if re.search(pattern, line)), None):
            found.setdefault((row_[1], row_[0]), []).append(line)
    return [
        _finding(
            verdict,
            what + (f", {len(lines)} times" if len(lines) > 1 else ""),
            lines[0].strip(),
            _RESET if verdict is Verdict.RESET else _RESTART,
        )
        for (verdict, what), lines in found.items()
    ]


def _finding(
    verdict: Verdict, message: str, evidence: str = "", command: str = "", *, value: str = "", expected: str = ""
) -> Finding:
    return Finding(
        check="fabric_manager", verdict=verdict, message=message, evidence=evidence, source=_SOURCE,
        command=command if verdict.faulty else "", value=value, expected=expected,
    )  # fmt: skip
