# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The doctor: answers that were read and kept, the figures in them the long way, and machines that are broken."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afd_dsv4.admission import SchedulerLimits, kv_plan
from afd_dsv4.compat.stack import InstalledStack, package_folder
from afd_dsv4.config import Settings
from afd_dsv4.doctor import Given, diagnose, metrics, planned, prefix, queue
from afd_dsv4.doctor.case import case_of
from afd_dsv4.doctor.facts import Engine, Finding, Server, Severity, disagreements, first_known
from afd_dsv4.doctor.machine import Machine
from afd_dsv4.doctor.options import options_of
from afd_dsv4.geometry import InputError, page_layout, preset
from tests.doctor.cases import ASCEND, CASES, HERE, OURS, ROOT, WITH_ASCEND, answer, machine, run
from tests.unit.test_stack import package

HEAVY = ("torch", "torch_npu", "vllm", "vllm_ascend", "afd_plugin", "transformers", "numpy", "griffe")


@pytest.mark.parametrize("name", CASES)
def test_the_answer_is_the_one_that_was_read(name: str, tmp_path: Path) -> None:
    """`python -m tests.doctor.cases` writes them anew; read what differs."""
    text, status, errors = answer(CASES[name], tmp_path)
    assert text == (HERE / f"{name}.txt").read_text(encoding="utf-8")
    assert status == CASES[name].status
    assert errors == ""


def snapshot(name: str) -> str:
    return (HERE / f"{name}.txt").read_text(encoding="utf-8")


def test_no_snapshot_is_of_no_case() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == set(CASES)


