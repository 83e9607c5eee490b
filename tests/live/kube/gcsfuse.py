"""A double of gcsfuse: a bucket of ``fakes.gcs`` as a file system, with the habits of the real one.

    with GcsFake.unkind() as fake, Mount(fake.url, "bucket", tmp_path / "gcs") as gcs:
        (gcs / "file").write_text("a real system call on a real FUSE mount")

Played from the sources of gcsfuse (7b39292), jacobsa/fuse (6ac65ea) and the CSI driver (5fcdc04) of summer 2026. What
is not there: hierarchical and rapid buckets, the file cache, the metrics. Made for Linux and root; ``why_not()`` says
what is missing. The parts: ``fuse_wire`` (the kernel), ``gcsfuse_bucket`` (requests, what is remembered),
``gcsfuse_options``, ``gcsfuse_files`` (streamed, staged), ``gcsfuse_inodes``, ``gcsfuse_server`` (operations).
Standard library only.
"""

import contextlib
import dataclasses
import errno
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import fuse_wire
from gcsfuse_options import Settings, settings

HERE = Path(__file__).parent


def why_not() -> str | None:
    """Why nothing can be mounted here; None: it can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse: {error.strerror}"
    return None


def server(
    url: str,
    bucket: str,
    of: Settings,
    *,
    hang_s: float,
    link_errno: int = errno.ENOSYS,
    parent: int = 0,
    mark: str = "",
) -> list[str]:
    """The program that serves the descriptor of ``fuse_wire.mount`` that is its standard input.

    ``hang_s`` until it begins; calls on the mount wait so long. ``parent``: it ends with this process. ``mark``: what
    it is found by.
    """
    spec = {
        "url": url, "bucket": bucket, "settings": dataclasses.asdict(of), "hang_s": hang_s, "link_errno": link_errno,
        "parent": parent, "mark": mark,
    }  # fmt: skip
    return [sys.executable, str(HERE / "gcsfuse_server.py"), json.dumps(spec)]


class Mount:
    """One pod's mount of one bucket, as a context manager; ``target`` is made, and is what it gives.

    ``options`` and ``attributes``: of the volume. ``machine``: the node's type, whose defaults hold. ``version``: of
    gcsfuse. ``link_errno``: what link(2) is answered (kernels make EPERM of ENOSYS). ``log``: the server's output.
    Raises OSError, ``gcsfuse_options.BadOption``.
    """

    def __init__(
        self,
        url: str,
        bucket: str,
        target: Path,
        *,
        options: Sequence[str] = (),
        attributes: Mapping[str, str] | None = None,
        machine: str = "",
        version: str = "3.11.2",
        hang_s: float = 0,
        link_errno: int = errno.ENOSYS,
        log: Path | None = None,
    ) -> None:
        self.url, self.bucket, self.target, self.log = url, bucket, target, log
        self.settings = settings(options, attributes, machine=machine, version=version)
        self.hang_s, self.link_errno = hang_s, link_errno
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Path:
        self.target.mkdir(parents=True, exist_ok=True)
        fd = fuse_wire.mount(self.bucket, str(self.target), read_only=self.settings.read_only)
        argv = server(
            self.url, self.bucket, self.settings, hang_s=self.hang_s, link_errno=self.link_errno, parent=os.getpid()
        )
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(open(self.log, "ab")) if self.log else None
            self.process = subprocess.Popen(argv, stdin=fd, stdout=output, stderr=output)
        os.close(fd)  # or nobody would hear ENOTCONN when the server dies
        return self.target

    def die(self) -> None:
        """As when its memory runs out: from now on every call fails with ENOTCONN, and what was unfinished is gone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.die()
        fuse_wire.unmount(str(self.target))
