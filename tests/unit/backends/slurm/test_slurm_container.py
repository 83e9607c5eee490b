"""A step in a container: its arguments, what it sees, and which images and mounts are refused with which words."""

import pytest
from slurm_cases import RUN_DIR, RUN_ID, spec

from muster.backends.slurm import container as module
from muster.backends.slurm.container import inside, make_places, mounts, step, step_environment
from muster.backends.slurm.run_file_rules import rules
from muster.backends.slurm.script import environment
from muster.config import load as runfile
from muster.config.spec import RunSpec
from muster.core.errors import RunFileError

JOB = {"SLURM_JOB_ID": "41"}
SQSH = "/home/me/pytorch.sqsh"


def boxed(image=SQSH, runtime="pyxis", *, resources=None, **container):
    slurm = {key: container.pop(key) for key in ("scratch", "environment") if key in container}
    return spec({"container": {"image": image, "runtime": runtime, **container}, **slurm}, **(resources or {}))


def test_a_step_is_one_node_unbound_and_its_container_sees_the_runs_folder():
    argv = step(boxed(mounts=["/data:/data"], scratch="/s"), "/r", "n7", [], JOB)
    assert {"--nodelist=n7", "--no-kill", "--overlap", "--cpu-bind=none"} <= set(argv)
    assert f"--container-image={SQSH}" in argv and "--container-mounts=/r:/r,/s:/s,/data:/data" in argv
    plain = step(spec(), "/r", "n7", [], JOB)
    assert "--cpu-bind=none" in plain and not any("container" in word for word in plain)


def test_the_runs_own_variables_win_over_the_images():
    """pyxis keeps a variable of the image unless it is named; apptainer has a prefix for it."""
    environment = {"NCCL_DEBUG": "INFO", "HF_HOME": "/data/hf"}
    argv = step(boxed(environment=environment, scratch="/s"), "/r", "n7", [], JOB)
    (names,) = [word.partition("=")[2].split(",") for word in argv if word.startswith("--container-env=")]
    assert {"NCCL_DEBUG", "HF_HOME", "MUSTER_RUN_ID", "MUSTER_TERM", "TMPDIR"} <= set(names)
    assert step_environment(boxed(environment=environment), RUN_ID, RUN_DIR) == {}
    of = boxed("/home/me/pytorch.sif", "apptainer", environment=environment)
    assert not any("container" in word for word in step(of, "/r", "n7", [], JOB))
    own = step_environment(of, RUN_ID, RUN_DIR)
    assert own["APPTAINERENV_HF_HOME"] == "/data/hf" and own["APPTAINERENV_MUSTER_RUN_ID"] == RUN_ID


def test_apptainer_gets_its_program_and_the_same_mounts():
    of = boxed("/home/me/pytorch.sif", "apptainer", mounts=["/data:/data:ro"])
    argv = inside(of, "/r", ["python", "x"], JOB)
    assert argv == [
        "apptainer", "exec", "--nv", "--bind", "/r:/r", "--bind", "/data:/data:ro", "/home/me/pytorch.sif", "python",
        "x",
    ]  # fmt: skip
    assert inside(boxed(), "/r", ["python", "x"], JOB) == ["python", "x"] == inside(spec(), "/r", ["python", "x"], JOB)


def test_the_fabric_is_mounted_in_both(monkeypatch):
    monkeypatch.setattr(module, "fabric_mounts", lambda *_, **__: ["/usr/local/gib"])
    assert mounts(boxed(mounts=["/usr/local:/usr/local"]), "/r", JOB) == ["/r:/r", "/usr/local:/usr/local"], "is in it"
    assert mounts(boxed(), "/r", JOB) == ["/r:/r", "/usr/local/gib:/usr/local/gib"]
    of = boxed("/home/me/pytorch.sif", "apptainer")
    assert inside(of, "/r", ["x"], JOB)[3:7] == ["--bind", "/r:/r", "--bind", "/usr/local/gib:/usr/local/gib"]


