"""A table as nccl-tests print it: people know it, and ``--from`` reads it again."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from muster.health.network.figures import Rung

_HEAD = """\
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)"""


def nccl_table(rungs: Sequence[Rung], ranks: Sequence[tuple[str, int, str]], *, repeats: int) -> str:
    """Of one collective. ``ranks``: (host, device, its name) of each. Times are medians of ``repeats``, of the slowest
    rank; the columns that were not measured repeat nothing: they say N/A (torch reduces in place only)."""
    if not rungs:
        return ""
    collective, sizes = rungs[0].collective, [rung.size_bytes for rung in rungs]
    in_place = collective == "all_reduce"
    lines = [
        f"# Collective test starting: {collective}_perf",
        f"# nThread 1 nGpus 1 minBytes {min(sizes)} maxBytes {max(sizes)} step: {_step(sizes)}(factor)"
        f" warmup iters: 1 iters: {repeats} agg iters: 1 validation: 1 graph: 0",
        "#",
        "# Using devices",
        *(
            f"#  Rank {rank:2d} Group  0 Pid      0 on {host:>10s} device {device:2d} [0x00] {name or 'processor'}"
            for rank, (host, device, name) in enumerate(ranks)
        ),
        _HEAD,
    ]
    for rung in rungs:
        count = rung.size_bytes // 4 // (1 if in_place else rung.ranks)
        redop = "sum" if collective in ("all_reduce", "reduce_scatter") else "none"
        cells = f"  {_time(rung.seconds * 1e6):>7s}  {rung.algbw:6.2f}  {rung.busbw:6.2f}  {rung.wrong:5d}"
        empty = f"  {'N/A':>7s}  {'N/A':>6s}  {'N/A':>6s}  {'N/A':>5s}"
        both = empty + cells if in_place else cells + empty
        lines.append(f"{rung.size_bytes:12d}  {count:12d}  {'float':>8s}  {redop:>6s}  {-1:6d}{both}")
    wrong = sum(rung.wrong for rung in rungs)
    lines += [
        f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# Avg bus bandwidth    : {fmean(rung.busbw for rung in rungs):g}",
        "#",
    ]
    return "\n".join(lines)


def _step(sizes: Sequence[int]) -> int:
    return max(2, round(sizes[1] / sizes[0])) if len(sizes) > 1 else 2


def _time(us: float) -> str:
    return f"{us:.0f}" if us >= 10000 else f"{us:.1f}" if us >= 100 else f"{us:.2f}"
