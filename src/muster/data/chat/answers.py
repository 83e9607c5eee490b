"""Each answer of a conversation as generation meets it: the prompt, and what must come after it up to a stop token.

The prompt is what the template writes of the history with ``add_generation_prompt``. Where the template goes on from
there, the answer is the rest; where it rewrites the history or the header, texts are replaced by sentinels, which show
what the template itself writes between the history and the answer, and after it. Nothing depends on a list of models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from muster.core.typed_json import Json
from muster.core.typed_json import JsonObject as Row
from muster.data.chat.rows import REASONING, NotWritten, RowRefusal, reasoning_of, with_words
from muster.data.chat.template import Span, Template, TemplateRefusal

Options = Mapping[str, Json]
#: Digits have no case, are not stripped, escaped, quoted or split; of one width none is part of another.
_BASE, _WIDTH, _LEAVES = 86753090, 8, 1000
_WORDS = {"content", "tool_calls", *REASONING}
_OPENS = re.compile(r"(?:<(?!/)([a-z_]+)>|\[(?!/)([A-Z_]+)\])\s*$")
_BLOCK = re.compile(r"<([a-z_]+)>\s*</\1>\s*|\[([A-Z_]+)\]\s*\[/\2\]\s*")


class Answer(NamedTuple):
    """One answer. What is trained on is ``prompt + text``, and ``text`` is learned."""

    prompt: str
    text: str
    """Up to and including ``stop``."""
    stop: str
    rest: str
    """What the template writes after the stop where the conversation ends: context, never learned."""
    marked: tuple[Span, ...] = ()
    """Characters of ``prompt + text`` that ``{% generation %}`` marks; empty: it marks none of them."""
    drops_reasoning: bool = False


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """The answer that is looked for, and the conversation that ends with it."""

    messages: Sequence[Row]
    """The whole conversation."""
    number: int
    tools: Sequence[Json]
    options: Options
    base: int
    """What sentinels begin with."""
    prompt: str
    full: str
    """The conversation up to the answer, as it is written."""
    marked: Row
    """The answer with sentinels as its texts."""
    shown: str
    """``full`` with ``marked`` as the answer."""
    span: Span
    """Of the sentinels in ``shown``."""

    @property
    def suffix(self) -> str:
        """What follows the answer's words."""
        return self.shown[self.span[1] :]


@dataclass(frozen=True)
class _Place:
    """Where an answer begins in the text of the conversation that ends with it."""

    start: int
    before: str = ""
    """What generation must produce first, which that text lacks."""
    trims: bool = False
    """The line ends that follow in that text belong to ``before``."""


