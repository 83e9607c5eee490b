"""Processes of this machine, read from ``/proc``: starting detached ones, finding them by label, ending them; and
what a process says.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TextIO

from muster.core.errors import BackendError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

#: The label: in the environment of every process of a run, independent of its parent and session.
RUN_ID = "MUSTER_RUN_ID"
RUN_DIR = "MUSTER_RUN_DIR"
HOST = "MUSTER_HOST"

_GROUPS, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")

#: What a run's processes get of the submitter's environment.
KEPT = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHASHSEED",
)  # fmt: skip
KEPT_PREFIXES = (
    "LC_", "XDG_", "MUSTER_", "LD_", "CUDA_", "CUBLAS_", "FLASH_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_",
    "TRITON_", "OMP_", "MKL_", "HF_", "HUGGING", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "MLFLOW_", "TRACKIO_",
    "GOOGLE_", "CLOUDSDK_", "GCSFS_", "AWS_", "SSL_CERT_", "REQUESTS_CA_", "STORAGE_EMULATOR_", "http_proxy",
    "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Process:
    """One living process."""

    pid: int
    start_ticks: int
    """With the pid, unique in this boot: pids are used again."""
    argv: tuple[str, ...] = ()
    run_dir: str = ""


def environment(given: Mapping[str, str], *, run_id: str, run_dir: str, extra: Mapping[str, str]) -> dict[str, str]:
    """What a process of the run gets: only what is needed, and the label."""
    kept = {
        key: value
        for key, value in given.items()
        if (key in KEPT or key.startswith(KEPT_PREFIXES)) and key not in (RUN_ID, RUN_DIR)
    }
    return {**kept, **extra, RUN_ID: run_id, RUN_DIR: run_dir}


def start(argv: Sequence[str], *, env: Mapping[str, str], log: Path, cwd: Path) -> Process:
    """Start ``argv`` detached: a session of its own, no stdin, both outputs appended to ``log``.

    Raises:
        BackendError: the program cannot be started.
    """
    try:
        with open_log(log) as output:
            child = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
                close_fds=True,
            )
    except OSError as error:
        raise BackendError(f"cannot start {argv[0]}: {error.strerror}", hint=f"see {log}") from error
    # Gone already: no running process has the recorded start time.
    return look(child.pid) or Process(pid=child.pid, start_ticks=-1, argv=tuple(argv))


def connect(argv: Sequence[str]) -> tuple[socket.socket, BinaryIO]:
    """Start ``argv``, whose input and output is the socket that is returned, and what it writes on standard error. It
    ends with the socket, and is collected then.

    Raises:
        OSError: it cannot be started.
    """
    mine, its = socket.socketpair()
    said = tempfile.TemporaryFile()  # noqa: SIM115 (the caller's)
    with its:
        child = subprocess.Popen(
            list(argv), stdin=its.fileno(), stdout=its.fileno(), stderr=said, start_new_session=True
        )  # fmt: skip
    threading.Thread(target=child.wait, daemon=True).start()
    return mine, said


def replace_text(path: Path, text: str) -> None:
    """Write the whole file, for this user alone, or leave the old one: never a half one, even after a power loss."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(folder: Path) -> None:
    """The names in it are on the disk when this returns."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_plain(path: str | Path) -> BinaryIO:
    """A file of a run's folder, which anybody may have sent, for reading: never waits, never leaves the folder.

    Raises:
        OSError: there is none, or it is a link, a pipe, a device or a folder.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise OSError(error.errno, "it is a link", str(path)) if error.errno == errno.ELOOP else error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(descriptor, "rb")


def read_plain(path: str | Path, *, most: int = 64 << 20) -> bytes:
    """The content of such a file. Raises OSError as ``open_plain``, or where it has more than ``most`` bytes."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
        return file.read()


def open_log(path: Path) -> BinaryIO:
    """``path`` for appending: made for this user alone, never a link. Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "ab")


