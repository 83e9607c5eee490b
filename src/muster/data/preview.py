"""What the model will see and what it will learn from, as data and as text with the masked part dimmed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from muster.core.typed_json import JsonObject, children, whole
from muster.data.formats import Segment
from muster.data.prepare import Prepared
from muster.data.sequences import UNSUPERVISED, Sequence
from muster.data.tokenizer import Encoder

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

#: Documents whose supervised share goes into the histogram.
_SAMPLED = 2_000
_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A few documents, and how much of the data is learned from."""

    examples: tuple[tuple[Segment, ...], ...]
    shares: tuple[float, ...]
    """Of each example the share of predicted tokens that is learned."""
    histogram: tuple[int, ...]
    """Documents by supervised share: ten bins of 10 %, over the first documents of the data."""
    stats: JsonObject

    def to_json(self) -> JsonObject:
        return {
            "examples": [[vars(segment) for segment in example] for example in self.examples],
            "learned_shares": list(self.shares),
            "supervised_share_histogram": list(self.histogram),
            "stats": dict(self.stats),
        }


def preview(prepared: Prepared, *, examples: int = 3) -> Preview:
    """The first ``examples`` documents of the training data, decoded, and the histogram. Reads what is prepared."""
    encoder = Encoder(prepared.tokenizer_dir) if prepared.tokenizer_dir else None
    shown: list[tuple[Segment, ...]] = []
    shares: list[float] = []
    histogram = [0] * 10
    seen = 0
    for sequence in prepared.train:
        for ids, supervised in _documents(sequence):
            share = sum(supervised[1:]) / max(1, len(supervised) - 1)
            if len(shown) < examples:
                shown.append(_segments(ids, supervised, encoder))
                shares.append(share)
            histogram[min(9, int(share * 10))] += 1
            seen += 1
        if seen >= _SAMPLED:
            break
    return Preview(examples=tuple(shown), shares=tuple(shares), histogram=tuple(histogram), stats=prepared.stats)


@dataclass(frozen=True)
class RenderedPreview:
    """The preview for a terminal: what is learned bright, the rest dimmed (in brackets without colour), the counts."""

    result: Preview

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        before, after = ("", "") if console.color_system else ("[[", "]]")
        for number, (example, share) in enumerate(zip(self.result.examples, self.result.shares, strict=True), start=1):
            text = Text(f"[{number}] {share:.0%} learned: ", style="bold")
            for segment in example:
                if segment.supervised:
                    text.append(f"{before}{segment.text}{after}", style="green")
                else:
                    text.append(segment.text, style="dim")
            yield text
        yield Text(summary(self.result))


def summary(result: Preview) -> str:
    """The counts in a few plain lines."""
    stats = result.stats
    positions = max(1, whole(stats, "positions"))
    supervised, context, padding = (
        whole(stats, f"{name}_tokens") / positions for name in ("supervised", "context", "padding")
    )
    most = max(result.histogram) or 1
    bars = "".join(_BARS[-(-count * (len(_BARS) - 1) // most)] for count in result.histogram)
    lines = [
        f"{stats['rows']:,} rows -> {stats['documents']:,} documents in {stats['sequences']:,} sequences, "
        f"{stats['tokens']:,} tokens",
        f"supervised {supervised:.1%}, context {context:.1%}, padding {padding:.1%} of all positions",
        f"supervised share of a document, 0 to 100 %: |{bars}|",
    ]
    row_counts = {
        "too long, dropped": stats["dropped"],
        "answers too long, dropped": stats["dropped_answers"],
        "truncated": stats["truncated"],
        "split": stats["split"],
        "empty": stats["empty"],
        "without an answer, left out": stats["empty_completions"],
        "without a supervised token": stats["masked_rows"],
    }
    changed = [f"{count:,} {outcome}" for outcome, count in row_counts.items() if count]
    if refused := whole(stats, "rows_refused"):
        changed.append(f"{refused:,} left out")
        lines.append(f"left out: {stats['rows_refused_why']}")
    lines.append("rows: " + (", ".join(changed) or "all used" + ("" if stats["rows_changed"] else " whole")))
    if stats["rows_changed"]:
        lines.append(f"counted: {stats['rows_changed']}")
    sources = children(stats, "sources")
    if len(sources) > 1:
        for source in sources:
            times = whole(source, "documents_used") / max(1, whole(source, "documents"))
            lines.append(f"source {source['name']}: {source['documents_used']:,} documents, each {times:.3g} times")
    if stats["questions_left_out"]:
        left_out, asked = whole(stats, "questions_left_out"), whole(stats, "questions")
        lines.append(
            f"{left_out:,} of {left_out + asked:,} held-out questions are left out; {stats['questions_left_out_why']}"
        )
    if stats.get("unknown_tokens"):
        lines.append(f"{stats['unknown_tokens']:,} tokens are unknown to the tokenizer (<unk>)")
    return "\n".join(lines)


def _documents(sequence: Sequence) -> list[tuple[list[int], list[bool]]]:
    """Each document's tokens and which of them are targets; the padding tail is left out.

    The last token is known only as a target, so a masked last token is not shown.
    """
    result = []
    start = 0
    for length in sequence.document_lengths.tolist():
        if start >= sequence.tokens:
            break
        ids = sequence.input_ids[start : start + length].tolist()
        labels = sequence.labels[start : start + length].tolist()
        supervised = [False, *(label != UNSUPERVISED for label in labels)]
        if labels[-1] == UNSUPERVISED:
            supervised.pop()
        else:
            ids.append(labels[-1])
        result.append((ids, supervised))
        start += length
    return result


def _segments(ids: list[int], supervised: list[bool], encoder: Encoder | None) -> tuple[Segment, ...]:
    """Runs of equal mask, decoded with special tokens shown; without a tokenizer the ids themselves."""
    result = []
    for flag, run in groupby(zip(ids, supervised, strict=True), key=lambda pair: pair[1]):
        tokens = [token for token, _ in run]
        text = encoder.decode(tokens, skip_special=False) if encoder else " ".join(map(str, tokens)) + " "
        result.append(Segment(text=text, supervised=flag))
    return tuple(result)
