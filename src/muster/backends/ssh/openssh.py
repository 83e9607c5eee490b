"""Orders to hosts through the user's own OpenSSH client, with its configuration, keys, agents and jump hosts."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from muster.core.clock import SystemShell
from muster.core.errors import AccessError, BackendError, BusyError, ConflictError, MusterError
from muster.core.protocols import Shell
from muster.core.typed_json import Unreadable
from muster.protocol.codec import encode, reader_of
from muster.protocol.pipes import FROM_FAR, FarFacts, ToFar
from muster.storage.store.ssh import FAR, MARK, client, split

NOT_CONNECTED = 255
"""ssh's own exit code."""
TIMEOUT_S = 120.0
AT_ONCE = 16
SILENT_S = 20.0
_SILENT: dict[str, tuple[float, MusterError]] = {}
_Result = TypeVar("_Result")


class Unreachable(BackendError):
    """No connection: nothing is known of the host."""


@dataclass(frozen=True)
class OpenSsh:
    """Runs ``ssh``."""

    shell: Shell = field(default_factory=lambda: SystemShell(own_group=True))
    silent: dict[str, tuple[float, MusterError]] = field(default_factory=lambda: _SILENT)
    """Hosts that did not answer, and until when they are not asked again."""

    def order(self, host: str, message: ToFar, timeout_s: float = TIMEOUT_S) -> FarFacts:
        """Have the far program carry out an order; how the host is then.

        Raises:
            Unreachable: no connection, or no answer in time.
            AccessError: the host's key is unknown or another one, or no key of ours is accepted.
            ConflictError: the host works for another run.
            BackendError: anything else; the far side's own words.
        """
        printed = self.run(host, FAR, encode(message).decode(), timeout_s)
        try:
            answer = reader_of(FROM_FAR)(printed.rpartition(f"\n{MARK}\n")[2].strip().encode())
        except Unreadable as error:
            raise BackendError(f"{host}: {error}", hint="muster up RUN.yaml: one version everywhere") from error
        if isinstance(answer, FarFacts):
            return answer
        kind = {"conflict": ConflictError, "access": AccessError}.get(answer.kind, BackendError)
        raise kind(f"{host}: {answer.text}", hint=answer.hint or None)

    def run(self, host: str, words: Sequence[str], text: str = "", timeout_s: float = TIMEOUT_S) -> str:
        """What a program on the host printed, with ``text`` as its input. Raises as ``order``, and for an exit code."""
        until_s, error = self.silent.get(host, (0.0, None))
        if error is not None and time.monotonic() < until_s:
            raise error
        try:
            done = self.shell.run([*client(host), *words], stdin=text, timeout_s=timeout_s)
            error = _trouble(host, done.returncode, done.stderr) if done.returncode else None
        except BusyError as busy:
            error = Unreachable(f"{host} does not answer: {busy}")
        if isinstance(error, Unreachable):
            self.silent[host] = time.monotonic() + SILENT_S, error
        if error is not None:
            raise error
        return done.stdout

    def send(self, host: str, folder: Path, to: str) -> None:
        """The folder's files to a folder there, by a stream. Raises as ``run``."""
        self.run(host, ["mkdir", "-p", to])
        argv = [*client(host), "tar", "-x", "-f", "-", "-C", to]
        with tempfile.TemporaryFile() as said:
            child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=said, stderr=said)
            with contextlib.suppress(BrokenPipeError), child:  # which waits for its end
                with tarfile.open(fileobj=child.stdin, mode="w|") as packed:
                    packed.add(folder, ".")
            said.seek(0)
            if child.returncode:
                raise _trouble(host, child.returncode, said.read().decode(errors="replace"))


def everywhere(hosts: Sequence[str], act: Callable[[str], _Result]) -> dict[str, _Result | MusterError]:
    """``act`` on all hosts at once; its result, or what it raised."""

    def caught(host: str) -> _Result | MusterError:
        try:
            return act(host)
        except MusterError as error:
            return error

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(hosts, pool.map(caught, hosts), strict=True))


def refuse(
    answers: Mapping[str, _Result | MusterError], *, most: int = 0, hint: str | None = None
) -> dict[str, _Result]:
    """The results; one error with everything that went wrong, where that is more than ``most``. ``hint``: besides
    those of the errors."""
    errors = [answer for answer in answers.values() if isinstance(answer, MusterError)]
    if len(errors) > most:
        hints = dict.fromkeys(found for found in (*(error.hint for error in errors), hint) if found)
        raise type(errors[0])("; ".join(map(str, errors)), hint="; ".join(hints) or None)
    return {host: answer for host, answer in answers.items() if not isinstance(answer, MusterError)}


def _trouble(host: str, code: int, stderr: str) -> MusterError:
    """What ssh or the far side's shell said, and what repairs it."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or [f"exit code {code}"]
    destination, port = split(host)
    if code != NOT_CONNECTED:
        return BackendError(f"{host}: {lines[-1]}", hint="muster up RUN.yaml prepares hosts")
    if re.search("HAS CHANGED", stderr):
        return AccessError(f"{host}: its key is another one than before", hint="ask who runs it, then: ssh-keygen -R")
    if "Host key verification failed" in stderr:
        by_hand = f"ssh {f'-p {port} ' if port else ''}{destination}"
        return AccessError(f"{host}: its key is unknown: {lines[0]}", hint=f"{by_hand} shows its fingerprint and asks")
    if "Permission denied" in stderr:
        return AccessError(f"{host}: {lines[-1]}", hint=f"ssh-copy-id {destination}, or an IdentityFile")
    return Unreachable(f"{host}: {lines[-1]}")
