"""Every reader on broken, foreign and malicious files for half a minute; see tests/fuzz."""

import sys

import pytest
from hypothesis import strategies as st

from fuzz.judge import TRACE, Target, judge, run_rounds
from fuzz.targets import TARGETS

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="measures memory as Linux does"),
    pytest.mark.filterwarnings("ignore"),  # of Pillow, on broken files
]


@pytest.mark.slow
def test_readers():
    tried, failed = run_rounds(TARGETS, seconds=30)
    assert not failed, "\n".join(failed)
    assert tried.keys() == TARGETS.keys()


def grow(_):
    return bytearray(80 * 2**20)


def leave_a_trace(_):
    open(TRACE, "w").close()


def forget_the_name(_):
    raise ValueError("a file is broken")


def talk(path):
    raise ValueError(str(path) * 1000)


def crash(path):
    raise KeyError(str(path))


def wait(_):
    while True:
        pass


@pytest.mark.parametrize("read", [grow, leave_a_trace, forget_the_name, talk, crash, wait])
def test_a_reader_that_misbehaves_is_found(tmp_path, monkeypatch, read):
    monkeypatch.setattr("fuzz.judge.LONGEST", 1)
    with pytest.raises(BaseException, match=r"took|ran what|without|message of|toy"):
        judge(Target(st.nothing(), read), {"toy": b""}, tmp_path)


def test_a_failure_comes_with_its_seed():
    said = []
    target = Target(st.just({"toy": b""}), crash)
    _, failed = run_rounds({"npz": target}, seconds=0.01, first=7, say=said.append)
    assert failed == said
    assert "python -m tests.fuzz --only npz --seed 7" in said[0]