def test_the_published_figures_are_those_of_the_long_way() -> None:
    tokens = 63_778
    c4 = math.ceil(tokens // 4 / 128)  # 128 compressed rows of 4 tokens
    c128 = math.ceil(tokens // 128 / 128)
    swa = 2 * math.ceil(tokens / 128)  # 43 layers in two groups
    c4_state, c128_state = math.ceil(tokens / 8), math.ceil(tokens / 32)
    native = c4 + c128 + swa + c4_state + c128_state
    assert native == 11_094  # vllm-project/vllm-ascend#15204
    for name in ("published", "published_from_a_log"):
        text = snapshot(name)
        assert "it needs 11,094 KV blocks, and 6,958 are free" in text
        for group, blocks in (("c4_mla", c4), ("c128_mla", c128), ("swa", swa), ("c4_state", c4_state)):
            assert f"{group:<12}{blocks:>8,}" in text
        assert f"{'c128_state':<12}{c128_state:>8,}{100 * c128_state / native:>6.1f} %" in text
        assert f"this plugin, with the states out of the KV cache: {c4 + c128 + swa:,} of 6,350 blocks" in text
        block = 22 * (131_072 + 16_640)  # widest group: 22 layers, padded pages of both sizes
        assert f"takes {block:,} B" in text
        assert f"a KV cache of {math.ceil((native + 1) * block * 100 / 2**30) / 100:.2f} GiB" in text
        assert "vllm-project/vllm-ascend#15204" in text
    # The largest batches, with one and with two in flight: states are capped by what is in flight, plus one block each.
    for batch, in_flight in ((39_665, 1), (19_832, 2)):
        for more, fits in ((0, True), (1, False)):
            alive = in_flight * (batch + more)
            need = c4 + c128 + 2 * min(math.ceil((127 + alive) / 128) + 1, math.ceil(tokens / 128))
            need += math.ceil((7 + alive) / 8) + 1 + math.ceil((127 + alive) / 32) + 1
            assert (need <= 6_958) is fits
        assert f"--max-num-batched-tokens {batch:,} or less" in snapshot("published")


def test_the_budget_that_is_too_small_is_judged_with_vllms_own_figures_of_a_start() -> None:
    length, alive = 131_072, 2 * 32_768
    need = length // 4 // 128 + length // 128 // 128
    need += (
        2 * (math.ceil((127 + alive) / 128) + 1) + math.ceil((7 + alive) / 8) + 1 + math.ceil((127 + alive) / 32) + 1
    )
    assert need == 11_539  # run in the real start-up check
    text = " ".join(snapshot("small_budget").split())
    assert f"{need:,} blocks of 3,249,664 B, {10 * 2**30 // 3_249_664:,} there are" in text
    assert f"wants {math.ceil(need * 3_249_664 * 100 / 2**30) / 100:.2f} GiB" in text
    assert "wants 34.93 GiB of KV cache, there are 21.06" in " ".join(snapshot("refused_start").split())  # of a log


def test_with_the_plugin_on_it_is_the_windows_that_multiply() -> None:
    """The next limiter, told by the block size of the page that nothing has overwritten."""
    tokens, alive = 1_000_000, 2 * 262_144
    swa = 2 * (math.ceil((127 + alive) / 128) + 1)
    need = math.ceil(tokens // 4 / 128) + math.ceil(tokens // 128 / 128) + swa
    text = " ".join(snapshot("windows").split())
    assert f"it needs {need:,} KV blocks, and 6,350 are free" in text
    assert f"Who multiplies: the sliding windows, {swa:,} blocks" in text
    assert "c4_state" not in text
    assert "this plugin, with the states" not in text


def test_hits_come_in_the_least_common_multiple_of_all_blocks() -> None:
    assert math.lcm(4 * 32, 128 * 32, 32, 2, 8) == 4_096  # vllm-project/vllm-ascend#16270
    assert "hits come in multiples of 4,096 tokens" in " ".join(snapshot("no_hits").split())
    assert prefix.hit_multiple(page_layout("vllm-ascend-0.23.0", 128)) == math.lcm(512, 16_384, 128, 8, 32) == 16_384


@pytest.mark.parametrize("name", ["healthy", "nothing"])
def test_nothing_is_found_where_nothing_is_wrong(name: str) -> None:
    assert snapshot(name).endswith("doctor: nothing found\n")


# What is given beside the case, on the machine of no packages.
def asked(tmp_path: Path, *arguments: str, given: bytes = b"", **environment: str) -> tuple[dict[str, Any], int, str]:
    done = run(tmp_path, [*arguments, "--json"], environment, given)
    return json.loads(done.stdout), done.returncode, done.stderr.decode()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty"),
        ("<html><body>502 Bad Gateway</body></html>\n", "is no Prometheus text (line 1: '<html>"),
        ('{"status": "ok"}', "is no Prometheus text"),
        ("\x00\ufffdPNG\r\n" * 50, "is no Prometheus text"),
        ("node_load1 0.5\nnode_load5 0.4\n", "holds no metric of vLLM, but 2 others such as node_load1"),
        ("# HELP vllm:num_requests_running x\n", "is no Prometheus text"),
    ],
)
def test_a_metrics_page_that_is_none_is_refused_by_name(content: str, says: str) -> None:
    with pytest.raises(InputError) as error:
        metrics.parse(content, "page")
    assert str(error.value).startswith("metrics 'page': ")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"<html>502 Bad Gateway</html>", "is no Prometheus text"), (b"x" * (33 << 20), "give at most 33,554,432")],
)
def test_an_input_that_is_refused_costs_only_what_it_would_have_said(content: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "page"
    file.write_bytes(content)
    found, status, errors = asked(tmp_path, "--metrics", str(file), *CASES["published"].arguments)
    assert (status, found["status"]) == (2, 2)
    assert len(found["errors"]) == 1
    assert str(file) in found["errors"][0]
    assert says in found["errors"][0]
    assert errors == f"afd-dsv4: error: {found['errors'][0]}\n"
    assert found["findings"][0]["code"] == "prompt-never-fits"


@pytest.mark.parametrize(
    ("option", "name", "why"),
    [
        ("--metrics", "fifo", "is not a regular file"),
        ("--log", "missing", "No such file"),
        ("--config", ".", "is not a regular file"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(option: str, name: str, why: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    found, status, _ = asked(tmp_path, option, str(tmp_path / name))
    assert status == 2
    assert repr(str(tmp_path / name)) in found["errors"][0]
    assert why in found["errors"][0]


def test_a_page_that_was_cut_in_a_line_says_so_and_what_is_missing(tmp_path: Path) -> None:
    whole = (HERE / "stuck.metrics").read_bytes()
    cut = whole[: whole.index(b"vllm:cache_config_info{") + 40]
    found, status, _ = asked(tmp_path, "--metrics", "-", given=cut)
    assert status == 1
    codes = {finding["code"]: finding for finding in found["findings"]}
    assert codes["malformed-metrics"]["numbers"] == {"malformed": 1}
    assert codes["looks-stuck"]["numbers"]["free_blocks"] is None
    assert "--num-gpu-blocks" in codes["looks-stuck"]["remedies"][-1]


def test_lines_that_are_no_samples_are_left_out_and_counted(tmp_path: Path) -> None:
    whole = (HERE / "stuck.metrics").read_bytes() + b"vllm:num_requests_running{engine=} 5\nvllm:x 1,5\n} {\n"
    found, _, _ = asked(tmp_path, "--metrics", "-", given=whole)
    assert [f["numbers"] for f in found["findings"] if f["code"] == "malformed-metrics"] == [{"malformed": 3}]
    assert found["server"]["engines"][0]["running"] == 0


def test_a_log_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    found, status, _ = asked(tmp_path, "--log", "stuck.metrics")
    assert status == 2
    assert "log 'stuck.metrics': holds 11,981 characters and no line such as 'INFO" in found["errors"][0]


def test_of_a_huge_log_begin_and_end_are_read_and_that_is_said(tmp_path: Path) -> None:
    begin = (HERE / "stuck.log").read_bytes()
    middle = b"INFO 11-30 09:15:42 [x.py:1] (Worker) nothing of interest, but a great deal of it, again and again\n"
    file = tmp_path / "log"
    file.write_bytes(begin + middle * (40_000_000 // len(middle)) + begin.splitlines(keepends=True)[-1])
    found, status, _ = asked(tmp_path, "--log", str(file), "--prompt-tokens", "63778")
    assert status == 1
    assert [finding["code"] for finding in found["findings"]] == ["prompt-never-fits", "log-cut"]
    assert found["findings"][0]["numbers"]["native"]["blocks_needed"] == 11_094


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "holds a JSON list"),
        ('{"mode": "colocated"}', "has the plugin's own 'mode' among the options of vLLM"),
        ("[" * 100_000, "cannot be read as JSON"),
        ('{"block_size": 128, "block_size": 64}', "'block_size' stands there twice"),
        ('{"block_size": 128, "block-size": 64}', "'block_size' stands there twice, under one name or two"),
        ('{"additional_config": {"afd_dsv4": {}, "afd_dsv4": {}}}', "'afd_dsv4' stands there twice"),
        ('{"block-size": "128"}', "block_size is '128'; give a whole number of at least 1"),
        ('{"max_num_seqs": 0}', "max_num_seqs is 0; give a whole number of at least 1"),
    ],
)
def test_a_configuration_that_is_none_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(InputError) as error:
        options_of(text, "c.json")
    assert str(error.value).startswith("config 'c.json': ")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--metrics", ""], "metrics: an empty name was given"),
        (["--log", ""], "log: an empty name was given"),
        (["--config", ""], "config: an empty name was given"),
        (["--stack", "nope"], "stack: 'nope' is unknown; supported are "),
    ],
)
def test_an_input_that_is_none_is_refused_and_all_else_is_printed(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    found, status, _ = asked(machine(tmp_path, WITH_ASCEND), *arguments, "--model", "flash", "--block-size", "128")
    assert (status, found["version"]) == (2, 1)
    assert [error for error in found["errors"] if error.startswith(says)], found["errors"]


def test_a_number_that_no_server_has_is_refused_and_all_else_is_printed(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"max_num_batched_tokens": -4}))
    numbers = ["--model", "flash", "--block-size", "128", "--free-blocks", "6958", "--prompt-tokens", "100"]
    found, status, _ = asked(machine(tmp_path, WITH_ASCEND), "--config", str(tmp_path / "c.json"), *numbers)
    assert (status, found["version"]) == (2, 1)
    assert any("max_num_batched_tokens is -4; give a whole number of at least 1" in e for e in found["errors"])


def test_standard_input_is_given_to_one(tmp_path: Path) -> None:
    done = run(machine(tmp_path, WITH_ASCEND), ["--metrics", "-", "--log", "-"], {}, b"")
    assert (done.returncode, b"standard input: asked for twice" in done.stderr) == (2, True)


@pytest.mark.parametrize("key", [field.name for field in fields(Settings)] + ["fence-timeout-s", "--tile-tokens"])
def test_every_setting_of_the_plugin_is_missed_where_it_stands_among_the_options_of_vllm(key: str) -> None:
    with pytest.raises(InputError, match=f"the plugin's own '{key.lstrip('-').replace('-', '_')}'"):
        options_of(json.dumps({key: 1}), "c.json")


def test_what_the_plugin_reserves_counts_the_staging_rows_of_its_own_kernels(tmp_path: Path) -> None:
    numbers = ["--model", "flash", "--max-num-batched-tokens", "32768", "--max-num-seqs", "16", "--block-size", "128"]
    reserved = []
    for executor in ("stock", "afd"):
        options = {"additional_config": {"afd_dsv4": {"mode": "colocated", "executor": executor}}}
        (tmp_path / "c.json").write_text(json.dumps(options))
        found, _, _ = asked(machine(tmp_path / executor, WITH_ASCEND), "--config", str(tmp_path / "c.json"), *numbers)
        reserved.append(found["sizes"]["reserved_bytes"])
    # A tile of 2,048 tokens and the window before it, in each of two slots, and 8 KiB of faults an area; C128's rows
    # lie in C4's.
    assert reserved[1] - reserved[0] == 2 * ((2048 + 4) * (8192 + 2048) + 2 * 8192)


def test_the_gate_gives_every_reason_against_a_configuration_before_a_server_is_started(tmp_path: Path) -> None:
    whole = {**WITH_ASCEND, "vllm": ("0.26.0", {})}
    options = {
        "enable-lora": True,
        "pipeline_parallel_size": 2,
        "additional_config": {"afd_dsv4": {"mode": "colocated"}},
    }
    (tmp_path / "c.json").write_text(json.dumps(options))
    found, status, _ = asked(machine(tmp_path, whole), "--config", str(tmp_path / "c.json"))
    assert status == 1
    assert found["gate"]["mode"] == "colocated"
    assert found["gate"]["refused"] is True
    reasons = " ".join(found["gate"]["reasons"])
    for said in ("installed stack: vllm 0.26.0, vllm-ascend 0.23.0", "prefix caching: on", "pipeline parallelism: 2"):
        assert said in reasons
    assert "LoRA: on" in reasons
    refused = next(finding for finding in found["findings"] if finding["code"] == "gate-refuses")
    assert refused["remedies"] == found["gate"]["reasons"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pipeline_parallel_size": "2"}, "option pipeline_parallel_size: '2'; it must be a whole number"),
        ({"enable_lora": 1}, "option enable_lora: 1; it must be true or false"),
        ({"speculative_config": {"method": 3}}, "option speculative_config.method: 3; it must be a text"),
        ({"additional_config": "{"}, "option additional_config: '{'; it must be a JSON object"),
    ],
)
def test_an_option_of_another_type_is_named(options: dict[str, Any], says: str) -> None:
    here = Machine(InstalledStack("3", "x", None, None, "0.23.0", "0.23.0", None), None, None, (), {})
    asked_for = {"additional_config": {"afd_dsv4": {"mode": "colocated"}}, **options}
    limits = {"max_num_batched_tokens": 8192, "block_size": 128, "max_num_seqs": 4}
    found = planned.plan(asked_for, here, {}, preset("flash"), **limits)
    assert says in str(found.error)
    assert found.decision is None


