"""What an assessment means: findings on hosts, paths and the network as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from muster.health.network.figures import SizeResult
from muster.health.network.search import Assessment, Figure, Pair
from muster.health.verdicts import Finding, Verdict

#: Loss from which a host, or a path, is faulty; below it, it is noted.
FAULTY = 0.20
#: A host whose every collective failed has lost this much, or more.
_ALL = 0.99
#: Where less than this loss would go unnoticed, hosts are not said to be sound.
_BLIND = 0.5
#: Lack of all together against pairs, from which it is noted.
_CONGESTED = 0.10


def judge_pairs(
    hosts: Sequence[str], figures: Sequence[Figure], seen: Assessment, *, failures: Mapping[Pair, str] | None = None
) -> list[Finding]:
    """Never empty. ``failures``: why a pair's figure is missing.

    With two hosts it cannot be decided which is slow; only a published figure can show that they are.
    """
    failures = failures or {}
    found = [_slow(host, loss, figures, seen, failures) for host, loss in sorted(seen.slow.items())]
    found += [_path(pair, loss, seen) for pair, loss in sorted(seen.paths.items())]
    if not any(figure.busbw for figure in figures):
        why = next(iter(failures.values()), "nothing was measured")
        text = f"no collective between {_names(hosts)} ended well: {why}"
        return [*found, Finding(check="net.pair", verdict=Verdict.INCOMPLETE, message=text, evidence=why)]
    if seen.undecided:
        text = (
            f"not decided: {_names(sorted(seen.undecided))} (noise {seen.noise:.0%}, a loss of {seen.detectable:.0%}"
            " or more is named)"
        )
        verdict = Verdict.INCOMPLETE if len(seen.sound) < 2 else Verdict.NOTE
        found.append(Finding(check="net.pair", verdict=verdict, message=text))
    if len(hosts) == 2:
        text = "two hosts: if they are slow, it is not known which; a third host would show it"
        found.append(Finding(check="net.pair", verdict=Verdict.NOTE, message=text))
    elif seen.sound:
        text = (
            f"{len(seen.sound)} of {len(hosts)} hosts reach {seen.level:,.3g} GB/s with each other"
            f" (noise {seen.noise:.0%}: a loss of {seen.detectable:.0%} or more is named)"
        )
        verdict = Verdict.HEALTHY if seen.detectable <= FAULTY else Verdict.NOTE
        if seen.detectable > _BLIND:
            verdict, text = Verdict.INCOMPLETE, f"{text}: too noisy, is something else running?"
        found.append(Finding(check="net.pair", verdict=verdict, message=text, value=f"{seen.level:.4g} GB/s"))
    return found


def judge_together(results: Sequence[SizeResult], seen: Assessment, *, hosts: int, size_bytes: int) -> list[Finding]:
    """All together against pairs of the same hosts, at the pairs' size: a ring is as fast with many as with two.

    Nothing where it is, or where it was not measured.
    """

    def near(one: SizeResult) -> bool:
        return abs(one.size_bytes / size_bytes - 1) < 0.01  # sizes are cut to a multiple of the ranks

    gathered = next((one for one in results if one.collective == "all_gather" and near(one)), None)
    lack = 1 - gathered.busbw / seen.level if gathered is not None and seen.level > 0 else 0.0
    if gathered is None or hosts < 3 or lack <= _CONGESTED:
        return []
    text = f"{hosts} hosts together are {lack:.0%} slower than pairs of them: congestion between switches"
    return [
        Finding(
            check="net.group", verdict=Verdict.NOTE, message=text, value=f"{gathered.busbw:.3g} GB/s",
            expected=f"> {seen.level * (1 - _CONGESTED):.3g} GB/s", source="compared with the pairs",
        )
    ]  # fmt: skip


def judge_values(wrong: Mapping[Pair, int], together: int) -> list[Finding]:
    """Results that were not what they should be, by pair, and of all together. The host is named that is in every pair
    with such results, where there are two of them or more."""
    count = sum(wrong.values()) + together
    if not count:
        return []
    common = set.intersection(*(set(pair) for pair in wrong)) if len(wrong) > 1 else set()
    where = ", ".join("-".join(pair) for pair in list(wrong)[:6]) or "all together"
    text = f"{count} wrong values ({where}): a GPU, memory or link corrupts data silently"
    return [
        Finding(
            check="net.values", verdict=Verdict.REPLACE, host=common.pop() if len(common) == 1 else "", message=text,
            value=str(count), expected="0", source="each result is known beforehand",
        )
    ]  # fmt: skip


def _slow(host: str, loss: float, figures: Sequence[Figure], seen: Assessment, failures: Mapping[Pair, str]) -> Finding:
    hosts = seen.sound | set(seen.slow) | seen.undecided
    partners = {one for figure in figures if host in figure.pair for one in figure.pair if one != host}
    well = sorted(partners & seen.sound) or sorted(partners)
    if loss > _ALL:
        why = next((text for pair, text in failures.items() if host in pair), "")
        text = f"no collective with it ends well; tried with {_names(well)}, whose own do{f': {why}' if why else ''}"
        return Finding(
            check="net.host", verdict=Verdict.REPLACE, host=host, message=text, evidence=why,
            expected=f"{seen.level:.3g} GB/s", source="compared with the other pairs",
        )  # fmt: skip
    text = f"its network is {loss:.0%} slower than that of other pairs, with {_names(well)}"
    if len(seen.slow) >= len(seen.sound):
        text += f" (so are {len(seen.slow)} of {len(hosts)} hosts: one fault, or two kinds?)"
    return Finding(
        check="net.host", verdict=Verdict.DRAIN if loss >= FAULTY else Verdict.NOTE, host=host, message=text,
        value=f"{seen.level * (1 - loss):.3g} GB/s", expected=f"{seen.level:.3g} GB/s",
        source="compared with the other pairs",
    )  # fmt: skip


def _path(pair: Pair, loss: float, seen: Assessment) -> Finding:
    text = f"the path between {pair[0]} and {pair[1]} is {loss:.0%} slower than others; both are sound with other hosts"
    return Finding(
        check="net.path", verdict=Verdict.NOTE, message=text, value=f"{seen.level * (1 - loss):.3g} GB/s",
        expected=f"{seen.level:.3g} GB/s", source="compared with the other pairs",
    )  # fmt: skip


def _names(hosts: Sequence[str]) -> str:
    shown = ", ".join(hosts[:6])
    return f"{shown} and {len(hosts) - 6} others" if len(hosts) > 6 else shown
