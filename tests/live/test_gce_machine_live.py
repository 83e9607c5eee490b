"""``startup.sh`` as root in a machine of namespaces: from the boot to the program that it starts, and what fails."""

import os
import time

import pytest
from fakes.compute_engine.machine_root import IMAGE_PYTHONS, PYTHONS
from gce_machines import ACCESS, HUB_TOKEN, POSSIBLE, SECRET_TOKEN, Watch, journal, place_at, run_spec, stages, until

from muster.backends.gce import requests
from muster.backends.gce.placement import place as placement_of
from muster.backends.google.request_log import FILE as REQUESTS
from muster.backends.google.request_log import RequestLog
from muster.config.spec import RunSpec
from muster.core.typed_json import encode

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not POSSIBLE, reason="namespaces need root, unshare, ip, curl and openssl"),
]
HUB = "projects/example-project/secrets/hugging-face/versions/1"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with place_at(tmp_path_factory.mktemp("place")) as found:
        yield found


@pytest.fixture
def submitted(place, request):
    gce = {
        "service_account": "muster-hosts@example-project.iam.gserviceaccount.com",
        "supervisor_service_account": "muster-supervisor@example-project.iam.gserviceaccount.com",
        "bundle": place.uri,
        "hugging_face_secret": HUB,
    }
    home = f"gs://example-bucket/runs/{request.node.name.replace('_', '-').lower()[:40]}"
    spec = RunSpec.model_validate(run_spec(gce=gce, run_dir=home))
    made = placement_of(spec, run_id=f"r{abs(hash(request.node.name)) % 10**8}", run_dir=None)
    place.submitted(made)
    place.secret(HUB, HUB_TOKEN.encode())
    yield made
    for one in place.machines:  # each goes on starting its agent for as long as no supervisor answers
        one.power_off()


def host_body(made):
    (bulk,) = requests.hosts(made, "us-central1-a", request_number=1)
    return bulk.body["instanceProperties"]


def told(place, made, name, stage):
    """The newest boot's words of that stage."""
    found = [rows[stage] for rows in stages(place, made.home, name).values() if stage in rows]
    return found[-1] if found else None


def test_from_the_boot_to_the_agent_and_again_after_a_reboot(place, submitted):
    machine = place.machine(host_body(submitted), "h0")
    with Watch(machine) as watch:
        machine.boot()
        until(lambda: told(place, submitted, "h0", "checked"), machine)
        until(lambda: any(b"muster.agent.watchdog" in line for line in watch.seen), machine)
        (first,) = stages(place, submitted.home, "h0")
        assert set(stages(place, submitted.home, "h0")[first]) == {"booted", "driver", "bundle", "started", "checked"}
        installed = os.stat(machine.disk / f"opt/muster/{place.bundle.name.partition('.')[0]}/ready").st_mtime_ns

        machine.reboot()
        until(lambda: sum("checked" in rows for rows in stages(place, submitted.home, "h0").values()) == 2, machine)
        after = os.stat(machine.disk / f"opt/muster/{place.bundle.name.partition('.')[0]}/ready").st_mtime_ns
        assert after == installed  # the bundle is not installed a second time
    units = list((machine.disk / "etc/systemd/system").iterdir())
    assert [one.name for one in units] == ["muster.service"]
    spoken = machine.serial() + journal(machine) + b"\n".join(watch.seen).decode(errors="replace")
    spoken += str(machine.values).replace(ACCESS, "")  # the metadata server gives the account's token to whoever asks
    spoken += "".join(file.read_text() for file in units)
    for secret in (SECRET_TOKEN, HUB_TOKEN, ACCESS):
        assert secret not in spoken
    for path in machine.disk.rglob("*"):  # nor on its disk: what was in memory is gone with the power
        if path.is_file() and path.stat().st_size < 1 << 20:
            assert SECRET_TOKEN.encode() not in path.read_bytes(), path


def test_a_flipped_byte_is_refused_with_its_reason(place, submitted):
    name = place.uri.removeprefix("gs://example-bucket/")
    good = place.object(name)
    place.put(name, good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    machine = place.machine(host_body(submitted), "h1")
    try:
        machine.boot()
        said = until(lambda: told(place, submitted, "h1", "failed"), machine)
        assert place.uri in said and "is not what its name says: its SHA-256 is " in said
        until(lambda: 'Script "startup-script" failed with error: exit status 1' in machine.serial(), machine)
        assert not (machine.disk / "etc/systemd/system/muster.service").exists()
        assert (
            not list((machine.disk / "opt/muster").glob("*/site")) if (machine.disk / "opt/muster").exists() else True
        )
    finally:
        place.put(name, good)
    machine.reboot()  # mended, the next boot gets there
    until(lambda: told(place, submitted, "h1", "checked"), machine)


def test_other_run_files_than_were_submitted_are_refused(place, submitted):
    key = f"{submitted.home.removeprefix('gs://example-bucket/')}/run-files/"
    (name,) = [one for one in place.bucket.buckets["example-bucket"] if one.startswith(key)]
    place.put(name, place.object(name).replace(b"live", b"evil"))
    machine = place.machine(host_body(submitted), "h2")
    machine.boot()
    said = until(lambda: told(place, submitted, "h2", "failed"), machine)
    assert "does not have its digest" in said
    assert told(place, submitted, "h2", "checked") is None


def test_an_image_without_a_new_python_says_so(place, submitted):
    machine = place.machine(host_body(submitted), "h3", hidden=IMAGE_PYTHONS + PYTHONS)
    machine.boot()
    said = until(lambda: told(place, submitted, "h3", "failed"), machine)
    assert said == "no Python 3.11 or newer, neither in the bundle nor on the image"


def test_cut_off_at_any_moment_the_next_boot_gets_there(place, submitted):
    machine = place.machine(host_body(submitted), "h4")
    for after_s in (0.2, 1.0, 2.5, 5.0):
        machine.boot()
        time.sleep(after_s)
        machine.power_off()
    machine.boot()
    until(lambda: told(place, submitted, "h4", "checked"), machine)


def test_a_metadata_server_that_is_not_well_is_waited_for(place, submitted):
    machine = place.machine(host_body(submitted), "h5")
    machine.boot()
    machine.server.unwell = 7
    until(lambda: told(place, submitted, "h5", "checked"), machine)


def test_a_host_that_comes_after_its_run_was_taken_back_shuts_down(place, submitted):
    name = f"{submitted.home.removeprefix('gs://example-bucket/')}/{REQUESTS}"
    place.put(name, encode(RequestLog(run_id=submitted.run_id, submission=int(submitted.submission), closed=True)))
    machine = place.machine(host_body(submitted), "h6")
    machine.boot()
    until(lambda: "systemd: powering off" in journal(machine), machine)
    assert told(place, submitted, "h6", "checked") is None and ": exiting" in journal(machine)