def test_checkpoints_go_to_the_shared_folder_from_the_first_one_on(tmp_path):
    """A folder that is not there yet cannot be mounted: the first save would stay in the container and go with it."""
    of = RunSpec.model_validate(
        {
            "name": "n",
            "backend": "slurm",
            "command": ["-m", "x"],
            "checkpoint": {"dir": str(tmp_path / "new" / "checkpoints")},
            "slurm": {"container": {"image": SQSH}},
        }
    )
    make_places(of, JOB)
    assert mounts(of, "/r", JOB)[1] == f"{tmp_path}/new/checkpoints:{tmp_path}/new/checkpoints"
    make_places(of.model_copy(update={"checkpoint": of.checkpoint.model_copy(update={"dir": "gs://b/c"})}), JOB)
    assert not (tmp_path / "gs:").exists()


def test_caches_are_the_users_for_a_container_can_write_nowhere_else(tmp_path):
    home = {
        **JOB,
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "xdg"),
        "HF_HOME": str(tmp_path / ".cache" / "hf"),
    }
    make_places(boxed(), home)
    found = [mount.partition(":")[0] for mount in mounts(boxed(), "/r", home)]
    assert found == ["/r", str(tmp_path / ".cache"), str(tmp_path / "xdg")], "HF_HOME is in the first"
    (names,) = [word for word in step(boxed(), "/r", "n7", [], home) if word.startswith("--container-env=")]
    assert "HOME" in names.partition("=")[2].split(","), "an image's own home is another"
    assert "HOME" not in "".join(step_environment(boxed("/x.sif", "apptainer"), RUN_ID, RUN_DIR)), "it refuses that"
    assert environment(boxed(), RUN_ID, RUN_DIR)["TRITON_CACHE_DIR"] == f"/tmp/{RUN_ID}/triton"
    own = boxed(environment={"TRITON_CACHE_DIR": "/x"}, scratch="/s")
    assert environment(own, RUN_ID, RUN_DIR)["TRITON_CACHE_DIR"] == "/x"
    assert "TRITON_CACHE_DIR" not in environment(spec(), RUN_ID, RUN_DIR)


def test_what_the_run_file_names_on_disk_is_mounted(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "policy").mkdir()
    of = RunSpec.model_validate(
        {
            "name": "n",
            "backend": "slurm",
            "model": {"source": str(tmp_path / "weights")},
            "data": {"sources": [{"type": "file", "path": str(tmp_path / "data" / "*" / "part-*.jsonl")}]},
            "checkpoint": {"dir": "/shared/checkpoints"},
            "recovery": {"policy": str(tmp_path / "policy" / "mine.py")},
            "slurm": {"container": {"image": SQSH}},
        }
    )
    found = {mount.partition(":")[0] for mount in mounts(of, "/r", JOB)}
    assert found == {"/r", *(str(tmp_path / name) for name in ("weights", "data", "policy"))}, "not what is not there"
    seen = mounts(of, "/r", JOB, exists=lambda path: path == "/shared/checkpoints")
    assert seen == ["/r:/r", "/shared/checkpoints:/shared/checkpoints"]
    inner = of.model_copy(update={"checkpoint": of.checkpoint.model_copy(update={"dir": "gs://bucket/checkpoints"})})
    assert mounts(inner, "/r", JOB, exists=lambda _: False) == ["/r:/r"]
    script = RunSpec.model_validate({"name": "n", "backend": "slurm", "command": ["/home/me/code/train.py", "--x"]})
    assert mounts(script, "/r", JOB, exists=lambda _: True) == ["/r:/r", "/home/me/code:/home/me/code"]
    assert mounts(script, "/home/me", JOB, exists=lambda _: True) == ["/home/me:/home/me"], "once is enough"


# ---------------------------------------------------------------- what is refused


def told(of):
    return [(problem.key, problem.message, problem.hint) for problem in rules(of)]


@pytest.mark.parametrize(
    "image",
    ["nvcr.io#nvidia/pytorch:25.03-py3", "us-docker.pkg.dev#p/r/i:1", "me@us-docker.pkg.dev#p/r/i:1", "ubuntu",
     "nvidia/cuda:12.8", "/shared/x.sqsh", "/shared/unpacked", "docker://nvcr.io#nvidia/pytorch:1",
     "localhost:5000#x/y", "dockerd://mine:1", "ubuntu@sha256:abc"],
)  # fmt: skip
def test_images_that_enroot_takes(image):
    assert told(boxed(image)) == []


