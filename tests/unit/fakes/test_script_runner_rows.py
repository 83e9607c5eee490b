"""The stand-in for what runs start-up scripts: every boot, no exit code, no second try."""

import io
import os
import signal
from pathlib import Path

import pytest
from fakes.compute_engine.script_runner import run_all
from fakes.metadata import metadata


def boot(url):
    output = io.StringIO()
    run_all(url, Path("/"), output)
    return output.getvalue()


def script(text, **more):
    return {"attributes/startup-script": text, "name": "h0", **more}


def test_row_15_every_boot_and_the_exit_code_is_a_line(tmp_path):
    with metadata(script(f"\n #!/bin/sh\necho once >> {tmp_path}/runs\necho said; exit 3\n")) as (_, url):
        for _ in range(2):
            said = boot(url)
            assert "startup-script: said" in said
            assert 'Script "startup-script" failed with error: exit status 3' in said
            assert said.endswith("Finished running startup scripts.\n")
    assert (tmp_path / "runs").read_text() == "once\nonce\n"


@pytest.mark.parametrize("line", range(4))
def test_row_15_killed_at_any_line_it_goes_on_from_the_start_at_the_next_boot(tmp_path, line):
    steps = [f"echo {number} >> {tmp_path}/steps" for number in range(4)]
    steps.insert(line, f"test -e {tmp_path}/died || {{ touch {tmp_path}/died; kill -9 $$; }}")
    with metadata(script("#!/bin/sh\n" + "\n".join(steps))) as (_, url):
        assert "failed with error" in boot(url)
        assert "exit status 0" in boot(url)
    assert (tmp_path / "steps").read_text().split() == [str(n) for n in range(line)] + ["0", "1", "2", "3"]


def test_row_15_what_it_leaves_running_stays(tmp_path):
    text = f"#!/bin/sh\nsleep 60 >/dev/null 2>&1 </dev/null & echo $! > {tmp_path}/pid\nexit 1\n"
    with metadata(script(text)) as (_, url):
        boot(url)
    child = int((tmp_path / "pid").read_text())
    os.kill(child, 0)
    os.kill(child, signal.SIGKILL)


def test_both_keys_run_and_the_projects_only_where_there_are_none(tmp_path):
    other = tmp_path / "other.sh"
    other.write_text("#!/bin/sh\necho from a file; echo ${HOME-nobody}; pwd >/dev/null; cat\n")
    values = script("#!/bin/sh\necho mine\n", **{"project/attributes/startup-script": "#!/bin/sh\necho theirs\n"})
    with metadata(values) as (server, url):
        server.unwell = 3  # as at boot
        assert "theirs" not in boot(url)
        values["attributes/startup-script-url"] = other.as_uri()
        said = boot(url)
        assert said.index("startup-script: mine") < said.index("startup-script-url: from a file")
        assert "startup-script-url: nobody" in said
        values["attributes/startup-script-url"] = f"{url}/gone"
        assert 'Script "startup-script-url" failed with error' in boot(url)
        for key in ("attributes/startup-script", "attributes/startup-script-url"):
            del values[key]
        assert "startup-script: theirs" in boot(url)
    with metadata({"name": "h0"}) as (_, url):
        assert boot(url) == "Finished running startup scripts.\n"
