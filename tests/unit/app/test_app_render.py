"""``muster render``: the same file gives the same text, offline; what it cannot do is said in one line."""

import json

import pytest

from muster.app.cluster.render import render, write
from muster.config.load import loads
from muster.core.errors import RunFileError, UsageError

RUN = """\
name: A Run with blanks
backend: gke
model: {source: meta-llama/Llama-3.1-8B}
data:
  sources: [{type: text2sql}]
training: {steps: 10}
checkpoint: {dir: gs://bucket/checkpoints}
resources: {machine: a4-highgpu-8g, provisioning_model: spot, image: registry/image:1, hosts: 2}
"""


def spec(*overrides):
    return loads(RUN, overrides, environment=False).spec


def test_same_file_same_text():
    first, second = render(spec()), render(spec())
    assert first == second and set(first.files) == {"cluster.yaml", "run.yaml"}
    assert "name: a-run-with-blanks\n" in first.files["run.yaml"]
    assert "gs://bucket/muster-runs/a-run-with-blanks" in first.files["run.yaml"]


def test_warnings_come_with_reasons():
    (warning,) = render(spec()).warnings
    assert warning.key == "recovery.grace_s" and ": " in warning.message


def test_a_chart_is_a_folder(tmp_path):
    written = write(render(spec(), format="helm"), tmp_path)
    assert tmp_path / "templates" / "run.yaml" in written
    assert json.loads((tmp_path / "values.schema.json").read_text())["additionalProperties"] is False


def test_other_back_ends_have_no_manifests():
    with pytest.raises(UsageError, match="'local'"):
        render(spec("backend=local"))


def test_broken_rules_are_refused_before_anything_is_written():
    with pytest.raises(RunFileError, match="cannot be had as on_demand"):
        render(spec("resources.provisioning_model=on_demand"))