@dataclass
class AnswerFinder:
    """Finds the answers that a template writes; keeps what ends a turn."""

    template: Template
    stops: tuple[str, ...]
    """Tokens that end generation, by the tokenizer's and the model's configs."""
    special: tuple[str, ...]
    closes_reasoning: bool = False
    """Whether an answer without reasoning closes a think block that the prompt has opened, and learns to."""
    _endings: dict[tuple[str, str, bool], tuple[str, str] | None] = field(default_factory=dict)

    def find(self, messages: Sequence[Row], tools: Sequence[Json], turn: int, options: Options) -> Answer:
        """The answer in turn ``turn``. Raises RowRefusal."""
        history, answer = messages[:turn], messages[turn]
        full = self.template.render(messages[: turn + 1], tools, options, prompt=False)
        base = self._unused_base(full)
        marked, sentinels, must = _with_sentinels(answer, base, turn)
        shown = self.template.render([*history, marked], tools, options, prompt=False)
        span = _span(shown, sentinels)
        if not all(name in shown for name in must):
            raise NotWritten("the chat template does not write calls of tools")
        if span is None:
            raise NotWritten("the chat template does not write an assistant's turn")
        if not full.endswith(shown[span[1] :]):
            raise RowRefusal("the chat template ends an answer differently by what it says")
        if turn:
            prompt = self.template.render(history, tools, options, prompt=True)
        else:
            prompt = self._header(full, tools, options, base)
        one = _Turn(
            messages=messages, number=turn, tools=tools, options=options, base=base, prompt=prompt, full=full,
            marked=marked, shown=shown, span=span,
        )  # fmt: skip
        place = _Place(len(prompt)) if full.startswith(prompt) else self._place(one)
        end = len(full) - len(one.suffix)
        if place.start > end:
            raise RowRefusal("the chat template writes an answer's words into its prompt")
        ending, stop = self._ending(one)
        text = place.before + full[place.start : end] + ending
        after = full[place.start :]
        marks: tuple[Span, ...] = ()
        if self.template.has_marks and not place.before:
            shift, limit = len(prompt) - place.start, len(prompt) + len(text)
            spans = self.template.marked(messages[: turn + 1], tools, options)
            inside = ((max(first + shift, len(prompt)), min(last + shift, limit)) for first, last in spans)
            marks = tuple((first, last) for first, last in inside if first < last)
        thought = marked.get(REASONING[0])
        return Answer(
            prompt=prompt, text=text, stop=stop, marked=marks,
            rest=after[len(text) :] if after.startswith(text) else "",
            drops_reasoning=isinstance(thought, str) and bool(thought) and thought not in shown and not place.before,
        )  # fmt: skip

    def _unused_base(self, text: str) -> int:
        base = _BASE
        while str(base) in text or str(base) in self.template.text:
            base += 1
        return base

    def _header(self, full: str, tools: Sequence[Json], options: Options, base: int) -> str:
        """The prompt of a conversation that the assistant begins: as far as the header that a question is asked with.
        (transformers renders no empty history.)"""
        question: list[Row] = [{"role": "user", "content": f"{base}{0:0{_WIDTH}}"}]
        asked = self.template.render(question, tools, options, prompt=True)
        header = asked.removeprefix(self.template.render(question, tools, options, prompt=False))
        place = full.find(header)
        if not header or len(header) == len(asked) or place < 0:
            raise RowRefusal("the assistant's turn comes first, and the chat template has no prompt for that")
        return full[: place + len(header)]

    def _place(self, one: _Turn) -> _Place:
        """Where an answer begins whose prompt is no prefix of the conversation that ends with it."""
        first = one.span[0]
        messages = one.messages[: one.number + 1]
        marked = [_with_sentinels(message, one.base, number) for number, message in enumerate(messages)]
        turns = [message for message, _, _ in marked]
        before = [name for _, names, _ in marked[:-1] for name in names]
        asked = self.template.render(turns[:-1], one.tools, one.options, prompt=True)
        answered = self.template.render(turns, one.tools, one.options, prompt=False)
        begin = _span(answered, marked[-1][1])
        if begin is None:
            raise NotWritten("the chat template does not write an assistant's turn")
        header = asked[(_span(asked, before) or (0, 0))[1] :]
        material = answered[(_span(answered[: begin[0]], before) or (0, 0))[1] : begin[0]]
        if not one.prompt.endswith(header) or not one.shown[:first].endswith(material):
            raise RowRefusal("the chat template writes an answer's header differently by what was said before")
        begins, result = first - len(material), self._aligned(header, material, messages[-1])
        if one.full[: begins + result.start] != one.shown[: begins + result.start]:
            raise RowRefusal("the chat template writes an answer's header differently by what it says")
        if not result.before:
            return _Place(begins + result.start)
        words = one.full[first:]
        return _Place(first + (len(words) - len(words.lstrip("\n")) if result.trims else 0), result.before)

    def _aligned(self, header: str, material: str, answer: Row) -> _Place:
        """How the end of a prompt (``header``) and what the template writes before an answer's words (``material``)
        fit: the place in ``material`` where the answer begins."""
        if material.startswith(header):
            return _Place(len(header))
        common = next((at for at in range(len(header)) if header[at] != material[at : at + 1]), len(header))
        for mark in "<[":  # never within a tag
            opened = header.rfind(mark, 0, common)
            closing = {"<": ">", "[": "]"}[mark]
            if opened >= 0 and closing not in header[opened:common]:
                common = opened
        extra, rest = header[common:], material[common:]
        if not extra.strip():
            return _Place(common + len(rest) - len(rest.lstrip()))
        if _BLOCK.fullmatch(extra.strip()):
            return _Place(common)
        if opens := _OPENS.fullmatch(extra.strip()):
            name = opens[1] or opens[2]
            close = f"</{name}>" if opens[1] else f"[/{name}]"
            thought = reasoning_of(answer)
            if not thought and not self.closes_reasoning:
                raise RowRefusal(
                    f"the prompt opens {extra.strip()} and an answer has no reasoning; data.thinking: off learns to "
                    "close it at once"
                )
            if close in rest:
                return _Place(len(material), thought + rest[rest.index(close) :])
            trims = bool(thought) and not answer.get(REASONING[0])
            return _Place(len(material), thought.strip("\n") + f"\n{close}\n\n", trims)
        for start in range(len(header)):
            tail = header[start:]
            if any(tail.startswith(token) for token in self.special) and tail in material:
                return _Place(material.rfind(tail) + len(tail))
        raise RowRefusal(f"the prompt's header {header[-40:]!r} is not what the template writes before an answer")

    def _ending(self, one: _Turn) -> tuple[str, str]:
        """(what follows an answer's words up to and with its stop token, that token)."""
        calls, after = bool(one.marked.get("tool_calls")), one.messages[one.number + 1 :]
        following = str(after[0]["role"]) if after else ("tool" if calls else "user")
        key = (one.suffix, following, calls)
        if key not in self._endings:
            between = self._between(one, following)
            # A template may write the name of a call again in the header of its result: the first place counts.
            words = one.shown[: one.span[1]]
            last = words if between.startswith(words) else words[-_WIDTH - len(str(one.base)) :]
            self._endings[key] = self._end_of(one.suffix, between.partition(last)[2] or one.suffix)
        ending = self._endings[key]
        if ending is None:
            raise RowRefusal(
                "nothing ends an answer: the template writes no special token after it, and the tokenizer names no "
                "eos_token"
            )
        return ending

    def _between(self, one: _Turn, role: str) -> str:
        """What the template writes before the words of a turn of ``role`` that follows; empty: it writes none there."""
        text = f"{one.base}{10**_WIDTH - 1}"
        message: dict[str, Json] = {"role": role, "content": text}
        if role == "tool":
            ids = (call["id"] for call in _calls(one.marked) if "id" in call)
            message |= {"name": "f", "tool_call_id": next(ids, "call00001")}
        turns = [*one.messages[: one.number], one.marked, message]
        try:
            return self.template.render(turns, one.tools, one.options, prompt=False).partition(text)[0]
        except TemplateRefusal:
            return ""

    def _end_of(self, suffix: str, between: str) -> tuple[str, str] | None:
        """``suffix``: what follows an answer that is the last turn; ``between``: what is between it and the next turn.

        A known stop token in ``suffix``, unless that ends the conversation and another special token the turn
        (Phi-3.5); else the first special token of it; else the first stop or special token of ``between``, which may be
        the next role's mark (GLM); else the end token, appended.
        """
        known, special = _first(suffix, self.stops), _first(suffix, self.special)
        ends_turn = special and special[1] in between and not (known and known[1] in between)
        found = special if ends_turn else known or special
        if found:
            return suffix[: found[0] + len(found[1])], found[1]
        found = _first(between, self.stops) or _first(between, self.special)
        if found:
            return between[: found[0] + len(found[1])], found[1]
        return (suffix.rstrip() + self.stops[0], self.stops[0]) if self.stops else None


def _with_sentinels(message: Row, base: int, number: int) -> tuple[Row, list[str], list[str]]:
    """A turn whose words are sentinels; these; and those of its calls' names, which must be written."""
    names: list[str] = []

    def named(words: str) -> Json:
        names.append(f"{base}{number * _LEAVES + len(names):0{_WIDTH}}")
        return names[-1]

    result = with_words(message, named, _WORDS)
    inner = [call.get("function", call) for call in _calls(result)]
    return result, names, [str(each["name"]) for each in inner if isinstance(each, dict) and each.get("name")]


def _calls(message: Row) -> list[Row]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _span(text: str, names: Sequence[str]) -> Span | None:
    """From the first to the last of ``names`` in ``text``."""
    present = [name for name in names if name in text]
    if not present:
        return None
    return min(map(text.find, present)), max(text.rfind(name) + len(name) for name in present)


def _first(text: str, tokens: Sequence[str]) -> tuple[int, str] | None:
    """The first of ``tokens`` in ``text``; of two at one place the longer."""
    places = [(text.find(token), -len(token), token) for token in tokens if token in text]
    return (min(places)[0], min(places)[2]) if places else None