def test_a_setting_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    found, status, _ = asked(tmp_path, AFD_DSV4_MODE="colocatd")
    assert status == 1
    assert [finding["code"] for finding in found["findings"]] == ["settings"]
    assert "colocatd" in found["findings"][0]["title"]


def test_with_an_allowlist_that_names_everybody_nothing_is_left_out(tmp_path: Path) -> None:
    """Negative control of the snapshot; and an empty list, which lets nobody in."""
    place = machine(tmp_path, {"afd-dsv4": ("0.1.0", OURS), "points": ("1", ASCEND)})
    names = "ascend,ascend_kv_connector,ascend_model,ascend_model_loader,ascend_service_profiling,afd_dsv4"
    found, status, _ = asked(place, VLLM_PLUGINS=names)
    assert (status, found["findings"]) == (0, [])
    found, status, _ = asked(place, VLLM_PLUGINS="")
    assert status == 1
    assert found["findings"][0]["numbers"]["missing"] == names.split(",")


def test_beside_ascends_platform_ours_is_no_conflict(tmp_path: Path) -> None:
    place = machine(tmp_path, {"afd-dsv4": ("0.1.0", OURS), "points": ("1", ASCEND)})
    found, status, _ = asked(place)
    assert (status, found["findings"]) == (0, [])
    assert {plugin["name"] for plugin in found["plugins"]} >= {"afd_dsv4", "ascend"}


