"""What is sent, byte by byte (``tests/golden/slurm/slurm_cases.py`` rewrites); and that nothing in it escapes."""

import subprocess

import pytest
from slurm_cases import HERE, RUN_DIR, RUN_ID, blueprints, scripts, spec, texts

from muster.backends.slurm.script import options, time_limit


@pytest.mark.parametrize("file", texts())
def test_as_recorded(file):
    assert texts()[file] == (HERE / file).read_text(), f"{file}: python {HERE / 'slurm_cases.py'} if meant"


def test_no_record_without_a_case():
    kinds = ("sh", "txt", "yaml")
    found = {f"{path.parent.name}/{path.name}" for kind in kinds for path in HERE.glob(f"*/*.{kind}")}
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


def test_googles_reservation_is_none_of_slurms():
    """The blueprint's run file is the one that is submitted to its cluster."""
    google = blueprints()["toolkit-a4-reservation"]
    assert google.resources.reservation == "mine"
    assert not [option for option in options(google, RUN_ID, RUN_DIR) if option.startswith("--reservation")]
    assert "--reservation=mine" in list(options(spec(reservation="mine"), RUN_ID, RUN_DIR))


def test_the_notice_comes_before_any_limit_unless_none_is_wanted():
    assert "--signal=B:USR1@180" in list(options(spec(), RUN_ID, RUN_DIR)), "the partition has a limit too"
    assert not any("--signal" in option for option in options(spec({"signal_before_timeout_s": 0}), RUN_ID, RUN_DIR))
