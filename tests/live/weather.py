"""A faulty environment for a run's processes: a stepped wall clock, a failing or slow disk (``weather.cpp``)."""

import errno
import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

HOUR_S = 3600.0
_FORM = struct.Struct("=qii")


class Weather:
    """The environment of processes started with ``environment``; changes apply to all of them at once."""

    def __init__(self, library: Path, page: Path, disk: Path):
        page.write_bytes(bytes(mmap.PAGESIZE))
        self.environment = {"LD_PRELOAD": str(library), "MUSTER_WEATHER": str(page), "MUSTER_WEATHER_DISK": str(disk)}
        with open(page, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)
        self.change()

    def change(self, *, clock_ahead_s=0.0, disk_errno=0, fsync_s=0.0):
        """Faults that are not named end."""
        self._page[: _FORM.size] = _FORM.pack(int(clock_ahead_s * 1e9), disk_errno, int(fsync_s * 1000))


def build(folder: Path) -> Path:
    """The library; skips the test where there is no compiler, or where it has no effect."""
    compiler = shutil.which("g++")
    if compiler is None or os.uname().sysname != "Linux":
        pytest.skip("g++ is not here: no library for bad weather")
    library = folder / "weather.so"
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    (folder / "probe").mkdir()
    weather = Weather(library, folder / "probe.page", folder / "probe")
    weather.change(clock_ahead_s=HOUR_S, disk_errno=errno.EIO)
    program = (
        "import errno, os, sys, threading, time\n"
        "away = time.time() - os.stat(sys.argv[1]).st_mtime\n"
        "began = time.monotonic(); threading.Event().wait(0.1); waited = time.monotonic() - began\n"
        "fd = os.open(sys.argv[1] + '/x', os.O_CREAT | os.O_WRONLY)\n"
        "try: os.write(fd, b'x'); wrote = 0\n"
        "except OSError as error: wrote = error.errno\n"
        "sys.exit(0 if 3500 < away < 3700 and waited < 2 and wrote == errno.EIO else 1)\n"
    )
    import sys

    probed = subprocess.run(
        [sys.executable, "-c", program, str(folder / "probe")], env={**os.environ, **weather.environment}, check=False
    )
    if probed.returncode != 0:
        pytest.skip("this machine's loader does not take the library for bad weather")
    return library
