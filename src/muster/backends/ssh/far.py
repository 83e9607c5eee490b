"""The one program that a terminal starts on a host (``storage.store.ssh.FAR``), an order on its standard input.

The answer begins after the line ``MARK``, since a login shell may have printed something before. Nothing from an order
becomes part of a shell's command line. With the argument ``store`` it speaks the frames of ``ssh://`` instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from muster.backends import hardware
from muster.backends.host.children import RealChildren
from muster.backends.letters import ASK, Answers
from muster.backends.run_home import RUN_ID
from muster.backends.ssh.home_copy import COPIED
from muster.backends.ssh.store_server import Homes, refusal
from muster.config import memory_at_logout
from muster.core import environment, processes, typed_json
from muster.core.clock import SystemShell
from muster.core.errors import BackendError, ConflictError, MusterError, UsageError
from muster.core.typed_json import Unreadable, decode
from muster.protocol.codec import encode, reader_of
from muster.protocol.pipes import (
    FROM_STORE,
    TO_FAR,
    TO_STORE,
    FarAsk,
    FarEnd,
    FarFacts,
    FarLook,
    FarRefused,
    FarStart,
    FromFar,
    ToFar,
)
from muster.storage import memory_dir
from muster.storage.store.ssh import MARK, OVER_SSH
from muster.transport.stream import Stream

HOST, STORE = "muster.backends.ssh.host", "muster.backends.ssh.store_server"
CONNECT_S = 20.0
"""For a host to reach the run's home on the first one, whose server is being started."""
LEAVE_S = 60.0
"""For the host program of an earlier submission to leave."""
KILL_S = 20.0


def root() -> Path:
    """What is kept for this user on this host."""
    return Path.home() / ".muster" / "ssh"


def folder_of(run_id: str) -> Path:
    """Of one run on this host. Raises UsageError for an id that is no folder's name."""
    if run_id in (".", "..") or "/" in run_id or "\0" in run_id:
        raise UsageError(f"{run_id!r} is no run id")
    return root() / "runs" / run_id


def secrets_of(folder: Path) -> Iterator[Path]:
    """The files of a run that hold a secret."""
    kept = [folder / "start.json", *(part / "token" for part in (folder, folder / "host", folder / "supervisor"))]
    yield from (path for path in (*kept, folder / "host" / "secrets.json") if path.exists())


def look(order: FarLook) -> FarFacts:
    """Looks, changes nothing."""
    gpus, living = ([], _living(order.run_id)) if order.run_id else (hardware.gpus(SystemShell(), {}), [])
    kept = root() / "homes" / order.run_id
    copied = kept / COPIED
    reached = (environment.inherited().get("SSH_CONNECTION", "").split() + [""] * 3)[2]
    return FarFacts(
        hostname=socket.gethostname(),
        boot=processes.boot_id(),
        home=str(Path.home()),
        address=reached,
        gpus=tuple(one.name for one in gpus),
        gpu_memory_bytes=min((one.memory_bytes for one in gpus), default=0),
        disk_bytes=shutil.disk_usage(Path.home()).free,
        wall_ns=time.time_ns(),
        doubts=memory_at_logout.doubts(),
        held_by=_holder()[0],
        keeps_home=bool(order.run_id) and (kept / RUN_ID).exists() and not copied.exists(),
        copied_wall_ns=copied.stat().st_mtime_ns if order.run_id and copied.exists() else 0,
        processes=len(living),
        supervises=any("muster.app.supervisor" in one.argv for one in living),
        left=tuple(_left(order.run_id)) if order.run_id else (),
    )


def _left(run_id: str) -> Iterator[str]:
    folder = folder_of(run_id)
    yield from (f"process {one.pid}: {' '.join(one.argv)[:80]}" for one in _living(run_id))
    yield from (f"memory {path}" for path in memory_dir.left_over(folder / "host", run_id)[0])
    yield from (f"secret {path}" for path in secrets_of(folder))


