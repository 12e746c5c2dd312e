# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Settings: strict, with a default for everything, from vLLM's additional_config and from the environment."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afd_dsv4.config import Executor, Mode, Settings, from_mapping, read, switched_off
from afd_dsv4.geometry import InputError


def from_environment(environment):
    return read(None, environment)


def test_an_empty_mapping_leaves_everything_off():
    assert from_mapping({}) == Settings()
    assert Settings().mode is Mode.OFF


@pytest.mark.parametrize("mode", ["off", "afd", "colocated"])
def test_each_mode_is_read_by_its_name(mode):
    assert from_mapping({"mode": mode}).mode.value == mode


@pytest.mark.parametrize("executor", ["auto", "stock", "afd"])
def test_each_executor_is_read_by_its_name_and_written_so(executor):
    settings = from_mapping({"executor": executor, "tile_tokens": 128})
    assert (settings.executor.value, settings.tile_tokens) == (executor, 128)
    assert from_mapping(settings.as_mapping()) == settings


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
        ({"fence_timeout_s": 0}, "setting fence_timeout_s: 0; it must be a number of seconds above 0"),
        ({"fence_timeout_s": -1.5}, "setting fence_timeout_s: -1.5"),
        ({"fence_timeout_s": float("inf")}, "setting fence_timeout_s: inf"),
        ({"fence_timeout_s": float("nan")}, "setting fence_timeout_s: nan"),
        ({"fence_timeout_s": 10**400}, "setting fence_timeout_s: 1000"),
        ({"fence_timeout_s": "60"}, "setting fence_timeout_s: '60'"),
        ({"fence_timeout_s": True}, "setting fence_timeout_s: True"),
        ({"fence_timeout_s": None}, "setting fence_timeout_s: None"),
        ({"executor": "ours"}, "choose one of auto, stock, afd"),
        ({"executor": None}, "setting executor"),
        ({"tile_tokens": 127}, "setting tile_tokens: 127; it must be a whole number of at least 128"),
        ({"tile_tokens": 2048.0}, "setting tile_tokens"),
        ([("mode", "off")], "settings: list"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(values, says):
    with pytest.raises(InputError) as caught:
        from_mapping(values)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "environment", [{}, {"AFD_DSV4_CONFIG": " "}, {"AFD_DSV4_CONFIG": "{}"}, {"AFD_DSV4_MODE": ""}, {"OTHER": "{"}]
)
def test_an_environment_that_sets_nothing_leaves_everything_off(environment):
    assert from_environment(environment) == Settings()


def test_the_environment_holds_all_settings_as_one_json_object():
    text = '{"mode": "colocated", "slots": 3, "drafts": 1, "fence_timeout_s": 7.5}'
    whole = Settings(Mode.COLOCATED, slots=3, drafts=1, fence_timeout_s=7.5)
    assert from_environment({"AFD_DSV4_CONFIG": text}) == whole


@pytest.mark.parametrize("mode", ["afd", " AFD "])
def test_the_mode_may_stand_in_a_variable_of_its_own_beside_other_settings(mode):
    environment = {"AFD_DSV4_CONFIG": '{"slots": 4}', "AFD_DSV4_MODE": mode}
    assert from_environment(environment) == Settings(Mode.AFD, slots=4)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"AFD_DSV4_CONFIG": '{"mode": "afd"'}, "AFD_DSV4_CONFIG: "),
        ({"AFD_DSV4_CONFIG": "mode=afd"}, 'give one such as {"mode": "afd", "slots": 2}'),
        ({"AFD_DSV4_CONFIG": "[" * 100_000}, "is no JSON object"),
        ({"AFD_DSV4_CONFIG": '["afd"]'}, "AFD_DSV4_CONFIG: list"),
        ({"AFD_DSV4_CONFIG": '["afd"]', "AFD_DSV4_MODE": "afd"}, "AFD_DSV4_CONFIG: list"),
        ({"AFD_DSV4_CONFIG": "null"}, "AFD_DSV4_CONFIG: NoneType"),
        ({"AFD_DSV4_CONFIG": '{"mode": "off", "mode": "afd"}'}, "'mode' stands there twice"),
        ({"AFD_DSV4_CONFIG": '{"slot": 2}'}, "unknown 'slot'; known are mode, slots, drafts, fence_timeout_s"),
        ({"AFD_DSV4_CONFIG": '{"slots": NaN}'}, "setting slots: nan"),
        ({"AFD_DSV4_CONFIG": '{"mode": "off"}', "AFD_DSV4_MODE": "afd"}, "set it in one place only"),
        ({"AFD_DSV4_MODE": "turbo"}, "setting mode: 'turbo'; choose one of off, afd, colocated"),
    ],
)
def test_an_environment_that_cannot_be_read_is_refused_in_one_line(environment, says):
    with pytest.raises(InputError) as caught:
        from_environment(environment)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("additional", [None, {}, {"afd": {"role": "ffn"}}, "a hash", {"afd_dsv4": {}}])
