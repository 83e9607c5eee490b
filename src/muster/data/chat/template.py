"""A chat template, rendered as transformers' ``apply_chat_template`` renders it, without importing transformers.

The environment is our own for two reasons: transformers' is private and copies all data on each call, and a date that a
template writes must be the day of preparation on every host and at every resume.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NoReturn

from muster.core.errors import UsageError, install_command
from muster.core.typed_json import Json
from muster.core.typed_json import JsonObject as Row
from muster.data.chat.rows import RowRefusal
from muster.data.chat.traced import joined

#: Noncharacters of Unicode around what ``{% generation %}`` marks: no text has them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
Span = tuple[int, int]
"""Characters [start, end)."""
#: Filters that ``Traced`` follows; of others nothing is known.
_FOLLOWED = {"trim", "string", "tojson", "length", "count", "default", "d", "list", "first", "last", "reverse", "items"}
_FOLLOWED |= {"replace", "lower", "upper", "selectattr", "rejectattr", "map"}


class TemplateRefusal(RowRefusal):
    """The template raised: its own message, or what went wrong in it."""


class Template:
    """One template with the special tokens that it may write."""

    def __init__(self, text: str, variables: Mapping[str, str], today: str) -> None:
        """``variables``: ``bos_token`` and the like. ``today``: ISO date for templates that write one.

        Raises UsageError where jinja2 is missing or the text is no template.
        """
        try:
            from jinja2 import TemplateError
        except ImportError as error:
            raise UsageError("chat templates need jinja2", hint=install_command("train")) from error
        self.text, self._variables, self.today = text, dict(variables), today
        self.has_marks = "endgeneration" in text
        self._written = dict.fromkeys(("user", "assistant", "tool"), True)
        try:
            self._plain = _compiled(text, today, marks=False)
        except TemplateError as error:
            raise UsageError(f"the chat template cannot be read: {error}") from error

    def render(
        self, messages: Sequence[Row], tools: Sequence[Json], options: Mapping[str, Json], *, prompt: bool,
        marks: bool = False,
    ) -> str:  # fmt: skip
        """The text of ``messages``; with ``prompt`` up to where the assistant's answer begins. Raises
        TemplateRefusal."""
        try:
            text = (self._with_marks if marks else self._plain).render(
                messages=messages, tools=tools or None, documents=None, add_generation_prompt=prompt,
                **{**self._variables, **options},
            )  # fmt: skip
            return "".join((text,))  # plain text, traced or not
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise TemplateRefusal(f"the chat template refuses a conversation: {reason}") from error

    def marked(self, messages: Sequence[Row], tools: Sequence[Json], options: Mapping[str, Json]) -> list[Span]:
        """What ``{% generation %}`` blocks wrote in the text of ``messages``. Raises TemplateRefusal."""
        spans, place, start = [], 0, 0
        for character in self.render(messages, tools, options, prompt=False, marks=True):
            if character == _OPEN:
                start = place
            elif character == _CLOSE:
                spans.append((start, place))
            else:
                place += 1
        return spans

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that a caller may set, ``enable_thinking`` for example."""
        from jinja2.meta import find_undeclared_variables

        environment = _environment(self.today, marks=False)
        return frozenset(find_undeclared_variables(environment.parse(self.text)))

    @cached_property
    def is_traceable(self) -> bool:
        """Whether all that it does with words goes through their methods, so that ``Traced`` ones record it."""
        from jinja2 import nodes

        def is_role(node: nodes.Node) -> bool:
            name = node.attr if isinstance(node, nodes.Getattr) else getattr(getattr(node, "arg", None), "value", None)
            return name == "role"

        tree = _environment(self.today, marks=False).parse(self.text)
        lost: list[bool] = [next(tree.find_all(nodes.Concat), None) is not None]
        lost += [each.name not in _FOLLOWED for each in tree.find_all(nodes.Filter)]
        lost += [each.attr in ("join", "format", "format_map") for each in tree.find_all(nodes.Getattr)]
        lost += [
            not (isinstance(each.right, nodes.Const) and isinstance(each.right.value, int))
            for each in tree.find_all(nodes.Mod)
        ]
        for each in tree.find_all(nodes.Compare):  # `words in text` asks the text
            lost += [
                not (isinstance(each.expr, nodes.Const) or isinstance(other.expr, nodes.List | nodes.Tuple))
                and not is_role(each.expr)
                for other in each.ops
                if other.op in ("in", "notin")
            ]
        return not any(lost)

    def writes(self, role: str) -> bool:
        """Whether a turn of ``role`` that is not the assistant's is in the text; True where the template refuses it."""
        if role not in self._written:
            turn: Row = {"role": role, "content": "8675309"}
            question: Row = {"role": "user", "content": "Q"}
            texts = []
            for turns in ([turn, question], [question, turn]):
                with suppress(TemplateRefusal):
                    texts.append(self.render(turns, [], {}, prompt=False))
            self._written[role] = not texts or any("8675309" in text for text in texts)
        return self._written[role]

    @cached_property
    def arguments_are_text(self) -> bool:
        """Whether calls of tools must hold their arguments as JSON text: an object makes the template raise."""
        return not self._takes_call({"a": "b"}, {"content": ""}) and self._takes_call('{"a": "b"}', {"content": ""})

    @cached_property
    def needs_content(self) -> bool:
        """Whether a turn that calls tools must have content, if only empty text."""
        arguments: Json = '{"a": "b"}' if self.arguments_are_text else {"a": "b"}
        return not self._takes_call(arguments, {}) and self._takes_call(arguments, {"content": ""})

    def _takes_call(self, arguments: Json, content: Row) -> bool:
        call: Row = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns: list[Row] = [
            {"role": "user", "content": "Q"}, {"role": "assistant", "tool_calls": [call], **content},
        ]  # fmt: skip
        try:
            self.render(turns, [], {}, prompt=False)
        except TemplateRefusal:
            return False
        return True

    @cached_property
    def _with_marks(self) -> Any:
        return _compiled(self.text, self.today, marks=True)


def _compiled(text: str, today: str, *, marks: bool) -> Any:
    result = _environment(today, marks=marks).from_string(text)
    # Each rendering copies them, and of a ChainMap that takes as long as the rest.
    result.globals = dict(result.globals)
    return result


def _environment(today: str, *, marks: bool) -> Any:
    """As transformers 5.23 builds it (``chat_template_utils``), ``strftime_now`` frozen to ``today``."""
    import jinja2.ext
    from jinja2 import nodes, utils
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """``{% generation %}``: its body, between marks where they are asked for."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> str:
            text: str = caller()
            return _OPEN + text + _CLOSE if marks else text

    class Namespace(utils.Namespace):
        def __init__(*args: Any, **kwargs: Any) -> None:
            self, *rest = args
            values = dict(*rest, **kwargs)
            for name in values:
                _refuse_private(name)
            utils.Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_private(name)
            utils.Namespace.__setitem__(self, name, value)

    class Dictionaries:
        """``dict(...)`` without the class's attributes."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    day = datetime.datetime.fromisoformat(today)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.concat = joined  # type: ignore[method-assign]  # an attribute that jinja2 means to be replaced
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=day.strftime, dict=Dictionaries(), namespace=Namespace
    )
    return environment


def _refuse_private(name: object) -> None:
    from jinja2.exceptions import SecurityError

    if isinstance(name, str) and name.startswith("_"):  # the way into Python's own objects
        raise SecurityError(f"a chat template may not store {name!r} in a namespace")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