class _Forgiving(io.FileIO):
    """Takes every byte. Those that the descriptor does not take are lost, which is said there once it takes some."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)
        self._lost = 0
        self._reason = ""

    def write(self, data: Buffer, /) -> int:
        left = given = bytes(data)
        try:
            if self._lost:  # on a line of its own: the one before it may be torn
                self._write_all(f"\n({self._lost} bytes of output are lost: {self._reason})\n".encode())
                self._lost = 0
            while left:
                left = left[os.write(self.fileno(), left) :]
        except OSError as error:
            self._lost, self._reason = self._lost + len(left), error.strerror or str(error)
        return len(given)

    def _write_all(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.fileno(), data) :]


def forgiving(fd: int, *, line_buffering: bool = True, write_through: bool = False) -> TextIO:
    """Text to ``fd`` that never raises: a full disk or a closed terminal loses lines, not the process that says so."""
    return io.TextIOWrapper(
        _Forgiving(fd),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=line_buffering,
        write_through=write_through,
    )


def forgive_outputs(*names: str) -> None:
    """Make ``sys.stdout`` and ``sys.stderr`` (or those named) ``forgiving``. First in a program's ``main``.

    An interpreter that cannot flush them at its end exits with code 120 instead of the program's own.
    """
    for name in names or ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(io.UnsupportedOperation):  # no descriptor: nothing that could be full
                fd, buffering, through = stream.fileno(), stream.line_buffering, stream.write_through
                setattr(sys, name, forgiving(fd, line_buffering=buffering, write_through=through))


def _status(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def look(pid: int) -> Process | None:
    """The process, unless it is gone or a zombie."""
    try:
        fields = _status(pid)
        argv = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, IndexError):
        return None
    if fields[0] in ("Z", "X"):
        return None
    arguments = argv.decode(errors="replace").split("\0")
    return Process(pid=pid, start_ticks=int(fields[19]), argv=tuple(arguments[:-1]))


def lives(pid: int, start_ticks: int) -> bool:
    """Is it still that very process?"""
    result = look(pid)
    return result is not None and result.start_ticks == start_ticks


def labelled(run_id: str, *, host: str | None = None) -> list[Process]:
    """Every living process of this user that carries the run's label, and the host's."""
    matches = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            variables = Path(f"/proc/{entry.name}/environ").read_bytes().split(b"\0")
        except OSError:
            continue  # another user's, or gone
        ours = [word.decode(errors="replace") for word in variables if word.startswith(b"MUSTER_")]
        result = dict(word.partition("=")[::2] for word in ours)
        if result.get(RUN_ID) != run_id or host not in (None, result.get(HOST)):
            continue
        if (process := look(int(entry.name))) is not None:
            matches.append(replace(process, run_dir=result.get(RUN_DIR, "")))
    return matches


def ancestors() -> set[int]:
    """This process and those above it: never to be ended by a run's tear-down."""
    result: set[int] = set()
    pid = os.getpid()
    while pid > 1 and pid not in result:
        result.add(pid)
        try:
            pid = int(_status(pid)[1])
        except (OSError, IndexError):
            break
    return result


