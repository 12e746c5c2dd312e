# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What the doctor reads: pages against prometheus_client's own reader, and logs in the words of the sources."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afd_dsv4.compat.stack import package_folder
from afd_dsv4.doctor import logs, metrics
from afd_dsv4.doctor.facts import Engine
from afd_dsv4.doctor.options import options_of
from afd_dsv4.gate import decide
from afd_dsv4.geometry import InputError
from tests.doctor.cases import HERE
from tests.unit.test_gate import COLOCATED, PLAIN

PAGES = sorted(path.name for path in HERE.glob("*.metrics"))
INFO = "INFO 11-30 09:12:04 [x.py:1] "


def page(text: str) -> metrics.Page:
    return metrics.parse(text, "page")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_read_as_prometheus_client_reads_it(name: str) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    text = (HERE / name).read_text(encoding="utf-8")
    theirs = [
        (sample.name, dict(sample.labels), sample.value)
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    ]
    ours = [(sample.name, sample.labels, sample.value) for sample in page(text).samples]
    assert len(ours) > 50
    assert sorted(ours, key=str) == sorted(theirs, key=str)
    assert page(text).malformed == ()


LABELS = st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True), st.text(max_size=12), max_size=4)


@given(labels=LABELS, value=st.floats(), stamp=st.none() | st.integers(0, 1 << 40))
def test_any_label_and_any_number_come_back(labels: dict[str, str], value: float, stamp: int | None) -> None:
    labels = {key: "".join(c for c in text if c.isprintable() or c == "\n") for key, text in labels.items()}

    def escaped(text: str) -> str:
        return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    shown = ",".join(f'{key}="{escaped(text)}"' for key, text in labels.items())
    number = {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN" if math.isnan(value) else repr(value))
    (sample,) = page(f"vllm:x{{{shown}}} {number}{'' if stamp is None else f' {stamp}'}\n").samples
    assert sample.labels == labels
    assert sample.value == value or (math.isnan(value) and math.isnan(sample.value))


@pytest.mark.parametrize(
    "line",
    [
        "vllm:x",
        "vllm:x 1,5",
        "vllm:x 1_000",
        "vllm:x 0x10",
        "vllm:x{a=b} 1",
        'vllm:x{a="b} 1',
        'vllm:x{a="b"c="d"} 1',
        'vllm:x{a="b"} 1 now',
        "2vllm:x 1",
        "vllm:x infinity",
        "vllm:x " + "1" * 70_000,
    ],
)
def test_a_line_that_is_no_sample_is_left_out(line: str) -> None:
    found = page(f"vllm:y 1\nvllm:z 2\n{line}\n")
    assert [sample.name for sample in found.samples] == ["vllm:y", "vllm:z"]
    assert [number for number, _ in found.malformed] == [3]


@pytest.mark.parametrize("line", ['vllm:x 1 # {trace_id="1"} 1', 'vllm:x{ a="b" , } +1e3', "vllm:x\t.5", "vllm:x{} 1."])
def test_a_line_that_is_one_in_another_dress_is_read(line: str) -> None:
    assert page(line).malformed == ()


@given(st.text())
def test_no_text_breaks_a_reader(text: str) -> None:
    for read in (metrics.parse, logs.parse, options_of):
        with contextlib.suppress(InputError):
            read(text, "name")


@given(st.lists(st.sampled_from([*'{}"\\=,:# \n', "vllm:num_requests_running", "engine", "1", "NaN", "-5", "1e300"])))
def test_no_page_breaks_what_is_made_of_it(parts: list[str]) -> None:
    with contextlib.suppress(InputError):
        metrics.server(page("".join(parts)))


def test_numbers_that_cannot_be_are_not_known() -> None:
    found = metrics.server(
        page(
            'vllm:num_requests_running{engine="0"} NaN\nvllm:num_requests_running{engine="1"} 1\n'
            'vllm:num_requests_waiting{engine="1"} 2\nvllm:kv_cache_usage_perc{engine="1"} 41\n'
            'vllm:cache_config_info{num_gpu_blocks="None",block_size="-8"} 1\nvllm:prefix_cache_hits_total -1\n'
        )
    )
    assert found.engines == (Engine("1", 1, 2, None, None),)
    assert (found.num_blocks, found.block_size, found.plugin, found.hits) == (None, None, None, None)


def test_blocks_of_several_engines_are_told_together_and_taken_apart() -> None:
    found = metrics.server(page((HERE / "two_engines.metrics").read_text()))
    assert [engine.name for engine in found.engines] == ["0", "1"]
    assert found.num_blocks == 13_918 // 2


@pytest.mark.parametrize(
    ("overwritten", "asked", "plugin"),
    [(8, 128, False), (4, 64, False), (2, 32, False), (128, 128, True), (16, 16, None)],
)
def test_the_block_size_that_was_asked_for_is_told_from_the_overwritten_one(
    overwritten: int, asked: int, plugin: bool | None
) -> None:
    """vllm-project/vllm-ascend#14479; the property is held by tests/regressions/test_vllm_ascend_14479_16270.py."""
    text = f'vllm:cache_config_info{{block_size="{overwritten}"}} 1\nvllm:x{{model_name="%s"}} 1'
    found = metrics.server(page(text % "deepseek-ai/DeepSeek-V4-Flash"))
    assert (found.block_size, found.plugin) == (asked, plugin)
    named_by_the_operator = metrics.server(page(text % "chat"), deepseek_v4=True)
    assert (named_by_the_operator.block_size, named_by_the_operator.plugin) == (asked, plugin)


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "chat", "deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V4.1"])
@pytest.mark.parametrize("block_size", [8, 128])
def test_of_another_model_the_block_size_tells_nothing(model: str, block_size: int) -> None:
    text = f'vllm:cache_config_info{{block_size="{block_size}"}} 1\nvllm:x{{model_name="{model}"}} 1'
    found = metrics.server(page(text))
    assert (found.block_size, found.plugin) == (block_size, None)


