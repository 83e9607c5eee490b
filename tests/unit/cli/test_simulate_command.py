"""``muster simulate`` from the command line: table, JSON, page, and what is refused."""

import json
import re
from pathlib import Path

import pytest

from muster.app.planning.simulate import Asked, scenario_of
from muster.cli.main import run

EXAMPLE = str(Path(__file__).parents[3] / "examples" / "llama3-70b-text2sql.yaml")
QUICK = [EXAMPLE, "--hosts", "8", "--spares", "1", "--hours", "6", "--seeds", "2", "--paired", "0"]


def test_json_has_the_distribution_the_categories_and_the_sources(capsys):
    assert run(["simulate", *QUICK, "--failures-per-day", "20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seeds"] == 2 and found["identity_error"] < 1e-9
    assert sum(row["share"] for row in found["categories"].values()) == pytest.approx(1)
    assert 0.5 < found["goodput_active"]["mean"] < 1
    assert found["goodput_purchased"]["mean"] < found["goodput_active"]["mean"], "a spare is paid for"
    assert all(stage["source"] for stage in found["profile"]["stages"].values())
    assert found["scenario"]["quantum_hosts"] == 2, "dp_shard 16 on hosts of 8"


def test_the_table_names_what_was_rehearsed_and_the_best_choices(capsys):
    assert (
        run(["simulate", EXAMPLE, "--hosts", "4", "--spares", "1", "--hours", "3", "--seeds", "2", "--paired", "1"])
        == 0
    )
    out = capsys.readouterr()
    for words in ("4 hosts (32 GPUs)", "of purchased hosts", "without", "spares", "policy", "most of what is paid for"):
        assert words in out.out, words
    assert "virtual" in out.err


def test_the_page_is_the_reports(tmp_path, capsys):
    target = tmp_path / "page.html"
    assert run(["simulate", *QUICK, "--failures-per-day", "20", "--html", str(target)]) == 0
    text = target.read_text(encoding="utf-8")
    assert "rehearsal, seed" in text and "virtual hosts and clock" in text and "host-7" in text
    assert "http-equiv" in text, "the report's own page, with its content policy"
    found = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])
    assert found["study"]["seeds"] == 2 and [len(values) for values in found["spread"].values()] == [2, 2]
    assert sum(found["spread"]["active"]) / 2 == pytest.approx(found["study"]["goodput_active"]["mean"])


