# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""What doctor asks the gate: every fact that options give, and what is taken where they say nothing.

No vLLM is asked here; `integration/test_serve_commands.py` asks it.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from afd_dsv4.compat.adapters import ADAPTERS, Adapter
from afd_dsv4.doctor import defaults, planned
from afd_dsv4.doctor.machine import Machine
from afd_dsv4.doctor.options import Options, findings, options_of
from afd_dsv4.doctor.planned import Planned
from afd_dsv4.gate import EngineFacts
from afd_dsv4.geometry import InputError, from_hf_config, preset
from tests import docs_pages, serve_commands
from tests.serve_commands import DEFAULTS, FORMER, MODEL, Has, command, documented
from tests.unit.test_doctor import asked

LIMITS = ("max_num_batched_tokens", "block_size", "max_num_seqs")
OURS = {"mode": "colocated"}
#: Nothing speaks against it, where an adapter covers nothing.
BASE: dict[str, Any] = {
    "additional_config": {"afd_dsv4": OURS, "multistream_dsv4_dsa_overlap": False},
    "async_scheduling": False,
    "block_size": 128,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 4,
}
LEFT_OUT = None
KERNELS = {"afd_dsv4": {**OURS, "executor": "afd"}}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
#: Of each fact, options that are other than those above, and how the reason begins that they give.
FACTS: list[tuple[str, dict[str, Any], str]] = [
    ("afd", {"additional_config": {"afd": {"role": "attention"}}}, "mode 'colocated': AFD role 'attention'"),
    ("dtype", {"dtype": "half", "additional_config": KERNELS}, "executor 'afd': dtype float16"),
    ("worker_cls", {"worker_cls": "a.B"}, "worker class: a.B"),
    (
        "kv_transfer",
        {"kv_transfer_config": {"kv_connector": "Some"}},
        "KV transfer: kv_transfer_config with Some",
    ),
    ("kv_transfer", {"ec_transfer_config": {"ec_connector": "Other"}}, "KV transfer: ec_transfer_config with Other"),
    ("kv_transfer", {"kv_offloading_size": 1.5}, "KV transfer: kv_offloading_size 1.5"),
    ("prefix_caching", {"enable_prefix_caching": LEFT_OUT}, "prefix caching: on"),
    ("decode_context_parallel", {"decode_context_parallel_size": 2}, "decode context parallelism: 2"),
    ("prefill_context_parallel", {"prefill_context_parallel_size": 3}, "prefill context parallelism: 3"),
    ("pipeline_parallel", {"pipeline_parallel_size": 4}, "pipeline parallelism: 4"),
    ("dsa_context_parallel", {"additional_config": {"enable_dsa_cp": True}}, "dsa_cp: on"),
    ("sleep_mode", {"enable_sleep_mode": True}, "sleep mode: on"),
    ("lora", {"enable_lora": True}, "LoRA: on"),
    ("policy", {"scheduling_policy": "priority"}, "scheduling policy: priority"),
    ("scheduler_cls", {"scheduler_cls": "a.B"}, "scheduler: a.B"),
    ("overlap", {"additional_config": {"multistream_dsv4_dsa_overlap": LEFT_OUT}}, "multistream overlap: on"),
    ("async_scheduling", {"async_scheduling": LEFT_OUT}, "asynchronous scheduling: on"),
    ("speculative_method", MTP, "speculative decoding: mtp"),
    ("speculative_method", {"spec_method": "ngram", "spec_tokens": 2}, "speculative decoding: ngram"),
    (
        "speculative_tokens",
        {**MTP, "additional_config": {"afd_dsv4": {**OURS, "drafts": 1}}},
        "setting drafts: 1 where",
    ),
    ("graphs", {"enforce_eager": LEFT_OUT}, "graph mode: FULL_AND_PIECEWISE"),
    ("ubatches", {"enable_dbo": True, "additional_config": {"afd": {"role": "attention"}}}, "uBatches: 2"),
    ("ubatches", {"ubatch_size": 3, "additional_config": {"afd": {"role": "attention"}}}, "uBatches: 3"),
    ("native_tail", {"additional_config": {"enable_dsv4_shared_compressor_workspace": True}}, "native tail mode"),
    ("max_num_seqs", {"max_num_seqs": 5000, "additional_config": KERNELS}, "executor 'afd': max_num_seqs 5000"),
    ("block_size", {"block_size": 16}, "block size: 16"),
]
#: Of the machine, the model and vLLM itself, which are judged elsewhere.
NOT_OF_OPTIONS = {
    "stack",
    "stack_name",
    "worker_class",
    "covers",
    "drift",
    "unread",
    "platform",
    "device",
    "model_type",
    "geometry",
    "geometry_error",
    "model_runner_v2",
    "kernels",
}
#: Speaks against nothing; it is a size.
SIZE = "max_num_batched_tokens"


