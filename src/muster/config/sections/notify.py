"""``notify`` of the run file: where news of the run is sent, and which secrets may not be written there in clear."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from muster.config.sections.section import Section
from muster.core.errors import Problem
from muster.core.redact import redact, secret_word

NewsKind: TypeAlias = Literal["hosts", "waiting", "limit", "ended"]
NEWS: tuple[NewsKind, ...] = ("hosts", "waiting", "limit", "ended")
#: Services whose addresses are the permission to post there.
_KEYS_TO_POST = ("hooks.slack.com", "discord.com", "discordapp.com", "chat.googleapis.com", ".webhook.office.com")


class Notify(Section):
    """Where the supervisor sends news of the run, in a thread of its own. What fails there is logged."""

    command: list[str] | None = None
    """A program and its arguments, started where the supervisor runs; the news is its standard input, as JSON. It has
    10 seconds, and the run's ``env`` and ``secrets``."""
    webhook: str | None = None
    """To which ``{"text": ...}`` is posted (Slack, Mattermost, Google Chat): a URL, or the name of one of ``secrets``
    that holds it."""
    on: list[NewsKind] = Field(default_factory=lambda: list(NEWS))
    """What is sent: hosts came; the run waits for some, longer than ``waiting_s``; nine tenths of a limit are used; the
    run ended."""
    waiting_s: Annotated[float, Field(gt=0)] = 600.0


def problems(notify: Notify, secrets: Mapping[str, str]) -> Iterator[Problem]:
    """A program that is none, a secret in clear, an address that is none."""
    if notify.command is not None:
        if not notify.command or not notify.command[0]:
            yield Problem("notify.command", "names no program", hint="for example [mail, -s, Muster, me@example.com]")
        elif any("\0" in word for word in notify.command):
            yield Problem("notify.command", "holds a NUL byte, which no argument can")
        elif secret_word(notify.command) is not None:
            message = "looks like a secret, and would stand in clear in run.yaml, resolved.json and every `ps`"
            yield Problem("notify.command", message, hint="secrets: {NAME: env}: the program has the variable NAME")
    if not notify.on and (notify.command or notify.webhook):
        yield Problem("notify.on", "is empty: no news would be sent", hint=f"some of {', '.join(NEWS)}")
    if notify.webhook is not None and notify.webhook not in secrets:
        yield from _address_problems(notify.webhook)


def _address_problems(webhook: str) -> Iterator[Problem]:
    hint = "secrets: {HOOK: env} and webhook: HOOK take it from the environment in which you submit"
    try:
        url = urllib.parse.urlsplit(webhook)
        host, _ = url.hostname or "", url.port
    except ValueError:
        host, url = "", urllib.parse.urlsplit("")
    if url.scheme not in ("http", "https") or not host:  # not shown: it may be the secret itself
        yield Problem("notify.webhook", "is neither a URL (http, https) nor the name of one of `secrets`", hint=hint)
    elif (
        url.username
        or url.query
        or redact(webhook) != webhook
        or any(host == known or (known.startswith(".") and host.endswith(known)) for known in _KEYS_TO_POST)
    ):
        message = f"anyone with this address at {host} can post there, and run.yaml would hold it in clear"
        yield Problem("notify.webhook", message, hint=hint)
