"""The time model against published runs, as the table of docs/plan.md.

python benchmarks/plan_anchors.py
"""

from __future__ import annotations

from muster.catalog import rows
from muster.plan.published_runs import checks, median_error


def table() -> str:
    """Markdown: every row, the efficiency of each stack, the median error of the checked rows."""
    found = checks(rows.anchors())
    lines = [
        "| stack | efficiency | row | published tokens/s/GPU | predicted | error | used to |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in found:
        anchor = each.anchor
        chip = rows.machines()[anchor.machine].accelerator
        what = (
            f"{anchor.model.split('/')[-1]} {anchor.job} {anchor.precision}{'' if anchor.compile else ' eager'}, "
            f"{anchor.gpus} {chip}, {anchor.sequence_length // 1024}k"
        )
        lines.append(
            f"| {anchor.stack} | {each.efficiency:.3f} | {what} | {anchor.tokens_per_s_per_gpu:,.0f} | "
            f"{each.predicted:,.0f} | {each.error:+.1%} | {anchor.use} |"
        )
    checked = sum(each.anchor.use == "check" for each in found)
    lines += ["", f"{len(found)} rows, {checked} of them checked: median error {median_error(found):.1%}."]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