def test_a_trace_replaces_failures_a_day(tmp_path, capsys):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 1800}, "data": [2, 2, 2, 1, 2, 2, 2, 2]}))
    asked = [
        "simulate",
        EXAMPLE,
        "--hosts",
        "2",
        "--min-hosts",
        "2",
        "--seeds",
        "1",
        "--paired",
        "1",
        "--trace",
        str(path),
    ]
    assert run([*asked, "--usd-per-host-hour", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scenario"]["trace"] == "t" and found["scenario"]["hours"] == 4.0
    assert {row["name"] for row in found["policies"]} >= {"default", "conservative"}
    assert found["best"]["policy"] is not None
    assert found["usd"] == pytest.approx(found["purchased_host_s"] / 360)


def simulated(capsys, *asked):
    assert run(["simulate", *asked, "--seeds", "1", "--paired", "0", "--hours", "2", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["scenario"]


@pytest.mark.parametrize("overrides", [[], ["resources.usd_per_host_hour=20"], ["training.sequence_length=2048"]])
def test_step_time_and_price_are_the_plans(capsys, overrides):
    found = simulated(capsys, EXAMPLE, *overrides)
    assert run(["plan", EXAMPLE, *overrides, "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert found["step_s"] == chosen["step_s"]
    assert found["usd_per_host_hour"] == pytest.approx(chosen["usd_per_hour"] / chosen["num_nodes"])
    assert found["step_source"] == found["price_source"] == f"plan: {chosen['title']}"
    if overrides[:1] == ["resources.usd_per_host_hour=20"]:
        assert found["usd_per_host_hour"] == 20


def test_step_time_and_price_that_are_given_win_and_the_table_says_where_they_are_from(capsys):
    found = simulated(capsys, EXAMPLE, "--step-s", "3", "--usd-per-host-hour", "7")
    assert (found["step_s"], found["step_source"]) == (3, "--step-s")
    assert (found["usd_per_host_hour"], found["price_source"]) == (7, "--usd-per-host-hour")
    assert simulated(capsys, EXAMPLE, "--profile", "gpu-modelled")["step_s"] == 8.0
    assert run(["simulate", *QUICK]) == 0
    assert "a host-hour (plan: 8 x a4-highgpu-8g" in capsys.readouterr().out


def test_other_numbers_of_hosts_are_planned_with_as_many_sequences_each(capsys):
    few, many = (simulated(capsys, EXAMPLE, "--hosts", count) for count in ("2", "64"))
    assert many["step_source"].startswith("plan: 64 x a4-highgpu-8g")
    assert few["step_s"] < many["step_s"] < 1.2 * few["step_s"], "the same work a rank, and a sum over replicas"


def test_hosts_that_the_run_file_leaves_open_are_the_plans(capsys, tmp_path):
    text = Path(EXAMPLE).read_text().replace("  hosts: 2\n", "").replace("  dp_shard: 16", "  dp_shard: -1")
    (tmp_path / "run.yaml").write_text(text)
    found = simulated(capsys, str(tmp_path / "run.yaml"))
    assert found["hosts"] > 1 and found["step_source"].startswith(f"plan: {found['hosts']} x ")


def test_where_there_is_no_plan_the_step_is_the_profiles_and_that_is_said(capsys):
    found = simulated(capsys, str(Path(EXAMPLE).parent / "own-loop.yaml"))
    assert "no plan: a run with `command` cannot be planned" in found["step_source"]
    assert found["step_s"] == 0.6 and found["usd_per_host_hour"] is None


@pytest.mark.parametrize("gap", ["inf", "nan", "-300"])
def test_a_trace_of_no_real_times_is_refused(tmp_path, capsys, gap):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": float(gap)}, "data": [2, 1]}))
    assert run(["simulate", *QUICK, "--trace", str(path)]) == 2
    assert "is not a capacity trace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--detection", "psychic"], "--detection 'psychic'"),
        (["--hours", "-1"], "--hours must be from 0.01"),
        (["--failures-per-day", "-3"], "--failures-per-day must be from 0"),
        (["--profile", "nothing-such"], "no profile and no run 'nothing-such'"),
        (["--policy", "hope"], "there is no policy 'hope'"),
        (["--trace", "none.json"], "cannot read none.json"),
        (["--min-hosts", "9"], "--min-hosts 9 is more than 8"),
        (["--seeds", "0"], "--seeds 0"),
        (["--hours", "nan"], "--hours must be from 0.01"),
        (["--usd-per-host-hour", "nan"], "--usd-per-host-hour must be from 0 to 1e+06, got nan"),
        (["--usd-per-host-hour", "-3"], "--usd-per-host-hour must be from 0 to 1e+06, got -3"),
        (["--weibull-shape", "0.001"], "--weibull-shape must be from 0.1"),
        (["--step-s", "inf"], "--step-s must be from 0.001"),
        (["--repair-hours", "inf"], "--repair-hours must be from 0.001"),
        (["--spares", "100000"], "8 hosts and 100,000 spares: a rehearsal takes at most 4,096 hosts and 1,024 spares"),
        (["resources.spare_hosts=100000", "--spares", "1025"], "1,025 spares"),
        (["--hosts", "100000"], "100,000 hosts"),
        (["--correlated-hosts", "1000000000"], "--correlated-hosts must be from 1 to 4,096"),
        (["--failures-per-day", "90000", "--hours", "1000"], "are 3,750,000 faults in each rehearsal"),
        (["--seeds", "1000000"], "from 1 to 10,000"),
        (["--step-s", "0.001", "--html", "never.html"], "a page of 21,600,000 steps cannot be written"),
    ],
)
def test_wrong_input_is_said_in_words(asked, words, capsys):
    assert run(["simulate", *QUICK, *asked]) == 2
    assert words in capsys.readouterr().err


def test_hosts_of_a_group_are_counted_by_every_axis_that_shares_it(tmp_path):
    """2 stages of 8 shards with contexts of 2 are 32 ranks: 4 hosts of 8, of which each reads 2 micro-batches."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: staged\nbackend: gke\nmodel: {source: meta-llama/Llama-3.1-8B}\ndata: {sources: [{type: random}]}\n"
        "training: {steps: 100, sequence_length: 4096, global_batch_size: 64, micro_batch_size: 1, compile: false}\n"
        "parallelism: {dp_shard: 8, pp: 2, cp: 2}\nresources: {hosts: 4, ranks_per_host: 8, device: cuda}\n"
    )
    found = scenario_of(path, ["resources.machine=a3-megagpu-8g"], Asked(hosts=8, step_s=10.0))
    assert found.quantum_hosts == 4 and found.data_ranks_per_host == 2
