"""Every example's request against the played custom-job service."""

import pytest

discovery = pytest.importorskip("fakes.discovery")
if discovery.folder() is None:
    pytest.skip("google-api-python-client (Google's discovery documents) is not installed", allow_module_level=True)

from fakes.vertex.machines import demand  # noqa: E402
from fakes.vertex.submitter import Submitter  # noqa: E402
from vertex_cases import cases  # noqa: E402

from muster.backends.vertex.custom_job import requests  # noqa: E402


@pytest.mark.parametrize("name", cases())
def test_the_service_takes_every_example(name):
    examples = requests(cases()[name])
    limits = {(one.region, metric): 1000 for one in examples for metric in demand(one.body["jobSpec"])}
    user = Submitter(limits=limits)
    for request in examples:
        reply = user.create(request.body, request.region)
        assert reply.status == 200, reply.message
