"""A log that the disk has no room for keeps no program of a host from starting."""

import subprocess

from muster.agent.values.host_identity import HostIdentity


def test_a_program_whose_log_cannot_be_made_starts_without_one(tmp_path):
    (tmp_path / "logs").write_text("no folder: nothing can be made in it, as root too")
    identity = HostIdentity(run_dir=tmp_path, run_id="run", host="host-0", bind="", memory=None)
    with identity.start_program("x", "platform", stdout=subprocess.PIPE) as child:
        assert child.stdout.read() and child.wait() == 0