def test_a_broken_vllm_breaks_nothing(tmp_path: Path) -> None:
    """It raises when it is imported, its metadata cannot be decoded, and its patches are no Python."""
    place = machine(tmp_path, {**WITH_ASCEND, "vllm": ("0.23.0", {})})
    package(place, "vllm")
    (package(place, "vllm_ascend") / "patch").mkdir()
    (place / "vllm_ascend" / "patch" / "p.py").write_text("def (:\n")
    (place / "vllm-0.23.0.dist-info" / "entry_points.txt").write_bytes(b"[vllm.general_plugins]\nx = \xff\xfe:y\n")
    found, status, _ = asked(place, *CASES["published"].arguments)
    assert status == 1
    codes = [finding["code"] for finding in found["findings"]]
    assert codes == ["prompt-never-fits", "drift", "unreadable"]
    assert found["drift"]["contract"] == "vllm-ascend-0.23.0"
    assert "plugins" in found["failed"]
    text = run(place, []).stdout.decode()
    assert "plugins  cannot be read: those of vllm: UnicodeDecodeError" in text
    assert "platform: afd_dsv4 (afd-dsv4 0.1.0), ascend (vllm_ascend 0.23.0)" in text


def test_every_answer_has_the_same_keys(tmp_path: Path) -> None:
    """Programs read them: a key may come, none may go while the version is 1."""
    found, _, _ = asked(tmp_path)
    assert found["version"] == 1
    keys = "version status errors findings stack adapter drift plugins patches failed gate sizes server"
    assert set(found) == set(keys.split())
    full, _, _ = asked(tmp_path, *CASES["published"].arguments)
    assert set(full) == set(found)
    assert set(full["findings"][0]) == {"code", "severity", "title", "why", "remedies", "issues", "numbers"}
    assert full["findings"][0]["numbers"]["native"]["free_blocks"] == 6_958
    assert full["sizes"]["tail_bytes_per_request"] == 13_926_400
    assert full["server"]["sources"]["num_blocks"] == "given"


