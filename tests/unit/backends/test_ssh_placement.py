"""What may be said in ``ssh:``, what ssh is given, and what a host of a run may read of the home."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from muster.backends.ssh.placement import notes, place, rules
from muster.backends.ssh.store_server import Homes
from muster.config.spec import RunSpec
from muster.protocol.pipes import FarRefused, StoreCall
from muster.storage.store.ssh import client


def spec(*hosts, needed=1, spares=0, run_dir=None):
    resources, ssh = {"hosts": needed, "spare_hosts": spares}, {"hosts": list(hosts)}
    given = {"name": "n", "backend": "ssh", "command": ["true"], "resources": resources, "ssh": ssh}
    return RunSpec.model_validate({**given, "run_dir": run_dir})


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=x", "a@-oX", "a -v", "a;id", "a\n", "$(id)", "`id`", "", "a@b@c", "a:b", "a'b", "a:", "é"]
)
def test_what_is_no_host_never_reaches_ssh(host):
    with pytest.raises(ValidationError):
        spec(host)


def test_hosts_in_a_file(tmp_path: Path):
    def named(path: Path) -> list[str]:
        given = {"name": "n", "backend": "ssh", "command": ["true"], "ssh": {"hosts": str(path)}}
        return RunSpec.model_validate(given).ssh.hosts

    (tmp_path / "hosts").write_text("gpu1\n\n# spares\nme@10.0.0.7:22  # the slow one\n")
    assert named(tmp_path / "hosts") == ["gpu1", "me@10.0.0.7:22"]
    (tmp_path / "bad").write_text("gpu1 -oProxyCommand=x\n")
    with pytest.raises(ValidationError):
        named(tmp_path / "bad")
    with pytest.raises(ValidationError, match=r"cannot read .*none: No such file"):
        named(tmp_path / "none")


def test_hosts_as_ssh_takes_them(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    words = client(spec("me@10.0.0.7:2222").ssh.hosts[0])
    assert words[-4:] == ["-p", "2222", "--", "me@10.0.0.7"], "an option cannot follow --"
    assert {"-oBatchMode=yes", "-oStrictHostKeyChecking=yes", "-oForwardAgent=no"} <= set(client("gpu-1.x"))


def test_rules():
    def keys(one):
        return [problem.key for problem in rules(one)]

    assert keys(spec("a", "b", "c", needed=2)) == [], "the third is a spare"
    assert keys(spec("a", needed=2)) == keys(spec("a", "a")) == ["ssh.hosts"]
    assert keys(spec("a", "b", spares=3)) == ["resources.spare_hosts"]
    assert keys(spec("a", run_dir="gs://bucket/run")) == keys(spec("a", run_dir="/shared/run")) == []
    assert keys(spec("a", run_dir="memory://run")) == keys(spec("a", run_dir="/shared/$(id)")) == ["run_dir"]


def test_where_the_home_is():
    here = place(spec("me@a:22", "b"), "r-1")
    assert (here.home, here.keeper, here.hosts) == ("ssh://me@a:22/r-1", "me@a:22", ["me@a:22", "b"])
    moved = place(spec("a", "b", "c"), "r-1", "ssh://b/r-1")
    assert (moved.keeper, moved.hosts) == ("b", ["b", "a", "c"]), "its keeper supervises it"
    assert moved.filled_in(moved.spec).checkpoint.dir == "ssh://b/r-1/checkpoints"
    assert place(spec("a", run_dir="/shared/run"), "r-1").is_shared and not here.is_shared
    assert place(spec("a", run_dir="gs://bucket/run/"), "r-1").keeper is None


def test_what_a_plan_says_of_a_lost_host():
    (said,) = notes(spec("a", "b"), 1.0, None)
    assert "on a: if it is lost the run stops, and muster recover RUN --from b continues from its copy" in said
    assert "there is no copy" in next(notes(spec("a"), 1.0, None))
    assert not [*notes(spec("a", "b", run_dir="gs://bucket/run"), 1.0, None)]
    assert not [*notes(spec("a", "b", run_dir="/shared/run"), 1.0, None)]


@pytest.mark.parametrize("key", ["other/x", "../x", "run/../../x", "/etc/passwd", "", "run/..", "."])
def test_a_host_of_a_run_reads_nothing_else(key, tmp_path: Path):
    for verb in ("get", "put", "list", "delete", "read", "write", "remove_tree"):
        answer = Homes(tmp_path / "homes", "run").answer(StoreCall(verb=verb, key=key))
        assert isinstance(answer, FarRefused) and answer.kind == "access", verb
