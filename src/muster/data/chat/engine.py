"""Chats as documents: token ids with a mask, one document an answer where the template rewrites history, else fewer.

For every answer that is learned: the ids before it are those of its prompt alone, as generation gets them, and the last
learned id ends generation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from muster.core.errors import UsageError
from muster.core.typed_json import Json
from muster.core.typed_json import JsonObject as Row
from muster.data.chat.answers import Answer, AnswerFinder, Options
from muster.data.chat.masks import ChatText, ChatTokenizer, Document, Learned, Masker, any_of
from muster.data.chat.rows import (
    Conversation,
    NotWritten,
    RowRefusal,
    conversation,
    reasoning_of,
    row_error,
    without_reasoning,
)
from muster.data.chat.structures import Differs, Structures
from muster.data.chat.template import Span, Template

#: Variables by which templates take whether the model thinks before it answers.
_THINKING = ("enable_thinking", "thinking")
_EMPTY_BLOCK = re.compile(r"<think>\s*</think>\s*")


@dataclass(frozen=True)
class ChatRules:
    """What decides, together with the tokenizer, how chats become tokens; travels to workers."""

    train_on: str | tuple[str, ...] = "completions"
    thinking: str = "auto"
    """``data.thinking``."""
    today: str = "2025-01-01"
    """ISO date, for templates that write it."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end generation by the model's configs."""

    @property
    def roles(self) -> frozenset[str]:
        return frozenset({"assistant"} if isinstance(self.train_on, str) else self.train_on)


