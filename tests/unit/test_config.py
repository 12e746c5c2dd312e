# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Settings: strict, with a default for everything."""

import dataclasses

import pytest

from afd_dsv4.config import Mode, Settings, from_mapping
from afd_dsv4.geometry import InputError


def test_an_empty_mapping_leaves_everything_off():
    assert from_mapping({}) == Settings()
    assert Settings().mode is Mode.OFF


@pytest.mark.parametrize("mode", ["off", "afd", "colocated"])
def test_each_mode_is_read_by_its_name(mode):
    assert from_mapping({"mode": mode}).mode.value == mode


def test_an_unknown_key_is_refused_with_the_known_ones():
    with pytest.raises(InputError) as caught:
        from_mapping({"made": "afd", "slots": 3})
    assert "unknown 'made'" in str(caught.value)
    assert all(field.name in str(caught.value) for field in dataclasses.fields(Settings))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"mode": "on"}, "choose one of off, afd, colocated"),
        ({"mode": True}, "setting mode"),
        ({"mode": None}, "setting mode"),
        ({"slots": 0}, "setting slots: 0"),
        ({"slots": 2.0}, "setting slots: 2.0"),
        ({"slots": True}, "setting slots"),
        ({"drafts": -1}, "setting drafts: -1"),
        ({"fence_timeout_s": 0}, "fence_timeout_s"),
        ({"fence_timeout_s": float("inf")}, "fence_timeout_s"),
        ({"fence_timeout_s": float("nan")}, "fence_timeout_s"),
        ({"fence_timeout_s": "60"}, "fence_timeout_s"),
        ([("mode", "off")], "settings: list"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(values, says):
    with pytest.raises(InputError) as caught:
        from_mapping(values)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
