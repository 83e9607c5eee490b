"""Which name is which inode: by (generation, metageneration) of the object, in one mount and nowhere else (fs.go).

A file that this mount wrote keeps its number; any change from elsewhere, and a move, is another inode. Numbers start
somewhere else in every mount, so that nobody who compares them between pods is lucky.
"""

import errno
import itertools
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from gcsfuse_bucket import Bucket, Meta, NotFound
from gcsfuse_files import File, Streams
from gcsfuse_options import Settings

ROOT = 1
#: What a file is shown as beside a folder of the same name.
CONFLICTING = "\n"


def missing(name: str) -> OSError:
    return OSError(errno.ENOENT, name)


@dataclass
class Folder:
    """``name`` ends with a slash but for the bucket's own ""; ``marker`` None: it is there only by what lies in it."""

    inode: int
    name: str
    marker: Meta | None = None
    lookups: int = 0


@dataclass
class Link:
    inode: int
    source: Meta
    lookups: int = 0

    @property
    def name(self) -> str:
        return self.source.name


Inode = File | Folder | Link
Some = TypeVar("Some", File, Folder, Inode)


@dataclass(frozen=True)
class Found:
    """What the bucket has at a name; an implicit folder has no object."""

    name: str
    meta: Meta | None


@dataclass
class Names:
    """All inodes of a mount. ``lock`` is held for moments, never over a request."""

    bucket: Bucket
    settings: Settings
    lock: threading.RLock = field(default_factory=threading.RLock)
    by_inode: dict[int, Inode] = field(default_factory=dict)
    backed: dict[str, Inode] = field(default_factory=dict)
    """By object: files, links and folders with a marker."""
    local: dict[str, File] = field(default_factory=dict)
    """Files that no object stands for yet."""
    implicit: dict[str, Folder] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.streams = Streams(self.settings.write_global_max_blocks)
        self.askers = ThreadPoolExecutor(16)
        self.numbers = itertools.count(2 + secrets.randbelow(1 << 40))
        start = self.settings.only_dir.strip("/")
        self.by_inode[ROOT] = Folder(ROOT, f"{start}/" if start else "", lookups=1)

    def folder(self, inode: int) -> Folder:
        found = self.by_inode[inode]
        assert isinstance(found, Folder)
        return found

    def file(self, inode: int) -> File:
        found = self.by_inode[inode]
        if not isinstance(found, File):
            raise OSError(errno.EISDIR, found.name)
        return found

    # ---------------------------------------------------------------- looking up

    def child(self, parent: Folder, name: str) -> Inode:
        """The inode of a name, counted as known to the kernel. Raises OSError (ENOENT)."""
        with self.lock:
            mine = self.local.get(parent.name + name)
            if mine is not None and not mine.unlinked:
                mine.lookups += 1
                return mine
        for _ in range(3):
            found = self.look(parent.name + name)
            if found is None:
                raise missing(parent.name + name)
            if (inode := self.of(found)) is not None:
                return inode
        raise OSError(errno.EIO, f"{name}: keeps changing")

    def look(self, name: str) -> Found | None:
        """What the bucket has there, a folder before a file; remembered answers first."""
        if name.endswith(CONFLICTING):
            name = name.removesuffix(CONFLICTING)
            return self._object(name) if self._folder(f"{name}/") else None
        knows_folder, folder = self.bucket.recall(f"{name}/")
        if knows_folder and folder:
            return Found(f"{name}/", folder)
        knows_file, file = self.bucket.recall(name)
        if knows_file and file:
            return Found(name, file)
        if knows_folder and knows_file:
            return None
        both = self.askers.submit(self._folder, f"{name}/")  # at the same time: a look-up is one round trip
        file_found = self._object(name)
        return both.result() or file_found

    def _object(self, name: str) -> Found | None:
        try:
            return Found(name, self.bucket.stat(name))
        except NotFound:
            return None

    def _folder(self, name: str) -> Found | None:
        if not self.settings.implicit_dirs:
            return self._object(name)
        found, _ = self.bucket.page(name, folders=False, most=1)
        if not found.objects:
            return None
        return Found(name, next((one for one in found.objects if one.name == name), None))

    def of(self, found: Found) -> Inode | None:
        """Its inode, old or new, counted; None where this mount has seen a newer one."""
        with self.lock:
            if found.meta is None:
                inode: Inode | None = self.implicit.get(found.name)
                if inode is None:
                    inode = self.implicit[found.name] = self._known(Folder(next(self.numbers), found.name))
                inode.lookups += 1
                return inode
            inode = self.backed.get(found.name)
        if inode is not None:
            have = identity(inode)
            if have > found.meta.identity:
                return None
            if have < found.meta.identity:
                inode = None
        with self.lock:
            if inode is None:
                inode = self.backed[found.name] = self._known(self._made(found.name, found.meta))
            inode.lookups += 1
            return inode

    def _made(self, name: str, meta: Meta) -> Inode:
        number = next(self.numbers)
        if name.endswith("/"):
            return Folder(number, name, meta)
        if meta.link is not None:
            return Link(number, meta)
        return File(number, name, meta, self.bucket, self.settings, self.streams)

    def _known(self, inode: Some) -> Some:
        self.by_inode[inode.inode] = inode
        return inode

    # ---------------------------------------------------------------- coming and going

    def create(self, name: str) -> File:
        """A file that is nowhere but here; the one of that name, if it is there. Counted."""
        with self.lock:
            file = self.local.get(name)
            if file is None or file.unlinked:
                number = next(self.numbers)
                file = self._known(File(number, name, None, self.bucket, self.settings, self.streams))
                self.local[name] = file
            file.lookups += 1
        return file

    def written(self, file: File) -> None:
        """It has an object now. Where another inode has taken its name meanwhile, that one keeps it."""
        if file.source is None:
            return
        with self.lock:
            if self.local.get(file.name) is file:
                del self.local[file.name]
            self.backed.setdefault(file.name, file)

    def lost(self, file: File) -> None:
        """Its object could not be made: it is as if it had been unlinked."""
        with self.lock:
            if self.local.get(file.name) is file:
                del self.local[file.name]

    def forget(self, inode: int, times: int) -> None:
        with self.lock:
            found = self.by_inode.get(inode)
            if found is None or inode == ROOT:
                return
            found.lookups -= times
            if found.lookups > 0:
                return
            del self.by_inode[inode]
            for names in (self.backed, self.local, self.implicit):
                if names.get(found.name) is found:
                    del names[found.name]
        if isinstance(found, File):
            with found.lock:
                found.drop()

    def local_below(self, folder: str) -> list[File]:
        """Unfinished files at any depth."""
        with self.lock:
            return [one for one in self.local.values() if one.name.startswith(folder) and not one.unlinked]


def identity(inode: Inode) -> tuple[int, int]:
    """(generation, metageneration); waits while the file is being written out."""
    if isinstance(inode, File):
        with inode.lock:
            return inode.source.identity if inode.source else (0, 0)
    meta = inode.marker if isinstance(inode, Folder) else inode.source
    return meta.identity if meta else (0, 0)
