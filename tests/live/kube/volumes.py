"""What a pod of the played kubelet finds in its files and its environment.

Config maps and secrets (with their mode), claims (folders that pods share), empty folders, buckets (by the double of
gcsfuse), the account's token. The token is bound to this pod and rotates in its file: the old one is refused from then
on, which the real one is an hour later.
"""

import base64
import contextlib
import os
import re
import shutil
import sys
import threading
import time
import uuid
from pathlib import Path

import gcsfuse_volumes

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
BUCKETS = "bucket-server"
"""A file in the plane's folder: where pods find the played bucket's server."""
LONGEST_PAUSE_S = 4.0


class NotYet(LookupError):
    """(code, why) as a mount's failure is told."""

    def __init__(self, why, code=""):
        super().__init__(why)
        self.why = f"rpc error: code = {code} desc = {why}" if code else why


class Volumes:
    def __init__(self, node, pod):
        self.node, self.pod = node, pod
        self.places: dict[str, str] = {}
        self.buckets: list[gcsfuse_volumes.BucketVolume] = []
        self.token_secret = ""
        self.lock = threading.Lock()

    # ---------------------------------------------------------------- mounting

    def mount(self):
        """All volumes, however long it takes; False where the pod ends before."""
        wanted = {one["name"]: one for one in self.pod.spec.get("volumes", [])}
        if self.pod.spec.get("serviceAccountName"):
            wanted["account"] = {"name": "account", "account": {}}
        began, pause_s = time.monotonic(), 0.5
        while not self.pod.ending.is_set():
            for name in wanted.keys() - self.places.keys():
                try:
                    self.places[name] = str(self._mount(wanted[name], time.monotonic() - began))
                except (LookupError, OSError) as error:
                    why = error.why if isinstance(error, NotYet) else str(error)
                    text = f'MountVolume.SetUp failed for volume "{name}" : {why}'
                    self.pod.event("Warning", "FailedMount", text)
            if not wanted.keys() - self.places.keys():
                gcsfuse_volumes.offer(self.pod.folder, self.buckets)
                return True
            self.pod.ending.wait(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        return False

    def _mount(self, volume, age_s):
        """The folder; raises LookupError where it is to be tried again."""
        place = self.pod.folder / "volumes" / volume["name"]
        if "persistentVolumeClaim" in volume:
            place = self.node.folder / "claims" / volume["persistentVolumeClaim"]["claimName"]
        elif "csi" in volume:
            return self._bucket(volume, age_s)
        place.mkdir(parents=True, exist_ok=True)
        for kind, name in (("configMap", "name"), ("secret", "secretName")):
            if kind in volume:
                plural = {"configMap": "configmaps", "secret": "secrets"}[kind]
                mode = volume[kind].get("defaultMode", 0o644)
                self._write(plural, volume[kind][name], place, mode, optional=volume[kind].get("optional"))
        if "account" in volume:
            shutil.copy(self.node.folder / "server.pem", place / "ca.crt")
            (place / "namespace").write_text(self.pod.manifest["metadata"]["namespace"])
            self.rotate_token(place)
        return place

    def _bucket(self, volume, age_s):
        url = self.node.folder / BUCKETS
        if not url.exists():  # no bucket is played: a folder of the machine, as kind as can be
            place = self.node.folder / "buckets" / volume["csi"]["volumeAttributes"]["bucketName"]
            place.mkdir(parents=True, exist_ok=True)
            return place
        if age_s < self.node.options.unauthenticated_s:
            raise NotYet("failed to prepare storage service: storage service manager failed to setup service: "
                         "context deadline exceeded", "Unauthenticated")  # fmt: skip
        if not self.pod.sidecars & {gcsfuse_volumes.SIDECAR}:
            raise NotYet("failed to find the sidecar container in Pod spec", "FailedPrecondition")
        place = self.node.folder / "mounts" / self.pod.uid / volume["name"]
        try:
            made = gcsfuse_volumes.BucketVolume(
                volume["csi"], place, url.read_text().strip(), machine=self.node.machine,
                version=self.node.options.gcsfuse, hang_s=self.node.options.gcsfuse_start_s * (len(self.buckets) + 1),
                fs_group=self.pod.spec.get("securityContext", {}).get("fsGroup"), mark=self.pod.uid,
            )  # fmt: skip
        except gcsfuse_volumes.Refused as refused:
            raise NotYet(str(refused), refused.code) from refused
        self.buckets.append(made)
        return place

    def _write(self, kind, name, place, mode, *, optional):
        one = self.node.api.get(self._beside(kind, name))
        if one is None:
            if optional:
                return
            raise NotYet(f'{kind[:-1]} "{name}" not found')
        for key, value in (one.get("data") or {}).items():
            (place / key).write_bytes(base64.b64decode(value) if kind == "secrets" else value.encode())
            (place / key).chmod(mode)

    def _beside(self, kind, name):
        return f"/api/v1/namespaces/{self.pod.manifest['metadata']['namespace']}/{kind}/{name}"

    def remove(self):
        """Nothing of it stays mounted; the account's token is worth nothing any more."""
        for one in self.buckets:
            one.remove()
        with contextlib.suppress(OSError):
            (self.node.folder / "mounts" / self.pod.uid).rmdir()
        if self.token_secret:
            with contextlib.suppress(OSError):
                self.node.api.call("DELETE", self._beside("secrets", self.token_secret))

    # ---------------------------------------------------------------- the account

    def rotate_token(self, place=None):
        """Another token in the file; the one before it is refused from now on.

        A token is bound to a secret that stands for nothing else: the API server refuses it once that has gone.
        """
        place = Path(place or self.places["account"])
        metadata = self.pod.manifest["metadata"]
        with self.lock:
            name = f"token-{metadata['uid'][:8]}-{uuid.uuid4().hex[:8]}"
            wanted = {"metadata": {"name": name}, "type": "played/token"}
            status, secret = self.node.api.call("POST", self._beside("secrets", "").rstrip("/"), wanted)
            if status >= 300:
                raise NotYet(str(secret.get("message")))
            bound = {"kind": "Secret", "apiVersion": "v1", "name": name, "uid": secret["metadata"]["uid"]}
            request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
                       "spec": {"audiences": [], "expirationSeconds": 3600, "boundObjectRef": bound}}  # fmt: skip
            account = self.pod.spec["serviceAccountName"]
            status, answer = self.node.api.call("POST", self._beside("serviceaccounts", f"{account}/token"), request)
            if status >= 300:
                self.node.api.call("DELETE", self._beside("secrets", name))
                raise NotYet(str(answer.get("message")))
            (place / ".token").write_text(answer["status"]["token"])
            os.replace(place / ".token", place / "token")
            old, self.token_secret = self.token_secret, name
        if old:
            self.node.api.call("DELETE", self._beside("secrets", old))

    # ---------------------------------------------------------------- what a container sees

    def of(self, container):
        """Path in the container -> [folder on the machine, whether it is read-only there]."""
        found = {
            mount["mountPath"]: [self.places[mount["name"]], bool(mount.get("readOnly"))]
            for mount in container.get("volumeMounts", [])
        }
        if "account" in self.places:
            found[ACCOUNT] = [self.places["account"], True]
        return found

    def environment(self, container):
        """Raises LookupError: a secret is not there."""
        found = {key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")}
        found |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": "/root"}
        host, _, port = (self.node.folder / "from-pods").read_text().strip().rpartition(":")
        found |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        if (url := self.node.folder / BUCKETS).exists():
            found["STORAGE_EMULATOR_HOST"] = url.read_text().strip()
        for one in container.get("env", []):
            source = one.get("valueFrom")
            if source is None:
                found[one["name"]] = one.get("value", "")
            elif "fieldRef" in source:
                found[one["name"]] = self._field(source["fieldRef"]["fieldPath"])
            elif "secretKeyRef" in source:
                wanted = source["secretKeyRef"]
                secret = self.node.api.get(self._beside("secrets", wanted["name"]))
                if secret is not None and wanted["key"] in (secret.get("data") or {}):
                    found[one["name"]] = base64.b64decode(secret["data"][wanted["key"]]).decode()
                elif not wanted.get("optional"):
                    raise LookupError(f'secret "{wanted["name"]}" not found')
        return found

    def _field(self, path):
        metadata = self.pod.manifest["metadata"]
        if found := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
            return metadata.get(found[1], {}).get(found[2], "")
        return {
            "metadata.name": metadata["name"], "metadata.namespace": metadata["namespace"],
            "metadata.uid": metadata["uid"], "spec.nodeName": self.node.options.name,
            "status.podIP": self.node.options.ip, "status.hostIP": self.node.options.ip,
        }[path]  # fmt: skip
