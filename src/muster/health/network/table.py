"""A table as nccl-tests print it: people know it, and ``--from`` reads it again."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from muster.health.network.figures import SizeResult

_HEAD = """\
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)"""


def nccl_table(results: Sequence[SizeResult], ranks: Sequence[tuple[str, int, str]], *, repeats: int) -> str:
    """Of one collective. ``ranks``: (host, device, its name) of each. Times are medians of ``repeats``, of the slowest
    rank; the columns that were not measured repeat nothing: they say N/A (torch reduces in place only)."""
    if not results:
        return ""
    collective, sizes = results[0].collective, [one.size_bytes for one in results]
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
    for one in results:
        count = one.size_bytes // 4 // (1 if in_place else one.ranks)
        redop = "sum" if collective in ("all_reduce", "reduce_scatter") else "none"
        cells = f"  {_time(one.seconds * 1e6):>7s}  {one.algbw:6.2f}  {one.busbw:6.2f}  {one.wrong:5d}"
        empty = f"  {'N/A':>7s}  {'N/A':>6s}  {'N/A':>6s}  {'N/A':>5s}"
        both = empty + cells if in_place else cells + empty
        lines.append(f"{one.size_bytes:12d}  {count:12d}  {'float':>8s}  {redop:>6s}  {-1:6d}{both}")
    wrong = sum(one.wrong for one in results)
    lines += [
        f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# Avg bus bandwidth    : {fmean(one.busbw for one in results):g}",
        "#",
    ]
    return "\n".join(lines)


def _step(sizes: Sequence[int]) -> int:
    return max(2, round(sizes[1] / sizes[0])) if len(sizes) > 1 else 2


def _time(us: float) -> str:
    return f"{us:.0f}" if us >= 10000 else f"{us:.1f}" if us >= 100 else f"{us:.2f}"
