"""TPUs on Vertex AI and Compute Engine are rendered; what would start something, or plan it, refuses in one line."""

import pytest

from muster.cli import main

RUN = """\
name: rendered
backend: {backend}
run_dir: gs://bucket/runs/rendered
model: {{config: {{model_type: llama}}, tokenizer: {{kind: word}}}}
data: {{sources: [{{type: text2sql, level: 1}}]}}
training: {{steps: 10, micro_batch_size: 4, global_batch_size: 8}}
vertex: {{service_account: hosts@project-1.iam.gserviceaccount.com}}
gce:
  service_account: hosts@project-1.iam.gserviceaccount.com
  supervisor_service_account: supervisor@project-1.iam.gserviceaccount.com
  bundle: gs://bucket/bundles/{bundle}.tar.gz
resources:
  {{device: tpu, machine: ct6e-standard-4t, hosts: 2, project: project-1, locations: [{location}], {image}
   provisioning_model: spot}}
"""
SEEN = {"vertex": '"tpuTopology": "2x4"', "gce": '"acceleratorTopology": "2x4"'}


@pytest.fixture(params=["vertex", "gce"])
def run(request, tmp_path, monkeypatch):
    """(the back end, a verb's words -> its exit code)."""
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    file = tmp_path / "run.yaml"
    zone, image = ("us-east5-b", "") if request.param == "gce" else ("us-east5", "image: r/i:1,")
    file.write_text(RUN.format(backend=request.param, bundle="0" * 64, location=zone, image=image))
    return request.param, lambda verb, *more: main.run([verb, str(file), *more])


def test_what_would_be_asked_for_is_printed(run, capsys):
    backend, call = run
    assert call("render") == 0
    assert SEEN[backend] in capsys.readouterr().out


@pytest.mark.parametrize("words", [("submit",), ("submit", "--dry-run"), ("plan",), ("up", "--dry-run")])
def test_nothing_is_started_or_planned(run, words, tmp_path, capsys):
    backend, call = run
    if words[0] == "up" and backend == "vertex":
        return  # nothing is made there beforehand
    code, said = call(*words), capsys.readouterr().err
    assert code == 2 and f"resources.device: tpu: on {backend} rendered, not submitted" in said, said
    assert not list(tmp_path.rglob("resolved.json"))
