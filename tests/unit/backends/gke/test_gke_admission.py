"""What is sent passes the played webhooks of JobSet 0.12 and Kueue 0.19.2 with their default feature gates."""

import pytest
from cases import RUN_DIR, cases, spec
from fakes.admission import defaulted, refusals

from muster.backends.gke.manifests.placement import Options, place
from muster.backends.gke.manifests.render import cluster_objects, run_manifests
from muster.backends.gke.pod.continuation import continuation

CASES = cases()
CONTINUED = 98


@pytest.mark.parametrize("name", CASES)
def test_nothing_recorded_is_refused(name):
    of = CASES[name]
    assert {one["kind"]: why for one in [*cluster_objects(of), *run_manifests(of)] if (why := refusals(one))} == {}


@pytest.mark.parametrize("length", [3, 23, 24, 26, 38, 39, 42, 63])
def test_a_run_of_any_name_and_its_next_allocations_are_taken(length):
    of = place(spec("a4-highgpu-8g", "spot", hosts=1024), run_id="n" * length, run_dir=RUN_DIR, options=Options())
    jobset = run_manifests(of)[-1]
    assert refusals(jobset) == []
    names = [jobset["metadata"]["name"]]
    for _ in range(CONTINUED):
        jobset = continuation(defaulted(jobset))
        assert refusals(jobset) == []
        names.append(jobset["metadata"]["name"])
    assert names[1:] == [f"{names[0]}-c{number}" for number in range(2, CONTINUED + 2)]
    assert (names[0] == "n" * length) == (length <= 38)
