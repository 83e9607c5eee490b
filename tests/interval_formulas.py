"""Closed forms of the literature for the interval between saves and its goodput, as references for tests.

Symbols as in ``muster.core.intervals``: ``C`` stall per save, ``M`` mean time between interruptions, ``R`` recovery.
"""

import math


def young(*, stall_s: float, mtbf_s: float) -> float:
    """sqrt(2 C M): Young 1974, first order."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly_first_order(*, stall_s: float, mtbf_s: float) -> float:
    """sqrt(2 C M) - C: Daly's first-order form. Not positive where C >= 2 M."""
    return young(stall_s=stall_s, mtbf_s=mtbf_s) - stall_s


def daly(*, stall_s: float, mtbf_s: float) -> float:
    """Daly 2006, higher order: sqrt(2CM)[1 + sqrt(C/2M)/3 + (C/2M)/9] - C if C < 2M, else M."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return young(stall_s=stall_s, mtbf_s=mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def exact(*, stall_s: float, mtbf_s: float) -> float:
    """The optimum of ``complete_goodput``: M [1 + W0(-exp(-1 - C/M))]. Recovery time drops out."""
    return mtbf_s * (1 + _lambert_w0_near_branch(stall_s / mtbf_s))


def _lambert_w0_near_branch(ratio: float) -> float:
    """W0(-exp(-1 - ratio)) for ratio >= 0, accurate next to the branch point at -1/e.

    Near the branch w = -1 + u turns w e^w = -e^(-1-r) into u + log(1 - u) = -r, which does not cancel in the
    argument; Newton starts from the branch series u = sqrt(2r) - 2r/3 (Corless et al. 1996, eq. 4.22).
    Far from it w is about -e^(-1-r), and Newton on w e^w itself is accurate.
    """
    if ratio <= 0:
        return -1.0
    if ratio > 1:
        target = -math.exp(-1 - ratio)
        w = target
        for _ in range(8):
            w -= (w - target * math.exp(-w)) / (1 + w)
        return w
    u = min(math.sqrt(2 * ratio) * (1 - math.sqrt(2 * ratio) / 3), 0.9)
    for _ in range(60):
        # The derivative of u + log(1 - u) is -u / (1 - u).
        after = u + (_u_plus_log(u) + ratio) * (1 - u) / u
        after = min(max(after, u / 4), (1 + u) / 2)
        if abs(after - u) <= 1e-15 * u:
            return after - 1
        u = after
    return u - 1


def _u_plus_log(u: float) -> float:
    """u + log(1 - u) for u < 1, by its series -u^2/2 - u^3/3 - ... where the direct form cancels."""
    if u > 0.05:
        return u + math.log1p(-u)
    total, power = 0.0, u
    for n in range(2, 16):
        power *= u
        total -= power / n
    return total


def complete_goodput(interval_s: float, *, stall_s: float, mtbf_s: float, recovery_s: float) -> float:
    """Useful time / wall time by Daly's complete model: t / [M e^(R/M) (e^((t+C)/M) - 1)].

    Exponential failures that strike work, saves and recoveries alike.
    """
    segment = mtbf_s * math.exp(recovery_s / mtbf_s) * math.expm1((interval_s + stall_s) / mtbf_s)
    return interval_s / segment


def first_order_goodput(interval_s: float, *, stall_s: float, mtbf_s: float, recovery_s: float) -> float:
    """(1 - (R + t/2)/M) / (1 + C/t): Meta's closed form, for t and R far below M."""
    return (1 - (recovery_s + interval_s / 2) / mtbf_s) / (1 + stall_s / interval_s)
