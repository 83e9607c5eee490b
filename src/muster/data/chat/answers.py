"""Each answer of a conversation as generation meets it: the prompt, and what must come after it up to a stop token.

The prompt is what the template writes of the history with ``add_generation_prompt``. Where the template goes on from
there, the answer is the rest; where it rewrites the history or the header, texts are replaced by sentinels, which show
what the template itself writes between the history and the answer, and after it. Nothing depends on a list of models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from muster.core.typed_json import Json
from muster.core.typed_json import JsonObject as Row
from muster.data.chat.rows import REASONING, RowRefusal, reasoning_of
from muster.data.chat.template import Span, Template, TemplateRefusal

Options = Mapping[str, Json]
#: Digits have no case, are not stripped, escaped, quoted or split; of one width none is part of another.
_BASE, _WIDTH, _LEAVES = 86753090, 8, 1000
_OPENS = re.compile(r"(?:<(?!/)([a-z_]+)>|\[(?!/)([A-Z_]+)\])\s*$")
_BLOCK = re.compile(r"<([a-z_]+)>\s*</\1>\s*|\[([A-Z_]+)\]\s*\[/\2\]\s*")


@dataclass(frozen=True)
class Answer:
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
        """The answer in turn ``turn``. Raises RowRefusal, TemplateRefusal."""
        history, answer = messages[:turn], messages[turn]
        full = self.template.render(messages[: turn + 1], tools, options, prompt=False)
        base = self._unused_base(full)
        marked, sentinels, must = _with_sentinels(answer, base, turn)
        shown = self.template.render([*history, marked], tools, options, prompt=False)
        span = _span(shown, sentinels)
        if not all(name in shown for name in must):
            raise RowRefusal("the chat template does not write calls of tools")
        if span is None:
            raise RowRefusal("the chat template does not write an assistant's turn")
        suffix = shown[span[1] :]
        if not full.endswith(suffix):
            raise RowRefusal("the chat template ends an answer differently by what it says")
        if turn:
            prompt = self.template.render(history, tools, options, prompt=True)
        else:
            prompt = self._header(full, tools, options, base)
        if full.startswith(prompt):
            place = _Place(len(prompt))
        else:
            place = self._place(messages, tools, turn, options, base, (prompt, full, shown, span[0]))
        end = len(full) - len(suffix)
        if place.start > end:
            raise RowRefusal("the chat template writes an answer's words into its prompt")
        ending, stop = self._ending(messages, tools, turn, options, base, (marked, shown, suffix))
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
        if len(header) == len(asked) or place < 0:
            raise RowRefusal("the assistant's turn comes first, and the chat template has no prompt for that")
        return full[: place + len(header)]

    def _place(
        self,
        messages: Sequence[Row],
        tools: Sequence[Json],
        turn: int,
        options: Options,
        base: int,
        texts: tuple[str, str, str, int],
    ) -> _Place:
        """Where an answer begins whose prompt is no prefix of the conversation that ends with it. ``texts``: the
        prompt, that conversation, the same with sentinels as the answer, where its first sentinel is."""
        prompt, full, shown, first = texts
        marked = [_with_sentinels(message, base, number) for number, message in enumerate(messages[: turn + 1])]
        turns = [message for message, _, _ in marked]
        before = [name for _, names, _ in marked[:-1] for name in names]
        asked = self.template.render(turns[:-1], tools, options, prompt=True)
        told = self.template.render(turns, tools, options, prompt=False)
        begin = _span(told, marked[-1][1])
        if begin is None:
            raise RowRefusal("the chat template does not write an assistant's turn")
        header = asked[_end(asked, before) :]
        material = told[_end(told[: begin[0]], before) : begin[0]]
        if not prompt.endswith(header) or not shown[:first].endswith(material):
            raise RowRefusal("the chat template writes an answer's header differently by what was said before")
        begins, found = first - len(material), self._aligned(header, material, messages[turn])
        if full[: begins + found.start] != shown[: begins + found.start]:
            raise RowRefusal("the chat template writes an answer's header differently by what it says")
        if not found.before:
            return _Place(begins + found.start)
        said = full[first:]
        return _Place(first + (len(said) - len(said.lstrip("\n")) if found.trims else 0), found.before)

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

    def _ending(
        self,
        messages: Sequence[Row],
        tools: Sequence[Json],
        turn: int,
        options: Options,
        base: int,
        texts: tuple[Row, str, str],
    ) -> tuple[str, str]:
        """(what follows an answer's words up to and with its stop token, that token)."""
        marked, shown, suffix = texts
        calls = bool(marked.get("tool_calls"))
        following = str(messages[turn + 1]["role"]) if turn + 1 < len(messages) else ("tool" if calls else "user")
        key = (suffix, following, calls)
        if key not in self._endings:
            between = self._between([*messages[:turn], marked], tools, options, f"{base}{10**_WIDTH - 1}", key)
            # A template may write the name of a call again in the header of its result: the first place counts.
            words = shown[: len(shown) - len(suffix)]
            last = words if between.startswith(words) else words[-_WIDTH - len(str(base)) :]
            self._endings[key] = self._end_of(suffix, between.partition(last)[2] or suffix)
        ending = self._endings[key]
        if ending is None:
            raise RowRefusal(
                "nothing ends an answer: the template writes no special token after it, and the tokenizer names no "
                "eos_token"
            )
        return ending

    def _between(
        self, turns: list[Row], tools: Sequence[Json], options: Options, text: str, key: tuple[str, str, bool]
    ) -> str:
        """What the template writes before the words of the turn that follows; empty: it writes no such turn there."""
        message: dict[str, Json] = {"role": key[1], "content": text}
        if key[1] == "tool":
            message |= {"name": "f", "tool_call_id": _call_id(turns[-1])}
        try:
            return self.template.render([*turns, message], tools, options, prompt=False).partition(text)[0]
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
    """A turn whose texts are sentinels; these; and those of its calls' names, which must be written.

    Empty texts stay, because templates test for them, and so does what is not text.
    """
    names: list[str] = []

    def replaced(value: Json) -> Json:
        if isinstance(value, str):
            if not value:
                return value
            names.append(f"{base}{number * _LEAVES + len(names):0{_WIDTH}}")
            return names[-1]
        if isinstance(value, dict):
            return {key: replaced(item) for key, item in value.items()}
        return [replaced(item) for item in value] if isinstance(value, list) else value

    result = dict(message)
    if isinstance(thought := message.get(REASONING[0]), str) and thought:
        sentinel = replaced(thought)
        result.update({name: sentinel for name in REASONING if name in message})
    result["content"] = replaced(message.get("content", ""))
    if "content" not in message:
        del result["content"]
    called: list[str] = []
    calls: list[Json] = []
    for call in _calls(message):
        inner = call.get("function") if isinstance(call.get("function"), dict) else call
        assert isinstance(inner, dict)
        function = {**inner, "name": replaced(inner.get("name")), "arguments": replaced(inner.get("arguments"))}
        called += [str(function["name"])] if function["name"] else []
        calls.append(function if inner is call else {**call, "function": function})
    if calls:
        result["tool_calls"] = calls
    return result, names, called


def _calls(message: Row) -> list[Row]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _call_id(message: Row) -> Json:
    return next((call["id"] for call in _calls(message) if "id" in call), "call00001")


def _span(text: str, names: Sequence[str]) -> Span | None:
    """From the first to the last of ``names`` in ``text``."""
    present = [name for name in names if name in text]
    if not present:
        return None
    return min(map(text.find, present)), max(text.rfind(name) + len(name) for name in present)


def _end(text: str, names: Sequence[str]) -> int:
    span = _span(text, names)
    return span[1] if span else 0


def _first(text: str, tokens: Sequence[str]) -> tuple[int, str] | None:
    """The first of ``tokens`` in ``text``; of two at one place the longer."""
    places = [(text.find(token), -len(token), token) for token in tokens if token in text]
    return (min(places)[0], min(places)[2]) if places else None
