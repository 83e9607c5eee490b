"""A look that is refused has not seen that nothing is there."""

import httpx2
import pytest
from fakes.kubernetes import FakeKubernetes, in_memory

from muster.core.errors import AccessError

SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "token", "namespace": "default"}}


@pytest.mark.parametrize("status", [401, 403])
def test_what_cannot_be_looked_up_is_not_taken_for_removed(status):
    """Kinds are found by discovery, which may be refused."""
    server, refused = FakeKubernetes(), []

    def handle(request):
        if request.method == "GET" and request.url.path == "/api/v1" and refused:
            return httpx2.Response(status, json={"kind": "Status", "code": status, "message": "not for you"})
        code, body = server.handle(request.method, request.url.raw_path.decode(), request.content)
        return httpx2.Response(code, json=body)

    in_memory(server, handle).apply(SECRET)
    refused.append(True)
    with pytest.raises(AccessError, match="not for you"):
        in_memory(server, handle).delete(SECRET)
    assert server.of_kind("Secret")
    refused.clear()
    in_memory(server, handle).delete(SECRET)
    assert not server.of_kind("Secret")
