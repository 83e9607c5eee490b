"""Who makes the others wait: exact in random virtual runs, whose ranks keep and send their figures as real ones."""

import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from thorough import usually

from muster.core.event_detail import Detail
from muster.core.event_details.training import RankPace, Step
from muster.health.stragglers import Cause, NotAssessed, Straggler, find_straggler, usd_per_day
from muster.train.distributed.arrivals import (
    FIELDS,
    KEPT_STEPS,
    MOST_RANKS,
    Arrivals,
    Mark,
    StepClock,
    conspicuous,
)
from muster.train.distributed.last_arrivals import FALSE_ALARM_STEPS, LastArrivals

RUNS = usually(300, nightly=1000)
STEPS = 64
#: A straggler is named so many steps after it became slow.
WITHIN = 30


@dataclass
class Times:
    """One rank's clock, moved by hand."""

    at: int = 0
    cpu: int = 0
    comm: int = 0
    data: int = 0
    stall: int = 0

    def mark(self) -> Mark:
        return Mark(self.at, self.cpu, self.comm, self.data, self.stall)

    def spend(self, part: str, ns: float) -> None:
        self.at += int(ns)
        if part != "gap":
            name = "cpu" if part == "compute" else part
            setattr(self, name, getattr(self, name) + int(ns))


@dataclass
class World:
    """Ranks in lockstep. ``rank_ms(step, rank)``: what a rank does before the sums, part -> milliseconds."""

    size: int
    rank_ms: object
    tokens: object = staticmethod(lambda step, rank: 4096)
    clocks: list = field(default_factory=list)
    named: list = field(default_factory=list)
    """(step, straggler) at each report that names one."""
    reports: int = 0

    def run(self, steps=STEPS):
        self.clocks = [Times(at=random.randrange(10**15)) for _ in range(self.size)]  # clocks of hosts differ
        ranks = [Arrivals(clock, rank=rank, world_size=self.size) for rank, clock in enumerate(self.clocks)]
        for step in range(1, steps + 1):
            late = []
            for rank, clock in enumerate(self.clocks):
                parts = self.rank_ms(step, rank)
                for part, ms in parts.items():
                    clock.spend(part, max(0.0, ms) * 1e6)
                late.append(sum(max(0.0, ms) for ms in parts.values()))
            sent = [one.arrive(self.tokens(step, rank)) for rank, one in enumerate(ranks)]
            agreed = [max(column) for column in zip(*sent, strict=True)]
            for clock, own in zip(self.clocks, late, strict=True):
                clock.spend("comm", (max(late) - own + 1.0) * 1e6)
            for one in ranks:
                one.released()
                one.learn(agreed)
            news = ranks[0].take_news()
            if news:
                self.reports += 1
                detail = Step.of(STEP | {"pace": list(news)})
                found = find_straggler(detail.pace)
                if found is not None:
                    self.named.append((step, found))
        return self


STEP = {
    "loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "step_ns": 1, "tokens": 1, "supervised_tokens": 1,
    "padding_tokens": 0,
}  # fmt: skip
PART = {Cause.LOADER: "data", Cause.SNAPSHOT: "stall", Cause.HOST: "gap", Cause.PROCESSOR: "compute"}


def healthy_ms(chance, *, size, base, noise, common):
    """Noise of each rank and of all; and in one step of five at most something takes one of them long."""
    shared: dict[int, float] = {}

    def of(step, rank):
        together = shared.setdefault(step, chance.gauss(0, common))
        own = base * (1 + together + chance.gauss(0, noise))
        spike = base * chance.uniform(0.2, 2.0) if chance.random() < min(0.02, 0.2 / size) else 0.0
        return {"data": 0.05, "compute": own * 0.97, "gap": own * 0.03 + spike, "stall": 0.2}

    return of


def virtual_run(seed):
    """What happens in it, and what was named."""
    chance = random.Random(seed)
    kind = ("healthy", "slow", "slow", "imbalance", "uneven")[seed % 5]
    size = chance.choice((2, 3, 4, 8, 16, 32))
    base = chance.uniform(50, 1000)
    noise = chance.uniform(0.0, 0.03 if kind in ("slow", "imbalance") else 0.15)
    usual = healthy_ms(chance, size=size, base=base, noise=noise, common=chance.uniform(0, 0.1))
    culprit, begin = chance.randrange(size), chance.choice((1, chance.randrange(1, STEPS - WITHIN)))
    share, cause = chance.uniform(0.1, 0.5), chance.choice(list(PART))
    tokens = dict.fromkeys(range(size), 4096)

    def slow(step, rank):
        parts = usual(step, rank)
        if rank == culprit and step >= begin:
            parts[PART[cause]] += base * share
        return parts

    def more(step, rank):
        parts = usual(step, rank)
        if rank == culprit:
            parts["compute"] *= 1 + share
        return parts

    def varied(step, rank):
        return 4096 * (1 + random.Random(f"{seed} {step} {rank}").uniform(-0.3, 0.3))

    def uneven(step, rank):
        parts = usual(step, rank)
        parts["compute"] *= varied(step, rank) / 4096
        return parts

    if kind == "imbalance":
        tokens[culprit] = int(4096 * (1 + share))
        return kind, culprit, begin, cause, World(size, more, lambda step, rank: tokens[rank]).run()
    if kind == "uneven":
        return kind, culprit, begin, cause, World(size, uneven, lambda step, rank: int(varied(step, rank))).run()
    return kind, culprit, begin, cause, World(size, slow if kind == "slow" else usual).run()