def test_an_additional_config_without_our_settings_leaves_everything_off(additional):
    assert read(additional, {}) == Settings()


def test_settings_from_vllm_and_from_the_environment_complete_each_other():
    additional = {"afd": {"role": "attention"}, "afd_dsv4": {"slots": 3}}
    environment = {"AFD_DSV4_CONFIG": '{"drafts": 1}', "AFD_DSV4_MODE": "afd"}
    assert read(additional, environment) == Settings(Mode.AFD, slots=3, drafts=1)


@pytest.mark.parametrize(
    ("environment", "places"),
    [
        (
            {"AFD_DSV4_CONFIG": '{"mode": "afd"}'},
            ("'colocated' in additional_config['afd_dsv4']", "'afd' in AFD_DSV4_CON"),
        ),
        (
            {"AFD_DSV4_MODE": "colocated"},
            ("'colocated' in additional_config['afd_dsv4']", "'colocated' in AFD_DSV4_MODE"),
        ),
    ],
)
def test_one_setting_in_two_places_is_refused_naming_both(environment, places):
    with pytest.raises(InputError) as caught:
        read({"afd_dsv4": {"mode": "colocated"}}, environment)
    assert all(place in str(caught.value) for place in places)
    assert "setting mode" in str(caught.value)


@pytest.mark.parametrize(
    ("ours", "says"),
    [
        ({"slot": 2}, "additional_config['afd_dsv4']: unknown 'slot'; known are mode, slots, drafts, fence_timeout_s"),
        (True, "additional_config['afd_dsv4']: bool"),
        (None, "additional_config['afd_dsv4']: NoneType"),
        ("colocated", "additional_config['afd_dsv4']: str"),
        ({"mode": "on"}, "setting mode: 'on'"),
        ({"mode": "AFD"}, "setting mode: 'AFD'"),
    ],
)
def test_an_additional_config_that_cannot_be_read_is_refused_in_one_line(ours, says):
    with pytest.raises(InputError) as caught:
        read({"afd_dsv4": ours}, {})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@given(
    st.sampled_from(list(Mode)),
    st.integers(1, 9),
    st.none() | st.integers(0, 9),
    st.integers(1, 99) | st.floats(0, 1e9, exclude_min=True),
)
def test_entered_settings_are_read_again_as_they_were(mode, slots, drafts, timeout):
    settings = Settings(mode, slots, drafts, timeout)
    assert from_mapping(settings.as_mapping()) == settings
    assert read({"afd_dsv4": settings.as_mapping()}, {}) == settings


@pytest.mark.parametrize(
    ("environment", "off"),
    [
        ({}, False),
        ({"AFD_DSV4_CONFIG": "{}"}, False),
        ({"AFD_DSV4_MODE": "Off"}, True),
        ({"AFD_DSV4_CONFIG": '{"mode": "off"}'}, True),
        ({"AFD_DSV4_MODE": "afd"}, False),
    ],
)
def test_only_an_environment_that_says_off_switches_off(environment, off):
    assert switched_off(environment) is off


def test_an_environment_that_cannot_be_read_does_not_switch_off():
    with pytest.raises(InputError):
        switched_off({"AFD_DSV4_MODE": "off", "AFD_DSV4_CONFIG": "{"})


README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def documented():
    """Rows of the table in the README's configuration section: the cells of each, by key."""
    section = README.split("\n## Configuration\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {row[0].strip("`"): row[1:] for row in rows[2:]}


def test_the_readme_documents_every_setting_in_order_with_its_default():
    table = documented()
    assert list(table) == [field.name for field in dataclasses.fields(Settings)]
    defaults = {name: cells[1].strip("`") for name, cells in table.items()}
    assert defaults == {
        "mode": Settings().mode.value,
        "slots": str(Settings().slots),
        "drafts": "as many as vLLM drafts",
        "fence_timeout_s": str(Settings().fence_timeout_s),
        "audit": "where the log is at level DEBUG",
        "executor": Settings().executor.value,
        "tile_tokens": str(Settings().tile_tokens),
    }
    assert (Settings().drafts, Settings().audit) == (None, None)
    assert re.findall(r"`(\w+)`", table["mode"][0]) == [mode.value for mode in Mode]
    assert re.findall(r"`(\w+)`", table["executor"][0]) == [executor.value for executor in Executor]


def test_the_examples_of_the_readme_can_be_read():
    (given,) = re.findall(r"--additional-config '(.*)'", README)
    assert read(json.loads(given), {}).mode is Mode.COLOCATED
    (text,) = re.findall(r"JSON object such as `(.*?)`", README)
    assert from_environment({"AFD_DSV4_CONFIG": text}) == Settings(Mode.COLOCATED, slots=3)
