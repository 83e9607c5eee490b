"""``~/.muster/config.yaml``: a person's project, region and bucket, for run files that name none."""

import pytest

from muster.cli import main
from muster.config.load import loads
from muster.core.errors import RunFileError

RUN_FILE = """\
name: mine
backend: {backend}
model: {{config: {{model_type: llama}}}}
data: {{sources: [{{type: random}}]}}
training: {{steps: 10}}
resources: {{machine: a3-highgpu-8g, hosts: 1, device: cuda{more}}}
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    (tmp_path / "config.yaml").write_text("project: my-project\nregion: us-central1\nbucket: gs://my-bucket/runs/\n")
    return tmp_path


def test_they_stand_in_for_what_nobody_gave_and_say_so(home, capsys):
    loaded = loads(RUN_FILE.format(backend="gke", more=""))
    assert loaded.spec.resources.project == "my-project" and loaded.spec.resources.locations == ["us-central1"]
    assert loaded.spec.run_dir == "gs://my-bucket/runs/mine"
    (home / "run.yaml").write_text(RUN_FILE.format(backend="gke", more=""))
    assert main.run(["show", str(home / "run.yaml")]) == 0
    shown = capsys.readouterr()
    assert f"resources.project is from {home / 'config.yaml'}:1" in shown.err and "my-project" in shown.out


def test_a_run_file_and_the_command_line_win(home):
    loaded = loads(RUN_FILE.format(backend="gke", more=", project: other"), ["run_dir=gs://third/x"])
    assert (loaded.spec.resources.project, loaded.spec.run_dir) == ("other", "gs://third/x")
    assert set(loaded.stood_in) == {"resources.locations"}


@pytest.mark.parametrize("backend", ["local", "slurm"])
def test_machines_that_are_not_google_clouds_have_none_of_them(home, backend):
    loaded = loads(RUN_FILE.format(backend=backend, more="").replace("device: cuda", "device: cpu"))
    assert loaded.spec.resources.project is None and loaded.spec.run_dir is None and not loaded.stood_in


@pytest.mark.parametrize(
    "text, said",
    [
        ("projekt: x\n", "config.yaml:1: projekt: unknown key (hint: did you mean project?)"),
        ("project: a\nregion: [1]\n", "config.yaml:2: region: must be a region or zone"),
        ("bucket: s3://x\n", "bucket: must be gs://BUCKET"),
        ("- a\n", "must be a mapping"),
        ("project: [\n", "not YAML"),
    ],
)
def test_a_mistake_in_them_is_one_line_with_its_place(home, text, said):
    (home / "config.yaml").write_text(text)
    with pytest.raises(RunFileError) as caught:
        loads(RUN_FILE.format(backend="gke", more=""))
    assert said in str(caught.value)
    loads(RUN_FILE.format(backend="local", more="").replace("device: cuda", "device: cpu"))  # not read there
