"""A program on a pseudo-terminal, and the screen it would be seen on."""

import codecs
import fcntl
import os
import select
import struct
import subprocess
import termios
import time

from fakes.screen import Screen

LIMIT_S = 120.0


class PtyProgram:
    """Its standard error (and input) is the terminal, as that of a person who sends the result to a file."""

    def __init__(self, argv, *, columns, lines, cwd=None, env=None):
        self.master, self._theirs = os.openpty()
        self.screen, self.raw = Screen(columns, lines), b""
        self._set_size()
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        environ |= {"TERM": "xterm-256color", "PYTHONUTF8": "1", **(env or {})}
        self.process = subprocess.Popen(
            argv, cwd=cwd, env=environ, stdin=self._theirs, stdout=subprocess.PIPE, stderr=self._theirs,
            start_new_session=True,
        )  # fmt: skip
        os.close(self._theirs)
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self, *until):
        """Play what comes until a row of the screen holds all of these, or to the end."""
        give_up = time.monotonic() + LIMIT_S
        while time.monotonic() < give_up:
            if until and any(all(words in row for words in until) for row in self.screen.shown()):
                return
            ready, _, _ = select.select([self.master], [], [], 1.0)
            if not ready:
                continue
            try:
                data = os.read(self.master, 4096)
            except OSError:  # nobody has the other end open
                data = b""
            if not data:
                assert not until, f"it ended without {until!r}:\n{self.text()}"
                return
            self._play(data)
        raise AssertionError(f"{until or 'the end'} did not come within {LIMIT_S} s:\n{self.text()}")

    def narrow(self, columns):
        """The window becomes narrower between two pictures, and folds what stands in it."""
        self.settle()
        self.screen.narrow(columns)
        self._set_size()

    def text(self):
        return "\n".join(row.rstrip() for row in self.screen.rows)

    def type(self, data):
        """Between two pictures, as a person does: what the terminal echoes would go into the midst of one."""
        self.settle()
        os.write(self.master, data)

    def code(self):
        return self.process.wait(LIMIT_S)

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        os.close(self.master)

    def settle(self, quiet_s=0.05):
        """Play what has come, until nothing comes for a moment."""
        while select.select([self.master], [], [], quiet_s)[0]:
            self._play(os.read(self.master, 65536))

    def _set_size(self):
        size = struct.pack("HHHH", self.screen.lines, self.screen.columns, 0, 0)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)

    def _play(self, data):
        self.raw += data
        self.screen.write(self.decoder.decode(data))