@dataclass
class ChatReport:
    """What was done to rows, in words with counts."""

    changes: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """Rows left out, by reason."""
    first: tuple[int, str] | None = None
    """Number and reason of the first row that was left out."""
    empty: int = 0
    """Rows with nothing to learn from: no answer says anything."""
    stops: set[int] = field(default_factory=set)
    """Ids that end what is learned."""

    def add(self, other: ChatReport) -> None:
        self.changes += other.changes
        self.refused += other.refused
        self.first = self.first or other.first
        self.empty += other.empty
        self.stops |= other.stops

    def to_json(self) -> dict[str, Json]:
        return {
            "changes": dict(self.changes), "refused": dict(self.refused), "empty": self.empty,
            "first": list(self.first) if self.first else None, "stops": sorted(self.stops),
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ChatReport:
        first, counts = value["first"], (Counter(value["changes"]), Counter(value["refused"]))
        return cls(*counts, (first[0], first[1]) if first else None, value["empty"], set(value["stops"]))


class ChatEngine:
    """Makes documents of rows with one tokenizer and its template."""

    def __init__(self, encoder: ChatTokenizer, rules: ChatRules) -> None:
        """Raises UsageError where the tokenizer has no chat template or none that can be read."""
        text = encoder.chat_template
        if text is None:
            raise UsageError(
                "the model's tokenizer has no chat template, and the rows are chats",
                hint="set data.chat_template: chatml (or llama3, a file, 'from MODEL')",
            )
        self._encoder, self._rules = encoder, rules
        self.template = Template(text, encoder.template_variables, rules.today)
        ids = [*([] if encoder.eos_id is None else [encoder.eos_id]), *rules.stop_ids]
        stops = [token for token in map(encoder.fast.id_to_token, dict.fromkeys(ids)) if token]
        self._finder = AnswerFinder(
            self.template, tuple(stops), encoder.special_tokens, closes_reasoning=rules.thinking == "off"
        )
        self._masker, self._control = Masker(encoder), any_of(encoder.special_tokens)
        self._named = frozenset(stops)
        odd = re.compile(f"{self._control.pattern}|<think>")
        self._structures = Structures(self.template, odd, self._texts)
        # What ends a plain answer ends one that calls tools: `</tool_call>` may be a special token, too.
        if (plain := self.plain_stop()) and plain not in stops:
            self._finder = replace(self._finder, stops=(*stops, plain))

    def documents(self, rows: Sequence[Row], first_row: int = 0) -> tuple[list[list[Document]], ChatReport]:
        """The documents of each row (none: it is left out, and counted). Raises RowError."""
        report = ChatReport()
        try:
            texts = [self._texts_or_refusal(row, report, first_row + index) for index, row in enumerate(rows)]
        except Differs:
            return self.documents(rows, first_row)
        encodings = iter(
            self._encoder.fast.encode_batch([each.text for row in texts for each in row], add_special_tokens=False)
        )
        result: list[list[Document]] = []
        for index, row in enumerate(texts):
            own = [next(encodings) for _ in row]
            try:
                result.append(self._masker.documents(row, own, report.stops))
            except RowRefusal as refusal:
                result.append([])
                refuse(report, str(refusal), first_row + index)
        return result, report

    def conversation(self, row: Row, changes: Counter[str] | None = None) -> Conversation:
        """A row's conversation as it is rendered. Raises UsageError, RowRefusal."""
        changes = Counter() if changes is None else changes
        found = conversation(row, changes, text_arguments=self.template.arguments_are_text)
        if self.template.needs_content:
            found = found._replace(messages=[{"content": "", **turn} for turn in found.messages])
        if self._rules.thinking == "off":
            turns = found.messages
            turns = [without_reasoning(turn, changes) if turn["role"] == "assistant" else turn for turn in turns]
            found = found._replace(messages=turns)
        return found

    def plain_stop(self) -> str | None:
        """The token that ends the answer to a question; None: the template refuses them, or nothing ends it."""
        turns: list[Row] = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "An answer."}]
        try:
            return self.answer(Conversation(turns, [], frozenset()), 1)[0].stop
        except RowRefusal:
            return None

    def answer(self, found: Conversation, turn: int) -> tuple[Answer, Options]:
        """The answer in turn ``turn``, and the template's options it is asked with. Raises RowRefusal."""
        first: RowRefusal | None = None
        for options in self._options(found.messages[turn]):
            try:
                return self._finder.find(found.messages, found.tools, turn, options), options
            except RowRefusal as error:
                first = first or error
        assert first is not None
        raise first

    def _options(self, answer: Row) -> list[Options]:
        """Options to try, in order: what the row shows, then the template's own default."""
        names = [name for name in _THINKING if name in self.template.variables]
        if not names:
            return [{}]
        if self._rules.thinking != "auto":
            return [dict.fromkeys(names, self._rules.thinking == "on")]
        return [dict.fromkeys(names, bool(reasoning_of(answer).strip())), {}]

    def _texts_or_refusal(self, row: Row, report: ChatReport, index: int) -> list[ChatText]:
        changes: Counter[str] = Counter()
        try:
            texts = self._structures.texts(self.conversation(row, changes), changes)
        except UsageError as error:
            raise row_error(error, index) from error
        except RowRefusal as refusal:
            refuse(report, str(refusal), index)
            return []
        if changes:
            report.changes.update(changes)
        report.empty += not texts
        return texts

    def _texts(self, found: Conversation, changes: Counter[str]) -> list[ChatText]:
        """The documents of a conversation; none: no answer says anything. Raises RowRefusal."""
        roles, train_on = self._rules.roles, self._rules.train_on
        for message in found.messages:
            if self._control.search(str(message.get("content"))):
                changes["texts with special tokens of the tokenizer, which stay what they are"] += 1
            if not self.template.writes(role := str(message["role"])):
                changes[f"turns of role {role!r}, which the chat template does not write"] += 1
        trained = [
            turn for turn, message in enumerate(found.messages)
            if message["role"] in roles and turn not in found.untrained
        ]  # fmt: skip
        saying = [turn for turn in trained if _says_something(found.messages[turn])]
        if trained and not saying and train_on != "all":
            return []
        if train_on == "all":
            return [self._all(found, saying)]
        others = [turn for turn in saying if found.messages[turn]["role"] != "assistant"]
        answers = self._answers(found, [turn for turn in saying if turn not in others], changes, required=not others)
        if empty := sum(found.messages[turn]["role"] == "assistant" for turn in set(trained) - set(saying)):
            changes["empty answers, not learned"] += empty
        if others or not answers:
            text = self._whole(found)
            spans = tuple(self._turn_span(found, turn, text) for turn in others)
            covered = [each for each in answers if text.startswith(each.prompt + each.text)]
            left = [each for each in answers if each not in covered]
            return [ChatText(text, self._learned(covered), spans), *self._covers(left)]
        return self._covers(answers)

    def _answers(
        self, found: Conversation, turns: Sequence[int], changes: Counter[str], *, required: bool
    ) -> list[Answer]:
        """The answers in these turns that the template writes as they are asked for. Raises RowRefusal: one is
        ``required``, and there is none."""
        answers, refused = [], None
        for turn in turns:
            try:
                answers.append(self.answer(found, turn)[0])
            except RowRefusal as refusal:
                refused = refusal
                changes[f"answers left out: {refusal}"] += 1
                if isinstance(refusal, NotWritten):
                    break
        if refused is not None and required and not answers:
            raise refused
        for answer in answers:
            asked = answer.prompt[answer.prompt.rfind("<think>") :]
            remarks = {
                "answers whose reasoning the template does not write": answer.drops_reasoning,
                "answers end with a token that no config names as an end": answer.stop not in self._named,
                "answers after an empty think block, which is the prompt's": _EMPTY_BLOCK.fullmatch(asked),
                "answers learn an empty think block first": _EMPTY_BLOCK.match(answer.text),
            }
            changes.update(remark for remark, applies in remarks.items() if applies)
        return answers

    def _learned(self, answers: Sequence[Answer]) -> tuple[Learned, ...]:
        return tuple(
            Learned(
                self._masker.last_special(each.prompt), len(each.prompt),
                len(each.prompt + each.text), each.stop, each.marked,
            )
            for each in answers
        )  # fmt: skip

    def _covers(self, answers: Sequence[Answer]) -> list[ChatText]:
        """The fewest documents that hold all answers: one that another begins with is part of it."""
        result: list[ChatText] = []
        left = list(answers)
        while left:  # a later turn's text is the longer one
            last = left[-1]
            text = last.prompt + last.text
            inside = [each for each in left if text.startswith(each.prompt + each.text)]
            left = [each for each in left if each not in inside]
            result.append(ChatText(text + last.rest, self._learned(inside)))
        return result[::-1]

    def _all(self, found: Conversation, saying: Sequence[int]) -> ChatText:
        """The whole conversation, with the stop token where it ends with an answer."""
        text, stop = self._whole(found), ""
        if saying and saying[-1] == len(found.messages) - 1:
            with suppress(RowRefusal):  # a text that is learned whole needs no prompt
                last = self.answer(found, saying[-1])[0]
                stop, ended = last.stop, last.prompt + last.text
                text = ended if ended.startswith(text) else text
        return ChatText(text, spans=((0, len(text)),), stop=stop)

    def _whole(self, found: Conversation, count: int | None = None) -> str:
        return self.template.render(found.messages[:count], found.tools, {}, prompt=False)

    def _turn_span(self, found: Conversation, turn: int, text: str) -> Span:
        """What a turn of another role adds to ``text``, up to its end token. Raises RowRefusal."""
        before, after = self._whole(found, turn) if turn else "", self._whole(found, turn + 1)
        for token in self._finder.special:
            place = after.rfind(token, len(before))
            if place >= 0 and not after[place + len(token) :].strip():
                after = after[: place + len(token)]
                break
        if not (text.startswith(before) and text.startswith(after)):
            raise RowRefusal(
                f"the chat template writes turns of {found.messages[turn]['role']} differently inside the whole "
                "conversation, so they cannot be learned alone"
            )
        return len(before), len(after)


def _says_something(message: Row) -> bool:
    return any(
        value.strip() if isinstance(value, str) else value
        for name, value in message.items()
        if name not in ("role", "name", "tool_call_id")
    )


def refuse(report: ChatReport, reason: str, index: int) -> None:
    """Count a row that is left out."""
    report.refused[reason] += 1
    if report.first is None or index < report.first[0]:
        report.first = (index, reason)
