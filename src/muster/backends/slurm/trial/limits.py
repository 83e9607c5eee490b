"""What a partition and the accounting allow, held against what a run asks for. Pure: nothing asks Slurm."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from muster.core.errors import AccessError, CapacityError, UsageError

Row = Mapping[str, str]
#: Flags of a QOS whose jobs a partition's limit does not hold for.
PASSES_MOST, PASSES_LEAST, PASSES_TIME = "PartitionMaxNodes", "PartitionMinNodes", "PartitionTimeLimit"


@dataclass(frozen=True, kw_only=True)
class Asked:
    partition: str | None
    nodes: int
    gpus: int
    """In all."""
    time: str | None
    account: str | None
    qos: str | None
    reservation: str | None

    @property
    def seconds(self) -> float:
        return seconds(self.time) if self.time is not None else 0.0


def partition_of(rows: Sequence[Row], want: Asked) -> Row:
    """The row of ``scontrol show partition`` that the run's jobs go to.

    Raises:
        UsageError: there is none.
    """
    names = ", ".join(row["PartitionName"] for row in rows) or "none"
    if want.partition is None:
        found = next((row for row in rows if row.get("Default") == "YES"), None)
        if found is None:
            raise UsageError(f"no partition is the default one (there are {names})", hint="resources.queue names one")
        return found
    found = next((row for row in rows if row["PartitionName"] == want.partition), None)
    if found is None:
        raise UsageError(f"there is no partition {want.partition} (there are {names})", hint="resources.queue")
    return found


def check_partition(row: Row, want: Asked, *, groups: Collection[str] | None, flags: Collection[str] = ()) -> None:
    """``groups``: this user's; None: an administrator's, whom no group keeps out. ``flags``: of the jobs' QOS, which
    may let them pass a limit.

    Raises:
        AccessError, CapacityError, UsageError: why its jobs would not start there.
    """
    name = row["PartitionName"]
    if row.get("State", "UP") != "UP":
        raise CapacityError(f"partition {name} is {row['State']}: it starts no job", hint="resources.queue")
    if row.get("RootOnly") == "YES" and groups is not None:
        raise AccessError(f"partition {name} takes jobs of root alone", hint="resources.queue")
    allowed = _names(row.get("AllowGroups", "ALL"))
    if groups is not None and allowed is not None and not allowed & set(groups):
        raise AccessError(f"partition {name} is for the groups {_text(allowed)}, and you are in none of them")
    if row.get("ReqResv") == "YES" and want.reservation is None:
        raise UsageError(f"partition {name} takes jobs with a reservation alone", hint="resources.reservation")
    for key, word, own in (("Accounts", "account", want.account), ("Qos", "QOS", want.qos)):
        allowed, denied = _names(row.get(f"Allow{key}", "ALL")), _names(row.get(f"Deny{key}", "")) or set()
        if own is not None and (own in denied or (allowed is not None and own not in allowed)):
            reason = f"it is for {_text(allowed)}" if allowed is not None else "it is kept out"
            raise AccessError(f"{word} {own} may not use partition {name}: {reason}", hint=f"slurm.{word.lower()}")
    most, least = _count(row.get("MaxNodes", "")), _count(row.get("MinNodes", "0"))
    if want.nodes > most and PASSES_MOST not in flags:
        raise CapacityError(f"partition {name} gives a job {most:.0f} nodes at most, and {want.nodes} are asked for")
    if math.isfinite(least) and want.nodes < least and PASSES_LEAST not in flags:
        raise CapacityError(f"partition {name} gives a job {least:.0f} nodes at least, and {want.nodes} are asked for")
    if PASSES_TIME not in flags:
        _check_time(f"partition {name}", row.get("MaxTime", ""), want)


def account_of(rows: Sequence[Row], want: Asked, partition: str, *, user: str, qos_enforced: bool) -> Row:
    """The user's association that the run's jobs go by, of an accounting that requires one.

    ``rows``: of ``commands.Slurm.associations``.

    Raises:
        AccessError: there is none that would do.
    """
    if not rows:
        raise AccessError(f"the accounting knows no account of {user}", hint="an administrator: sacctmgr add user")
    account = want.account or rows[0]["default_account"]
    mine = [row for row in rows if row["account"] == account]
    if not mine:
        accounts = _text(_each(rows, "account"))
        raise AccessError(f"{user} has no account {account} (there are {accounts})", hint="slurm.account")
    here = sorted((row for row in mine if row["partition"] in ("", partition)), key=lambda row: not row["partition"])
    if not here:
        raise AccessError(
            f"account {account} may use the partitions {_text(_each(mine, 'partition'))} alone, and not {partition}",
            hint="resources.queue, or slurm.account",
        )
    if qos_enforced and want.qos is not None and want.qos not in here[0]["qos"].split(","):
        raise AccessError(
            f"account {account} may use the QOS {here[0]['qos'] or '(none)'}, and not {want.qos}", hint="slurm.qos"
        )
    return here[0]


def qos_of(association: Row, want: Asked) -> str:
    """The QOS of the run's jobs, by name; empty: not known."""
    there = [word for word in association["qos"].split(",") if word]
    return want.qos or association["default_qos"] or (there[0] if len(there) == 1 else "")


def check_limits(given: Sequence[tuple[str, Row]], want: Asked) -> None:
    """Of a partition's QOS, the jobs' own and their association, for one job: the first that sets a limit is the one
    that holds. Each with what it is called.

    Raises:
        CapacityError, UsageError: a job would wait forever, or be refused.
    """
    for key, word, number in (("node", "nodes", want.nodes), ("gres/gpu", "GPUs", want.gpus)):
        for what, row in given:
            most = _tres(row).get(key, "")
            if number > _count(most):
                raise CapacityError(f"{what} gives a job {most} {word} at most, and {number} are asked for")
            if most:
                break
    timed = next(((what, row["max_wall"]) for what, row in given if row["max_wall"]), None)
    if timed is not None:
        _check_time(*timed, want)


def seconds(text: str) -> float:
    """``30`` (minutes), ``5:00``, ``12:00:00``, ``3-12``, ``3-12:30``, ``3-00:00:00``; infinite where it is no time."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?(?:\.\d+)?", text.strip())
    if match is None:
        return math.inf
    days, first, second, third = (None if group is None else int(group) for group in match.groups())
    if days is not None or third is not None:
        return 86_400 * (days or 0) + 3600 * (first or 0) + 60 * (second or 0) + (third or 0)
    return 60 * (first or 0) + (second or 0)


def _check_time(what: str, most: str, want: Asked) -> None:
    if want.seconds > seconds(most):
        raise UsageError(
            f"{what} ends a job after {most}, and one of {want.time} is asked for", hint=f"slurm.time_limit={most}"
        )


def _tres(row: Row) -> dict[str, str]:
    return dict(word.split("=", 1) for word in row["max_tres"].split(",") if "=" in word)


def _count(text: str) -> float:
    return float(text) if text.isdigit() else math.inf


def _names(text: str) -> set[str] | None:
    """None: all."""
    return None if text in ("ALL", "(null)") else {word for word in text.split(",") if word}


def _each(rows: Iterable[Row], key: str) -> set[str]:
    return {row[key] for row in rows}


def _text(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
