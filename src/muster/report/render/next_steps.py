"""What to do next with a run that has ended."""

from __future__ import annotations

from muster.report.render.document import Document

MOST_NEXT = 3
_WASTE = 0.1
"""A share of the host time that is worth a line."""
_ADVICE = {
    "start": "a longer run pays for its start; prepared data is used again",
    "eval": "a larger evaluation.every_steps, or fewer evaluation.num_questions",
    "checkpoint": "a larger checkpoint.every_steps",
    "data_wait": "more data workers, or rows that are prepared beforehand",
    "redone": "a smaller checkpoint.every_steps, or snapshots in memory",
    "wait": "a spare host (resources.spare_hosts), or recovery with fewer hosts (resources.min_hosts)",
    "spare": "fewer spare hosts (resources.spare_hosts)",
    "hold": "a shorter recovery.keep_hosts_after_failure_s",
    "idle": "ranks ended at different times: muster why names the last",
}


def next_steps(document: Document) -> list[str]:
    """What to do next, at most ``MOST_NEXT`` lines, each from a figure of the report; none while it runs."""
    lines: list[str] = []
    run_id, step = document.run_id, document.final_step
    accuracy, baseline = document.execution_accuracy, document.baseline_accuracy
    if document.outcome in ("stopped", "preempted"):
        lines.append(f"muster recover {run_id} continues it{'' if step is None else f' after step {step:,}'}")
    elif document.outcome == "failed":
        lines.append(f"muster why {run_id} says what went wrong{'' if step is None else f' after step {step:,}'}")
    elif document.outcome == "succeeded" and document.heldout_loss is not None:
        lines.append(f"muster export {run_id}: the model with a held-out loss of {document.heldout_loss:.4f}")
    if document.outcome and accuracy is not None and baseline is not None and accuracy <= baseline:
        lines.append(
            f"execution accuracy {accuracy:.1%} is not above the {baseline:.1%} of always giving the commonest answer: "
            "more training.steps, or a better start"
        )
    lost = {name: spent.share or 0.0 for name, spent in document.categories.items() if name in _ADVICE}
    most = max(lost, key=lambda name: lost[name], default=None)
    if document.outcome and most is not None and lost[most] >= _WASTE:
        lines.append(f"{lost[most]:.0%} of the host time went to {most}: {_ADVICE[most]}")
    return lines[:MOST_NEXT]
