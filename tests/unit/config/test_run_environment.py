"""`env` and `secrets`: a run file holds no value, names what Muster sets itself, and says what is missing."""

from __future__ import annotations

import os

import pytest

from muster.config import load
from muster.config.run_environment import read_secrets
from muster.core.errors import RunFileError, UsageError

FILE = "name: own\ncommand: [-m, train]\nresources: {device: cpu}\n"
VERSION = "projects/p-1/secrets/hub/versions/3"
VERTEX = ("backend=vertex", "resources.machine=n1-standard-8", "checkpoint.dir=gs://b/c")


def problems(*overrides: str) -> dict[str, str]:
    try:
        load.loads(FILE, overrides, environment=False)
    except RunFileError as error:
        assert "hunter2" not in str(error)
        return {problem.key: problem.message for problem in error.problems}
    return {}


@pytest.mark.parametrize(
    "overrides",
    [
        ("env.FLAVOUR=sweet", "secrets.WANDB_API_KEY=env"),
        ("secrets.HUB=env:HF_TOKEN", "secrets.OTHER=file:~/.key"),
        ("env.TOKEN_FILE=/run/token",),
        ("env.MAX_TOKENS=4096",),
    ],
)
def test_right_ones(overrides):
    assert not problems(*overrides)


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("env.WANDB_API_KEY=hunter2hunter2", "env.WANDB_API_KEY", "looks like a secret"),
        (f"env.X=hf_{'a' * 34}", "env.X", "looks like a secret"),
        ("slurm.environment.API_KEY=hunter2hunter2", "slurm.environment.API_KEY", "looks like a secret"),
        ("env.RANK=x", "env.RANK", "set by Muster"),
        ("env.MUSTER_HOME=/x", "env.MUSTER_HOME", "set by Muster"),
        ("env.OMP_NUM_THREADS=four", "env.OMP_NUM_THREADS", "set for each rank"),
        ("env.2X=a", "env.2X", "no name of a variable"),
        ("secrets.KEY=hunter2", "secrets.KEY", "does not say where"),
        (f"secrets.KEY={VERSION}", "secrets.KEY", "not read on local"),
    ],
)
def test_wrong_ones(override, key, words):
    assert words in problems(override)[key]


def test_a_number_is_to_be_put_in_quotes():
    with pytest.raises(RunFileError) as caught:
        load.loads(FILE + "env: {RETRIES: 3}\n", environment=False)
    (problem,) = caught.value.problems
    assert (problem.key, problem.hint) == ("env.RETRIES", 'put it in quotes: "3"')


def test_a_name_in_both_is_refused():
    assert "is in `env` too" in problems("env.X=a", "secrets.X=env")["secrets.X"]


def test_where_hosts_read_secret_manager_nothing_else_is_taken():
    assert "secrets.HUB" not in problems(*VERTEX, f"secrets.HUB={VERSION}")
    assert "Secret Manager" in problems(*VERTEX, "secrets.HUB=env")["secrets.HUB"]


def test_a_command_with_a_secret_is_refused_with_this_as_the_way():
    with pytest.raises(RunFileError) as caught:
        load.loads(FILE, ["command=[-m, train, --api-key, hunter2hunter2]"], environment=False)
    (problem,) = caught.value.problems
    assert "secrets: {NAME: env}" in (problem.hint or "") and "hunter2" not in str(caught.value)


def test_values_come_from_the_environment_or_from_a_file_of_ones_own(tmp_path):
    path = tmp_path / "key"
    path.write_text("from a file\n")
    path.chmod(0o600)
    sources = {"A": "env", "B": "env:OTHER", "C": f"file:{path}", "D": VERSION}
    found = read_secrets(sources, {"A": "a", "OTHER": "b"})
    assert found == {"A": "a", "B": "b", "C": "from a file"}


def test_what_is_missing_or_open_to_others_is_said(tmp_path):
    path = tmp_path / "key"
    with pytest.raises(UsageError, match="the variable A is not set"):
        read_secrets({"A": "env"}, {"A": ""})
    with pytest.raises(UsageError, match="No such file"):
        read_secrets({"A": f"file:{path}"}, {})
    path.write_text("value")
    path.chmod(0o644)
    with pytest.raises(UsageError, match="others can read"):
        read_secrets({"A": f"file:{path}"}, {})
    os.truncate(path, 0)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="is empty"):
        read_secrets({"A": f"file:{path}"}, {})
