"""What keeps a machine's program alive: real programs, which end in one way or another."""

import signal
import sys
from types import SimpleNamespace

import pytest

from muster.backends.gce.host import HOST, SHORTEST_PAUSE_S, SUPERVISOR, Keeper


class Home:
    """The run ends once its program was started so often."""

    def __init__(self, starts, times):
        self.starts, self.times, self.shipped = starts, times, []

    def ended(self):
        return 0 if len(self.began()) >= self.times else None

    def began(self):
        return [float(line) for line in self.starts.read_text().split()] if self.starts.exists() else []

    def ship(self, writer, _timeout_s):
        self.shipped.append(writer)


def keep(tmp_path, role, *, code, times):
    """Seconds between the starts of a program that ends with ``code`` at once."""
    starts = tmp_path / "starts"
    program = f"import time; open({str(starts)!r}, 'a').write(f'{{time.time()}}\\n'); raise SystemExit({code})"
    home = Home(starts, times)
    machine = SimpleNamespace(role=role, name="host-0")
    keeper = Keeper(machine=machine, argv=[sys.executable, "-S", "-c", program], environ={}, state=home, look_s=0.2)
    assert keeper.run() == 0
    return [after - before for before, after in zip(home.began(), home.began()[1:], strict=False)], home


@pytest.fixture(autouse=True)
def _signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_an_agent_that_came_to_its_own_end_is_wanted_at_once(tmp_path):
    """It found no supervisor and had no work: however often that happens, its next start is no later."""
    apart, home = keep(tmp_path, HOST, code=0, times=4)
    assert len(apart) == 3 and max(apart) < SHORTEST_PAUSE_S, apart
    assert home.shipped == []


@pytest.mark.parametrize(("role", "code"), [(HOST, 1), (SUPERVISOR, 0)])
def test_one_that_crashes_waits_and_so_does_a_supervisor_whose_end_cannot_be_read(tmp_path, role, code):
    apart, home = keep(tmp_path, role, code=code, times=3)
    assert apart[0] >= SHORTEST_PAUSE_S - 0.1 and apart[1] >= 2 * SHORTEST_PAUSE_S - 0.1, apart
    assert home.shipped == (["host-0"] * 3 if code else [])