ENGINES = "".join(f'vllm:cache_config_info{{engine="{n}",num_gpu_blocks="13918"}} 1\n' for n in (0, 1))


def test_blocks_are_divided_among_all_engines_also_where_the_queue_of_one_is_not_known() -> None:
    queue = 'vllm:num_requests_running{{engine="{0}"}} {1}\nvllm:num_requests_waiting{{engine="{0}"}} 1\n'
    found = metrics.server(page(ENGINES + queue.format(0, 0) + queue.format(1, "NaN")))
    assert [engine.name for engine in found.engines] == ["0"]
    assert found.num_blocks == 13_918 // 2


def test_blocks_that_engines_tell_differently_are_not_known() -> None:
    assert metrics.server(page(ENGINES.replace("13918", "6959", 1))).num_blocks is None


@pytest.mark.parametrize(
    ("awake", "asleep"), [("0", True), ("1", False), ("NaN", None)], ids=["asleep", "awake", "not known"]
)
def test_an_engine_that_sleeps_is_told(awake: str, asleep: bool | None) -> None:
    found = metrics.server(
        page(
            'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 1\n'
            f'vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {awake}\n'
            'vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 0\n'
        )
    )
    assert found.engines[0].asleep is asleep


@pytest.mark.parametrize(
    ("line", "apart"),
    [
        ('vllm:num_requests_running{engine="0",instance="%s"} 1\n', ", with instance 'a' and 'b',"),
        ('vllm:kv_cache_usage_perc{engine="0"} %.0s0\n', " for engine '0', so it is"),
        ('vllm:num_requests_waiting_by_reason{reason="capacity",engine="1",pod="%s"} 1\n', "for engine '1', with pod"),
    ],
)
def test_a_page_of_several_servers_is_refused(line: str, apart: str) -> None:
    with pytest.raises(InputError) as error:
        page(line % "a" + line % "b")
    assert f"{line.partition('{')[0]} stands twice for engine" in str(error.value)
    assert apart in str(error.value)
    assert "give the page of one server" in str(error.value)


def test_other_ends_of_lines_in_a_label_end_no_line() -> None:
    odd = "a\u2028b\x85c\x0bd\x1ee"
    found = page(f'vllm:x{{model_name="{odd}"}} 1\r\n')
    assert (found.samples[0].labels, found.malformed) == ({"model_name": odd}, ())


def test_digits_of_other_scripts_are_none() -> None:
    assert [number for number, _ in page("vllm:y 1\nvllm:z 1\nvllm:x \u0663\n").malformed] == [3]