def judge(seed):
    """One word: right, or what is wrong."""
    kind, culprit, begin, cause, world = virtual_run(seed)
    named = world.named
    if kind in ("healthy", "uneven"):
        return "right" if not named else f"{kind}: somebody named"
    if any(one.rank != culprit for _, one in named):
        return f"{kind}: another named"
    if kind == "imbalance":
        return "imbalance: host blamed" if any(one.cause.blames_host for _, one in named) else "right"
    if any(step < begin for step, _ in named):
        return "slow: before it was"
    first = max(begin, 2)  # a run's first step begins at no step's sums: no rank can measure it
    in_time = [one for step, one in named if step < first + WITHIN]
    if not in_time:
        return "slow: not in time"
    return "right" if {one.cause for one in in_time} == {cause} else "slow: wrong cause"


def test_random_virtual_runs_are_judged_right():
    found = Counter({seed: judge(seed) for seed in range(RUNS)}.values())
    assert found == {"right": RUNS}


def test_imbalance_is_named_as_such():
    world = World(4, lambda step, rank: {"compute": 130.0 if rank == 2 else 100.0},
                  lambda step, rank: 5200 if rank == 2 else 4000).run()  # fmt: skip
    assert world.named
    assert {(one.rank, one.cause) for _, one in world.named} == {(2, Cause.TOKENS)}
    assert "5,200 tokens a step, the others 4,000" in world.named[0][1].evidence


def test_a_lag_that_its_tokens_do_not_explain_is_the_hosts():
    """4 % more tokens, 40 % slower."""
    world = World(4, lambda step, rank: {"compute": 100.0, "gap": 40.0 if rank == 2 else 0.0},
                  lambda step, rank: 4160 if rank == 2 else 4000).run()  # fmt: skip
    assert {(one.rank, one.cause) for _, one in world.named} == {(2, Cause.HOST)}


def test_equal_ranks_send_nothing():
    assert World(4, lambda step, rank: {"compute": 100.0 + (step + rank) % 4}).run().reports == 0


def test_the_sentence_has_values():
    world = World(2, lambda step, rank: {"data": 12.0 if rank else 0.0, "compute": 100.0}).run(40)
    step, found = world.named[0]
    assert step <= WITHIN
    assert found.evidence == (
        f"rank 1 came last in {found.steps} of {found.steps} steps, 12.0 ms after the others (11% of a step): "
        "it waits for its batch (12.0 ms more than theirs)"
    )
    assert found.steps >= 20
    assert usd_per_day(found.lag_us, found.step_us, hosts=2, usd_per_host_hour=10.0) == pytest.approx(
        12 / 113 * 480, rel=0.01
    )
    assert usd_per_day(found.lag_us, found.step_us, hosts=2, usd_per_host_hour=None) is None


def pace(rank, **more):
    usual = {
        "steps": 24, "last": 0, "ahead_us": 20_000, "ahead_spread_us": 100, "late_us": 100_000, "wait_us": 21_000,
        "data_us": 0, "stall_us": 0, "gap_us": 0, "tokens": 100,
    }  # fmt: skip
    return RankPace(rank=rank, **{**usual, **more})


SLOW = {"last": 24, "ahead_us": 0, "late_us": 120_000, "gap_us": 20_000, "wait_us": 1000}


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 19, "last": 19},
        {"last": 12},
        {"ahead_us": 17_000},  # 3 ms of 121: under 3 %
        {"late_us": 105_000},
    ],
    ids=["too few steps", "not most of them", "too little", "its own clock does not show it"],
)
def test_each_condition_is_needed(change):
    others = [pace(rank) for rank in range(1, 4)]
    assert find_straggler([pace(0, **SLOW), *others]) is not None
    assert find_straggler([pace(0, **{**SLOW, **change}), *others]) is None


def test_noise_of_the_others_is_counted():
    slow, others = pace(0, **SLOW), [pace(rank) for rank in range(1, 4)]
    assert find_straggler([slow, *(replace(one, ahead_spread_us=24_000) for one in others)]) is None
    assert find_straggler([slow, *(replace(one, ahead_us=20_000 + 9000 * one.rank) for one in others)]) is None
    assert find_straggler([slow]) is None
    assert find_straggler([]) is None


