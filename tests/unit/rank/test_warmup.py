"""What a restarted rank need not pay again: the first step of a process, first values, the proof of its attention."""

import contextlib
import json
import os
import socket

import pytest
import torch
import torch.distributed as dist
import transformers
from fakes.small_model import CPU, LLAMA, build, process_group, spec_of
from torch.distributed.tensor import DTensor

from muster.config.spec import RunSpec
from muster.core.types import Layout
from muster.rank import warmup
from muster.train.distributed.device_mesh import make_meshes
from muster.train.model import attention_isolation_check as proofs
from muster.train.model import causal_lm as models
from muster.train.state.snapshot import offsets_of


@pytest.mark.parametrize(
    "config", [LLAMA, {**LLAMA, "model_type": "gpt_neox"}, {"model_type": "gpt2", "n_embd": 32, "n_layer": 2}]
)
@pytest.mark.parametrize("training", [{}, {"exact": True}])
def test_a_standby_warms_up_and_leaves_no_group(config, training):
    before = sockets()
    assert warmup.warm_up(spec_of(config, training=training))
    assert not dist.is_initialized()
    assert not sockets() - before, "and no socket"


def sockets():
    """This process's open sockets by inode, which no other socket has while they are open.

    Only new ones count: those that earlier tests left here close at any moment. And psutil's list has no order.
    """
    found = set()
    for descriptor in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # scandir's own, or closed meanwhile
            found.add(os.readlink(descriptor))
    return {target for target in found if target.startswith("socket:")}


def test_a_socket_left_behind_is_seen():
    before = sockets()
    with socket.socket() as left:
        assert f"socket:[{os.fstat(left.fileno()).st_ino}]" in sockets() - before


def test_adapters_warm_up_too():
    assert warmup.warm_up(spec_of(lora={"rank": 4}))


def test_a_trouble_is_a_note_and_no_failure(capsys, monkeypatch):
    monkeypatch.setattr(warmup, "build_model", lambda *_, **__: 1 / 0)
    assert not warmup.warm_up(spec_of())
    assert "could not warm up: division by zero" in capsys.readouterr().err
    assert not dist.is_initialized()
    assert warmup.small_spec(spec_of({"model_type": "no_such"})) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"command": ["train.py"], "model": None, "data": None}, False),
        ({"resources": {"device": "cuda"}}, False),
        ({"recovery": {"warm_standby": "imports"}}, False),
    ],
)
def test_only_our_own_trainer_on_the_cpu_warms_up(changes, expected):
    given = RunSpec.model_validate({**spec_of().model_dump(), "resources": {"device": "cpu"}, **changes})
    assert warmup.applies(given) is expected
    if "resources" not in changes:
        on_gpu = given.resources.model_copy(update={"device": "cuda"})
        assert warmup.applies(given.model_copy(update={"resources": on_gpu}), context=True) is expected


class Cuda:
    """Stands in for torch.cuda, which has no device here; the tensors lie on the CPU."""

    def __init__(self, *, free=8 << 30, refuses=None):
        self.free, self.refuses, self.device, self.emptied = free, refuses, None, False

    def set_device(self, device):
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.device = device

    def mem_get_info(self, device):
        assert device == self.device, "the context is where the rank will be"
        return self.free, 80 << 30

    def synchronize(self, device):
        assert device == self.device

    def empty_cache(self):
        self.emptied = True


@pytest.fixture
def on_gpu(monkeypatch):
    def put(**more):
        found = Cuda(**more)
        for name in ("set_device", "mem_get_info", "synchronize", "empty_cache"):
            monkeypatch.setattr(warmup.torch.cuda, name, getattr(found, name))
        monkeypatch.setattr(warmup, "device_of", lambda gpu: CPU)
        return found

    return put


@pytest.mark.parametrize("config", [LLAMA, {"model_type": "no_such"}])
def test_on_a_gpu_it_leaves_a_context_behind(config, on_gpu):
    cuda = on_gpu()
    assert warmup.warm_up(spec_of(config), gpu=3), "also where the family has no small model"
    assert cuda.device == 3 and cuda.emptied == (config is LLAMA) and not dist.is_initialized()