MESSAGES = {
    "Chunked prefill is enabled with max_num_batched_tokens=4096.": ("max_num_batched_tokens", 4096),
    "Asynchronous scheduling is disabled.": ("async_scheduling", False),
    "Asynchronous scheduling is enabled.": ("async_scheduling", True),
    "Using max model len 1024": ("max_model_len", 1024),
    "Auto-fit max_model_len: reduced from 9000 to 7000 to fit in available GPU memory": ("max_model_len", 7000),
    "Available KV cache memory: 7.31 GiB": ("kv_gib", 7.31),
    "Overriding num_gpu_blocks=212632 with num_gpu_blocks_override=1500": ("num_blocks", 1500),
    "Engine 000: vllm cache_config_info with initialization after num_gpu_blocks is: 12": ("num_blocks", 12),
    "4 Engines: vllm cache_config_info with initialization after num_gpu_blocks is: 48": ("num_blocks", 12),
    "non-default args: {'max_num_seqs': 7, 'x': <Mode.A: 1>, 'y': Thing(a=1)}": ("max_num_seqs", 7),
    "non-default args: {'kv_transfer_config': {'kv_connector': 'Mooncake'}}": ("kv_connector", "Mooncake"),
}


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize(
    "dress", ["{}", "2026-11-30T10:00:00Z stdout F (EngineCore pid=7) {}", "\x1b[32m{}\x1b[0m", "{}\r"]
)
def test_a_message_is_read_in_whatever_stands_before_it(message: str, dress: str) -> None:
    name, value = MESSAGES[message]
    assert getattr(logs.parse(dress.format(INFO + message) + "\n", "log").server, name) == value


def test_of_settings_the_last_counts() -> None:
    text = f"{INFO}Asynchronous scheduling is enabled.\n{INFO}nothing\n{INFO}Asynchronous scheduling is disabled."
    assert logs.parse(text, "log").server.async_scheduling is False


STATE = (
    "Engine 001: Avg prompt throughput: 5.0 tokens/s, Avg generation throughput: 1.5 tokens/s, Running: 1 reqs, "
    "Waiting: 3 reqs, Deferred: 2 reqs, Preemptions: 4, GPU KV cache usage: 41.0%, Prefix cache hit rate: 0.0%, "
    "External prefix cache hit rate: 0.0%"
)


def test_the_state_of_a_queue_is_read_with_its_optional_parts() -> None:
    log = logs.parse(INFO + STATE, "log")
    assert log.server.engines == (Engine("1", 1, 3, 2, 0.41, 5.0, 1.5),)
    assert log.hit_rate == 0
    assert logs.parse(INFO + STATE.replace("throughput: 5.0", "throughput: 0.0"), "log").hit_rate is None


