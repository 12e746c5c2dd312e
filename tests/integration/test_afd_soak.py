# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A small seed of the soak of AFD, with every point of a forward's life; and that the soak fails where it should."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from afd_dsv4.softnpu import runtime as softnpu
from tests.afd import judge, load
from tests.afd.points import Mode, Point
from tests.afd.rank import Rank
from tests.stock_world import small_hidden_size

__all__ = ["small_hidden_size"]  # a fixture

pytestmark = pytest.mark.npu


@pytest.mark.parametrize("mode", Mode)
def test_every_point_has_its_outcome(mode: Mode) -> None:
    totals = load.soak(mode, "small", 60)
    assert judge.missed(totals, mode) == []
    assert totals.violations == []
    assert (totals.corrupt, totals.lost.total()) == (0, 0)
    assert totals.rows > 100
    assert (totals.fatal > 0) == (mode is Mode.CAM)
    assert (totals.swallowed > 0) == (mode is Mode.DBO)
    assert totals.quarantined > 0
    assert judge.failures(totals, [], (3, 3), [mode]) == []


def test_points_are_numbered_from_one_without_a_gap() -> None:
    assert [point.number for point in Point] == [*range(1, len(Point) + 1)]
    assert len({point.what for point in Point}) == len(Point)


def test_the_soak_fails_for_each_of_its_reasons() -> None:
    good = judge.Totals()
    for point in Point:
        good.hits[Mode.SYNC, point] += Mode.SYNC in point.where
    modes = [Mode.SYNC]
    assert judge.failures(good, [], (2, 2), modes) == []
    assert "blind" in judge.failures(good, ["it"], (2, 2), modes)[0]
    assert "1 of 2 planted" in judge.failures(good, [], (1, 2), modes)[0]
    assert judge.failures(good, [], (0, 0), modes)
    assert "point 1 " in judge.failures(judge.Totals(), [], (2, 2), modes)[0]
    for bad in (judge.Totals(violations=["x"]), judge.Totals(corrupt=1)):
        assert "violated" in judge.failures(good + bad, [], (2, 2), modes)[-1]
    bad = judge.Totals()
    bad.lost["slots"] = 1
    assert "violated" in judge.failures(good + bad, [], (2, 2), modes)[-1]


def test_an_outcome_that_is_not_the_expected_one_is_seen() -> None:
    totals = judge.Totals()
    totals.expect(True, "one is one")
    totals.expect_raise(ValueError, "invalid literal", lambda: int("x"), "a letter")
    assert totals.violations == []
    totals.expect(False, "one is two")
    totals.expect_raise(ValueError, "in other words", lambda: int("x"), "a letter")
    totals.expect_raise(ValueError, "invalid literal", lambda: int("1"), "a digit")
    outcome, words, silence = totals.violations
    assert "one is two" in outcome
    assert "says 'in other words', but: invalid literal" in words
    assert "a digit raises ValueError" in silence


def test_slots_that_cannot_be_leased_at_the_end_are_counted_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rank, "take_slots", lambda rank: 0)
    totals = load.soak(Mode.SYNC, "blind", 1, points=False)
    assert totals.lost["slots"] > 0
    softnpu.set_schedule(0)
