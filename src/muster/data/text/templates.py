"""Chat templates by name and from files, and the special tokens that each needs.

The shipped ones follow the published formats (OpenAI's ChatML, Meta's Llama 3) in words of our own; both list ``tools``
as JSON schemas in the system turn and write calls as JSON.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from muster.core.errors import UsageError

_CALLS = """
    {%- for call in message.tool_calls or [] %}
        {%- set call = call.function or call %}
        {%- set given = call.arguments if call.arguments is string else call.arguments | tojson %}
        {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + given + '}\\n</tool_call>' }}
    {%- endfor %}"""

_SYSTEM_WITH_TOOLS = """
    {%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\nYou may call these functions, one JSON schema a line:\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '\\nA call is written as\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>' }}"""

CHATML = (
    """{%- if tools %}
    {{- '<|im_start|>system\\n' }}"""
    + _SYSTEM_WITH_TOOLS
    + """
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if tools and loop.first and message.role == 'system' %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"""
    + _CALLS
    + """
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)

LLAMA3 = (
    """{{- bos_token or '' }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}"""
    + _SYSTEM_WITH_TOOLS
    + """
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if tools and loop.first and message.role == 'system' %}{%- continue %}{%- endif %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + (message.content or '') | trim }}"""
    + _CALLS
    + """
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
)

SHIPPED = {
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama3": (LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
}
#: What a user's own template writes as a special token: ChatML's kind of names, and Gemma's marks.
_MARK = re.compile(r"<\|[^\s|<>'\"{}]{1,40}\|>|<(?:start|end)_of_turn>")


@dataclass(frozen=True)
class ChatTemplate:
    """A template as text, and what a tokenizer must know as one token each."""

    text: str
    tokens: tuple[str, ...]


def shipped_or_file(value: str) -> ChatTemplate:
    """A template by its name, or of a file, in which marks such as ``<|user|>`` and ``<end_of_turn>`` are special
    tokens.

    Raises:
        UsageError: neither such a name nor a file that can be read.
    """
    if value in SHIPPED:
        return ChatTemplate(*SHIPPED[value])
    try:
        text = Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        known = ", ".join(SHIPPED)
        raise UsageError(
            f"data.chat_template {value!r} cannot be read: {error}", hint=f"one of {known}, a file, or 'from MODEL'"
        ) from error
    return ChatTemplate(text, tuple(dict.fromkeys(_MARK.findall(text))))
