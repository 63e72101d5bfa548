"""What `tests.parity.flashinfer` says of three runs: a difference is never called equal."""

import pytest

from tests.parity.flashinfer import verdict


def ran(bits="a", off=0.01, repeats=True, plan="eng7", **more):
    told = {"hashes": {"out": bits}, "differences": {"out": off}, "tolerance": 0.05}
    return {**told, "repeats": repeats, "plans": [plan], **more}


@pytest.mark.parametrize(
    ("three", "expected"),
    [
        ([ran(), ran(), ran()], "equal"),
        ([ran(), ran(), ran(bits="b")], "WRONG: other bits of the same plan"),
        ([ran(), ran(), ran(bits="b", plan="eng4")], "close"),
        ([ran(repeats=False), ran(bits="b", repeats=False), ran(bits="c")], "close"),
        ([ran(), ran(), ran(off=0.06)], "WRONG: out differs by 0.06 from what torch gives"),
        ([ran(), ran(), ran(off=float("nan"))], "WRONG: out differs by nan from what torch gives"),
        ([ran(), ran(), ran(bits="b", plan="eng4", differences={})], "WRONG: no reference for ['out']"),
        ([ran(differences={}), ran(), ran(bits="b", plan="eng4")], "WRONG: no reference for ['out']"),
        ([ran(), ran(), ran(hashes={"lse": "a"})], "WRONG: other outputs"),
        ([{"refused": "E: no"}] * 3, "equal: refused"),
        ([{"refused": "E: no"}, {"refused": "E: no"}, {"refused": "F: no"}], "WRONG: E: no | E: no | F: no"),
        ([ran(), ran(), {"refused": "E: no"}], "WRONG: None | None | E: no"),
        ([ran(), ran(), None], "WRONG: missing in a run"),
    ],
)
def test_three_runs_are_judged(three, expected):
    assert verdict(three) == expected