FAULTS = {
    "ValueError: The decoder prompt (length 9) is longer than the maximum model length of 8. Make sure": (
        "prompt-longer-than-model",
        {"prompt_tokens": 9, "max_model_len": 8},
    ),
    "The decoder prompt (length 8) plus the number of requested output tokens (at least 1) is longer than the "
    "maximum model length of 8.": ("prompt-longer-than-model", {"prompt_tokens": 8, "max_model_len": 8}),
    "This model's maximum context length is 8 tokens. However, you requested 2 output tokens and your prompt "
    "contains at least 7 input tokens, for a total of at least 9 tokens.": (
        "prompt-longer-than-model",
        {"prompt_tokens": 7, "max_model_len": 8},
    ),
    "This model's maximum context length is 8 tokens. However, you requested 2 output tokens and your prompt "
    "contains 999 characters (more than 600 characters, which is the upper bound for 6 input tokens).": (
        "prompt-longer-than-model",
        {"prompt_tokens": 7, "max_model_len": 8},
    ),
    "No available memory for the cache blocks. Try": ("cache-too-small", {}),
    "Failed to load plugin afd_dsv4": ("plugin-not-loaded", {"plugin": "afd_dsv4"}),
    "Only one platform plugin can be activated, but got: ['b', 'a']": (
        "two-platform-plugins",
        {"platform_plugins": ["a", "b"]},
    ),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_is_told_once_however_often_it_is_logged(message: str) -> None:
    log = logs.parse(f"{INFO}{message}\n" * 3, "log")
    assert [(one.code, one.numbers) for one in log.findings] == [FAULTS[message]]


def test_a_log_of_a_server_that_is_well_has_no_fault() -> None:
    whole = [message for message in MESSAGES if "Thing(" not in message]
    assert logs.parse("".join(f"{INFO}{message}\n" for message in (*whole, STATE)), "log").findings == ()


@pytest.mark.parametrize(("changes", "on"), [({}, True), ({"lora": True}, False)])
def test_our_own_line_is_read_as_the_gate_writes_it(changes: dict[str, object], on: bool) -> None:
    line = decide(COLOCATED, replace(PLAIN, **changes)).line()
    log = logs.parse(f"{INFO}afd-dsv4 0.1.0, {line}; stack: vllm 0.23.0, vllm-ascend 0.23.0", "log")
    assert log.server.plugin is on
    assert line in str(log.plugin)


#: Words that are looked for, by the file that prints them: of the format strings, what no argument stands in.
WORDS = {
    "vllm/logger.py": ["%(levelname)s %(asctime)s ", "[%(fileinfo)s:%(lineno)d] %(message)s", "%m-%d %H:%M:%S"],
    "vllm/v1/metrics/loggers.py": [
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason"),
        *("vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions"),
        *("vllm:request_prompt_tokens", "vllm:cache_config_info", '= "capacity"', '= "deferred"'),
        *("Avg prompt throughput: %.1f tokens/s", "Running: %d reqs", "Waiting: %d reqs", "Deferred: %d reqs"),
        *("Preemptions: %d", "GPU KV cache usage: %.1f%%", "Prefix cache hit rate: %.1f%%", "Engines Aggregated: "),
        *("Engine {:03d}: ", "%d Engines: vllm cache_config_info", "num_gpu_blocks is: %d"),
    ],
    "vllm/config/scheduler.py": ["Chunked prefill is enabled with max_num_batched_tokens=%d."],
    "vllm/config/vllm.py": ["Asynchronous scheduling is %s.", "max_seq_len={", "enable_prefix_caching={"],
    "vllm/config/model.py": ["Using max model len %s"],
    "vllm/v1/engine/core.py": [
        "Initializing a V1 LLM engine (v%s) with config: %s",
        *("vllm_config.cache_config.block_size = min(", "        vllm_config.__post_init__()\n", 'f"EngineCore_DP{'),
    ],
    "vllm/v1/engine/core_client.py": ["num_gpu_blocks += response.num_gpu_blocks", "max_model_len = min("],
    "vllm/config/speculative.py": ["self.draft_model_config = ModelConfig("],
    "vllm/v1/core/kv_cache_utils.py": [
        *(
            "To serve at least one request with the model's max seq len ",
            "GiB KV ",
            "cache is needed, which is larger than",
        ),
        *("the estimated maximum model length is ", "No available memory for the cache blocks. "),
        *(
            "Overriding num_gpu_blocks=%d with num_gpu_blocks_override=%d",
            "Auto-fit max_model_len: reduced from %d to %d",
        ),
    ],
    "vllm/v1/engine/input_processor.py": [
        *(
            "prompt (length {prompt_len}) is ",
            "longer than the maximum model length of ",
            "prompt (length {prompt_len}) plus",
        ),
    ],
    "vllm/renderers/params.py": ["This model's maximum context length is ", "input tokens, ", "upper bound "],
    "vllm/platforms/__init__.py": ["Only one platform plugin can be activated, but got: "],
    "vllm/plugins/__init__.py": ["Failed to load plugin %s"],
    "vllm/entrypoints/serve/utils/api_utils.py": ["non-default args: %s"],
    "vllm_ascend/worker/worker.py": ["Available KV cache memory: %.2f GiB"],
    "vllm_ascend/utils.py": ["For deepseek_v4 model, block size should be 32, 64 or 128. ", "Setting block size to 32"],
}


@pytest.mark.parametrize("file", WORDS)
def test_the_words_are_those_of_the_installed_sources(file: str) -> None:
    package, _, rest = file.partition("/")
    folder = package_folder(package)
    if folder is None:
        pytest.skip(f"{package} is not installed")
    text = (Path(folder) / rest).read_text(encoding="utf-8")
    assert [word for word in WORDS[file] if word not in text] == []