def test_on_a_gpu_the_compiler_is_loaded_and_nothing_of_the_model_compiled(on_gpu, monkeypatch):
    on_gpu()
    asked, loaded = [], []
    monkeypatch.setattr(warmup, "load_compiler", loaded.append)
    true = warmup.build_model
    monkeypatch.setattr(warmup, "build_model", lambda spec, **more: asked.append(spec) or true(spec, **more))
    assert warmup.warm_up(spec_of(training={"compile": True}), gpu=0)
    assert [spec.training.compile for spec in asked] == [False] and loaded == [CPU]


@pytest.mark.parametrize(
    ("trouble", "said"),
    [({"refuses": "CUDA-capable device(s) is/are busy or unavailable"}, "busy or unavailable"),
     ({"free": warmup.SPARE_BYTES - 1}, "GPU 1 has 2.1 GB free")],
)  # fmt: skip
def test_where_there_is_no_context_or_no_room_for_one_it_is_not_fit(trouble, said, on_gpu, capsys, monkeypatch):
    on_gpu(**trouble)
    monkeypatch.setattr(warmup, "build_model", lambda *_, **__: pytest.fail("nothing more is tried"))
    assert not warmup.warm_up(spec_of(), gpu=1)
    assert said in capsys.readouterr().err


def test_a_kernel_that_fails_in_it_makes_it_unfit(on_gpu, monkeypatch):
    on_gpu()
    monkeypatch.setattr(warmup, "build_model", lambda *_, **__: 1 / 0)
    assert not warmup.warm_up(spec_of(), gpu=1) and not dist.is_initialized()


