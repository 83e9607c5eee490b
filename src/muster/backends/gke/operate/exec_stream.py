"""Running a command in a pod: its output is streamed back, and its exit code at the end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from muster.backends.gke.kubernetes.api import Cluster
from muster.backends.gke.kubernetes.streams import ERROR, RESIZE, STDERR, STDIN, STDOUT, Stream
from muster.backends.google.http import Unreachable
from muster.core.errors import BackendError
from muster.core.typed_json import JsonObject, children, text, whole

Write = Callable[[bytes], object]


@dataclass(frozen=True, kw_only=True)
class Target:
    namespace: str
    pod: str
    container: str


def _open(cluster: Cluster, target: Target, argv: Sequence[str], *, stdin: bool, tty: bool) -> Stream:
    """Every word of the command is a parameter of its own, so nothing is ever quoted."""
    switches = {"stdin": stdin, "stdout": True, "stderr": not tty, "tty": tty}
    query = [*(("command", word) for word in argv), ("container", target.container)]
    query += [(name, str(value).lower()) for name, value in switches.items()]
    return cluster.connection.open(f"api/v1/namespaces/{target.namespace}/pods/{target.pod}/exec", query)


def run(cluster: Cluster, target: Target, argv: Sequence[str], *, line: str, timeout_s: float = 60.0) -> bytes:
    """Give the command one line of input and return its output.

    Raises:
        BackendError: it cannot be started, failed (its last words are in the message), or took too long.
    """
    stream = _open(cluster, target, argv, stdin=True, tty=False)
    out, err = bytearray(), bytearray()
    late = threading.Timer(timeout_s, stream.abort)
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
        lines = err.decode(errors="replace").strip().splitlines() or [f"code {code}"]
        raise BackendError(f"{argv[-1] if argv else ''} in {target.pod} ended with {code}: {lines[-1][:300]}")
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
    """Run the command with a terminal attached; return its exit code.

    ``typed`` is read in a thread of its own and never waited for; ``size`` is (columns, lines).
    """
    stream = _open(cluster, target, argv, stdin=typed is not None, tty=tty)
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


def exit_code(status: JsonObject) -> int:
    """Of the ``Status`` that ends a stream.

    Raises:
        BackendError: the command was not started.
    """
    if status.get("status") == "Success":
        return 0
    for cause in children(status, "details", "causes"):
        if text(cause, "reason") == "ExitCode":
            return whole(cause, "message")
    raise BackendError(str(status.get("message", "the command was not started")))


def _forward(typed: Iterator[bytes], stream: Stream) -> None:
    try:
        for data in typed:
            stream.send(STDIN, data)
    except OSError:
        return  # the command has ended and no longer reads
