# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What a log may be beside its words: starts, wrappings, what a user typed, and what this plugin said, or counts."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from afd_dsv4 import doctor
from afd_dsv4.compat.stack import InstalledStack
from afd_dsv4.doctor import Given, Report, logs, machine, metrics
from afd_dsv4.doctor.defaults import graphs
from afd_dsv4.doctor.facts import Finding, Server, Severity
from afd_dsv4.doctor.lines import lines_with, starts
from afd_dsv4.doctor.machine import Machine
from afd_dsv4.doctor.options import Options
from afd_dsv4.gate import decide
from afd_dsv4.geometry import InputError, ModelGeometry, preset
from tests.doctor.cases import HERE
from tests.unit.test_gate import COLOCATED, PLAIN

INFO = "INFO 11-30 09:12:04 [x.py:1] "
STUCK = (HERE / "stuck.log").read_text(encoding="utf-8")
REFUSED = (HERE / "refused_start.log").read_text(encoding="utf-8")
STATE = (
    "Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 0 reqs, "
    "Waiting: 2 reqs, GPU KV cache usage: 0.0%, Prefix cache hit rate: 0.0%"
)


def read(*lines: str) -> logs.Log:
    return logs.parse("\n".join(lines) + "\n", "log")


def codes(findings: tuple[Finding, ...]) -> list[str]:
    return [finding.code for finding in findings]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with nothing on it, as that of whoever was sent a log."""
    nothing = Machine(InstalledStack("3.12", "x86_64", None, None, None, None, None), None, None, (), {})
    monkeypatch.setattr(machine, "survey", lambda environment: nothing)


def examine(**given: object) -> Report:
    def model(name: str) -> ModelGeometry:
        return preset(name)

    return doctor.diagnose(Given(**given), {}, model)  # type: ignore[arg-type]


# Starts


def test_the_last_start_is_judged_and_what_ended_an_earlier_one_is_a_note() -> None:
    log = read(REFUSED.rstrip("\n"), STUCK.rstrip("\n"))
    assert log.server == logs.parse(STUCK, "log").server
    assert [(one.code, one.severity) for one in log.findings] == [("earlier-start", Severity.NOTE)]
    assert log.findings[0].numbers == {"code": "cache-too-small", "times": 1, "starts": 2}
    assert "wants 34.93 GiB" in log.findings[0].title


def test_a_start_that_was_refused_after_others_is_a_problem() -> None:
    """Negative control of the test above: the order decides."""
    again = STUCK.splitlines()[0].replace("pid=311", "pid=900")
    log = read(STUCK.rstrip("\n"), again, REFUSED.rstrip("\n"))
    assert codes(log.findings) == ["cache-too-small"]
    assert log.server.engines == ()
    assert log.server.max_num_batched_tokens == 32_768


HEAD = f"(APIServer pid=1) {INFO}non-default args: {{'max_num_seqs': 7}}"
MADE = f"(EngineCore_DP0 pid=2) {INFO}Initializing a V1 LLM engine (v0.26.0) with config: model='m', x"
SEEN = f"(APIServer pid=1) {INFO}{STATE}"


@pytest.mark.parametrize(
    ("lines", "lengths"),
    [
        ([HEAD, MADE, SEEN], [3]),
        ([HEAD, MADE, MADE.replace("DP0", "DP1"), SEEN], [4]),  # the engines of one start
        ([HEAD, MADE, SEEN, HEAD, MADE], [3, 2]),  # a container, in which ids are the same
        ([SEEN, SEEN.replace("pid=1", "pid=9")], [1, 1]),
        ([MADE, SEEN, MADE, SEEN], [2, 2]),
        ([SEEN, HEAD, MADE], [1, 2]),
        ([HEAD.replace("APIServer", "A_0"), HEAD.replace("APIServer", "A_1"), SEEN], [3]),  # several, side by side
        ([HEAD, SEEN, SEEN.replace("pid=1", "pid=9"), SEEN], [2, 2]),  # the first one's last words
    ],
)
def test_a_start_begins_where_a_server_does(lines: list[str], lengths: list[int]) -> None:
    text = "\n".join(lines)
    assert [len(one) for one in starts(lines_with(("non-default", "Initializing", "Engine 000"), text))] == lengths


def test_what_is_said_before_the_options_is_of_the_start_that_follows() -> None:
    """Plugins are loaded before vLLM prints its options, by a process that has no name yet."""
    early = f"{INFO}Failed to load plugin ascend"
    assert codes(read(early, HEAD).findings) == ["plugin-not-loaded"]
    assert codes(read(early, "a line of a shell: Failed to load", HEAD).findings) == ["plugin-not-loaded"]
    assert codes(read(HEAD, SEEN, early, HEAD, SEEN).findings) == ["plugin-not-loaded"]
    assert codes(read(early, HEAD, SEEN, HEAD, SEEN).findings) == ["earlier-start"]


def test_of_the_workers_memory_the_least_counts_in_each_start_for_itself() -> None:
    memory = [f"(Worker_TP{n} pid=5) {INFO}Available KV cache memory: {gib} GiB" for n, gib in enumerate((20, 40))]
    assert read(*memory).server.kv_gib == 20
    assert read(HEAD, *memory, HEAD, memory[1]).server.kv_gib == 40


@pytest.mark.usefixtures("bare")
def test_a_prompt_is_judged_by_the_worker_with_the_least_memory(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("".join(f"{INFO}Available KV cache memory: {gib} GiB\n" for gib in ("20.00", "40.00")))
    given = Server(block_size=128, max_num_batched_tokens=65_536)
    report = examine(log=str(file), model="flash", prompt_tokens=63_778, server=given)
    assert [finding.code for finding in report.findings] == ["prompt-never-fits"]
    block = 22 * (131_072 + 16_640)
    assert report.findings[0].numbers["native"]["free_blocks"] == 20 * 2**30 // block - 1 < 11_094 < 40 * 2**30 // block


# Numbers that are said again

OVERWRITES = (
    "For deepseek_v4 model, block size should be 32, 64 or 128. Setting block size to 32 for better performance."
)
API, CORE = "APIServer pid=1", "EngineCore_DP0 pid=2"


@pytest.mark.parametrize(
    ("told", "who", "block_size"),
    [
        (128, [CORE], 128),
        (64, [CORE, CORE.replace("DP0", "DP1")], 64),
        (32, [CORE], 32),
        (128, ["DPMoEEngineCoreActor pid=2"], 128),
        (128, [""], 128),  # whoever collected the log took the names away
        (16, [API, CORE], 32),
        (None, [API, CORE], 32),  # vLLM's default is 16
        (None, [CORE], None),  # the begin of the log is lost
        (None, ["DPMoEEngineCoreActor pid=2"], None),
    ],
)
def test_a_native_engine_core_says_32_whatever_block_size_was_asked_for(
    told: int | None, who: list[str], block_size: int | None
) -> None:
    """By then the smallest block of all KV groups, 8 of 128, stands for it (vllm-project/vllm-ascend#14479)."""
    options = by(API, f"non-default args: {{'block_size': {told}}}")
    log = read(options, *(by(name, OVERWRITES) if name else INFO + OVERWRITES for name in who))
    assert log.server.block_size == block_size


@pytest.mark.usefixtures("bare")
def test_a_prompt_is_counted_in_the_blocks_that_the_server_in_a_native_log_was_told() -> None:
    assert STUCK.count(OVERWRITES) == 2
    (finding,) = [one for one in examine(log=str(HERE / "stuck.log"), prompt_tokens=63_778).findings if one.remedies]
    tokens_a_block = {"c4_mla": 4 * 128, "c128_mla": 128 * 128, "c4_state": 8, "c128_state": 32}
    groups = {group: math.ceil(63_778 / tokens) for group, tokens in tokens_a_block.items()}
    assert finding.numbers["native"]["blocks_needed"] == sum(groups.values()) + 2 * math.ceil(63_778 / 128) == 11_094
    assert finding.remedies[0] == "--max-num-batched-tokens 19,832 or less"


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("option", ["config", "server"])
def test_a_block_size_that_was_told_apart_from_the_log_is_not_contradicted_by_an_engine_core(
    option: str, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(by(CORE, OVERWRITES) + "\n")
    (tmp_path / "c.json").write_text('{"block_size": 128}')
    told = {"config": str(tmp_path / "c.json"), "server": Server(block_size=128)}[option]
    report = examine(log=str(tmp_path / "log"), **{option: told})
    assert report.server.block_size == 128
    assert "disagree" not in [finding.code for finding in report.findings]


def test_the_longest_sequence_is_the_models_and_not_that_of_its_drafts() -> None:
    model, draft = (by(API, f"Using max model len {length}") for length in (2048, 65_536))
    made = by(CORE, "Initializing a V1 LLM engine (v0.23.0) with config: model='m', max_seq_len=2048, x")
    other = draft.replace("APIServer pid=1", "ApiServer_1 pid=3")
    assert read(model, draft).server.max_model_len == 2048
    assert read(model, draft, made, other).server.max_model_len == 2048


def test_of_the_lengths_that_engines_fit_to_their_memory_the_least_counts() -> None:
    fitted = [
        by(f"EngineCore_DP{n} pid={n}", f"Auto-fit max_model_len: reduced from 65536 to {length} to fit in available")
        for n, length in enumerate((1080, 1088))
    ]
    assert read(by(API, "Using max model len 65536"), *fitted).server.max_model_len == 1080


def test_the_blocks_that_each_of_several_engines_says_are_those_of_all() -> None:
    """As vLLM 0.23.0 said it at level DEBUG of two engines with 400 blocks each."""
    said = [
        by(API, f"Engine {n:03}: vllm cache_config_info with initialization after num_gpu_blocks is: 800")
        for n in range(2)
    ]
    assert read(*said).server.num_blocks == 400
    assert read(*said, *said).server.num_blocks == 400
    assert read(said[0]).server.num_blocks == 800


def test_a_log_in_which_two_servers_speak_by_turns_is_refused() -> None:
    other = [line.replace("pid=1", "pid=9").replace("pid=2", "pid=10") for line in (HEAD, MADE, SEEN)]
    mixed = [line for pair in zip((HEAD, MADE, SEEN), other, strict=True) for line in pair]
    for by_turns in (mixed, [HEAD, MADE, *other, SEEN], [SEEN, *other, SEEN]):
        with pytest.raises(InputError, match=r"by turns, APIServer pid=\d and pid=\d; give the log of one server"):
            read(*by_turns)


def test_the_last_words_of_a_server_that_was_there_before_are_not_taken_for_turns() -> None:
    """Negative control of the test above."""
    head, made, seen = (line.replace("pid=1", "pid=9").replace("pid=2", "pid=10") for line in (HEAD, MADE, SEEN))
    assert read(HEAD, MADE, SEEN, head, SEEN, made, SEEN, seen, seen).server.engines == read(SEEN).server.engines


# Wrappings


def docker(text: str) -> str:
    return "".join(json.dumps({"log": line, "stream": "stdout"}) + "\n" for line in text.splitlines(keepends=True))


def test_the_log_of_docker_is_read_as_the_servers_own() -> None:
    assert logs.parse(docker(STUCK), "log") == logs.parse(STUCK, "log")
    assert logs.parse(docker(STUCK).replace('"log"', '"message"'), "log") == logs.parse(STUCK, "log")
    coloured = docker(STUCK.replace("INFO", "\x1b[32mINFO\x1b[0m"))
    assert logs.parse(coloured, "log") == logs.parse(STUCK, "log")


def test_a_line_that_docker_cut_is_put_together() -> None:
    told = f"{INFO}non-default args: {{'x': '{'y' * 16_384}', 'max_num_seqs': 7}}"
    parts = [told[:16_384], told[16_384:] + "\n"]
    log = logs.parse("".join(json.dumps({"log": part}) + "\n" for part in parts), "log")
    assert (log.server.max_num_seqs, log.findings) == (7, ())


@pytest.mark.parametrize(
    ("told", "lost"),
    [
        ("{'max_num_seqs': 7, 'kv': KVTransferConfig(1, a=1), 'y': f()}", "kv, y"),
        ("{'max_num_seqs': 7, 'kv': KVTransferConfig(a=PosixPath('x'))}", "kv"),
        ("{'max_num_seqs': 7, 'model': ", ""),
        ("['max_num_seqs']", ""),
        ("{'x': " + "(" * 3000, ""),
        ("{'max_num_seqs': 7, 'x': {'y': [0x" + "f" * 5000 + "]}, 'z': 1e999}", "x, z"),
    ],
    ids=range(6),
)
def test_options_that_cannot_be_read_are_not_passed_over(told: str, lost: str) -> None:
    log = read(f"{INFO}non-default args: {told}")
    assert codes(log.findings) == ["options-not-read"]
    assert log.findings[0].numbers == {"options": lost}
    assert log.server.max_num_seqs == (7 if lost else None)


def test_a_configuration_among_the_options_is_read_as_it_was_told() -> None:
    """As vLLM 0.26.0 prints `--kv-transfer-config` and `--eplb-config`."""
    told = (
        "{'max_num_seqs': 7, 'kv_transfer_config': KVTransferConfig(kv_connector='MooncakeConnectorV1', "
        "kv_buffer_size=1000000000.0, kv_rank=None, kv_connector_extra_config={'a': [1]}), "
        "'mode': <CompilationMode.NONE: 0>, 'eplb_config': EPLBConfig(window_size=1000, x=Inner(y=-1))}"
    )
    log = read(f"{INFO}non-default args: {told}")
    assert (log.findings, log.server.kv_connector) == ((), "MooncakeConnectorV1")
    assert log.options["kv_transfer_config"]["kv_connector_extra_config"] == {"a": [1]}
    assert log.options["eplb_config"] == {"window_size": 1000, "x": {"y": -1}}
    assert log.options["mode"] == "NONE"


def test_a_graph_mode_in_a_log_is_no_default() -> None:
    """Enumerations are told by their members, of numbers or pairs; anything else in such brackets is not known."""
    told = (
        "{'compilation_config': {'level': None, 'mode': <CompilationMode.VLLM_COMPILE: 3>, 'cudagraph_mode': "
        "<CUDAGraphMode.FULL_DECODE_ONLY: (2, 0)>, 'f': <function f at 0x7f00>}}"
    )
    log = read(f"{INFO}non-default args: {told}")
    found = {"level": None, "mode": "VLLM_COMPILE", "cudagraph_mode": "FULL_DECODE_ONLY", "f": None}
    assert (log.findings, log.options) == ((), {"compilation_config": found})
    assert graphs(Options(log.options)) == "FULL_DECODE_ONLY"


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("option", ["log", "metrics"])
def test_a_byte_order_mark_is_no_part_of_an_input(option: str, tmp_path: Path) -> None:
    file = tmp_path / "input"
    text = STUCK if option == "log" else (HERE / "stuck.metrics").read_text(encoding="utf-8")
    answers = []
    for encoding in ("utf-8", "utf-8-sig"):
        file.write_text(text, encoding=encoding)
        answers.append(str(examine(**{option: str(file)})))
    assert answers[0] == answers[1]
    assert "stuck" in answers[0]


@pytest.mark.usefixtures("bare")
def test_an_address_is_answered_with_the_command_that_asks_it() -> None:
    report = examine(metrics="http://h:8000/metrics?a=1&b=2")
    assert report.status == 2
    assert "say `curl -s 'http://h:8000/metrics?a=1&b=2' | afd-dsv4 doctor --metrics -`" in report.errors[0]


# What a user typed

TYPED = (
    "Failed to load plugin ascend",
    "Only one platform plugin can be activated, but got: ['a', 'b']",
    "Available KV cache memory: 3.00 GiB",
    "ValueError: No available memory for the cache blocks. Try",
    "The decoder prompt (length 9) is longer than the maximum model length of 8.",
    "afd-dsv4 0.1.0, stays off: KeyError: 'x'",
    "afd-dsv4: slot 0 is quarantined: nobody can prove that X is over",
    "non-default args: {'max_num_seqs': 7}",
    STATE,
)


@pytest.mark.parametrize("words", TYPED)
def test_words_in_a_request_are_no_message(words: str) -> None:
    asked = (
        f"(APIServer pid=3) {INFO.replace('x.py', 'request_logger.py')}Request cmpl-1 details: prompt: 'why {words}'"
    )
    log = read(asked, asked.replace("why ", ""), f"a program's own line: {words}")
    assert (log.server, log.findings, log.plugin) == (Server(), (), None)


@pytest.mark.parametrize("dress", ["{}", "(EngineCore pid=7) {}", "2026-11-30T10:00:00Z stderr F {}", "vllm-1  | {}"])
def test_what_python_prints_of_an_exception_is_read_without_a_logger(dress: str) -> None:
    raised = "RuntimeError: Only one platform plugin can be activated, but got: ['b', 'a']"
    assert codes(read(f"{INFO}x", dress.format(raised)).findings) == ["two-platform-plugins"]


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("option", ["log", "metrics"])
def test_nothing_of_an_input_moves_the_terminal_or_makes_a_line(option: str, tmp_path: Path) -> None:
    odd = "x\n\ndoctor: nothing found  \n\x1b[2J\x1b]0;owned\x07\u2028\u202e"
    file = tmp_path / "input"
    if option == "log":
        typed = odd.replace("\n", "")
        file.write_text(f"{INFO}Failed to load plugin {typed}\n{INFO}afd-dsv4 1, stays off: {typed}\n", "utf-8")
    else:
        name = odd.replace("\n", "\\n")
        file.write_text(
            f'vllm:num_requests_running{{engine="{name}",model_name="{name}"}} 0\n'
            f'vllm:num_requests_waiting{{engine="{name}"}} 1\nvllm:kv_cache_usage_perc{{engine="{name}"}} 0\n'
            f'afd_dsv4_decisions_total{{mode="{name}",verdict="refused"}} 1\n',
            "utf-8",
        )
    lines = str(examine(**{option: str(file)})).split("\n")
    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if line.startswith("doctor:")] == lines[-1:]
    assert "\\x1b[2J" in "".join(lines)


# What this plugin said

STACK = "; stack: vllm 0.26.0, vllm-ascend 0.19.1rc2.dev1304+g80d8c194f (commit 80d8c194f)"
REFUSAL = decide(COLOCATED, replace(PLAIN, lora=True, prefix_caching=True))
ON = f"afd-dsv4 0.1.0, {decide(COLOCATED, PLAIN).line()}{STACK}"
NOT_ASKED = f"afd-dsv4 0.1.0, mode 'off': off (no other mode was asked for){STACK}"
NO_USE = f"afd-dsv4 0.1.0, mode 'afd': off (of no use in the role ffn){STACK}"
REFUSES = f"afd-dsv4 0.1.0, {REFUSAL.line()}{STACK}"
FAILS = "afd-dsv4 0.1.0, stays off: KeyError: 'x'"
LOST = (
    "afd-dsv4: slot 1 is quarantined: nobody can prove that X is over. Neither it nor the pages of its requests are "
    "used again; 1 of 2 slots are left. Plan a restart of this worker"
)


def by(process: str, message: str) -> str:
    return f"({process}) {INFO}{message}"


@pytest.mark.parametrize(
    ("lines", "found", "plugin"),
    [
        ([by("A pid=1", ON)], [], True),
        ([by("A pid=1", NOT_ASKED)], [], False),
        ([by("A pid=1", REFUSES), by("B pid=2", REFUSES)], ["plugin-refused"], False),
        ([by("A pid=1", FAILS)], ["plugin-failed"], False),
        ([by("A pid=1", ON), by("W pid=3", LOST)], ["quarantined"], True),
        ([by("A pid=1", REFUSES), by("B pid=2", ON)], ["plugin-refused", "nodes-disagree"], None),
        ([by("A pid=1", ON), by("B pid=2", NOT_ASKED)], ["nodes-disagree"], None),
        ([by("A pid=1", ON), by("B pid=2", NO_USE)], [], False),  # right in that role
        ([by("A pid=1", NOT_ASKED), by("A pid=1", ON)], [], True),  # one process, one engine behind the other
        ([INFO + REFUSES, INFO + ON], ["plugin-refused", "nodes-disagree"], None),  # whose, nobody says
    ],
)
def test_what_the_plugin_said_is_found(lines: list[str], found: list[str], plugin: bool | None) -> None:
    log = read(*lines)
    assert codes(log.findings) == found
    assert all(one.severity is Severity.PROBLEM for one in log.findings)
    assert log.server.plugin is plugin


def test_a_refusal_is_quoted_counted_and_answered_with_every_reason() -> None:
    (finding,) = read(by("A pid=1", REFUSES), by("B pid=2", REFUSES)).findings
    assert finding.why == (f"The first of 2 lines: {by('A pid=1', REFUSES)[:300]} ...",)
    assert finding.remedies == REFUSAL.reasons
    assert len(finding.remedies) == 2
    one = decide(COLOCATED, replace(PLAIN, lora=True))
    (finding,) = read(by("A pid=1", f"afd-dsv4 0.1.0, {one.line()}")).findings
    assert finding.remedies == one.reasons


def test_slots_are_counted_once_each_and_what_is_left_is_said() -> None:
    again = LOST.replace("slot 1", "slot 0").replace("1 of 2", "0 of 2")
    (finding,) = read(by("W pid=3", LOST), by("W pid=3", LOST), by("W pid=3", again)).findings
    assert finding.numbers == {"slots": 2}
    assert finding.title.endswith("; 0 of 2 slots are left")


def test_a_setting_that_cannot_be_read_is_no_mistake_of_the_plugins() -> None:
    setting, mistake = (
        read(f"{INFO}afd-dsv4 0.1.0, stays off: {why}").findings[0].remedies[0]
        for why in ("mode: 'x'; choose off, afd or colocated", "KeyError: 'x'")
    )
    assert setting.startswith("correct the setting")
    assert mistake.startswith("report it")


DECIDED = 'afd_dsv4_decisions_total{{mode="colocated",verdict="{}"}} {}\n'
SLOT = 'afd_dsv4_slots{engine="0",rank="0",state="unused"} 2\n'


@pytest.mark.parametrize(
    ("text", "found", "plugin"),
    [
        (SLOT, [], True),
        (SLOT.replace(" 2", " 0"), [], None),
        (DECIDED.format("on", 2), [], True),
        (DECIDED.format("off", 1), [], False),
        (DECIDED.format("refused", 1), ["plugin-refused"], False),
        (DECIDED.format("refused", 0), [], None),
        (DECIDED.format("refused", 1) + DECIDED.format("on", 1), ["plugin-refused", "nodes-disagree"], None),
        ('afd_dsv4_quarantined_total{engine="0",rank="1"} 2\n', ["quarantined"], True),
        ('afd_dsv4_quarantined_total{engine="0",rank="1"} NaN\n', [], None),
        ('afd_dsv4_refusals_total{what="request",reason="streaming input"} 3\n', [], None),
    ],
)
def test_what_the_plugin_counts_is_found(text: str, found: list[str], plugin: bool | None) -> None:
    page = metrics.parse("vllm:x 1\n" + text, "page")
    assert codes(metrics.said(page).findings) == found
    assert metrics.server(page).plugin is plugin


def test_what_the_plugin_counts_comes_before_what_a_block_size_lets_guess() -> None:
    info = 'vllm:cache_config_info{block_size="128",model_name="deepseek-ai/DeepSeek-V4-Flash"} 1\n'
    assert metrics.server(metrics.parse(info, "page")).plugin is True
    assert metrics.server(metrics.parse(info + DECIDED.format("refused", 1), "page")).plugin is False


def test_reasons_on_a_page_are_those_of_configurations() -> None:
    refusals = 'afd_dsv4_refusals_total{{what="{}",reason="{}"}} {}\n'
    text = (
        DECIDED.format("refused", 2) + refusals.format("configuration", "LoRA", 2) + refusals.format("request", "x", 1)
    )
    said = metrics.said(metrics.parse("vllm:x 1\n" + text, "page"))
    assert said.findings[0].numbers == {"mode": "colocated", "processes": 2, "reasons": ["LoRA"]}


@pytest.mark.usefixtures("bare")
def test_the_gate_says_nothing_of_options_that_nobody_gave(tmp_path: Path) -> None:
    nothing = examine()
    assert "gate     not known: no options were given" in str(nothing)
    assert (nothing.as_dict()["gate"]["mode"], nothing.as_dict()["gate"]["active"]) == (None, None)
    (tmp_path / "c.json").write_text("{}")
    assert "mode 'off': off (no other mode was asked for)" in str(examine(config=str(tmp_path / "c.json")))


def test_whether_a_queue_of_several_engines_moves_is_not_known(bare: None, tmp_path: Path) -> None:
    line = STATE.replace("Engine 000", "{} Engines Aggregated").replace("Running: 0", "Running: 1")
    found = []
    for count in (1, 2):
        (tmp_path / "log").write_text(INFO + line.format(count) + "\n")
        found += [finding.code for finding in examine(log=str(tmp_path / "log")).findings]
    assert found == ["queue-moves", "queue-not-known"]


# Numbers that are none

WEIRD = (
    *("0", "-1", "NaN", "Inf", "-Inf", "1e308", "9" * 30, "9" * 400, "9" * 5000, "1.5", ".", "..", "1.2.3", ""),
    *("\u0663", "\u00b2", "\x00", "\u2028", "{", "}", '"', "\\", "%", "x", "0.0", "1e-300", "100000000000", "4096"),
    *("None", "True", "-0", "00", "1_000", "0x" + "f" * 5000),
)


@pytest.mark.parametrize(
    "message",
    [
        "Available KV cache memory: {} GiB",
        "Using max model len {}",
        "Chunked prefill is enabled with max_num_batched_tokens={}.",
        "{} Engines: vllm cache_config_info with initialization after num_gpu_blocks is: {}",
        STATE.replace("0.0", "{}"),
        (
            "To serve at least one request with the model's max seq len ({}), ({} GiB KV cache is needed, which is "
            "larger than the available KV cache memory ({} GiB)."
        ),
        "non-default args: {{'max_num_seqs': {}, 'block_size': {}}}",
    ],
)
@pytest.mark.parametrize("number", WEIRD, ids=range(len(WEIRD)))
def test_no_number_of_a_log_is_more_than_a_server_can_have(message: str, number: str) -> None:
    log = read(INFO + "x", INFO + message.replace("{}", number).replace("{{", "{").replace("}}", "}"))
    for value in log.server.known().values():
        assert isinstance(value, bool | str) or 0 <= value < 1e12


def mutated(text: str, chance: random.Random) -> str:
    """The text with a few lines lost, doubled, cut or out of order, or with another number in them."""
    lines = text.split("\n")
    for _ in range(chance.choice((1, 1, 2, 3, 6))):
        kind, at = chance.random(), chance.randrange(len(lines))
        numbers = list(re.finditer(r"\d+(\.\d+)?", lines[at]))
        if kind < 0.15 and len(lines) > 1:
            del lines[at]
        elif kind < 0.25:
            lines.insert(at, chance.choice(lines))
        elif kind < 0.35:
            lines[at] = lines[at][: chance.randrange(len(lines[at]) + 1)]
        elif kind < 0.9 and numbers:
            one = chance.choice(numbers)
            lines[at] = lines[at][: one.start()] + chance.choice(WEIRD) + lines[at][one.end() :]
        else:
            chance.shuffle(lines)
    return "\n".join(lines)


def inputs(seed: int, count: int) -> Iterator[dict[str, str]]:
    chance = random.Random(seed)
    kinds = {kind: [path.read_text("utf-8") for path in sorted(HERE.glob(f"*.{kind}"))] for kind in ("log", "metrics")}
    for _ in range(count):
        given = [kind for kind in kinds if chance.random() < 0.7]
        yield {kind: mutated(chance.choice(kinds[kind]), chance) for kind in given}


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("seed", range(3))
def test_no_log_and_no_page_ends_in_a_traceback(seed: int, tmp_path: Path) -> None:
    refused = 0
    for texts in inputs(seed, 60):
        names = {}
        for kind, text in texts.items():
            names[kind] = str(tmp_path / kind)
            Path(names[kind]).write_text(text, encoding="utf-8")
        prompt = None if seed else 63_778
        report = examine(**names, prompt_tokens=prompt, model="flash" if seed == 1 else None)
        refused += bool(report.errors)
        assert all(line.isprintable() for line in str(report).split("\n"))
        json.dumps(report.as_dict(), allow_nan=False)
    assert refused < 30  # most are read


def test_a_number_of_too_many_digits_is_no_number_and_no_line_is_lost_with_it() -> None:
    log = read(f"{INFO}Using max model len {'9' * 13}", f"{INFO}Using max model len 999999999999")
    assert log.server.max_model_len == 999_999_999_999
    with pytest.raises(InputError):
        logs.parse("no log at all", "log")
