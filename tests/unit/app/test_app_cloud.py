"""``muster up --dry-run`` needs nothing; what is missing is said in one line; tokens are in no output."""

from fakes.gke_run import invoke, on_gke

from muster.backends.gke.provision.cluster import open_cluster
from muster.backends.gke.provision.software import wanted_software
from muster.cli import cloud as commands
from muster.cli import render as render_command
from muster.config.load import loads
from muster.core.errors import UsageError


def manifests(tmp_path):
    folder = tmp_path / "manifests"
    folder.mkdir()
    for name in wanted_software(open_cluster(loads(on_gke(), (), environment=False).spec).sites[0]):
        (folder / name).write_text(f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\n")
    return str(folder)


def test_dry_run_prints_every_request(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_print")
    found = invoke(commands.up, tmp_path, "--dry-run", "--manifests", manifests(tmp_path))
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert "POST https://container.googleapis.com/v1/projects/example-project/locations/us-central1/clusters" in lines
    assert "hf_do_not_print" not in found.output


def test_missing_manifests_come_with_their_addresses(tmp_path):
    found = invoke(commands.up, tmp_path, "--dry-run")
    assert isinstance(found.exception, UsageError) and "curl -L -o kueue.yaml" in str(found.exception)


def test_a_local_run_file_has_no_cluster(tmp_path):
    found = invoke(commands.up, tmp_path, "backend=local")
    assert isinstance(found.exception, UsageError)


def test_render_to_standard_output_and_to_a_folder(tmp_path):
    plain = invoke(render_command.render, tmp_path)
    assert plain.exit_code == 0 and "kind: JobSet" in plain.output
    chart = invoke(render_command.render, tmp_path, "--format", "helm", "--output", str(tmp_path / "chart"))
    assert chart.exit_code == 0 and (tmp_path / "chart" / "values.yaml").exists()
    nowhere = invoke(render_command.render, tmp_path, "--format", "helm")
    assert isinstance(nowhere.exception, UsageError)
