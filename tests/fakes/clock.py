"""Time that passes only where somebody sleeps."""


class VirtualClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)

    wall_ns = monotonic_ns
