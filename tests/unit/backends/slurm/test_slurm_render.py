"""What is sent, byte by byte (``tests/golden/slurm/slurm_cases.py`` rewrites); and that nothing in it escapes."""

import re
import subprocess

import pytest
from ruamel.yaml import YAML
from slurm_cases import HERE, RUN_DIR, RUN_ID, blueprints, scripts, spec, texts

from muster.backends.slurm.script import options, time_limit
from muster.backends.slurm.toolkit import blueprint
from muster.core.errors import RunFileError


@pytest.mark.parametrize("file", texts())
def test_as_recorded(file):
    assert texts()[file] == (HERE / file).read_text(), f"{file}: python {HERE / 'slurm_cases.py'} if meant"


def test_no_record_without_a_case():
    found = {f"{path.parent.name}/{path.name}" for path in [*HERE.glob("*/*.sh"), *HERE.glob("*/*.yaml")]}
    assert found == set(texts())


@pytest.mark.parametrize("name", scripts())
def test_bash_takes_every_value_as_a_whole_word(name, tmp_path):
    """Run with everything replaced by printing: what arrives is what the run file says."""
    of = scripts()[name]
    text = texts()[f"{name}/job.sh"]
    body = text.replace("exec ", "exec printf '%s\\n' ").replace("module load", "printf '%s\\n'")
    path = tmp_path / "job.sh"
    path.write_text(body)
    done = subprocess.run(["bash", str(path)], capture_output=True, text=True, check=True, env={})
    lines = done.stdout.splitlines()
    modules = of.slurm.modules
    assert lines[: len(modules)] == list(modules)
    assert lines[len(modules) :][1:4] == ["-P", "-m", "muster.backends.slurm.batch"]
    assert lines[-4:] == ["--run-dir", RUN_DIR, "--run-id", RUN_ID]


@pytest.mark.parametrize("name", scripts())
def test_each_sbatch_line_holds_one_option(name):
    of = scripts()[name]
    lines = [line.removeprefix("#SBATCH ") for line in texts()[f"{name}/job.sh"].splitlines() if "#SBATCH" in line]
    assert [as_sbatch_reads(line) for line in lines] == list(options(of, RUN_ID, RUN_DIR))


def as_sbatch_reads(line):
    """One #SBATCH argument as sbatch reads it (tried with 22.05): backslash escapes inside quotes too."""
    found, quote, place = "", "", 0
    while place < len(line):
        sign = line[place]
        if sign == "\\":
            place += 1
            found += line[place]
        elif sign == quote:
            quote = ""
        elif not quote and sign in "\"'":
            quote = sign
        else:
            assert quote or not (sign.isspace() or sign == "#"), f"a second argument, or a comment: {line}"
            found += sign
        place += 1
    assert not quote, line
    return found


def test_the_time_limit_in_slurms_words():
    assert time_limit(spec(limits={"max_hours": 36.5})) == "1-12:30:00"
    assert time_limit(spec(limits={"max_hours": 0.01})) == "0-00:01:00"
    assert time_limit(spec({"time_limit": "90"}, {"max_hours": 1})) == "90"
    assert time_limit(spec()) is None


def test_a_default_time_limit_is_for_runs_that_name_none():
    assert time_limit(spec({"default_time_limit": "12:00:00"})) == "12:00:00"
    assert "--time=12:00:00" in list(options(spec({"default_time_limit": "12:00:00"}), RUN_ID, RUN_DIR))
    assert time_limit(spec({"default_time_limit": "12:00:00", "time_limit": "90"})) == "90"
    assert time_limit(spec({"default_time_limit": "12:00:00"}, {"max_hours": 1})) == "0-01:00:00"


def test_the_notice_comes_before_any_limit_unless_none_is_wanted():
    assert "--signal=B:USR1@180" in list(options(spec(), RUN_ID, RUN_DIR)), "the partition has a limit too"
    assert not any("--signal" in option for option in options(spec({"signal_before_timeout_s": 0}), RUN_ID, RUN_DIR))


# ---------------------------------------------------------------- blueprints


@pytest.mark.parametrize("name", blueprints())
def test_a_blueprint_refers_to_what_it_defines(name):
    files = blueprint(blueprints()[name])
    yaml = YAML(typ="safe", pure=True)
    built, deployment = yaml.load(files["blueprint.yaml"]), yaml.load(files["deployment.yaml"])
    modules = [module for group in built["deployment_groups"] for module in group["modules"]]
    names = [module["id"] for module in modules]
    assert len(names) == len(set(names))
    known = set(built["vars"]) | set(deployment["vars"])
    assert set(re.findall(r"(?<![a-z_])vars\.([a-z_0-9]+)", files["blueprint.yaml"])) <= known
    for place, module in enumerate(modules):
        assert set(module.get("use", ())) <= set(names[:place]), f"{module['id']} uses what comes later"
        for reference in re.findall(r"\$\(([a-z-]+)\.", str(module["settings"])):
            assert reference == "vars" or reference in names[:place]
    sizes = [module["settings"]["disk_size_gb"] for module in modules if "instance_image" in module["settings"]]
    image = next(module for module in modules if module.get("kind") == "packer")
    assert len(sizes) == 3 and min(sizes) >= image["settings"]["disk_size"], "a disk holds its image"
    controller = modules[-1]
    assert {"homefs", "partition", "login"} <= set(controller["use"])
    assert deployment["vars"]["cluster_size"] == 3, "spares are nodes too"
    assert "gcluster destroy llama" in files["blueprint.yaml"]


def test_what_is_not_sold_or_not_said_is_refused():
    with pytest.raises(RunFileError) as caught:
        blueprint(spec(machine="a4-highgpu-8g", provisioning_model="on_demand"))
    text = str(caught.value)
    assert "resources.provisioning_model" in text and "resources.project" in text and "resources.locations" in text
    with pytest.raises(RunFileError, match="has no Cluster Toolkit blueprint"):
        blueprint(spec(machine="n2-standard-8", project="p", locations=["us-central1-b"]))
