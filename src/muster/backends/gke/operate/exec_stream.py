"""Running a command in a pod: what it prints comes back as it comes, and its exit code at the end."""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.kubernetes.http import Call, Unreachable
from muster.backends.gke.kubernetes.stream import ERROR, RESIZE, STDERR, STDIN, STDOUT, Stream
from muster.core.errors import BackendError

Write = Callable[[bytes], object]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A container."""

    namespace: str
    pod: str
    container: str


def exec_call(cluster: Cluster, target: Target, argv: Sequence[str], *, stdin: bool, tty: bool) -> Call:
    """The request: every word of the command is a parameter of its own, so nothing is ever quoted."""
    switches = {"container": target.container, "stdin": stdin, "stdout": True, "stderr": not tty, "tty": tty}
    words = [("command", word) for word in argv]
    query = urllib.parse.urlencode([*words, *((name, str(value).lower() if isinstance(value, bool) else value)
                                              for name, value in switches.items())])  # fmt: skip
    path = f"api/v1/namespaces/{target.namespace}/pods/{target.pod}/exec"
    return Call(method="GET", url=f"{cluster.endpoint}/{path}?{query}", ca_pem=cluster.ca_pem)


def run(cluster: Cluster, target: Target, argv: Sequence[str], *, line: str, timeout_s: float = 60.0) -> bytes:
    """Give the command one line of input and return its output.

    Raises:
        BackendError: it cannot be started, failed (its last words are in the message), or took too long.
    """
    stream = cluster.session.http.open(exec_call(cluster, target, argv, stdin=True, tty=False))
    out, err = bytearray(), bytearray()
    late = threading.Timer(timeout_s, stream.close)
    late.daemon = True
    late.start()
    try:
        stream.send(STDIN, line.encode() + b"\n")
        code = _until_end(stream, out.extend, err.extend)
    except OSError as error:
        raise Unreachable(f"the connection to {target.pod} broke, or took over {timeout_s:.0f} s: {error}") from error
    finally:
        late.cancel()
        stream.close()
    if code != 0:
        words = err.decode(errors="replace").strip().splitlines() or [f"code {code}"]
        raise BackendError(f"{argv[-1] if argv else ''} in {target.pod} ended with {code}: {words[-1][:300]}")
    return bytes(out)


def attach(
    cluster: Cluster,
    target: Target,
    argv: Sequence[str],
    *,
    out: Write,
    err: Write,
    typed: Iterator[bytes] | None = None,
    tty: bool = False,
    size: tuple[int, int] | None = None,
) -> int:
    """Run the command with somebody at the terminal; return its exit code.

    ``typed`` is read in a thread of its own and never waited for; ``size`` is (columns, lines).
    """
    stream = cluster.session.http.open(exec_call(cluster, target, argv, stdin=typed is not None, tty=tty))
    try:
        if tty and size is not None:
            stream.send(RESIZE, json.dumps({"Width": size[0], "Height": size[1]}).encode())
        if typed is not None:
            threading.Thread(target=_forward, args=(typed, stream), daemon=True).start()
        return _until_end(stream, out, err)
    except OSError as error:
        raise Unreachable(f"the connection to {target.pod} broke: {error}") from error
    finally:
        stream.close()


def _until_end(stream: Stream, out: Write, err: Write) -> int:
    while (message := stream.receive()) is not None:
        channel, data = message
        if channel == STDOUT:
            out(data)
        elif channel == STDERR:
            err(data)
        elif channel == ERROR:
            return exit_code(json.loads(data))
    raise ConnectionError("the stream ended without a verdict")


def exit_code(status: Mapping[str, Any]) -> int:
    """Of the ``Status`` that ends a stream.

    Raises:
        BackendError: the command was not started.
    """
    if status.get("status") == "Success":
        return 0
    for cause in status.get("details", {}).get("causes", []):
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise BackendError(str(status.get("message", "the command was not started")))


def _forward(typed: Iterator[bytes], stream: Stream) -> None:
    try:
        for data in typed:
            stream.send(STDIN, data)
    except OSError:
        return  # the command has ended: nobody reads any more