def _living(run_id: str) -> list[processes.Process]:
    spared = processes.ancestors()
    return [one for one in processes.labelled(run_id) if one.pid not in spared]


def start(order: FarStart) -> None:
    """Start the host program, detached; the same order twice starts one.

    Raises:
        ConflictError: this host works for another run.
        BackendError: the run's home cannot be reached from here.
    """
    folder = folder_of(order.run_id)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _lease(order) as lease:
        if lease is None:
            return
        end(FarEnd(run_id=order.run_id, grace_s=0.0))  # a host program that was killed leaves an agent behind
        if order.server and order.server != order.address:
            _reach(order)
        processes.replace_text(folder / "start.json", typed_json.encode(order).decode())
        processes.replace_text(folder / "token", order.token)
        lease.truncate(0)
        lease.write(f"{order.run_id} {order.submission}".encode())
        lease.flush()
        env, python = _environment(order, folder), [sys.executable, "-I", "-m"]
        if order.server == order.address:
            kept = root() / "homes" / order.run_id
            if not (kept / RUN_ID).exists():
                raise BackendError(f"{socket.gethostname()} does not see the run's home: is its folder shared?")
            (kept / COPIED).unlink(missing_ok=True)  # from now on it is the home
            server = [*python, STORE, str(root() / "homes"), order.run_id, order.address, str(order.port)]
            processes.start(server, env=env, log=folder / "store.log", cwd=folder)
            _reach(order)
        with processes.open_log(folder / "host.log") as log:
            subprocess.Popen(
                [*python, HOST, str(folder)], env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, pass_fds=[lease.fileno()],
            )  # fmt: skip


def _environment(order: FarStart, folder: Path) -> dict[str, str]:
    """Of the run's programs here."""
    extra = {"MUSTER_BIND": order.address, "MUSTER_TOKEN_FILE": str(folder / "token")}
    if order.server:
        extra["MUSTER_STORE"] = f"{order.server} {order.port}"
    return processes.environment(environment.inherited(), run_id=order.run_id, run_dir=str(folder), extra=extra)


def ask(order: FarAsk) -> str:
    """The answer; needs none of this host's programs but the supervisor. Raises BackendError: there is none."""
    folder = folder_of(order.run_id)
    try:
        begun = decode(FarStart, processes.read_plain(folder / "start.json"))
    except FileNotFoundError as error:
        raise BackendError(f"nothing of {order.run_id} is at work on {socket.gethostname()}") from error
    os.chdir(folder)
    answers = Answers(children=RealChildren(), env=_environment(begun, folder), run_dir=folder / "supervisor")
    return (answers.ask if order.kind == ASK else answers.command)(order.kind, order.text)


@contextlib.contextmanager
def _lease(order: FarStart) -> Iterator[BinaryIO | None]:
    """This host's lock, which the host program inherits and holds until it ends; None: that of this order holds it.

    Raises:
        ConflictError: another run has the host, by its program or by processes that a killed one left.
    """
    until = time.monotonic() + LEAVE_S
    descriptor = os.open(root() / "lease", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "r+b") as file:
        while True:
            taken = False
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                taken = True
            run_id, submission = _holder()
            if run_id not in ("", order.run_id):
                what = f"{socket.gethostname()} works for the run {run_id}"
                raise ConflictError(what, hint=f"muster down {run_id} ends that one")
            if taken or submission == order.submission:
                yield file if taken else None
                return
            if time.monotonic() > until:  # cut off since: the run goes on without what that does
                end(FarEnd(run_id=order.run_id, grace_s=0.0))
            time.sleep(0.2)


def _holder() -> tuple[str, str]:
    """(run, submission) that this host works for; empty where nothing of it runs."""
    with contextlib.suppress(OSError):
        run_id, _, submission = (root() / "lease").read_text().partition(" ")
        if run_id and any(STORE not in one.argv for one in _living(run_id)):  # a home outlives its run by seconds
            return run_id, submission
    return "", ""


