"""The API server as a kubelet sees it: one request at a time, as the administrator. Standard library only."""

import datetime
import http.client
import json
import ssl


def now(fraction=False):
    stamp = "%Y-%m-%dT%H:%M:%S" + (".%fZ" if fraction else "Z")
    return datetime.datetime.now(datetime.UTC).strftime(stamp)


class Api:
    """The API server, as the administrator."""

    def __init__(self, folder):
        self.address, self.token = (folder / "api").read_text().split()
        self.trust = ssl.create_default_context(cafile=str(folder / "server.pem"))

    def call(self, method, path, body=None, kind="application/json", stream=False):
        connection = http.client.HTTPSConnection(self.address, context=self.trust, timeout=330 if stream else 10)
        headers = {"authorization": f"Bearer {self.token}", "content-type": kind}
        connection.request(method, path, body and json.dumps(body), headers)
        reply = connection.getresponse()
        return reply if stream else (reply.status, json.loads(reply.read() or b"{}"))

    def get(self, path):
        status, body = self.call("GET", path)
        return body if status < 300 else None