@pytest.mark.parametrize(
    ("image", "hint"),
    [
        ("us-docker.pkg.dev/p/r/i:1", "us-docker.pkg.dev#p/r/i:1"),
        ("nvcr.io/nvidia/pytorch:25.03-py3", "nvcr.io#nvidia/pytorch:25.03-py3"),
        ("docker://nvcr.io/nvidia/pytorch:1", "nvcr.io#nvidia/pytorch:1"),
        ("me@us-docker.pkg.dev/p/r/i:1", "me@us-docker.pkg.dev#p/r/i:1"),
        ("localhost:5000/x/y", "localhost:5000#x/y"),
        ("us-docker.pkg.dev/p#r/i:1", "us-docker.pkg.dev#p/r/i:1"),
        ("pytorch.sqsh", "enroot import"),
        ("./pytorch.sqsh", "enroot import"),
        ("../x", "enroot import"),
    ],
)
def test_images_that_enroot_reads_otherwise_are_refused_with_the_right_name(image, hint):
    ((key, message, said),) = told(boxed(image))
    assert key == "slurm.container.image" and hint in said and "\n" not in message
    if "#" in hint:
        assert told(boxed(said)) == [], "what is proposed is taken"


@pytest.mark.parametrize(
    ("image", "hint"),
    [
        ("nvcr.io#nvidia/pytorch:1", "docker://nvcr.io/nvidia/pytorch:1"),
        ("docker://nvcr.io#nvidia/pytorch:1", "docker://nvcr.io/nvidia/pytorch:1"),
        ("nvcr.io/nvidia/pytorch:1", "docker://nvcr.io/nvidia/pytorch:1"),
        ("pytorch.sif", ".sif file in a folder"),
        ("./pytorch", ".sif file in a folder"),
    ],
)
def test_images_that_apptainer_reads_otherwise_are_refused(image, hint):
    ((key, _, said),) = told(boxed(image, "apptainer"))
    assert key == "slurm.container.image" and hint in said
    if said.startswith("docker://"):
        assert told(boxed(said, "apptainer")) == []
    assert told(boxed("/shared/pytorch.sif", "apptainer")) == told(boxed("oras://x/y:1", "apptainer")) == []


@pytest.mark.parametrize("mount", ["/a", "/a:/b", "/a:/b:ro", "/a:/b:ro+rprivate", "tmpfs:/x", "umount:/x"])
def test_mounts_that_pyxis_takes(mount):
    assert told(boxed(mounts=[mount])) == []


@pytest.mark.parametrize(
    ("mount", "says"),
    [
        ("/a:/b,/c:/d", "comma"), ("data:/data", "source must be a whole path"), ("./data:/data", "whole path"),
        ("/a:b", "target"), ("/a:/b:ro:x", "three parts"), ("~/data:/data", "whole path"),
    ],
)  # fmt: skip
def test_mounts_that_a_runtime_would_refuse_hours_later(mount, says):
    ((key, message, hint),) = told(boxed(mounts=["/ok:/ok", mount]))
    assert key == "slurm.container.mounts.1" and says in message and "SOURCE:TARGET" in hint
    assert told(boxed("/x.sif", "apptainer", mounts=["tmpfs:/x"])), "pyxis alone knows these words"


def test_a_run_folder_that_separators_would_split_and_one_in_a_bucket():
    of = boxed()
    assert [key for key, _, _ in told(of.model_copy(update={"run_dir": "/home/a,b"}))] == ["run_dir"]
    ((key, message, _),) = told(spec().model_copy(update={"run_dir": "gs://bucket/run"}))
    assert key == "run_dir" and "all nodes share" in message


def test_the_rules_are_asked_when_a_run_file_is_read():
    text = "name: n\nbackend: slurm\ncommand: [-m, x]\nslurm:\n  container: {image: nvcr.io/nvidia/pytorch:1}\n"
    with pytest.raises(RunFileError, match=r"slurm.container.image.*\n?.*nvcr.io#nvidia/pytorch:1"):
        runfile.loads(text, environment=False)
