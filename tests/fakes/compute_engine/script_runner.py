"""What runs a machine's start-up script: a stand-in for Google's guest agent, with its contract and no more.

On every boot: ``startup-script``, then ``startup-script-url``, both if both are there; the project's keys only where
the machine has neither. A script goes to a temporary folder, runs as ``SHELL -c FILE`` with no stdin, and is removed.
Its exit code is a line in the output and nothing else; there is no second try and no limit of time. Children stay alive
when it is over; one that holds its output keeps the runner waiting. Usage: ``script_runner.py METADATA [ROOT]``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import IO

KEYS = ("startup-script", "startup-script-url")


def attributes(metadata: str) -> dict[str, str]:
    """The scripts: the machine's own, else the project's. Asked again until the metadata server is well."""
    for place in ("instance", "project"):
        url = f"{metadata}/computeMetadata/v1/{place}/attributes/?recursive=true&alt=json"
        request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        for left in reversed(range(100)):
            try:
                with urllib.request.urlopen(request, timeout=70) as reply:
                    values = json.load(reply)
                break
            except OSError:
                if not left:
                    raise
                time.sleep(0.1)
        if found := {key: values[key] for key in KEYS if values.get(key)}:
            return found
    return {}


def download(url: str) -> bytes:
    for left in (2, 1, 0):
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                found: bytes = reply.read()
                return found
        except OSError:
            if not left:
                raise
            time.sleep(1)
    raise AssertionError("unreachable")


def run(key: str, value: str, root: Path, output: IO[str]) -> None:
    """Raises OSError or CalledProcessError; the caller makes a line of it."""
    (root / "tmp").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="metadata-scripts", dir=root / "tmp"))
    try:
        file = folder / key
        file.write_bytes(download(value.strip()) if key.endswith("-url") else value.lstrip(" \n\v\f\t\r").encode())
        file.chmod(0o755)
        inside = f"/{file.relative_to(root)}"
        command = ["/bin/sh", "-c", inside] if root == Path("/") else ["chroot", str(root), "/bin/sh", "-c", inside]
        environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
        assert child.stdout is not None
        for line in child.stdout:  # until everybody who holds it has let go of it
            print(f"{key}: {line.decode(errors='replace').rstrip()}", file=output, flush=True)
        if code := child.wait():
            raise subprocess.CalledProcessError(code, key)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_all(metadata: str, root: Path, output: IO[str]) -> None:
    """One boot's scripts. It ends well whatever they do."""
    scripts = attributes(metadata)
    for key in KEYS:
        if key in scripts:
            print(f"Found {key} in metadata.", file=output, flush=True)
            try:
                run(key, scripts[key], root, output)
            except (OSError, subprocess.CalledProcessError) as error:
                code = error.returncode if isinstance(error, subprocess.CalledProcessError) else error
                words = f"exit status {code}" if isinstance(code, int) and code > 0 else f"{code}"
                print(f'Script "{key}" failed with error: {words}', file=output, flush=True)
            else:
                print(f"{key} exit status 0", file=output, flush=True)
    print("Finished running startup scripts.", file=output, flush=True)


if __name__ == "__main__":
    run_all(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else "/"), sys.stdout)
    os._exit(0)
