"""The double of gcsfuse: its file system operations (fs.go), for one mount. One process a mount; see ``gcsfuse.py``.

usage: python gcsfuse_server.py SPEC-JSON, as ``gcsfuse.server`` writes it; standard input is the mount's descriptor
"""

import errno
import itertools
import json
import os
import stat
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import fuse_wire as wire
from fuse_wire import Attributes, Op, Request
from gcsfuse_bucket import Bucket, Meta, Precondition, children
from gcsfuse_files import File, Window
from gcsfuse_inodes import CONFLICTING, Folder, Found, Inode, Link, Names
from gcsfuse_options import Settings

DT_DIR, DT_FILE, DT_LINK = 4, 8, 10


@dataclass
class Opened:
    """A descriptor: what of the file was read ahead, or a folder's names as the last listing from its start found
    them."""

    file: File | None
    window: Window = field(default_factory=Window)
    names: list[tuple[str, int]] = field(default_factory=list)


class FileSystem:
    def __init__(self, bucket: Bucket, settings: Settings, *, link_errno: int = errno.ENOSYS) -> None:
        self.bucket, self.settings, self.link_errno = bucket, settings, link_errno
        self.names = Names(bucket, settings)
        self.opened: dict[int, Opened] = {}
        self.handles = itertools.count(1)
        self.listed: dict[int, float] = {}
        self.started_ns = time.time_ns()
        self.calls: dict[int, Callable[[Request], bytes | memoryview]] = {
            Op.LOOKUP: self.lookup, Op.FORGET: self.forget, Op.BATCH_FORGET: self.batch_forget,
            Op.GETATTR: self.getattr, Op.SETATTR: self.setattr, Op.READLINK: self.readlink, Op.SYMLINK: self.symlink,
            Op.MKNOD: self.mknod, Op.MKDIR: self.mkdir, Op.UNLINK: self.unlink, Op.RMDIR: self.rmdir,
            Op.RENAME: self.rename, Op.LINK: self.link, Op.OPEN: self.open, Op.READ: self.read, Op.WRITE: self.write,
            Op.STATFS: lambda _: wire.statfs(), Op.RELEASE: self.release, Op.FSYNC: self.fsync, Op.FLUSH: self.flush,
            Op.OPENDIR: self.opendir, Op.READDIR: self.readdir, Op.RELEASEDIR: self.release,
            Op.FSYNCDIR: lambda _: b"", Op.CREATE: self.create, Op.INTERRUPT: lambda _: b"",
        }  # fmt: skip

    def __call__(self, request: Request) -> bytes | memoryview:
        call = self.calls.get(request.op)
        if call is None:
            raise NotImplementedError
        return call(request)

    # ---------------------------------------------------------------- attributes

    def attributes(self, inode: Inode) -> Attributes:
        """Modes and owners are the mount's, whatever was asked for."""
        own = self.settings
        if isinstance(inode, Folder):
            return Attributes(inode.inode, stat.S_IFDIR | own.dir_mode, 0, self.started_ns, 1, own.uid, own.gid)
        if isinstance(inode, Link):
            size, mode = len(inode.source.link or ""), stat.S_IFLNK | own.file_mode
            return Attributes(inode.inode, mode, size, inode.source.mtime_ns, 1, own.uid, own.gid)
        with inode.lock:
            size, mtime_ns, links = inode.attributes()
        return Attributes(inode.inode, stat.S_IFREG | own.file_mode, size, mtime_ns, links, own.uid, own.gid)

    def entry(self, inode: Inode) -> bytes:
        """Raises OSError, and takes back that the kernel knows the inode."""
        try:
            return wire.entry(self.attributes(inode), self.settings.ttl_s)
        except BaseException:
            self.names.forget(inode.inode, 1)
            raise

    def answer(self, inode: Inode) -> bytes:
        return wire.attributes_answer(self.attributes(inode), self.settings.ttl_s)

    def lookup(self, request: Request) -> bytes:
        return self.entry(self.names.child(self.names.folder(request.node), request.names()[0]))

    def forget(self, request: Request) -> bytes:
        self.names.forget(request.node, struct.unpack_from("<Q", request.body)[0])
        return b""

    def batch_forget(self, request: Request) -> bytes:
        (count,) = struct.unpack_from("<I", request.body)
        for number in range(count):
            self.names.forget(*struct.unpack_from("<QQ", request.body, 8 + 16 * number))
        return b""

    def getattr(self, request: Request) -> bytes:
        return self.answer(self.names.by_inode[request.node])

    def setattr(self, request: Request) -> bytes:
        """Size and modification time of files; modes, owners and all else are said to be changed and are not."""
        given, _, _, size, _, _, mtime, _, _, mtime_ns, *_ = wire.SETATTR.unpack_from(request.body)
        inode = self.names.by_inode[request.node]
        if isinstance(inode, File):
            with inode.lock:
                if given & (wire.SET_MTIME | wire.SET_MTIME_NOW):
                    now = given & wire.SET_MTIME_NOW
                    inode.set_mtime(time.time_ns() if now else mtime * 10**9 + mtime_ns)
                if given & wire.SET_SIZE:
                    inode.truncate(size)
                    self.names.written(inode)
        return self.answer(inode)

    # ---------------------------------------------------------------- files

    def _handle(self, file: File | None = None) -> int:
        number = next(self.handles)
        self.opened[number] = Opened(file)
        if file is not None:
            with file.lock:
                file.opens += 1
        return number

    def create(self, request: Request) -> bytes:
        """O_EXCL is the kernel's, by what this mount knows: the bucket is not asked."""
        name = self.names.folder(request.node).name + request.names(16)[0]
        if self.settings.create_empty_file:
            file = self._made_empty(name)
        else:
            file = self.names.create(name)
            with file.lock:
                file.new()
        return self.entry(file) + wire.OPEN.pack(self._handle(file), 0, 0)

    def _made_empty(self, name: str) -> File:
        made = self.names.of(Found(name, self._new(name)))
        if not isinstance(made, File):
            raise OSError(errno.EIO, name)
        return made

    def _new(self, name: str, data: bytes = b"", link: str | None = None) -> Meta:
        try:
            return self.bucket.insert(name, data, None, link=link)
        except Precondition as error:
            raise OSError(errno.EEXIST, name) from error

    def open(self, request: Request) -> bytes:
        file = self.names.file(request.node)
        if self.settings.strong_consistency_on_open:
            with file.lock:
                file.check()
        (flags,) = struct.unpack_from("<I", request.body)
        return wire.OPEN.pack(self._handle(file), wire.DIRECT_IO if flags & os.O_DIRECT else wire.KEEP_CACHE, 0)

    def read(self, request: Request) -> memoryview:
        handle, offset, size, *_ = wire.READ_WRITE.unpack_from(request.body)
        file = self.names.file(request.node)
        with file.lock:
            if file.stream is not None:
                self._written(file, file.flush)
            return file.read(self.opened[handle].window, offset, size)

    def write(self, request: Request) -> bytes:
        _, offset, size, *_ = wire.READ_WRITE.unpack_from(request.body)
        file = self.names.file(request.node)
        with file.lock:
            file.write(request.body[wire.READ_WRITE.size :][:size], offset)
            self.names.written(file)
        return struct.pack("<II", size, 0)

    def flush(self, request: Request) -> bytes:
        file = self.names.file(request.node)
        with file.lock:
            self._written(file, file.flush)
        return b""

    def fsync(self, request: Request) -> bytes:
        file = self.names.file(request.node)
        with file.lock:
            self._written(file, file.sync)
        return b""

    def _written(self, file: File, how: Callable[[], None]) -> None:
        if file.unlinked:
            file.drop()
            return
        try:
            how()
        except OSError:
            self.names.lost(file)
            raise
        self.names.written(file)

    def release(self, request: Request) -> bytes:
        (handle,) = struct.unpack_from("<Q", request.body)
        file = self.opened.pop(handle).file
        if file is not None:
            with file.lock:
                file.closed()
        return b""

    def unlink(self, request: Request) -> bytes:
        name = self.names.folder(request.node).name + request.names()[0].removesuffix(CONFLICTING)
        with self.names.lock:
            mine = self.names.local.get(name)
            inode = mine or self.names.backed.get(name)
        if isinstance(inode, File):
            with inode.lock:
                inode.unlinked = True
        if mine is None:
            self.bucket.delete(name)
        return b""

    # ---------------------------------------------------------------- names

    def link(self, request: Request) -> bytes:
        raise OSError(self.link_errno, "link")

    def symlink(self, request: Request) -> bytes:
        name, target = request.names()
        full = self.names.folder(request.node).name + name
        return self._entry_of(full, self._new(full, target.encode(), target))

    def readlink(self, request: Request) -> bytes:
        inode = self.names.by_inode[request.node]
        assert isinstance(inode, Link)
        return os.fsencode(inode.source.link or "")

    def mknod(self, request: Request) -> bytes:
        (mode,) = struct.unpack_from("<I", request.body)
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            raise OSError(errno.ENOTSUP, "mknod")
        return self.entry(self._made_empty(self.names.folder(request.node).name + request.names(16)[0]))

    def mkdir(self, request: Request) -> bytes:
        name = f"{self.names.folder(request.node).name}{request.names(8)[0]}/"
        return self._entry_of(name, self._new(name))

    def _entry_of(self, name: str, made: Meta) -> bytes:
        inode = self.names.of(Found(name, made))
        if inode is None:
            raise OSError(errno.EIO, name)
        return self.entry(inode)

    def rmdir(self, request: Request) -> bytes:
        """Looks, then deletes: what comes in between stays without a folder."""
        parent = self.names.folder(request.node)
        folder = self.names.child(parent, request.names()[0])
        try:
            if not isinstance(folder, Folder):
                raise OSError(errno.ENOTDIR, folder.name)
            self._want_empty(folder)
            if folder.name not in self.names.implicit:
                self.bucket.delete(folder.name)
            else:
                self.bucket.note(folder.name, None)
        finally:
            self.names.forget(folder.inode, 1)
        return b""

    def _want_empty(self, folder: Folder) -> None:
        found = self.bucket.list(folder.name)
        inside = [one for one in found.prefixes if one != folder.name] if self.settings.implicit_dirs else []
        direct = [one for one in self.names.local_below(folder.name) if "/" not in one.name[len(folder.name) :]]
        if direct or inside or children(found, folder.name):
            raise OSError(errno.ENOTEMPTY, folder.name)

    def rename(self, request: Request) -> bytes:
        (to,) = struct.unpack_from("<Q", request.body)
        old, new = request.names(8)
        parent, onto = self.names.folder(request.node), self.names.folder(to)
        inode = self.names.child(parent, old)
        self.names.forget(inode.inode, 1)
        if isinstance(inode, Folder):
            self._rename_folder(inode, onto.name + new + "/")
            return b""
        if isinstance(inode, File):
            with inode.lock:
                self._written(inode, inode.flush)
                source = inode.source
            if source is None:
                raise OSError(errno.ENOENT, old)
        else:
            source = inode.source
        self._move(source, onto.name + new)
        return b""

    def _move(self, source: Meta, to: str) -> None:
        """One step, with a condition on the source alone; two steps where that is asked for, and for folders."""
        if self.settings.enable_atomic_rename_object and not source.name.endswith("/"):
            self.bucket.move(source, to)
        else:
            self.bucket.copy(source, to)
            self.bucket.delete(source.name, source)

    def _rename_folder(self, folder: Folder, to: str) -> None:
        """Object by object, and only so many (a flat bucket)."""
        if self.names.local_below(folder.name):
            raise OSError(errno.ENOTSUP, "the folder holds unfinished files")
        limit = self.settings.rename_dir_limit
        found, token = self.bucket.page(folder.name, folders=False, most=limit + 2)
        inside = list(children(found, folder.name))
        while token and len(inside) <= limit:
            found, token = self.bucket.page(folder.name, folders=False, most=limit + 2, token=token)
            inside += children(found, folder.name)
        if len(inside) > limit:
            raise OSError(errno.EMFILE, "too many objects to be renamed")
        try:
            self.bucket.insert(to, b"", None)
        except Precondition:
            pass  # there already: right, if it is empty
        self._want_empty(Folder(0, to))
        for one in inside:
            self._move(one, to + one.name[len(folder.name) :])
        if folder.name not in self.names.implicit:
            self.bucket.delete(folder.name)

    # ---------------------------------------------------------------- listings

    def opendir(self, request: Request) -> bytes:
        flags, ttl_s = 0, self.settings.kernel_list_cache_ttl_secs
        if ttl_s:
            flags = wire.CACHE_DIR
            if request.node in self.listed and (ttl_s < 0 or time.monotonic() - self.listed[request.node] < ttl_s):
                flags |= wire.KEEP_CACHE
        return wire.OPEN.pack(self._handle(), flags, 0)

    def readdir(self, request: Request) -> bytes:
        handle, offset, size, *_ = wire.READ_WRITE.unpack_from(request.body)
        opened = self.opened[handle]
        if offset == 0:
            self.listed[request.node] = time.monotonic()
            opened.names = self._entries(self.names.folder(request.node))
        return wire.directory(opened.names, offset, size)

    def _entries(self, folder: Folder) -> list[tuple[str, int]]:
        start = len(folder.name)
        found = self.bucket.list(folder.name)
        folders = {one.name[start:-1] for one in children(found, folder.name) if one.name.endswith("/")}
        if self.settings.implicit_dirs:
            folders |= {one[start:-1] for one in found.prefixes}
        kinds = {one.name[start:]: DT_LINK if one.link is not None else DT_FILE
                 for one in children(found, folder.name) if not one.name.endswith("/")}  # fmt: skip
        kinds |= {one.name[start:]: DT_FILE for one in self.names.local_below(folder.name)
                  if "/" not in one.name[start:]}  # fmt: skip
        shown = {name + CONFLICTING if name in folders else name: kind for name, kind in kinds.items()}
        shown |= dict.fromkeys(folders, DT_DIR)
        return sorted((name, kind) for name, kind in shown.items() if name)


def main() -> None:
    given = json.loads(sys.argv[1])
    settings = Settings(**given["settings"])
    if given["parent"]:
        wire.die_with(given["parent"])
    time.sleep(given["hang_s"])
    known = Bucket(
        given["url"], given["bucket"], ttl_s=settings.ttl_s,
        negative_ttl_s=settings.metadata_cache_negative_ttl_secs,
    )  # fmt: skip
    wire.Connection(0, FileSystem(known, settings, link_errno=given["link_errno"])).serve()


if __name__ == "__main__":
    main()
