"""A run file for GKE as a user writes it, and a command line that is given it."""

import typer
from typer.testing import CliRunner

TEXT = """\
name: tiny
backend: gke
model: {{source: meta-llama/Llama-3.1-8B}}
data:
  sources: [{{type: text2sql}}]
training: {{steps: 10}}
checkpoint: {{dir: gs://example-bucket/checkpoints}}
resources:
  machine: {machine}
  provisioning_model: {mode}
  image: registry/image:1
  project: example-project
  locations: [us-central1-b]
"""


def on_gke(machine="g2-standard-48", mode="spot"):
    """The file's text."""
    return TEXT.format(machine=machine, mode=mode)


def invoke(command, folder, *arguments):
    """``muster COMMAND run.yaml ARGUMENTS`` without a process; what it raises is in the result."""
    (folder / "run.yaml").write_text(on_gke())
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(folder / "run.yaml"), *arguments])