def test_where_processors_are_shared_no_verdict_is_given():
    """Of a healthy run beside 18 ready threads on two processors (2026-11-29): rank 0 was last in 20 of 20 steps."""
    seen = pace(0, steps=20, last=20, ahead_us=0, late_us=575_924, wait_us=69_376, gap_us=486_076, stall_us=9572)
    other = pace(
        1, steps=20, ahead_us=137_864, ahead_spread_us=67_629, late_us=450_000, wait_us=237_679, gap_us=374_223
    )
    found = find_straggler([seen, other])
    assert isinstance(found, NotAssessed)
    assert found.reason.startswith("stragglers not assessed: processors shared (the other ranks' threads wait 374.2 ms")
    assert isinstance(find_straggler([replace(seen, last=3), other]), type(None)), "nobody stands out"
    quiet = replace(other, gap_us=3000)
    assert isinstance(find_straggler([seen, quiet]), Straggler), "its processor alone is taken"
    beyond = replace(seen, late_us=2_000_000, gap_us=1_900_000), replace(other, ahead_us=1_500_000)
    assert isinstance(find_straggler(beyond), Straggler), "far beyond what the others wait"


def test_of_a_large_world_a_choice_is_sent():
    size = 1000
    figures = [0] * (size * len(FIELDS))
    for rank in range(size):
        slow = rank == 77
        figures[rank * len(FIELDS) : rank * len(FIELDS) + 3] = [KEPT_STEPS, KEPT_STEPS * slow, 0 if slow else 5]
    chosen, worst = conspicuous(figures)
    assert worst == 77
    assert len(chosen) <= MOST_RANKS
    assert 77 in [one["rank"] for one in chosen]
    assert chosen[-1]["rank"] > size * 0.9
    assert issubclass(Step, Detail)
    assert Step.of(STEP | {"pace": list(chosen)}).pace[0].steps == KEPT_STEPS


def test_a_rank_that_is_last_by_nothing_is_no_news():
    """One that writes the events, say: always last, by a hundredth of a step."""
    assert World(4, lambda step, rank: {"compute": 101.0 if rank == 0 else 100.0}).run().reports == 0


def test_a_slow_rank_is_told_of_ever_more_seldom():
    world = World(3, lambda step, rank: {"compute": 120.0 if rank == 1 else 100.0}).run(1500)
    steps = [step for step, _ in world.named]
    assert steps[:3] == [22, 26, 30]
    assert 8 <= len(steps) <= 12
    later = World(3, lambda step, rank: {"compute": 120.0 if rank == (1 if step < 800 else 2) else 100.0}).run(1000)
    assert any(found.rank == 2 and step < 800 + WITHIN for step, found in later.named)


@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_equal_ranks_are_seldom_accused(ranks):
    """Less than once in as many steps as it says, with any noise: only the order counts."""
    chance, steps, alarms = random.Random(ranks), 12 * FALSE_ALARM_STEPS, 0
    one = LastArrivals(ranks)
    for _ in range(steps):
        one.add(chance.randrange(ranks))
        if one.accused() is not None:
            alarms, one = alarms + 1, LastArrivals(ranks)
    assert alarms <= steps / FALSE_ALARM_STEPS


def test_one_that_is_mostly_last_is_accused_and_forgiven():
    one = LastArrivals(2)
    for step in range(20):
        assert one.accused() is None or step > 16
        one.add(0 if step == 3 else 1)
    one.add(1)
    assert one.accused() == 1
    for _ in range(2):
        one.add(0)
    assert one.accused() is None


def test_its_cost_is_under_a_five_hundredth_of_a_step():
    """Processor time of everything that a rank of eight does for it in a step, against a step of 50 ms."""
    one, steps = Arrivals(StepClock(), rank=0, world_size=8), 800
    began = time.thread_time()
    for _ in range(steps):
        begin = one.clock.mark()
        figures = one.arrive(100)
        one.released()
        one.learn(figures)
        one.take_news()
        begin.until(one.clock.mark())
    assert (time.thread_time() - began) / steps < 0.002 * 0.05


def test_what_is_no_step_is_not_counted():
    """An evaluation between two steps is no lateness, and a rank that resumes has no figure at first."""
    clock = Times()
    one = Arrivals(clock, rank=0, world_size=2)
    assert one.arrive(10) == [0]
    one.released()
    clock.spend("compute", 5_000_000)
    one.interrupt()
    one.learn([0])
    assert one.arrive(10) == [0]
    one.released()
    one.learn([0])
    clock.spend("compute", 5_000_000)
    assert one.arrive(10)[0] >> 20 == 5000
    assert Arrivals(clock, rank=0, world_size=1).arrive(10) == []
    assert Arrivals(clock, rank=0, world_size=2, enabled=False).arrive(10) == []
