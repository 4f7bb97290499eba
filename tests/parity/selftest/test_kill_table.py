"""The whole kill table, as people run it (a full proof: minutes of work), and its parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from jaxtwin.configs import BadInput
from jaxtwin.parity.selftest import kill_table, optimizer_faults
from jaxtwin.parity.selftest.faults import FAULTS


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(1200)
def test_everything_is_caught_and_nearly_everything_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jaxtwin", "faults", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    table = json.loads(done.stdout)
    faults, pairs = table["faults"], table["pairs"]
    kinds = Counter(f["name"].split("/")[0] for f in faults if "/" in f["name"])
    assert len(faults) >= 120
    assert kinds == {"optimizer": 38, "sharding": 11}
    assert [f["name"] for f in faults if not f["caught"]] == []
    # One that the catalogue does not have, on purpose, and one that is named in two of three models
    # and not proven in the third, where a gradient that nearly cancels loses six times torch's
    # digits. Nothing else may be named in their place.
    unnamed = {f["name"] for f in faults if not f["named"]}
    assert {"optimizer/nesterov"} <= unnamed <= {"optimizer/nesterov", "softmax-bfloat16"}
    causes = {run["cause"] for f in faults if not f["named"] for run in f["runs"]}
    assert causes <= {"", "softmax-bfloat16"}
    assert (table["false_alarms"], table["controls"]) == (0, 200), table["alarms"]
    assert (pairs["tried"], pairs["named"] >= 40) == (50, True), pairs["missed"]


def complete(table: dict[str, Any], names: list[str]) -> None:
    """Those faults, all caught and named; no false alarm; every pair located and named."""
    assert [f["name"] for f in table["faults"]] == sorted(names, key=KNOWN.index)
    assert [f["name"] for f in table["faults"] if not (f["caught"] and f["named"])] == []
    assert table["false_alarms"] == 0, table["alarms"]
    pairs = table["pairs"]
    assert pairs["tried"] == pairs["located"] == pairs["named"], pairs["missed"]


KNOWN = [*FAULTS, *kill_table.training()]


@pytest.mark.slow
def test_a_fault_is_caught_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kill_table, "MODELS", 1)
    names = kill_table.sample()[:1]
    complete(kill_table.run(names=names, controls=1, pairs=0, workers=1), names)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_fault_of_each_kind_is_caught_and_named() -> None:
    names = kill_table.sample()
    complete(kill_table.run(names=names, controls=10, pairs=3), names)


def test_an_unknown_fault_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(BadInput, match="no such fault: rope-bass; did you mean 'rope-base'"):
        kill_table.run(names=["rope-bass"])


def test_what_was_not_caught_is_not_passed() -> None:
    good = {"faults": [{"caught": True, "named": False}], "false_alarms": 0}
    assert kill_table.passed(good)
    assert not kill_table.passed({**good, "false_alarms": 1})
    assert not kill_table.passed({**good, "faults": [{"caught": False, "named": False}]})


@pytest.mark.slow
def test_faults_of_training_are_in_the_table() -> None:
    """Nesterov's momentum is no mistake known here: it is caught, and nothing else is named."""
    names = ["optimizer/eps", "optimizer/nesterov", "sharding/same-rows"]
    table = kill_table.run(names=names, controls=0, pairs=0, workers=1)
    assert [f["name"] for f in table["faults"]] == names
    assert [f["caught"] for f in table["faults"]] == [True] * 3
    assert [f["named"] for f in table["faults"]] == [True, False, True]
    assert [f["cause"] for f in table["faults"]] == ["eps", "", "same-rows"]
    assert (table["false_alarms"], table["alarms"]) == (0, [])


def test_a_wrong_control_of_training_is_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = optimizer_faults.Result(True, "step 1, mu of embed.weight", None)
    monkeypatch.setattr(optimizer_faults, "control", lambda: wrong)
    table = kill_table.run(names=["sharding/same-rows"], controls=0, pairs=0, workers=1)
    assert table["alarms"] == ["optimizer: step 1, mu of embed.weight"]
    assert not kill_table.passed(table)


class Deadly:
    """Kills the process that it is sent to."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (9,)


def test_a_killed_process_ends_the_run() -> None:
    """The pool of multiprocessing would wait for its result for ever."""
    work = [("pair", Deadly())] * 8
    with pytest.raises(BadInput, match=r"one of the 2 processes was killed.*--workers"):
        list(kill_table._spread(work, 2, lambda step: None))
