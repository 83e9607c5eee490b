"""Machines of a Compute Engine run as namespaces of this computer: their image, their software, their metadata.

Stands in for Google: bucket and Secret Manager are the played ones, behind their own names and TLS; systemd is a shim.
Real: ``startup.sh`` as root, curl, pip, the bundle of Muster's own wheel, the programs that it starts.
"""

import base64
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path

import pydantic
from fakes.compute_engine.google_front import Front, base_python, certificates, image
from fakes.compute_engine.machine_root import PYTHONS, MachineRoot
from fakes.discovery import Discovery, folder
from fakes.gcs import GcsFake
from fakes.gcs.objects import Refused
from fakes.metadata import token
from fakes.secrets import ACCESSOR, FakeSecrets

from muster.backends.gce import requests
from muster.backends.gce.placement import Placement
from muster.backends.google.request_log import FILE as REQUESTS
from muster.backends.google.request_log import RequestLog
from muster.core.typed_json import encode

SOURCE = Path(__file__).parents[2] / "src"
PACKAGES = Path(pydantic.__file__).parents[1]
"""What the image brings, as Google's with torch would."""
SHOWN = (str(PACKAGES), sys.base_prefix)
OTHER_PYTHONS = tuple(path for path in PYTHONS if not Path(path).samefile(base_python()))
"""Newer ones would be taken first, and cannot use the packages of this environment."""
SECRET_TOKEN, HUB_TOKEN = "the-run's-own-token-0123456789abcdef", "hf_" + "q" * 34
ACCESS = "ya29.fake"
ACCOUNT = "muster-hosts@example-project.iam.gserviceaccount.com"

POSSIBLE = os.geteuid() == 0 and all(map(shutil.which, ("unshare", "ip", "curl", "openssl")))


