"""The kernel's side of a FUSE file system: mount(2) and the messages on /dev/fuse, without a library.

Written to behave as jacobsa/fuse does (its connection.go and conversions.go, of June 2026): protocol 7.31; of the
kernel's offers it takes big writes, many pages and parallel look-ups, and neither locks nor a write-back cache; what
it does not know is ENOSYS. Structures are those of linux/fuse.h. Standard library only; Linux, and root to mount.
"""

import ctypes
import errno
import os
import signal
import struct
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_SLAVE, MS_REC = 1, 2, 4, 1 << 19, 1 << 14
MNT_DETACH = 2
CLONE_NEWNS = 0x20000
_LIBC = ctypes.CDLL(None, use_errno=True)

MAX_WRITE = 1 << 20
MAX_WORKERS = 256  # each may wait for the bucket, for as long as that refuses
FOR_EVER_S = 1 << 32

IN_HEADER = struct.Struct("<IIQQIIII")
OUT_HEADER = struct.Struct("<IiQ")
ATTR = struct.Struct("<6Q3I6II")
ENTRY = struct.Struct("<4Q2I")
ATTR_VALID = struct.Struct("<QII")
OPEN = struct.Struct("<QIi")
READ_WRITE = struct.Struct("<QQIIQII")
SETATTR = struct.Struct("<IIQQQQQQIIIIIIII")
INIT_OUT = struct.Struct("<IIIIHHIIHHI7I")
STATFS = struct.Struct("<5Q3II6I")
DIRENT = struct.Struct("<QQII")

BIG_WRITES, PARALLEL_DIROPS, HAVE_MAX_PAGES = 1 << 5, 1 << 18, 1 << 22
KEEP_CACHE, DIRECT_IO, CACHE_DIR = 1 << 1, 1 << 0, 1 << 3
SET_SIZE, SET_MTIME, SET_MTIME_NOW = 1 << 3, 1 << 5, 1 << 8


class Op(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    BATCH_FORGET = 42


#: The kernel waits for no answer to these.
SILENT = {Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT}


@dataclass(frozen=True)
class Attributes:
    inode: int
    mode: int
    size: int
    mtime_ns: int
    links: int
    uid: int
    gid: int

    def packed(self) -> bytes:
        seconds, rest = divmod(self.mtime_ns, 10**9)
        blocks = (self.size + 511) // 512
        return ATTR.pack(
            self.inode, self.size, blocks, seconds, seconds, seconds, rest, rest, rest,
            self.mode, self.links, self.uid, self.gid, 0, 0, 0,
        )  # fmt: skip


@dataclass(frozen=True)
class Request:
    op: int
    node: int
    body: memoryview

    def names(self, skip: int = 0) -> list[str]:
        """The zero-terminated names behind ``skip`` bytes."""
        return [os.fsdecode(one) for one in bytes(self.body[skip:]).split(b"\0")[:-1]]


def entry(attributes: Attributes, valid_s: float) -> bytes:
    """A name's answer. The name itself is never cached by the kernel: each walk asks again."""
    seconds, rest = _valid(valid_s)
    return ENTRY.pack(attributes.inode, 0, 0, seconds, 0, rest) + attributes.packed()


def attributes_answer(attributes: Attributes, valid_s: float) -> bytes:
    return ATTR_VALID.pack(*_valid(valid_s), 0) + attributes.packed()


def _valid(seconds: float) -> tuple[int, int]:
    """(s, ns); a negative time is for ever."""
    if seconds < 0:
        return FOR_EVER_S, 0
    return int(seconds), int(seconds % 1 * 10**9)


def directory(entries: Sequence[tuple[str, int]], offset: int, size: int) -> bytes:
    """Names and their kinds (``DT_*``) from the ``offset``-th on, as many as fit."""
    answer = bytearray()
    for number, (name, kind) in enumerate(entries[offset:], offset + 1):
        raw = os.fsencode(name)
        one = DIRENT.pack(1, number, len(raw), kind) + raw
        one += bytes(-len(one) % 8)
        if len(answer) + len(one) > size:
            break
        answer += one
    return bytes(answer)


# ---------------------------------------------------------------- the mount


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str, *, read_only: bool = False) -> int:
    """The descriptor of a new mount at ``target``, of the type and with the options that the CSI driver gives it.

    Calls on it wait until somebody serves the descriptor, and fail with ENOTCONN once the last copy of it is closed.
    """
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},default_permissions,allow_other"
    flags = ctypes.c_ulong(MS_NODEV | MS_NOSUID | (MS_RDONLY if read_only else 0))
    try:
        words = [word.encode() for word in (source, target, "fuse")]
        _checked(_LIBC.mount(*words, flags, options.encode()), f"mount {target}")
    except OSError:
        os.close(fd)
        raise
    return fd


