"""``dcgmi diag`` and ``dcgmi health --check``, as tables and as JSON (``--json``).

Forms: NVIDIA/DCGM, dcgmi/Diag.cpp and dcgmi/Health.cpp at 72fa3fe; of versions before 4, ``Pass - All`` and ``Fail -
GPUs: 0, 2`` in place of a line for each GPU, and no severities in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from muster.core.typed_json import JsonObject, Unreadable, child, children, parse_object, text, texts, whole
from muster.health.verdicts import Finding, Verdict

_JSON = re.compile(r'"DCGM (?:GPU )?Diagnostic"|"Health Monitor Report"')
_TEXT = re.compile(
    r"^\W*(?:Diagnostic\s+\| Result|Health Monitor Report)\b|ran diagnostic for group"
    r"|Unable to (?:complete diagnostic|check health watches)|Health watches not enabled",
    re.MULTILINE,
)
_REFUSED = re.compile(r"^Error: .*|.*(?:Unable to complete diagnostic|Health watches not enabled).*", re.MULTILINE)
_END = re.compile(r"^[ \t]*\+[-=]{10,}\+?[-=]{20,}\+[ \t]*(?:\n(?![ \t]*(?:\||\+=))|\Z)", re.MULTILINE)
_ROW = re.compile(r"^\s*\|(?: (.*?)\s*\|)? (.*?)\s*\|\s*$")
_RESULT = re.compile(
    r"(?:(GPU|NvSwitch|Switch|CPU|\w+?) ?(\d+): )?(Pass|Fail|Warn|Skip|Not Run)\b(?: - (?:All|\w+?s?: ?([\d, ]+)))?"
)
#: dcgm_errors.h, dcgmErrorSeverity_t. A configuration is nothing that another host would have otherwise.
_SEVERITIES = {0: Verdict.NOTE, 1: Verdict.NOTE, 2: Verdict.DRAIN, 4: Verdict.DRAIN, 5: Verdict.NOTE, 6: Verdict.RESET}
_OVERALL = "overall health"
#: ``Warning``; before version 2 ``PCIe system: Warning - what`` and ``Overall Health: Healthy`` too.
_HEALTH = re.compile(r"(?:([\w ]+): *)?(Healthy|Warning|Failure)\b(?: - (.*))?\s*$")
_HEALTHS = {"Healthy": Verdict.HEALTHY, "Warning": Verdict.NOTE, "Failure": Verdict.DRAIN}
#: Tests of how the host is set up, which costs no host.
_SETTINGS = ("persistence mode", "environment variables", "permissions and os blocks", "graphics processes")
_ASKED = re.compile(r"(?:drain the gpu and )?reset (?:it|the gpu|gpu)", re.IGNORECASE)


@dataclass
class _Result:
    """Of one test or watch on one GPU, or on all (``gpu`` None)."""

    what: str
    status: str
    gpu: int | None = None
    warning: str = ""
    severity: int | None = None

    @property
    def verdict(self) -> Verdict:
        if self.status != "Fail":
            return {"Warn": Verdict.NOTE, **_HEALTHS}.get(self.status, Verdict.HEALTHY)
        if self.severity in _SEVERITIES:
            return _SEVERITIES[self.severity]
        if _ASKED.search(self.warning) or "remap" in self.what.lower():
            return Verdict.RESET
        return Verdict.NOTE if self.what.lower() in _SETTINGS else Verdict.DRAIN


def is_dcgm(captured: str) -> bool:
    return bool(_JSON.search(captured) or _TEXT.search(captured))


def judge_dcgm(captured: str) -> list[Finding]:
    """What failed, by GPU; one HEALTHY finding where all passed, one INCOMPLETE where the output is not whole."""
    results: list[_Result] = []
    refused = _REFUSED.search(captured)
    missing = refused[0].strip() if refused else ""
    try:
        if _JSON.search(captured):
            for part in _objects(captured):
                results += [*_diag_json(part), *_health_json(part)]
        else:
            results = list(_table(captured))
            missing = missing or ("" if _END.search(captured) else "the table has no end")
    except (Unreadable, ValueError, TypeError) as error:
        missing = missing or str(error)
    bad = [one for one in results if one.verdict is not Verdict.HEALTHY]
    findings = [_finding(one) for one in bad if one.what != _OVERALL or len(bad) == 1]
    passed = {one.what for one in results if one.status in ("Pass", "Healthy")}
    if missing or not (findings or passed):
        findings.append(Finding("gpu.dcgm", Verdict.INCOMPLETE, f"dcgmi: {missing or 'no test has run'}"))
    elif not findings:
        findings.append(Finding("gpu.dcgm", Verdict.HEALTHY, f"dcgmi: {', '.join(sorted(passed)[:8])}: nothing found"))
    return findings


def _finding(one: _Result) -> Finding:
    on_gpu = one.gpu is not None
    message = f"dcgmi: {one.what}: {one.status.lower()}" + (f": {one.warning[:300]}" if one.warning else "")
    return Finding(
        check="gpu.dcgm", verdict=one.verdict, message=f"GPU {one.gpu}: {message}" if on_gpu else message, gpu=one.gpu,
        value=one.status, expected="Pass", evidence=one.warning[:300] or f"{one.what} {one.status}", source="DCGM",
        command=f"nvidia-smi --gpu-reset -i {one.gpu}" if one.verdict is Verdict.RESET and on_gpu else "",
    )  # fmt: skip


# ---------------------------------------------------------------- JSON


def _objects(captured: str) -> Iterator[JsonObject]:
    """The JSON objects of both reports among other text."""
    end = 0
    for match in re.finditer(r"^\{", captured, re.MULTILINE):
        if match.start() >= end:
            try:
                _, end = json.JSONDecoder().raw_decode(captured, match.start())
            except (ValueError, RecursionError):
                raise Unreadable("its JSON is cut or damaged") from None
            yield parse_object(captured[match.start() : end])


def _diag_json(part: JsonObject) -> Iterator[_Result]:
    diagnostic = child(part, "DCGM Diagnostic") or child(part, "DCGM GPU Diagnostic")
    if reason := text(diagnostic, "runtime_error"):
        raise Unreadable(reason.strip())
    for category in children(diagnostic, "test_categories"):
        for test in children(category, "tests"):
            results = children(test, "results") or [child(test, "test_summary")]
            for row in results:
                gpu = text(row, "entity_id") or text(row, "gpu_id") or text(row, "gpu_ids")
                on_gpu = text(row, "entity_group") in ("", "GPU") and gpu.isdigit()
                graded = [whole(one, "error_severity") for one in children(row, "warnings") if "error_severity" in one]
                messages = [*texts(row, "warnings"), *(text(one, "warning") for one in children(row, "warnings"))]
                yield _Result(
                    what=text(test, "name"),
                    status=text(row, "status").capitalize(),
                    gpu=int(gpu) if on_gpu else None,
                    warning="; ".join(messages) or text(row, "warning") or text(row, "warnings"),
                    severity=max(graded, default=None),
                )


def _health_json(part: JsonObject) -> Iterator[_Result]:
    body = child(part, "body")
    if "Overall Health" in body:
        yield _Result(what=_OVERALL, status=text(body, "Overall Health", "value"))
    for group in body:
        for number in child(body, group, "children"):
            watches = child(body, group, "children", number, "children", "Errors", "children")
            gpu = int(number) if group == "GPU" and number.isdigit() else None
            for name in watches:
                warning = " ".join(texts(watches, name, "overflow"))
                yield _Result(what=name, status=text(watches, name, "value"), warning=warning, gpu=gpu)


# ---------------------------------------------------------------- tables


def _table(captured: str) -> Iterator[_Result]:
    """Rows of both tables. A text that goes on has an empty first cell; ``->`` marks levels below a group."""
    rows = [(match[1] or "", match[2]) for line in captured.splitlines() if (match := _ROW.match(line))]
    width = 45 if "| Diagnostic" in captured else 0  # dcgmi diag cuts texts there, wherever words end
    test, group, number = "", "", None
    last: list[_Result] = []
    before = ""
    for name, value in rows:
        name, value = name.replace("->", "").strip(), value.strip()
        result, health = _RESULT.match(value), _HEALTH.match(value)
        if result and (name or result[1]) and not name.startswith(("Warning", "Info")):
            yield from (one for one in last if one.gpu is not None or one.warning or not result[1])
            test = name or test
            gpus = [result[2]] if result[2] and result[1] == "GPU" else re.findall(r"\d+", result[4] or "")
            last = [_Result(test, result[3], int(gpu)) for gpu in gpus] or [_Result(test, result[3])]
        elif health and (name or health[1]):
            yield from last
            entity = re.fullmatch(r"(?:GPU ID: )?(\d+)", name)
            number = int(entity[1]) if entity and group in ("", "GPU") else number
            overall = _OVERALL in f"{name} {health[1]}".lower()
            what, of = (_OVERALL, None) if overall else (health[1] or name, number)
            last = [] if entity else [_Result(what, health[2], of, health[3] or "")]
        elif name and not value:
            group = name if name != "Errors" else group
        elif not name or name.startswith("Warning"):
            of_gpu = re.search(r"GPU ?(\d+)", name)
            for one in last:
                space = " " if one.warning and len(before) != width else ""
                one.warning += space + value if of_gpu is None or int(of_gpu[1]) == one.gpu else ""
        before = value
    yield from last