def _reach(order: FarStart) -> None:
    """Wait for the server of the run's home, which proves that it is this run's: another program may have the port."""
    address, until, last = order.server, time.monotonic() + CONNECT_S, ""
    while time.monotonic() < until:
        try:
            with socket.create_connection((address, order.port), timeout=2.0) as sock:
                Stream(sock, order.token.encode(), server=False, decode=reader_of(FROM_STORE), handshake_s=5.0)
                return
        except (OSError, MusterError, Unreadable) as error:
            last = getattr(error, "strerror", None) or str(error)
        time.sleep(0.1)
    raise BackendError(
        f"{socket.gethostname()} does not reach the first host at {address} port {order.port}: {last}",
        hint="hosts need every TCP port of each other, at the addresses by which ssh reaches them; ssh.port is free?",
    )


def end(order: FarEnd) -> None:
    """End everything of the run on this host and remove memory and secrets; absent is success.

    Raises:
        BackendError: processes do not end.
    """
    folder, began_s = folder_of(order.run_id), time.monotonic()
    # The host program first and at once, since it would start again what ends; the home's server last.
    processes.send([one for one in _living(order.run_id) if HOST in one.argv], signal.SIGKILL)
    if order.grace_s:
        processes.send([one for one in _living(order.run_id) if STORE not in one.argv], signal.SIGTERM)
    while found := _living(order.run_id):
        waited_s = time.monotonic() - began_s
        if waited_s > order.grace_s + KILL_S:
            pids = ", ".join(str(one.pid) for one in found[:5])
            raise BackendError(f"{len(found)} processes do not end: {pids}", hint="muster down again")
        if waited_s > order.grace_s or all(STORE in one.argv for one in found):
            processes.send(found, signal.SIGKILL)
        time.sleep(0.05)
    for path in memory_dir.left_over(folder / "host", order.run_id)[0]:
        shutil.rmtree(path, ignore_errors=True)
    for path in secrets_of(folder):
        path.unlink(missing_ok=True)
    if order.forget:
        for gone in (folder, root() / "homes" / order.run_id):
            shutil.rmtree(gone, ignore_errors=True)


def store() -> None:
    """Speak the store's frames on standard input and output until they end."""
    mine, its = socket.socketpair()

    def feed() -> None:
        while data := os.read(0, 1 << 16):
            its.sendall(data)
        its.shutdown(socket.SHUT_WR)

    def drain() -> None:
        with open(1, "wb", buffering=0, closefd=False) as out:
            while data := its.recv(1 << 16):
                while data := data[out.write(data) :]:
                    pass

    for pump in (feed, drain):
        threading.Thread(target=pump, daemon=True).start()
    with contextlib.suppress(ConnectionError):
        stream = Stream(mine, OVER_SSH, server=True, decode=reader_of(TO_STORE), handshake_s=30.0)
        Homes(root() / "homes").serve(stream)


def answer(order: ToFar) -> FromFar:
    """What becomes of one order: how the host is then."""
    try:
        match order:
            case FarStart():
                start(order)
            case FarEnd():
                end(order)
            case FarAsk():
                return replace(look(FarLook()), reply=ask(order))
            case FarLook():
                return look(order)
        return look(FarLook(run_id=order.run_id))
    except (MusterError, OSError, ValueError) as error:
        return refusal(error)


def main() -> None:
    os.umask(0o077)
    root().mkdir(mode=0o700, parents=True, exist_ok=True)
    os.write(1, f"\n{MARK}\n".encode())
    if sys.argv[1:] == ["store"]:
        store()
        return
    try:
        result = answer(reader_of(TO_FAR)(sys.stdin.buffer.read()))
    except Unreadable as error:
        result = FarRefused(kind="failed", text=str(error), hint="muster up RUN.yaml: one version everywhere")
    os.write(1, encode(result) + b"\n")


if __name__ == "__main__":
    main()