def unmount(target: str) -> None:
    """Take it away, whoever still uses it."""
    _checked(_LIBC.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def own_mounts() -> None:
    """From here on this process and its children mount for themselves: what they mount ends with them."""
    _checked(_LIBC.unshare(CLONE_NEWNS), "unshare")
    _checked(_LIBC.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_SLAVE), None), "make / a slave")


def die_with(parent: int) -> None:
    """End by SIGKILL when the process ``parent``, which started this one, has ended."""
    _checked(_LIBC.prctl(1, signal.SIGKILL, 0, 0, 0), "prctl")  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


# ---------------------------------------------------------------- the loop


class Connection:
    """Serves a descriptor of ``mount``; as many workers as calls are under way."""

    def __init__(self, fd: int, answer: Callable[[Request], bytes | memoryview]) -> None:
        self.fd, self.answer = fd, answer
        self.lock = threading.Lock()
        self.idle = self.workers = 0
        self.ended = threading.Event()

    def serve(self) -> None:
        """Until it is unmounted."""
        self._hire()
        self.ended.wait()

    def _hire(self) -> None:
        with self.lock:
            if self.workers >= MAX_WORKERS:
                return
            self.workers += 1
            self.idle += 1
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        buffer = bytearray(MAX_WRITE + 4096)
        view = memoryview(buffer)
        while True:
            try:
                size = os.readv(self.fd, [buffer])
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                self.ended.set()  # ENODEV: unmounted
                return
            with self.lock:
                self.idle -= 1
                alone = self.idle == 0
            if alone:
                self._hire()
            try:
                self._one(view[:size])
            except OSError as error:  # the asker was killed, or the mount has gone
                if error.errno not in (errno.ENOENT, errno.ENODEV):
                    raise
            with self.lock:
                self.idle += 1

    def _one(self, message: memoryview) -> None:
        _, op, unique, node, *_ = IN_HEADER.unpack_from(message)
        request = Request(op, node, message[IN_HEADER.size :])
        code, data = 0, memoryview(b"")
        try:
            data = memoryview(_init() if op == Op.INIT else self.answer(request))
        except OSError as error:
            code = error.errno or errno.EIO
        except NotImplementedError:
            code = errno.ENOSYS
        except Exception:  # noqa: BLE001 (whoever asked must not wait for ever)
            traceback.print_exc()
            code = errno.EIO
        if op not in SILENT:
            os.writev(self.fd, [OUT_HEADER.pack(OUT_HEADER.size + len(data), -code, unique), data])


def _init() -> bytes:
    flags = BIG_WRITES | HAVE_MAX_PAGES | PARALLEL_DIROPS
    pages = MAX_WRITE // os.sysconf("SC_PAGE_SIZE")
    return INIT_OUT.pack(7, 31, 1 << 20, flags, 12, 9, MAX_WRITE, 1, pages, 0, 0, *[0] * 7)


def statfs() -> bytes:
    """So much space that nothing is ever full."""
    blocks, inodes = 1 << 33, 1 << 50
    return STATFS.pack(blocks, blocks, blocks, inodes, inodes, 1 << 20, 255, 1 << 17, 0, *[0] * 6)