@pytest.mark.skipif(package_folder("vllm_ascend") is None, reason="vllm-ascend is not installed")
def test_nothing_heavy_is_imported_where_it_is_installed(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"additional_config": {"afd_dsv4": {"mode": "colocated"}}}')
    inputs = ["--metrics", "stuck.metrics", "--log", "stuck.log", "--config", str(tmp_path / "c.json")]
    command = [sys.executable, "-X", "importtime", "-m", "afd_dsv4", "doctor", *inputs]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=HERE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 1, done.stderr[-1000:]
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "afd_dsv4" in imported  # the list is read right
    assert imported.isdisjoint(HEAVY)
    assert "known as vllm-ascend-" in done.stdout
    assert "vllm_ascend: " in done.stdout  # its patches, read as text


FLASH = preset("flash")
FLASH_128 = ("--model", "flash", "--block-size", "128")


def findings_of(**given: Any) -> list[Finding]:
    """Of a native server with DeepSeek-V4-Flash and block size 128."""
    prompt, hbm = given.pop("prompt", None), given.pop("hbm", None)
    server = Server(block_size=128, **given)
    case = case_of(server, FLASH, page_layout("vllm-ascend-0.23.0", 128), prompt=prompt, hbm=hbm)
    return list(queue.findings(case, server))


