"""The run file's ``slurm:`` block: unknown keys are refused, values are what sbatch takes, elsewhere it is reported."""

import pytest

from muster.config import load as runfile
from muster.core.errors import RunFileError

FILE = "name: n\nbackend: {backend}\ncommand: [x]\nresources: {{device: cpu}}\nslurm:\n  {line}\n"


def load(line, backend="slurm"):
    return runfile.loads(FILE.format(backend=backend, line=line), environment=False)


@pytest.mark.parametrize("value", ["90", "1:30:00", "2-00", "2-12:30:00", "30:00"])
def test_times_that_sbatch_takes(value):
    assert load(f'time_limit: "{value}"').spec.slurm.time_limit == value


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("time_limits: 1", "did you mean"),
        ('time_limit: "2 days"', "slurm.time_limit"),
        ("acount: lab", "did you mean"),
        ('account: "two\\nlines"', "slurm.account"),
        ("container: {image: x, runtime: docker}", "pyxis, apptainer"),
        ("options: [mail-type=END]", "slurm.options"),
        ('environment: {"BAD-NAME": "1"}', "slurm.environment"),
        ("signal_before_timeout_s: -1", "slurm.signal_before_timeout_s"),
        ("resubmit: maybe", "new_job, requeue, no"),
    ],
)
def test_mistakes_are_named(line, says):
    with pytest.raises(RunFileError) as caught:
        load(line)
    assert says in str(caught.value)


def test_the_block_has_no_effect_elsewhere_and_says_so():
    assert any(problem.key == "slurm" for problem in load("account: lab", backend="local").warnings)
    assert not load("account: lab").warnings