def send(processes: Sequence[Process], number: signal.Signals) -> None:
    """Signal each that is still itself; gone is success."""
    for process in processes:
        if lives(process.pid, process.start_ticks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


#: What may be limited, by number. Two names of one number are one limit.
_LIMITS = {getattr(resource, name): name for name in reversed(dir(resource)) if name.startswith("RLIMIT_")}


def limits() -> dict[int, tuple[int, int]]:
    """This process's resource limits by number, soft and hard: what it starts inherits them (getrlimit(2))."""
    return {number: resource.getrlimit(number) for number in _LIMITS}


def restore_limits(before: Mapping[int, tuple[int, int]]) -> str:
    """Restore those limits of this process that were lowered since (prlimit(2)).

    Returns which of them stay low, in words; empty: none. A hard limit may be raised with CAP_SYS_RESOURCE alone, which
    root has outside containers.
    """
    low = []
    for number, now in limits().items():
        was = before.get(number, now)
        if all(_height(is_now) >= _height(it_was) for is_now, it_was in zip(now, was, strict=True)):
            continue
        wanted = (max(now[0], was[0], key=_height), max(now[1], was[1], key=_height))
        try:
            resource.setrlimit(number, wanted)
        except (OSError, ValueError):
            soft = min(was[0], now[1], key=_height)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(number, (soft, now[1]))
            if _height(soft) < _height(was[0]):
                low.append(
                    f"{_LIMITS[number]} of process {os.getpid()} was lowered from {_words(was[0])} to {_words(soft)}"
                )
    return "; ".join(low)


def memory_limit() -> int:
    """Bytes of addresses that this process may have (RLIMIT_AS); 0: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return 0 if soft == resource.RLIM_INFINITY else soft


def host_memory(meminfo: Path) -> tuple[int, int] | None:
    """(bytes in use, bytes that are left) of the host, by its ``/proc/meminfo``; None: it does not say."""
    try:
        rows = dict(line.split(":") for line in meminfo.read_text().splitlines() if ":" in line)
        total, left = (int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return max(0, total - left), left


def memory_groups() -> list[tuple[int, int]]:
    """(bytes in use, bytes that are left) of this process's cgroup and of those above it that have a limit of memory.

    Of version 1 where the memory controller is there, else of version 2. File pages that were not used lately are given
    back before a limit is reached: they count as left.
    """
    try:
        rows = [line.split(":", 2) for line in _GROUPS.read_text().splitlines()]
    except OSError:
        return []
    paths = {name: path for _, names, path in rows for name in names.split(",")}
    if "memory" in paths:
        top, names = _CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    else:
        top, names = _CGROUPS, ("memory.max", "memory.current", "inactive_file")
    folder = top / paths.get("memory", paths.get("", "")).lstrip("/")
    if not folder.is_dir():  # a container may see no more than its own
        folder = top
    found = [_memory_of(each, *names) for each in (folder, *folder.parents) if each.is_relative_to(top)]
    return [group for group in found if group is not None]


def _memory_of(folder: Path, limit: str, usage: str, unused: str) -> tuple[int, int] | None:
    try:
        most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max"; the topmost group of version 2 has no such files
        return None
    used -= int(stat.get(unused, 0))
    return used, max(0, most - used)


def _height(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def _words(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def boot_id() -> str:
    """The kernel's name for this boot of the machine; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def tell(
    argv: Sequence[str], given: bytes, *, env: Mapping[str, str], cwd: Path, limit_s: float
) -> tuple[int | None, bytes]:
    """Run a program with ``given`` as its input; (its exit code, what it wrote). The code is None if it did not end
    in time: it is killed with all processes that it started. Processes that it left behind are always killed.

    Raises:
        OSError, ValueError: it cannot be started.
    """
    started = subprocess.Popen(
        list(argv), env=dict(env), cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = started.communicate(given, timeout=limit_s)
        return started.returncode, said
    except subprocess.TimeoutExpired:
        return None, b""
    finally:
        with contextlib.suppress(OSError):
            os.killpg(started.pid, signal.SIGKILL)


def spawn(argv: Sequence[str], *, env: Mapping[str, str], keep: Sequence[int] = ()) -> int:
    """Start a program in a session of its own that writes where this process does; its pid, for ``waitpid``.

    ``keep``: file descriptors that it inherits; all others of Python's stay here. Not a fork, so threads do no harm.
    """
    for fd in keep:
        os.set_inheritable(fd, True)
    return os.posix_spawn(argv[0], list(argv), env, setsid=True)


def run_visibly(argv: Sequence[str]) -> tuple[int, str]:
    """Run ``argv`` to its end; its stderr is ours. Returns the exit code and what it printed.

    Raises:
        BackendError: the program cannot be started.
    """
    try:
        done = subprocess.run(list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise BackendError(f"cannot start {argv[0]}: {error.strerror}") from error
    return done.returncode, done.stdout


def program(name: str) -> str | None:
    """Path of a tool in the folder of this Python, else on the path; None: not installed."""
    sibling = Path(sys.executable).with_name(name)
    return str(sibling) if sibling.exists() else shutil.which(name)


def processor_ticks(proc: Path = Path("/proc")) -> tuple[int | None, int | None]:
    """(of processors that worked, of all) since the machine began; None where the system does not say. Guests' ticks
    are in the users' already."""
    try:
        with open(proc / "stat") as file:
            user, nice, system, idle, wait, interrupt, soft, steal = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return None, None
    busy = user + nice + system + interrupt + soft + steal
    return busy, busy + idle + wait
