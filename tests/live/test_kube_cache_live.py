"""The cache of the control plane that live tests use: built once, whole or not there, anew when its recipe changes.

The real recipe takes minutes; a stand-in writes four small programs.
"""

import os
import subprocess
from pathlib import Path

import pytest

BUILD = Path(__file__).resolve().parent / "kube" / "build.sh"
pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

RECIPE = """#!/bin/sh
set -e
echo built >> {log}
mkdir -p "$1/bin"
{extra}
for each in etcd kube-apiserver kube-controller-manager kube-scheduler; do echo "$each" > "$1/bin/$each"; done
"""


@pytest.fixture
def cache(tmp_path):
    def recipe(extra=""):
        (tmp_path / "compile.sh").write_text(RECIPE.format(log=tmp_path / "log", extra=extra))
        (tmp_path / "compile.sh").chmod(0o755)

    recipe()
    return tmp_path, recipe


def started(tmp_path, *words):
    environment = {**os.environ, "MUSTER_KUBE_COMPILE": str(tmp_path / "compile.sh"), "HOME": str(tmp_path)}
    for name in ("MUSTER_KUBE", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    return subprocess.Popen(
        [BUILD, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ended(tmp_path, *words):
    process = started(tmp_path, *words)
    said, _ = process.communicate(timeout=60)
    return process.returncode, said.strip()


def builds(tmp_path):
    return len((tmp_path / "log").read_text().splitlines()) if (tmp_path / "log").exists() else 0


def test_built_once_however_many_ask(cache):
    tmp_path, recipe = cache
    # The first one waits in its recipe until the second one has asked for the lock, or a while.
    recipe("for _ in 1 2 3 4 5 6 7 8 9 10; do sleep 0.1; done")
    folder = tmp_path / "a folder"
    code, said = ended(tmp_path, "--check", str(folder))
    assert code == 1 and said.startswith(f"no control plane in {folder}: nobody built one") and "\n" not in said
    both = [started(tmp_path, str(folder)) for _ in range(2)]
    assert [one.wait(60) for one in both] == [0, 0] and builds(tmp_path) == 1
    assert ended(tmp_path, "--check", str(folder)) == (0, f"a control plane is in {folder}")
    assert ended(tmp_path, str(folder)) == (0, "") and builds(tmp_path) == 1
    assert (folder / "bin" / "etcd").read_text() == "etcd\n"


def test_the_default_folder_is_the_users_cache(cache):
    tmp_path, _ = cache
    assert ended(tmp_path) == (0, "")
    assert ended(tmp_path, "--check") == (0, f"a control plane is in {tmp_path}/.cache/muster/kube")


def test_an_interrupted_one_is_not_used_and_gone_on_with(cache):
    tmp_path, recipe = cache
    folder = tmp_path / "kube"
    recipe('[ -e "$1/downloaded" ] || { touch "$1/downloaded"; echo no network >&2; exit 3; }')
    assert ended(tmp_path, str(folder)) == (3, "no network")
    assert ended(tmp_path, "--check", str(folder))[0] == 1 and not (folder / "bin").exists()
    assert ended(tmp_path, str(folder))[0] == 0 and builds(tmp_path) == 2
    assert ended(tmp_path, "--check", str(folder))[0] == 0


def test_another_recipe_a_torn_program_and_what_is_not_ours(cache):
    tmp_path, recipe = cache
    folder = tmp_path / "kube"
    (folder / "of-somebody-else").mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "kube-apiserver").touch(mode=0o755)
    assert "never finished" in ended(tmp_path, "--check", str(folder))[1]
    assert ended(tmp_path, str(folder))[0] == 0, "an older layout makes room"
    (folder / "bin" / "etcd").write_text("torn, longer")
    assert "not whole" in ended(tmp_path, "--check", str(folder))[1]
    assert ended(tmp_path, str(folder))[0] == 0 and builds(tmp_path) == 2
    recipe("# version 2")
    assert "another recipe" in ended(tmp_path, "--check", str(folder))[1]
    assert ended(tmp_path, str(folder))[0] == 0 and builds(tmp_path) == 3
    kept = {path.name for path in folder.iterdir() if path.is_dir()} - {"bin", "of-somebody-else"}
    assert len(kept) == 1 and (folder / "of-somebody-else").is_dir(), "the old one is gone, others' things are not"
