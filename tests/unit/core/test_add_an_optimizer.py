"""An optimizer that another package adds: its own file and one entry point, nothing in ``src``."""

import pytest
from fakes.extra_package import install

from muster.config import load
from muster.core.errors import RunFileError
from muster.core.flops import ModelShape
from muster.core.layout import Layout
from muster.core.optimizers import ADAMW, OPTIMIZERS
from muster.plan.memory import DeviceOverhead, memory
from muster.plan.workload import Setting, workload

torch = pytest.importorskip("torch")

MOMENTUM = '''
"""Stochastic gradient descent with momentum."""

from muster.core.optimizers import OptimizerTraits

TRAITS = OptimizerTraits(title="SGD", factory="momentum:make", moments=1)


class Momentum:
    def __init__(self, named, settings):
        import torch

        self.named, self.beta = dict(named), settings.betas[0]
        self.velocity = {name: torch.zeros_like(p.detach()) for name, p in named.items()}

    @property
    def moments(self):
        return {"velocity": self.velocity}

    def load_moments(self, moments):
        """Nothing to do: `moments` are the moments themselves."""

    def step(self, *, step, learning_rate, scale, skip):
        if float(skip):
            return
        for name, parameter in self.named.items():
            self.velocity[name].mul_(self.beta).add_(parameter.grad * scale)
            parameter.data.sub_(learning_rate * self.velocity[name])


def make(named, settings, *, elementwise):
    return Momentum(named, settings)
'''
RUN = """\
name: added
model: {config: {model_type: llama}}
data: {sources: [{type: random}]}
training: {steps: 10, optimizer: {name: momentum, betas: [0.5, 0.9]}}
"""
SHAPE = ModelShape.from_config(
    {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
     "num_attention_heads": 4, "vocab_size": 512}
)  # fmt: skip


def test_its_run_file_is_refused_with_what_there_is_until_it_is_installed():
    with pytest.raises(RunFileError) as caught:
        load.loads(RUN.replace("momentum", "adamv"))
    (problem,) = caught.value.problems
    assert (problem.key, problem.line) == ("training.optimizer.name", 4)
    assert problem.message == 'must be one of adamw, adamw_8bit, got "adamv"'
    assert problem.hint == "did you mean adamw?"


def test_an_optimizer_from_another_package(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, OPTIMIZERS, "momentum", "momentum:TRAITS", {"momentum.py": MOMENTUM})
    spec = load.loads(RUN).spec

    # The plan counts its state: one float32 a parameter, AdamW has two.
    work, setting = workload(spec, SHAPE), Setting(layout=Layout(), micro_batch_size=1, activation_checkpointing="none")
    assert "SGD" in work.title
    held = memory(work, setting, DeviceOverhead(context_bytes=0, communicator_bytes=0, fragmentation=0.0)).items
    assert held["optimizer state"] == pytest.approx(4 * SHAPE.parameters)
    assert ADAMW.device_bytes(4) == 8

    # The trainer builds it and takes a step.
    from muster.train.optim.optimizer import make_optimizer

    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 2.0)
    optimizer = make_optimizer({"weight": weight}, spec.training.optimizer, elementwise=False)
    for step in (1, 2):
        optimizer.step(step=step, learning_rate=0.1, scale=torch.tensor(0.5), skip=torch.tensor(0.0))
    assert torch.allclose(weight, torch.full((3,), 1.0 - 0.1 - 0.15))
    assert torch.allclose(optimizer.moments["velocity"]["weight"], torch.full((3,), 1.5))

    # Its state is in snapshots and checkpoints, and comes back to the bit.
    from muster.train.state.training_state import TrainingState

    saved = {name: part.clone() for name, part in TrainingState({"weight": weight}, optimizer).local_tensors().items()}
    assert sorted(saved) == ["model.weight", "optimizer.velocity.weight"]
    optimizer.step(step=3, learning_rate=0.1, scale=torch.tensor(0.5), skip=torch.tensor(0.0))

    restored = torch.nn.Parameter(torch.zeros(3))
    restored.grad = weight.grad
    resumed = make_optimizer({"weight": restored}, spec.training.optimizer, elementwise=False)
    TrainingState({"weight": restored}, resumed).load(2, saved)
    resumed.step(step=3, learning_rate=0.1, scale=torch.tensor(0.5), skip=torch.tensor(0.0))
    assert torch.equal(restored, weight)