@pytest.fixture
def covers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every fact has a reason."""
    adapters = {name: Adapter(adapter.worker, frozenset()) for name, adapter in ADAPTERS.items()}
    monkeypatch.setattr(planned, "ADAPTERS", adapters)


def ask(changes: dict[str, Any], base: dict[str, Any] = BASE, stack: str | None = None) -> Planned:
    """A laptop, of a server with Flash."""
    additional = {**base.get("additional_config", {}), **changes.get("additional_config", {})}
    told = {**base, **changes, "additional_config": additional}
    limits = {name: told.get(name) for name in LIMITS}
    return planned.plan(told, Machine(None, None, None, (), {}), {}, preset("flash"), **limits, stack=stack)


@pytest.mark.usefixtures("covers_nothing")
@pytest.mark.parametrize(("fact", "changes", "reason"), FACTS, ids=[f"{fact}: {why}" for fact, _, why in FACTS])
def test_what_an_option_says_reaches_the_gate(fact: str, changes: dict[str, Any], reason: str) -> None:
    """Without the option, nothing speaks against it: the reason is its own."""
    before, after = ask({}), ask(changes)
    assert before.decision is not None
    assert before.decision.active
    assert after.decision is not None, after.error
    assert [why for why in after.decision.reasons if why.startswith(reason)], after.decision.reasons


def test_no_fact_is_forgotten_in_the_table() -> None:
    table = {fact for fact, _, _ in FACTS}
    assert {field.name for field in fields(EngineFacts)} == table | NOT_OF_OPTIONS | {SIZE}
    assert not (table | {SIZE}) & NOT_OF_OPTIONS


def test_tokens_of_a_batch_are_what_slots_are_sized_for() -> None:
    small, large = ask({SIZE: 8192}).decision, ask({SIZE: 65_536}).decision
    assert small
    assert large
    assert small.sizes
    assert large.sizes
    assert small.sizes.tail_bytes == large.sizes.tail_bytes
    assert small.sizes.slot_bytes < large.sizes.slot_bytes


@pytest.mark.usefixtures("covers_nothing")
def test_ubatches_that_vllm_ascend_resets_are_none() -> None:
    for changes in ({"enable_dbo": True}, {"ubatch_size": 2}):
        decision = ask(changes).decision
        assert decision is not None
        assert decision.active


@pytest.mark.parametrize("options", DEFAULTS)
def test_what_is_left_out_is_what_vllm_serve_has(options: str) -> None:
    """`integration/test_serve_commands.py` asks real configurations for the same."""
    told = options_of(json.dumps(serve_commands.options_of(command(options))), "c")
    server = Options(told)
    longest = from_hf_config(MODEL, "model").max_position_embeddings
    batch, block_size, seqs = (told.get(name) for name in LIMITS)
    found = defaults.limits(server, batch=batch, block_size=block_size, seqs=seqs, longest=longest)
    method = server.inner("speculative_config").text("method")
    has = Has(
        defaults.graphs(server),
        found.max_num_batched_tokens,
        found.block_size,
        found.max_num_seqs,
        defaults.asynchronous(server, method),
    )
    assert has == DEFAULTS[options]


def assumed(changes: dict[str, Any], base: dict[str, Any] = BASE) -> list[str]:
    return [said for said in ask(changes, base).assumed if "defaults" in said]


def test_defaults_that_were_taken_are_listed_and_no_others() -> None:
    whole = "graph mode FULL_AND_PIECEWISE, max_num_batched_tokens 2,048, block_size 32, max_num_seqs 256"
    ours = {"additional_config": {"afd_dsv4": OURS}}
    assert assumed({}, ours) == [f"the defaults of `vllm serve` ({whole})"]
    assert assumed({}) == []
    assert assumed({"max_num_seqs": None}) == ["the defaults of `vllm serve` (max_num_seqs 256)"]
    decodes = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}
    assert assumed(decodes) == []


def test_requests_that_no_option_says_are_those_that_the_gate_took_in_every_line(tmp_path: Path) -> None:
    told = {**BASE, "max_num_seqs": None, "model": "deepseek-ai/DeepSeek-V4-Flash"}
    found, _, errors = asked(tmp_path, "--config", "-", given=json.dumps(told).encode())
    decision = ask({"max_num_seqs": None}).decision
    assert decision is not None
    assert decision.sizes is not None
    assert (errors, found["gate"]["active"], found["server"]["max_num_seqs"]) == ("", True, 256)
    assert found["sizes"]["reserved_bytes"] == decision.sizes.device_bytes
    assert not [said for said in found["server"]["taken"] if "requests" in said]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"optimization_level": 4}, "optimization_level is 4; give one of O0, O1, O2, O3"),
        ({"optimization_level": True}, "optimization_level is True; give one of"),
        ({"optimization_level": "2"}, "optimization_level is '2'; give one of"),
        ({"performance_mode": 1}, "performance_mode is 1; give a text"),
        ({"enable_chunked_prefill": 0}, "enable_chunked_prefill is 0; give true or false"),
    ],
)
def test_an_option_that_defaults_follow_from_is_read_strictly(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        options_of(json.dumps(options), "c")
    assert says in str(error.value)
    assert options_of('{"optimization-level": 3}', "c") == {"optimization_level": "O3"}


@pytest.mark.parametrize("name", ["mode", "cudagraph_mode"])
def test_a_graph_mode_that_is_none_is_refused_by_name(name: str) -> None:
    found = ask({"enforce_eager": False, "compilation_config": {name: "FUL"}})
    assert found.decision is None
    assert str(found.error).startswith(f"option compilation_config.{name}: 'FUL'; it must be one of NONE, ")


PAGES = list(documented())


@pytest.mark.parametrize(("page", "words"), PAGES, ids=[page for page, _ in PAGES])
def test_a_command_on_a_page_is_on_by_options_that_vllm_has(page: str, words: list[str]) -> None:
    told = options_of(json.dumps(serve_commands.options_of(words)), page)
    for stack, vllm in (("vllm-ascend-0.23.0", "0.23.0"), ("vllm-ascend-80d8c194f", "0.26.0")):
        assert not list(findings(told, vllm))
        decision = ask({}, told, stack).decision
        assert decision is not None
        assert decision.active, decision.reasons


def test_the_command_that_the_quick_start_had_is_refused() -> None:
    """Negative control of the test above."""
    decision = ask({}, options_of(json.dumps(serve_commands.options_of(FORMER)), "c")).decision
    assert decision is not None
    assert [why.partition(",")[0] for why in decision.reasons] == ["graph mode: FULL_AND_PIECEWISE"]


def test_the_quick_start_says_what_the_plugin_reserves_with_its_options_and_without() -> None:
    (words,) = (words for page, words in documented() if page == "quickstart.md")
    told = options_of(json.dumps(serve_commands.options_of(words)), "c")
    bare = {name: value for name, value in told.items() if name not in LIMITS}
    mib = []
    for options in (told, bare):
        decision = ask({}, options).decision
        assert decision is not None
        assert decision.sizes is not None
        mib.append(f"{decision.sizes.device_bytes / 2**20:,.1f} MiB")
    text = " ".join(docs_pages.text_of(docs_pages.DOCS / "quickstart.md").split())
    assert f"each worker: {mib[0]}, and {mib[1]} with the defaults" in text