@given(
    prompt=st.integers(1, 1 << 20),
    batch=st.integers(1, 1 << 17),
    blocks=st.integers(2, 20_000),
    asynchronous=st.booleans(),
)
def test_a_remedy_helps_and_one_step_less_does_not(prompt: int, batch: int, blocks: int, asynchronous: bool) -> None:
    plan = kv_plan(FLASH, page_layout("vllm-ascend-0.23.0", 128), plugin=False)

    def need(tokens: int, in_flight: int) -> int:
        return sum(plan.whole_prompt(prompt, SchedulerLimits(tokens, 1 << 20, 16, in_flight)).values())

    found = findings_of(prompt=prompt, max_num_batched_tokens=batch, num_blocks=blocks, async_scheduling=asynchronous)
    here = 1 + asynchronous
    if prompt >= 1 << 20:
        assert [one.code for one in found] == ["prompt-longer-than-model"]
        return
    if need(batch, here) < blocks:
        assert [one.code for one in found] == ["prompt-fits"]
        assert found[0].numbers["native"]["blocks_needed"] == need(batch, here)
        return
    assert [one.code for one in found] == ["prompt-never-fits"]
    offered = [remedy for remedy in found[0].remedies if remedy.startswith("--max-num-batched-tokens")]
    fits = [tokens for tokens in (1, batch // 2, batch - 1) if tokens and need(tokens, here) < blocks]
    assert bool(offered) or not fits
    if offered:
        largest = int(offered[0].split()[1].replace(",", ""))
        assert need(largest, here) < blocks <= need(largest + 1, here)


@pytest.mark.parametrize(
    ("tokens", "codes"), [(4094, ["prompt-fits"]), (4095, ["prompt-fits"]), (4096, ["prompt-longer-than-model"])]
)
def test_a_prompt_must_leave_room_for_one_token(tokens: int, codes: list[str]) -> None:
    """`vllm/v1/engine/input_processor.py`: a prompt of the longest length is refused."""
    found = findings_of(prompt=tokens, max_num_batched_tokens=4096, max_model_len=4096, num_blocks=6959)
    assert [one.code for one in found] == codes


def test_that_the_first_chunk_fits_alone_is_said_with_what_it_costs() -> None:
    """A longer prompt than the batch: the cap of the whole is above what the first chunk takes."""
    (found,) = findings_of(
        prompt=65_536, max_num_batched_tokens=8_192, num_blocks=1_548, async_scheduling=False, max_model_len=131_072
    )
    chunk = 2048 // 128 + 1 + 2 * 8192 // 128 + 8192 // 8 + 8192 // 32  # C128's 64 rows begin a block
    # The 8th and last chunk: seven lie before it, of which the windows of the next token keep 127, 7 and 127 tokens.
    end = 65_536
    most = math.ceil(end // 4 / 128) + math.ceil(end // 128 / 128)
    most += 2 * (end // 128 - (end - 8192 - 127) // 128)
    most += end // 8 - (end - 8192 - 7) // 8 + end // 32 - (end - 8192 - 127) // 32
    flag = "--no-scheduler-reserve-full-isl"
    assert (
        f"{flag} starts it with {chunk:,} blocks for the first chunk, and on its way it takes {most:,} at most; beside "
        "others it may be preempted again and again"
    ) in found.remedies


def test_to_start_a_prompt_that_can_never_end_is_not_offered() -> None:
    """The C4 rows of all its tokens alone want more than there is, whatever its chunks want."""
    (found,) = findings_of(
        prompt=280_000, max_num_batched_tokens=1024, num_blocks=401, async_scheduling=False, max_model_len=300_000
    )
    chunk = 1024 // 4 // 128 + 1 + 2 * 1024 // 128 + 1024 // 8 + 1024 // 32
    assert math.ceil(280_000 // 4 / 128) > 400 > chunk
    assert any(
        remedy.startswith(f"not --no-scheduler-reserve-full-isl: it would start with {chunk:,} blocks")
        and "never end" in remedy
        for remedy in found.remedies
    )


def test_a_prompt_that_cannot_be_judged_is_not_passed_over() -> None:
    (found,) = findings_of(prompt=63_778)
    assert (found.code, found.severity) == ("prompt-not-judged", Severity.NOTE)
    assert found.remedies == ("give --num-gpu-blocks, --max-num-batched-tokens",)
    (found,) = findings_of(prompt=63_778, max_num_batched_tokens=65_536)
    assert "it needs 11,094 KV blocks" in found.title
    assert found.remedies == ("give --num-gpu-blocks",)
    (found,) = queue.findings(None, Server(), 63_778)
    assert found.remedies == ("give --model, --block-size, --num-gpu-blocks, --max-num-batched-tokens",)


def test_a_server_that_is_well_has_nothing_to_show_in_its_log(tmp_path: Path) -> None:
    lines = (HERE / "stuck.log").read_bytes().splitlines(keepends=True)
    found, status, _ = asked(tmp_path, "--log", "-", given=b"".join(lines[:-2]))
    assert found["server"]["engines"][0]["running"] == 2
    assert (status, found["findings"]) == (0, [])


def queued(
    running: int, waiting: int, usage: float | None, deferred: int = 0, computed: float | None = None, **said: bool
) -> tuple[Engine, ...]:
    """One engine; what it computed in the interval of a log's line, where there is one."""
    return (Engine("0", running, waiting, deferred, usage, computed, None if computed is None else 0.0, **said),)


@pytest.mark.parametrize(
    ("engines", "codes"),
    [
        (queued(0, 1, 0.0), ["looks-stuck"]),
        (queued(0, 1, 0.0, computed=0.0), ["stuck-queue"]),
        (queued(0, 2, 0.0, computed=8192.0), ["queue-moves"]),
        (queued(0, 1, 0.0, asleep=False), ["looks-stuck"]),
        (queued(0, 1, 0.0, asleep=True), ["asleep"]),
        (queued(0, 1, 0.0, computed=0.0, asleep=True), ["asleep"]),
        (queued(0, 0, 0.0), []),
        (queued(4, 0, 0.99), []),
        (queued(1, 1, 0.0), ["queue-moves"]),
        (queued(0, 1, 0.2), ["queue-moves"]),
        (queued(0, 1, 0.0, deferred=1), ["deferred"]),
        (queued(0, 1, None), []),
    ],
)
def test_only_a_queue_that_nobody_can_move_is_called_stuck(engines: tuple[Engine, ...], codes: list[str]) -> None:
    found = findings_of(engines=engines, num_blocks=6959, max_num_batched_tokens=65536)
    assert [one.code for one in found] == codes


def test_an_engine_that_sleeps_needs_somebody_only_where_requests_wait_for_it() -> None:
    for waiting, severity in ((2, Severity.PROBLEM), (0, Severity.NOTE)):
        (found,) = findings_of(engines=queued(0, waiting, 0.0, asleep=True))
        assert (found.code, found.severity, found.numbers["waiting"]) == ("asleep", severity, waiting)


def test_an_instant_between_two_steps_is_told_from_a_queue_that_is_stuck() -> None:
    """A healthy prefill server of prompts that fit: its page looks so for an instant."""
    numbers = {"num_blocks": 6959, "max_num_batched_tokens": 8192, "max_model_len": 131_072}
    (found,) = findings_of(engines=queued(0, 2, 0.0), **numbers)
    assert (found.code, found.severity) == ("looks-stuck", Severity.PROBLEM)
    assert "an instant between two steps" in found.why[0]
    assert found.remedies[0].startswith("take a second page 10 s later")
    found = findings_of(engines=queued(0, 2, 0.0), prompt=8192, **numbers)
    assert [one.code for one in found] == ["prompt-fits", "looks-stuck"]
    found = findings_of(engines=queued(0, 2, 0.0), prompt=63_778, **numbers | {"max_num_batched_tokens": 65_536})
    assert [one.code for one in found] == ["prompt-never-fits"]  # by arithmetic
    assert any(line.startswith("So it is here: engine 0: 2 requests waiting") for line in found[0].why)


@pytest.mark.parametrize(
    ("log", "code"),
    [
        (queued(0, 1, 0.0, computed=0.0), "stuck-queue"),
        ((Engine("2 Engines Aggregated", 0, 1, 0, 0.0, 0.0, 0.0),), "stuck-queue"),
        ((Engine("1", 0, 1, 0, 0.0, 0.0, 0.0),), "looks-stuck"),  # of another engine
        (queued(0, 0, 0.0, computed=0.0), "looks-stuck"),  # from before the requests came
        (queued(0, 1, 0.0, computed=5.0), "looks-stuck"),
        (queued(1, 1, 0.0, computed=0.0), "looks-stuck"),
        ((), "looks-stuck"),
    ],
)
def test_a_page_and_a_log_that_agree_prove_together(log: tuple[Engine, ...], code: str) -> None:
    both = first_known([("metrics", Server(engines=queued(0, 1, 0.0))), ("log", Server(engines=log))])
    assert [one.code for one in queue.findings(None, both)] == [code]


def test_what_start_up_wants_of_a_length_that_fills_no_block_is_not_offered_too_long(tmp_path: Path) -> None:
    """`AscendMLAAttentionSpec.max_memory_usage_bytes` counts a window that is not full; run in the real check."""
    numbers = [*FLASH_128, "--hbm-gib", "2.2", "--max-num-batched-tokens", "2048", "--max-model-len", "131072"]
    found, _, _ = asked(tmp_path, *numbers)

    def wanted(length: int) -> int:
        swa, c4, c128 = (min(window - 1 + 2 * 2048, length) for window in (128, 8, 128))
        windows = 2 * (math.ceil(swa / 128) + 1) + math.ceil(c4 / 8) + 1 + math.ceil(c128 / 32) + 1
        return math.ceil(length / (4 * 128)) + math.ceil(length / (128 * 128)) + windows

    there = int(2.2 * 2**30) // 3_249_664
    assert (there, wanted(5_120), wanted(5_121), wanted(5_123)) == (726, 726, 727, 727)

    # Nor is a length that starts, and whose longest prompt never does: the scheduler has a block less to hand out.
    def of_a_prompt(tokens: int) -> int:
        swa, c4, c128 = (min(window - 1 + 2 * 2048, tokens) for window in (128, 8, 128))
        windows = 2 * (math.ceil(swa / 128) + 1) + math.ceil(c4 / 8) + 1 + math.ceil(c128 / 32) + 1
        return math.ceil(tokens // 4 / 128) + math.ceil(tokens // 128 / 128) + windows

    assert (there - 1, of_a_prompt(4_611), of_a_prompt(4_612)) == (725, 725, 726)
    assert "--max-model-len 4,612 or less" in found["findings"][0]["remedies"]


def test_a_longest_sequence_beyond_the_model_is_refused_and_the_models_own_is_taken(tmp_path: Path) -> None:
    numbers = [*FLASH_128, "--free-blocks", "6958", "--max-num-batched-tokens", "2048"]
    asked_for = [*numbers, "--max-model-len", "9999999", "--prompt-tokens", "2000000"]
    found, status, _ = asked(tmp_path, *asked_for)
    assert (status, found["errors"]) == (2, ["max-model-len: 9999999, flash ends at 1048576; lower it"])
    assert [one["code"] for one in found["findings"]] == ["prompt-longer-than-model"]
    assert "max_model_len" not in {**found["server"], **found["server"]["sources"]}
    # A server that runs beyond it was told to.
    line = b"INFO 11-30 09:12:04 [x.py:1] Using max model len 9999999\n"
    found, status, _ = asked(tmp_path, *numbers, "--log", "-", "--prompt-tokens", "2000000", given=line)
    assert (status, found["errors"]) == (0, [])
    assert "longest sequence 9,999,999, although the model ends at 1,048,576" in found["server"]["taken"]


def test_a_number_that_no_scheduler_has_costs_only_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever read it: what the queue shows, and what is installed, is said all the same."""
    monkeypatch.setattr("afd_dsv4.doctor.machine.survey", lambda _: Machine(None, None, None, (), {}))
    server = Server(block_size=128, max_num_batched_tokens=0, num_blocks=6959, engines=queued(0, 1, 0.0))
    report = diagnose(Given(model="flash", server=server, prompt_tokens=100), {}, preset)
    assert report.errors == ("max_num_batched_tokens: 0; it must be at least 1",)
    assert [one.code for one in report.findings] == ["looks-stuck"]


def test_a_stuck_queue_of_a_prompt_that_fits_is_not_explained_with_that_prompt() -> None:
    found = findings_of(
        engines=queued(0, 1, 0.0, computed=0.0), num_blocks=6959, max_num_batched_tokens=4096, prompt=4096
    )
    assert [one.code for one in found] == ["stuck-although-it-fits"]
    need = 1024 // 128 + 1 + 2 * 4096 // 128 + 4096 // 8 + 4096 // 32  # C128's 32 rows begin a block
    assert found[0].numbers["native"]["blocks_needed"] == need


def test_where_every_prompt_would_start_the_numbers_are_doubted() -> None:
    found = findings_of(engines=queued(0, 1, 0.0), num_blocks=6959, max_num_batched_tokens=4096)
    assert "By these numbers every prompt starts" in " ".join(found[0].why)


def test_prompts_that_are_long_enough_to_hit_are_not_blamed_on_the_multiple() -> None:
    short, long = ({"queries": 9, "hits": 0, "mean_prompt": mean} for mean in (16_384.0, 16_385.0))
    assert [one.code for one in findings_of(**short)] == ["prefix-hits-zero"]
    assert [(one.code, one.severity) for one in findings_of(**long)] == [("no-prefix-hits", Severity.NOTE)]
    assert findings_of(queries=9, hits=1, mean_prompt=100.0) == []
    assert findings_of(queries=0, hits=0) == []
    assert findings_of(queries=9, hits=0, prefix_caching=False) == []


def test_of_several_sources_the_first_that_knows_a_number_is_believed_and_named() -> None:
    one, two = Server(num_blocks=5), Server(num_blocks=6, block_size=128, prefix_caching=False)
    both = first_known([("given", one), ("log", two)])
    assert (both.num_blocks, both.block_size, both.prefix_caching) == (5, 128, False)
    assert both.sources == {"num_blocks": "given", "block_size": "log", "prefix_caching": "log"}


def test_inputs_that_disagree_are_named_with_both_values_and_the_one_that_was_taken(tmp_path: Path) -> None:
    page = (HERE / "stuck.metrics").read_text(encoding="utf-8").replace('num_gpu_blocks="6959"', 'num_gpu_blocks="100"')
    (tmp_path / "page").write_text(page, encoding="utf-8")
    found, _, _ = asked(tmp_path / "none", "--metrics", str(tmp_path / "page"), "--log", "stuck.log")
    (differ,) = [one for one in found["findings"] if one["code"] == "disagree"]
    assert differ["severity"] == "note"
    assert differ["title"] == "the inputs disagree about num_blocks"
    assert differ["why"] == ["num_blocks: 100 (metrics), 6,959 (log); 100 was taken."]
    assert differ["numbers"] == {"num_blocks": {"metrics": 100, "log": 6959, "taken": "metrics"}}
    assert found["server"]["num_blocks"] == 100


def test_inputs_that_may_differ_or_say_the_same_do_not_disagree() -> None:
    page = Server(model="deepseek-ai/DeepSeek-V4-Flash", num_blocks=5, plugin=True, hits=1)
    log = Server(model="/models/DeepSeek-V4-Flash", num_blocks=5, hits=2, kv_gib=1.5)
    assert disagreements([("metrics", page), ("log", log), ("config", Server(model="dsv4"))]) is None
    differ = disagreements([("metrics", page), ("log", Server(model="DeepSeek-V4-Pro", plugin=False))])
    assert differ
    assert differ.why == (
        "model: flash (metrics), pro (log); flash was taken.",
        "plugin: on (metrics), off (log); on was taken.",
    )


def test_a_log_of_a_busy_server_and_a_page_of_one_that_sleeps_are_not_called_stuck(tmp_path: Path) -> None:
    """Whole: what is read decides what is concluded."""
    line = (
        "INFO 11-30 09:15:02 [loggers.py:271] Engine 000: Avg prompt throughput: {0} tokens/s, Avg generation "
        "throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 2 reqs, GPU KV cache usage: 0.0%, Prefix cache hit rate: "
        "0.0%\n"
    )
    for throughput, code in (("8192.0", "queue-moves"), ("0.0", "stuck-queue")):
        found, _, _ = asked(tmp_path, "--log", "-", given=line.format(throughput).encode())
        assert [one["code"] for one in found["findings"]] == [code]
    page = (HERE / "stuck.metrics").read_text(encoding="utf-8")
    for awake, code in ((0, "asleep"), (1, "looks-stuck")):
        state = f'vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {awake}.0\n'
        lines = [text for text in page.splitlines(keepends=True) if not text.startswith("vllm:engine_sleep_state")]
        found, _, _ = asked(tmp_path, "--metrics", "-", given="".join([*lines, state]).encode())
        assert [one["code"] for one in found["findings"]] == [code]
