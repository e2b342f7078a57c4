"""The harness itself: accidents are survived, and it notices what is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.chaos.accident import Accident, check_screen
from tests.chaos.commands import Screen
from tests.chaos.comparison import Lost, differences
from tests.chaos.damage import files_of

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its commands")
def test_a_minute_of_accidents():
    paths = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--seconds", "60"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "accidents were survived" in done.stdout


def test_one_bit_is_noticed():
    whole = {"weights": torch.ones(3), "epochs": [{"loss": 0.5}], "seconds": 1.0}
    same = {"weights": torch.ones(3), "epochs": [{"loss": 0.5}], "seconds": 2.0}
    assert not list(differences(whole, same, "run"))
    same["weights"].view(torch.int32)[1] ^= 1
    same["epochs"] = [{"loss": 0.5 + 2**-53}, {"loss": 0.5}]
    assert list(differences(whole, same, "run")) == [
        "run/weights: other numbers",
        "run/epochs: 1 became 2 items",
        "run/epochs/0/loss: 0.5 became 0.5000000000000001",
    ]


def test_what_a_killed_process_had_begun_is_not_damaged(tmp_path):
    for name in ("recipe.yaml", "recipe.yaml.17.part"):
        (tmp_path / name).touch()
    assert files_of(tmp_path) == [tmp_path / "recipe.yaml"]


@pytest.mark.parametrize(
    ("screen", "lost"),
    [
        (Screen((0,), "Saved"), None),
        (Screen((2,), "Error: a sentence"), None),
        (Screen((2,), "a sentence"), "without a message"),
        (Screen((2,), "Error: " + "a sentence " * 100), "too long"),
        (Screen((0, 3), "Saved"), "status is 3"),
        (Screen((0,), "Traceback (most recent call last)"), "traceback"),
        (Screen((0,), "Traceback\nin main\nKeyboardInterrupt"), "traceback"),
        (Screen((0,), "Traceback\nin <module>\nKeyboardInterrupt"), None),
        (Screen((-9,), "the command hangs"), "hangs"),
    ],
)
def test_bad_screens_are_noticed(screen, lost):
    if lost is None:
        check_screen(screen, Accident("").codes)
    else:
        with pytest.raises(Lost, match=lost):
            check_screen(screen, Accident("").codes)