def wheel_of_muster(target):
    """The package as it is in the tree. Made by hand: a build needs a network for its tools."""
    name = "muster_gpu-0.0.1"
    record = []
    with zipfile.ZipFile(target / f"{name}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as out:
        files = {
            str(path.relative_to(SOURCE)): path.read_bytes()
            for path in sorted((SOURCE / "muster").rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }
        info = f"{name}.dist-info"
        files[f"{info}/METADATA"] = b"Metadata-Version: 2.1\nName: muster-gpu\nVersion: 0.0.1\n"
        files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        for path, data in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(data)}\n")
            out.writestr(path, data)
        out.writestr(f"{info}/RECORD", "".join(record) + f"{info}/RECORD,,\n")


def pack(target):
    """The bundle that a user would make: ``python -m muster.backends.gce.bundle WHEELS OUT``."""
    wheels = target / "wheels"
    wheels.mkdir()
    wheel_of_muster(wheels)
    import ensurepip

    places = (Path(ensurepip.__file__).parent / "_bundled", Path("/usr/share/python-wheels"))  # Debian's are apart
    shutil.copy(next(found for place in places for found in place.glob("pip-*.whl")), wheels)
    words = [sys.executable, "-m", "muster.backends.gce.bundle", str(wheels), str(target)]
    return Path(subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip())


class Place:
    """A bucket, secrets, and the image and software of machines."""

    def __init__(self, at):
        self.at = at
        self.bucket = GcsFake.unkind(buckets=("example-bucket",))
        self.secrets = FakeSecrets(discovery=Discovery(folder() or Path(), ("secretmanager.v1",)))
        authority, *self.certificate = certificates(at / "tls")
        # On a file system of its own, as machines' disks: a layer may not be inside another one.
        self.volume = Path(tempfile.mkdtemp(prefix="image-", dir="/dev/shm"))
        self.image = image(self.volume / "image", authority, packages=PACKAGES)
        self.bundle = pack(at)
        self.uri = f"gs://example-bucket/bundles/{self.bundle.name}"
        self.put(f"bundles/{self.bundle.name}", self.bundle.read_bytes())
        self.machines = []

    def put(self, name, data):
        """Waits a second where the bucket says 429: it takes one change of an object a second."""
        try:
            self.bucket.write("example-bucket", name, data, {})
        except Refused as refused:
            if refused.code != 429:
                raise
            time.sleep(1.1)
            self.bucket.write("example-bucket", name, data, {})

    def object(self, name):
        return self.bucket.buckets["example-bucket"][name].data

    def secret(self, version, data):
        name = version.split("/")[3]
        self.secrets.versions[name], self.secrets.labels[name] = [data], {}
        members = [f"serviceAccount:{ACCOUNT}"]
        self.secrets.policies[name] = {"bindings": [{"role": ACCESSOR, "members": members}], "etag": "MQ=="}

    def submitted(self, placement: Placement):
        """What ``submit`` puts there before there is a machine."""
        data = requests.run_files(placement.spec, placement).encoded()
        home = placement.home.removeprefix("gs://example-bucket/")
        self.put(f"{home}/run-files/{hashlib.sha256(data).hexdigest()}", data)
        self.secret(placement.token_secret, SECRET_TOKEN.encode())
        log = RequestLog(run_id=placement.run_id, submission=int(placement.submission))
        self.put(f"{home}/{REQUESTS}", encode(log))
        self.put(f"{home}/run_id", placement.run_id.encode())

    def machine(
        self, body, name, *, hidden=OTHER_PYTHONS, address="127.0.0.1", account=ACCOUNT, plug=None, compute=None
    ):
        """Powered off; ``body`` is what was asked for at Compute Engine. ``plug``: what connects it to others, inside;
        ``compute``: Compute Engine as that account is answered."""
        values = {f"attributes/{row['key']}": row["value"] for row in body["metadata"]["items"]}
        values |= {"name": name, "zone": "projects/123456789/zones/us-central1-a", "network-interfaces/0/ip": address}
        values |= {"preempted": "FALSE", "maintenance-event": "NONE", **token(account)}
        values["project/project-id"] = "example-project"

        def ask(call):
            if compute is not None and "://compute." in call.url:
                return compute(account, call)
            return self.secrets.as_account(account, call)

        def services():
            if plug is not None:
                plug(made, address)
            return Front(self.bucket, ask, {ACCESS}, tuple(self.certificate))

        folder = Path(tempfile.mkdtemp(prefix="machine-", dir="/dev/shm"))
        made = MachineRoot(folder, values, hidden, image=self.image, shown=SHOWN, services=services)
        self.machines.append(made)
        return made

    def close(self):
        for one in self.machines:
            one.power_off()
            shutil.rmtree(one.folder, ignore_errors=True)
        shutil.rmtree(self.volume, ignore_errors=True)


@contextlib.contextmanager
def place_at(path):
    found = Place(path)
    with found.bucket:
        try:
            yield found
        finally:
            found.close()


def stages(place, home, name):
    """Boot -> stage -> words, as machines told them."""
    found = {}
    before = f"{home.removeprefix('gs://example-bucket/')}/machines/{name}/"
    for key in list(place.bucket.buckets["example-bucket"]):
        if key.startswith(before):
            boot, _, stage = key.removeprefix(before).partition(".")
            found.setdefault(boot, {})[stage] = place.object(key).decode().strip().partition(" ")[2]
    return found


def until(found, machine, patience_s=90):
    ends = time.monotonic() + patience_s
    while not (said := found()):
        assert time.monotonic() < ends, machine.serial()[-3000:] + journal(machine)[-3000:]
        time.sleep(0.2)
    return said


def journal(machine):
    path = machine.disk / "var/log/journal.txt"
    return path.read_text(errors="replace") if path.exists() else ""


class Watch:
    """Every command line that a machine's processes had, looked at a few times a second."""

    def __init__(self, machine):
        self.machine, self.seen, self._over = machine, set(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _look(self):
        while not self._over.wait(0.1):
            first = self.machine.first
            if first is None:
                continue
            for pid in descendants(first.pid):
                with contextlib.suppress(OSError):
                    self.seen.add(Path(f"/proc/{pid}/cmdline").read_bytes())


def descendants(pid):
    """All processes in the machine: those whose process namespace is its first process's."""
    try:
        (inner,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[:1] or [""]
        space = os.readlink(f"/proc/{inner}/ns/pid")
    except (OSError, ValueError):
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns/pid") == space:
                    found.append(int(entry.name))
    return found


def kill_program(machine, module):
    """SIGKILL to the machine's program of that module."""
    word = f"\0{module}\0".encode()
    [pid] = [pid for pid in descendants(machine.first.pid) if word in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(pid, signal.SIGKILL)


def run_spec(**changes):
    resources = {"hosts": 1, "machine": "e2-standard-4", "project": "example-project", "locations": ["us-central1-a"],
                 "provisioning_model": "on_demand"}  # fmt: skip
    return {"name": "live", "backend": "gce", "run_dir": "gs://example-bucket/runs/live", "resources": resources,
            "command": ["-c", "print(1)"], **changes}  # fmt: skip