@pytest.mark.parametrize("training", [{"deterministic": True}, {"exact": True}, {}])
def test_cublas_is_opened_as_the_rank_would_open_it(training, on_gpu, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    on_gpu()
    warmup.open_context(spec_of(training=training), 0)
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == bool(training)


def again(spec, proof, *, restored):
    return models.build_model(
        spec, device=CPU, vocab_size=50, mesh=make_meshes(Layout(), "cpu"), seed=1,
        whole_below=0, proof=proof, restored=restored,
    )  # fmt: skip


@pytest.fixture
def given(monkeypatch):
    """How often values were given and the attention was proven."""
    counts = {"set_initial_values": 0, "prove_isolation": 0}
    for name in counts:
        true = getattr(models, name)

        def counted(*arguments, _true=true, _name=name, **more):
            counts[_name] += 1
            return _true(*arguments, **more)

        monkeypatch.setattr(models, name, counted)
    return counts


def test_a_restored_rank_takes_the_proof_of_the_first(tmp_path, given):
    proof = tmp_path / "attention_proof.json"
    with process_group():
        first = again(spec_of(), proof, restored=False)
        assert given == {"set_initial_values": 1, "prove_isolation": 1}
        second = again(spec_of(), proof, restored=True)
        assert given == {"set_initial_values": 1, "prove_isolation": 1}
        assert second.proof == first.proof
        # What no state holds is there: with the first one's values the second computes the same.
        with torch.no_grad():
            for mine, theirs in zip(second.module.parameters(), first.module.parameters(), strict=True):
                mine.copy_(theirs)
        for (name, mine), (_, theirs) in zip(second.module.named_buffers(), first.module.named_buffers(), strict=True):
            assert torch.equal(mine, theirs), name


def test_a_warm_standby_has_built_the_runs_model_once(monkeypatch):
    built = []
    spec = spec_of({**LLAMA, "vocab_size": 50})
    true = transformers.AutoModelForCausalLM.from_config
    counted = lambda config, **more: built.append(config.vocab_size) or true(config, **more)  # noqa: E731
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", counted)
    assert warmup.warm_up(spec) and built == [warmup.SMALL["vocab_size"], 50]
    with process_group():
        first = again(spec, None, restored=False)
        assert len(built) == 2, "it was taken"
        second = again(spec, None, restored=False)
        assert len(built) == 3 and second.module is not first.module, "and is not taken twice"
        for mine, theirs in zip(first.module.parameters(), second.module.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_model_of_another_config_is_not_taken():
    with process_group():
        assert models.build_ahead(spec_of({**LLAMA, "vocab_size": 60}))
        assert again(spec_of({**LLAMA, "vocab_size": 50}), None, restored=False).config.vocab_size == 50


def test_nobody_waits_for_the_hub_in_advance(monkeypatch):
    monkeypatch.setattr(models, "read_config", lambda *_: pytest.fail("it may ask the hub"))
    hub = spec_of()
    named = hub.model_copy(update={"model": hub.model.model_copy(update={"source": "org/name", "config": None})})
    assert not models.build_ahead(named)


@pytest.mark.parametrize(
    "axes", [{"dp_shard": 2}, {"dp_shard": 2, "dp_replicate": 2}, {"pp": 2, "dp_shard": 1}, {"tp": 2, "dp_shard": 1}]
)
def test_a_standby_has_cut_its_model_and_knows_its_own_place(axes, monkeypatch):
    """What torch remembers of the world that was alone would be of rank 0 there."""
    seen, cut = [], warmup.cut_ahead
    monkeypatch.setattr(warmup, "cut_ahead", lambda *given: seen.append(given[1].layout) or cut(*given))
    replicas, within = axes.get("dp_replicate", 1), {**axes, "dp_replicate": 1}
    spec = RunSpec.model_validate(
        {
            **spec_of({**LLAMA, "hidden_size": 40, "vocab_size": 61}).model_dump(mode="json"),
            "parallelism": axes,
            "resources": {"hosts": replicas, "ranks_per_host": 2},
        }
    )
    assert warmup.warm_up(spec) and not dist.is_initialized() and [one.ranks_per_replica for one in seen] == [2]
    with process_group(world=2, rank=1):
        mesh = make_meshes(Layout(**within), "cpu", replica=0)
        module = models.laid_out(spec, models.read_config(spec, None, 61), mesh, CPU)[0].to_empty(device=CPU)
        cut = [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]
        assert cut or mesh.stages is not None, "a stage that one rank has stays whole"
        for parameter in cut:
            assert sum(parameter.device_mesh.get_coordinate()) == parameter.device_mesh.size() - 1
            whole, own = parameter.shape[0], parameter.to_local().shape[0]
            assert own == whole or (own == whole // 2 and offsets_of(parameter)[0] == whole - own)
        if mesh.shard.size() > 1:
            assert all(parameter.device_mesh is mesh.shard for parameter in cut)


def test_a_model_that_cannot_be_built_in_advance_is_a_note(capsys, monkeypatch):
    monkeypatch.setattr(warmup, "build_ahead", lambda _: 1 / 0)
    assert warmup.warm_up(spec_of())
    assert "could not build the model: division by zero" in capsys.readouterr().err


def test_replicas_that_leave_their_proofs_at_once_do_not_meet(tmp_path, monkeypatch):
    kept, proof = tmp_path / "attention_proof.json", proofs.Proof(leak=0.0, control=1.0, own_head=True)
    monkeypatch.setattr(proofs, "subject", lambda *_: "the model")
    true, others = proofs.Path.write_text, [lambda: proofs.keep_proof(None, CPU, proof, kept)]

    def write(self, text):
        written = true(self, text)
        if others:
            others.pop()()  # another replica's first rank does all of it between this one's write and its rename
        return written

    monkeypatch.setattr(proofs.Path, "write_text", write)
    proofs.keep_proof(None, CPU, proof, kept)
    assert json.loads(kept.read_text())["of"] == "the model" and list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize("damage", ["absent", "torn", "another model", "keys"])
def test_without_a_proof_of_this_model_it_is_proven_again(tmp_path, given, damage):
    proof = tmp_path / "attention_proof.json"
    with process_group():
        again(spec_of({**LLAMA, "num_hidden_layers": 1} if damage == "another model" else LLAMA), proof, restored=False)
        if damage == "absent":
            proof.unlink()
        elif damage == "torn":
            proof.write_text(proof.read_text()[:-9])
        elif damage == "keys":
            proof.write_text(json.dumps({"of": "?"}))
        again(spec_of(), proof, restored=True)
    assert given == {"set_initial_values": 2, "prove_isolation": 2}


def test_frozen_weights_are_read_again(tmp_path, given):
    proof = tmp_path / "attention_proof.json"
    with process_group():
        build(spec_of())
        again(spec_of(lora={"rank": 4}), proof, restored=False)
        again(spec_of(lora={"rank": 4}), proof, restored=True)
    assert given == {"set_initial_values": 3, "prove_isolation": 2}, "the state holds the adapters alone"
