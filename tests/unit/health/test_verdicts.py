"""What several findings amount to."""

import pytest

from muster.health.verdicts import Finding, Verdict, exit_code, worst


def finding(verdict: Verdict) -> Finding:
    return Finding(check="gpu.test", verdict=verdict, message="a test")


@pytest.mark.parametrize(
    ("verdicts", "expected", "code"),
    [
        ([], Verdict.INCOMPLETE, 1),
        ([Verdict.HEALTHY, Verdict.NOTE], Verdict.NOTE, 0),
        ([Verdict.APP, Verdict.HEALTHY], Verdict.APP, 0),
        ([Verdict.HEALTHY, Verdict.INCOMPLETE, Verdict.NOTE], Verdict.INCOMPLETE, 1),
        ([Verdict.INCOMPLETE, Verdict.RESET], Verdict.RESET, 6),
        ([Verdict.DRAIN, Verdict.REPLACE, Verdict.RESET], Verdict.REPLACE, 6),
    ],
)
def test_the_gravest_decides_and_a_missing_look_is_never_health(
    verdicts: list[Verdict], expected: Verdict, code: int
) -> None:
    findings = [finding(one) for one in verdicts]
    assert worst(findings) is expected
    assert exit_code(findings) == code
