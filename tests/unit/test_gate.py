# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The gate: on only where nothing speaks against it, every reason by name, and what nobody knows is a reason too."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afd_dsv4 import gate
from afd_dsv4.config import Executor, Mode, Settings
from afd_dsv4.gate import COVERABLE, AfdFacts, Decision, EngineFacts, KernelFacts, decide
from afd_dsv4.geometry import ModelGeometry, preset

WORKER = "afd_dsv4.compat.adapters.example.AfdDsv4Worker"
#: An engine that nothing speaks against, with an adapter that covers nothing in particular.
PLAIN = EngineFacts(
    stack="vllm 0.23.0, vllm-ascend 0.23.0",
    stack_name="vllm-ascend-0.23.0",
    worker_class=WORKER,
    covers=frozenset(),
    drift=(),
    unread=(),
    platform="vllm_ascend.platform.NPUPlatform",
    device="A2",
    model_type="deepseek_v4",
    dtype="bfloat16",
    geometry=preset("flash"),
    geometry_error=None,
    afd=None,
    worker_cls="vllm_ascend.worker.worker.NPUWorker",
    kv_transfer=None,
    prefix_caching=False,
    decode_context_parallel=1,
    prefill_context_parallel=1,
    pipeline_parallel=1,
    dsa_context_parallel=False,
    model_runner_v2=False,
    sleep_mode=False,
    lora=False,
    policy="fcfs",
    scheduler_cls=None,
    overlap=False,
    async_scheduling=False,
    speculative_method=None,
    speculative_tokens=0,
    graphs="NONE",
    ubatches=0,
    native_tail=False,
    max_num_seqs=4,
    max_num_batched_tokens=32_768,
    block_size=128,
    kernels=KernelFacts(backend=None, on_hardware=False, lacks="kernels: none here; build them"),
)
COLOCATED = Settings(Mode.COLOCATED)
#: The Attention role with the asynchronous connector in two stages, and a model that somebody has made for it.
ATTENTION = AfdFacts(
    role="attention",
    connector="CAMAsyncAFDConnector",
    asynchronous=True,
    stages=2,
    split="token",
    dense=0,
    plugin="commit 85e826e",
    pin="afd-plugin-85e826e",
    lacks=None,
    not_loaded=(),
    model="somebody.models:DeepseekV4",
)
FFN = replace(ATTENTION, role="ffn")
COVERED = frozenset({gate.AFD, gate.UBATCHES})

#: What is changed, and what the one reason must say: what was asked, what was found, what to do.
ALONE = {
    "platform": ({"platform": "vllm.platforms.cpu.CpuPlatform"}, ("platform", "CpuPlatform", "VLLM_PLUGINS")),
    "unknown stack": ({"stack_name": None}, ("stack", "vllm 0.23.0, vllm-ascend 0.23.0", "install")),
    "no adapter": ({"worker_class": None}, ("stack", "no adapter", "install")),
    "drift": ({"drift": ("Compressor moved", "b")}, ("contracts", "2 differences", "Compressor moved", "compat check")),
    "unread": ({"unread": ("vllm_config.a", "vllm_config.b")}, ("configuration", "vllm_config.a, vllm_config.b")),
    "worker": ({"worker_cls": "my.Worker"}, ("worker class", "my.Worker", "NPUWorker")),
    "xlite": ({"worker_cls": "vllm_ascend.xlite.xlite_worker.XliteWorker"}, ("worker class", "XliteWorker")),
    "A5": ({"device": "A5"}, ("device", "A5", "A2 or A3")),
    "310P": ({"device": "_310P"}, ("device", "_310P", "A2 or A3")),
    "other model": ({"model_type": "deepseek_v3", "geometry": None, "geometry_error": "x"}, ("model", "'deepseek_v3'")),
    "odd model": ({"geometry": None, "geometry_error": "model: ratio 2; V4.1"}, ("ratio 2", "V4.1")),
    "no compressor": ({"geometry": ModelGeometry("x", 1024, 2, (0, 0))}, ("no layer with a compressor",)),
    "wide rows": ({"geometry": ModelGeometry("x", 1024, 1, (4,), head_dim=4096)}, ("state page of layer 0", "bytes")),
    "block size": ({"block_size": 16}, ("block size", "16", "32, 64, 128")),
    "native tail": ({"native_tail": True}, ("native tail", "enable_dsv4_shared_compressor_workspace", "mode 'off'")),
    "KV transfer": ({"kv_transfer": "MooncakeConnector"}, ("KV transfer", "MooncakeConnector", "drop the connector")),
    "prefix caching": ({"prefix_caching": True}, ("prefix caching", "--no-enable-prefix-caching")),
    "DCP": ({"decode_context_parallel": 2}, ("decode context", "2", "--decode-context-parallel-size 1")),
    "PCP": ({"prefill_context_parallel": 4}, ("prefill context", "4", "--prefill-context-parallel-size 1")),
    "PP": ({"pipeline_parallel": 3}, ("pipeline", "3", "--pipeline-parallel-size 1")),
    "dsa_cp": ({"dsa_context_parallel": True}, ("dsa_cp", "enable_dsa_cp")),
    "runner V2": ({"model_runner_v2": True}, ("model runner", "V2", "VLLM_USE_V2_MODEL_RUNNER=0")),
    "sleep mode": ({"sleep_mode": True}, ("sleep mode", "--enable-sleep-mode")),
    "LoRA": ({"lora": True}, ("LoRA", "--enable-lora")),
    "priorities": ({"policy": "priority"}, ("scheduling policy", "priority", "--scheduling-policy fcfs")),
    "scheduler": ({"scheduler_cls": "my.Scheduler"}, ("scheduler", "my.Scheduler", "vLLM's")),
    "overlap": ({"overlap": True}, ("overlap", "does not cover", "multistream_dsv4_dsa_overlap")),
    "async": ({"async_scheduling": True}, ("asynchronous scheduling", "does not cover", "--no-async-scheduling")),
    "MTP": ({"speculative_method": "mtp", "speculative_tokens": 1}, ("speculative", "mtp", "--speculative-config")),
    "eagle": ({"speculative_method": "eagle"}, ("speculative", "eagle", "does not cover")),
    "optimistic starts": (
        {
            "speculative_method": "mtp",
            "async_scheduling": True,
            "covers": frozenset({gate.MTP, gate.ASYNC_SCHEDULING}),
        },
        ("exact starts", "too far ahead", "--no-async-scheduling"),
    ),
    "full graphs": ({"graphs": "FULL_DECODE_ONLY"}, ("graph mode", "FULL_DECODE_ONLY", "--enforce-eager")),
    "piecewise": ({"graphs": "PIECEWISE"}, ("graph mode", "PIECEWISE", "--enforce-eager")),
    "half covered graphs": (
        {"graphs": "FULL_AND_PIECEWISE", "covers": frozenset({gate.FULL_GRAPHS})},
        ("graph mode", "FULL_AND_PIECEWISE"),
    ),
    "unheard-of graphs": (
        {"graphs": "SOME", "covers": COVERABLE},
        ("graph mode", "SOME"),
    ),
    "uBatches": ({"ubatches": 2}, ("uBatches", "2", "--enable-dbo")),
    "AFD role": ({"afd": ATTENTION}, ("mode 'colocated'", "'attention'", "mode 'afd'")),
}


def refused(settings: Settings = COLOCATED, **changes: object) -> tuple[str, ...]:
    decision = decide(settings, replace(PLAIN, **changes))  # type: ignore[arg-type]
    assert decision.refused
    assert not decision.active
    return decision.reasons


def test_off_is_the_default_and_no_refusal():
    decision = decide(Settings(), PLAIN)
    assert (decision.requested, decision.active, decision.refused) == (Mode.OFF, False, False)


def test_colocated_is_on_where_nothing_speaks_against_it():
    decision = decide(COLOCATED, PLAIN)
    assert decision.active
    assert decision.reasons == ("colocated was asked for",)
    assert decision.settings == Settings(Mode.COLOCATED, slots=2, drafts=0, executor=Executor.STOCK)


@pytest.mark.parametrize("name", ALONE)
def test_each_obstacle_alone_is_the_one_reason_and_says_what_was_found_and_what_to_do(name):
    changes, words = ALONE[name]
    (reason,) = refused(**changes)
    assert all(word in reason for word in words), reason
    assert "\n" not in reason


@pytest.mark.parametrize("field", sorted(gate._REQUIRED))
def test_what_nobody_could_read_is_a_reason_by_name(field):
    reasons = refused(**{field: None})
    assert any("vLLM's configuration: cannot read" in reason and field in reason for reason in reasons)


def test_every_fact_that_may_be_unknown_is_either_required_or_none_by_nature():
    optional = {field.name for field in fields(EngineFacts) if "None" in str(field.type)}
    by_nature = {"afd", "kv_transfer", "scheduler_cls", "speculative_method"}
    elsewhere = {"stack_name", "worker_class", "geometry", "geometry_error"}
    assert optional - by_nature - elsewhere == set(gate._REQUIRED)


def test_without_ascend_the_platform_is_the_reason_and_not_what_could_not_be_read_of_it():
    reasons = refused(
        platform="vllm.platforms.cpu.CpuPlatform", device=None, overlap=None, unread=("vllm_ascend.utils",)
    )
    assert [reason.split(":")[0] for reason in reasons] == ["vLLM's platform"]


def test_several_obstacles_are_all_told_at_once():
    reasons = refused(
        kv_transfer="X", device="A5", prefix_caching=True, pipeline_parallel=2, overlap=True, drift=("d",)
    )
    assert len(reasons) == 6
    line = decide(COLOCATED, replace(PLAIN, device="A5", sleep_mode=True)).line()
    assert "(1. device: A5" in line
    assert "; 2. sleep mode: on" in line


@pytest.mark.parametrize(
    ("feature", "changes"),
    [
        (gate.OVERLAP, {"overlap": True}),
        (gate.ASYNC_SCHEDULING, {"async_scheduling": True}),
        (gate.MTP, {"speculative_method": "mtp", "speculative_tokens": 2}),
        (gate.FULL_GRAPHS, {"graphs": "FULL_DECODE_ONLY"}),
        (gate.FULL_GRAPHS, {"graphs": "FULL"}),
        (gate.PIECEWISE_GRAPHS, {"graphs": "PIECEWISE"}),
        (gate.UBATCHES, {"ubatches": 2}),
        (gate.PREFIX_CACHING, {"prefix_caching": True}),
    ],
)
def test_what_an_adapter_covers_is_no_obstacle_and_covers_nothing_else(feature, changes):
    assert refused(**changes, covers=COVERABLE - {feature})
    assert decide(COLOCATED, replace(PLAIN, **changes, covers=frozenset({feature}))).active


def test_an_adapter_cannot_cover_what_nobody_asks_for():
    with pytest.raises(ValueError, match="overlaps"):
        replace(PLAIN, covers=frozenset({"overlaps"}))


def test_afd_without_the_afd_plugin_is_refused():
    (reason,) = refused(Settings(Mode.AFD), covers=frozenset({gate.AFD}))
    assert "additional_config" in reason


def test_afd_on_the_ffn_side_is_off_and_no_refusal():
    decision = decide(Settings(Mode.AFD), replace(PLAIN, afd=FFN, device="A5", kv_transfer="X"))
    assert (decision.active, decision.refused) == (False, False)
    assert "'ffn'" in decision.reasons[0]


def test_afd_on_the_attention_side_needs_an_adapter_that_covers_it():
    for changes in ({}, {"worker_class": None, "covers": COVERED, "overlap": True}):
        (reason,) = refused(Settings(Mode.AFD), afd=ATTENTION, **changes)
        assert "no adapter for it" in reason
        assert PLAIN.stack in reason
    facts = replace(PLAIN, afd=ATTENTION, ubatches=2, covers=COVERED)
    decision = decide(Settings(Mode.AFD), facts)
    assert decision.active
    assert decision.reasons == ("AFD role 'attention' with CAMAsyncAFDConnector, 2 uBatches",)


P2P = replace(ATTENTION, connector="CAMP2pAFDConnector", asynchronous=False, stages=1, split="request")
#: What is changed of AFD, what of the engine, and what the one reason must say.
AFD_ALONE = {
    "not installed": (
        {"plugin": None, "pin": None},
        {"worker_class": None, "covers": frozenset()},
        ("afd-plugin", "not installed", "85e826e"),
    ),
    "unknown commit": (
        {"plugin": "commit 03b57b3", "pin": None},
        {"worker_class": None, "covers": frozenset(), "overlap": True, "async_scheduling": True},
        ("afd-plugin", "commit 03b57b3", "no commit that is known", "85e826e"),
    ),
    "old commit": (
        {"plugin": "commit 2e4378f", "pin": "afd-plugin-2e4378f", "lacks": "it registers no DeepSeek-V4"},
        {"worker_class": None, "covers": frozenset()},
        ("afd-plugin", "commit 2e4378f", "registers no DeepSeek-V4", "85e826e"),
    ),
    "not loaded": ({"not_loaded": ("afd_plugin.x",)}, {}, ("afd-plugin", "afd_plugin.x not loaded", "VLLM_PLUGINS")),
    "CUDA-only model": (
        {"model": gate.CUDA_ONLY},
        {},
        ("AFD model", "every device but CUDA", "with or without this plugin"),
    ),
    "no model": ({"model": None}, {}, ("AFD model", "no class is registered")),
    "P2pNccl": (
        {"connector": "P2pNcclAFDConnector"},
        {},
        ("AFD connector", "P2pNccl", "CAMAsyncAFDConnector or CAMP2p"),
    ),
    "unheard-of connector": ({"connector": "Some"}, {}, ("AFD connector", "Some", "CAMAsyncAFDConnector or CAMP2p")),
    "not asynchronous": ({"asynchronous": False}, {}, ("CAMAsyncAFDConnector", "async is false", "to true")),
    "three stages": ({"stages": 3}, {}, ("async_moe_num_ubatches", "3", "set it to 2")),
    "another split": ({"split": "layer"}, {}, ("async_moe_split", "layer", "'request' or 'token'")),
    "dense layers in stages": ({"dense": 3}, {}, ("async_moe_ubatching", "3 dense layers", "set it to false")),
    "PCP": ({}, {"prefill_context_parallel": 2}, ("prefill context", "2", "--prefill-context-parallel-size 1")),
    "prefix caching": ({}, {"prefix_caching": True}, ("prefix caching", "--no-enable-prefix-caching")),
    "drafts": (
        {},
        {"speculative_method": "mtp", "speculative_tokens": 1},
        ("speculative decoding", "mtp", "does not cover"),
    ),
    "graphs": ({}, {"graphs": "FULL_DECODE_ONLY"}, ("graph mode", "FULL_DECODE_ONLY", "--enforce-eager")),
    "overlap": ({}, {"overlap": True}, ("overlap", "multistream_dsv4_dsa_overlap")),
    "another worker": ({}, {"worker_cls": "my.Worker"}, ("worker class", "my.Worker", "AFDNPUAttentionWorker")),
}


@pytest.mark.parametrize("name", AFD_ALONE)
def test_each_obstacle_to_afd_alone_is_the_one_reason_and_says_what_was_found_and_what_to_do(name):
    afd, engine, words = AFD_ALONE[name]
    (reason,) = refused(Settings(Mode.AFD), **({"covers": COVERED} | engine | {"afd": replace(ATTENTION, **afd)}))
    assert all(word in reason for word in words), reason
    assert "\n" not in reason


@pytest.mark.parametrize("worker", [gate.NATIVE_WORKER, gate.AFD_WORKER, WORKER])
@pytest.mark.parametrize(
    ("afd", "ubatches"),
    [(ATTENTION, 2), (replace(ATTENTION, stages=1), 1), (replace(ATTENTION, split="request"), 2), (P2P, 0), (P2P, 1)],
)
def test_both_connectors_are_followed_cut_or_whole_with_afd_plugins_worker_or_vllm_ascends(afd, ubatches, worker):
    facts = replace(PLAIN, afd=afd, ubatches=ubatches, worker_cls=worker, covers=COVERED)
    assert decide(Settings(Mode.AFD), facts).active


def test_afd_plugins_worker_is_none_that_a_colocated_one_may_stand_in_for():
    (reason,) = refused(worker_cls=gate.AFD_WORKER)
    assert reason.startswith("worker class")


@pytest.mark.parametrize("ubatches", [2, 4])
def test_dbo_is_refused_since_the_second_ubatch_gets_the_metadata_of_the_first(ubatches):
    (reason,) = refused(Settings(Mode.AFD, slots=4), afd=P2P, ubatches=ubatches, covers=COVERED)
    assert reason.startswith(f"DBO of afd-plugin: {ubatches} uBatches, of which all but the first")
    assert "with or without this plugin" in reason


def test_fewer_slots_than_stages_are_refused():
    (reason,) = refused(Settings(Mode.AFD, slots=1), afd=ATTENTION, ubatches=2, covers=COVERED)
    assert "setting slots: 1 for 2 uBatches" in reason


def test_drafts_come_from_the_speculative_configuration_unless_given():
    facts = replace(PLAIN, speculative_method="mtp", speculative_tokens=2, covers=frozenset({gate.MTP}))
    taken = [decide(Settings(Mode.COLOCATED, drafts=drafts), facts).settings for drafts in (None, 2, 3)]
    assert [settings.drafts for settings in taken if settings] == [2, 2, 3]
    refusal = decide(Settings(Mode.COLOCATED, drafts=1), facts)
    assert refusal.reasons == (
        "setting drafts: 1 where vLLM drafts 2 tokens a step; leave it out, or give at least as many",
    )


def test_what_is_no_matter_of_the_gate_is_handed_on_as_it_was_given():
    settings = decide(Settings(Mode.COLOCATED, slots=3, fence_timeout_s=5), PLAIN).settings
    assert settings == Settings(Mode.COLOCATED, slots=3, drafts=0, fence_timeout_s=5, executor=Executor.STOCK)


def test_fewer_slots_than_ubatches_are_refused():
    (reason,) = refused(Settings(Mode.COLOCATED, slots=1), ubatches=2, covers=frozenset({gate.UBATCHES}))
    assert "setting slots: 1 for 2 uBatches" in reason


def test_the_line_tells_the_memory_that_is_taken():
    # One C4 layer with its indexer, one C128 layer; block size 128: pages of 8 and of 32 rows.
    geometry = ModelGeometry("x", 1024, 2, (4, 128))
    decision = decide(Settings(Mode.COLOCATED, slots=3), replace(PLAIN, geometry=geometry, max_num_seqs=4))
    # A request's worst phase: 2 C4 pages (a page of 8 rows is not aligned to a tail of 4 to 7), 4 C128 pages.
    c4, indexer, c128 = 8 * 2048 * 4, 8 * 512 * 4, 32 * 1024 * 4
    tails = 4 * (2 * (c4 + indexer) + 4 * c128) + c4 + indexer + c128  # and a null page of each kind
    assert decision.sizes is not None
    assert decision.sizes.tail_bytes == tails
    rest = decision.sizes.device_bytes - tails
    assert rest > 0
    whole = f"{(tails + rest) / 2**20:.1f} MiB on each worker (tails {tails / 2**20:.1f} MiB, slots "
    expected = f", executor 'stock', 3 slots, {whole}"
    assert expected in decision.line()


OURS = Settings(Mode.COLOCATED, executor=Executor.AFD, tile_tokens=4096)
EMULATED = KernelFacts(backend="emulation", on_hardware=False, lacks=None)


@pytest.mark.parametrize("executor", [Executor.AUTO, Executor.STOCK])
def test_auto_is_the_stock_executor_also_where_there_are_kernels(executor):
    for kernels in (PLAIN.kernels, EMULATED):
        decision = decide(Settings(Mode.COLOCATED, executor=executor), replace(PLAIN, kernels=kernels))
        assert decision.settings is not None
        assert decision.settings.executor is Executor.STOCK
        assert decision.sizes is not None
        assert decision.sizes.rows_bytes == 0
        assert decision.reasons == ("colocated was asked for",)


def test_the_afd_executor_takes_its_staging_rows_and_is_named_with_its_back_end():
    decision = decide(OURS, replace(PLAIN, kernels=EMULATED))
    assert decision.settings == replace(OURS, drafts=0)
    assert decision.sizes is not None
    assert decision.sizes.rows_bytes == 2 * ((4096 + 4) * 10240 + 2 * 8192)
    assert "(colocated was asked for, with kernels of the back end 'emulation'), executor 'afd', 2" in decision.line()


def test_kernels_for_hardware_are_said_not_to_have_run_there():
    line = decide(OURS, replace(PLAIN, kernels=KernelFacts("ascendc", on_hardware=True, lacks=None))).line()
    assert "kernels of the back end 'ascendc', which have not run on hardware yet" in line


def test_the_afd_executor_is_refused_without_kernels_with_what_to_do():
    assert refused(OURS) == ("kernels: none here; build them",)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head_dim": 256}, "head_dim 256, its kernels have 512"),
        ({"index_head_dim": 64}, "index_head_dim 64, its kernels have 128"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim 32, its kernels have 64"),
    ],
)
def test_a_model_that_the_kernels_have_not_is_refused_with_the_afd_executor_alone(changes, says):
    geometry = replace(preset("flash"), **changes)
    assert decide(COLOCATED, replace(PLAIN, geometry=geometry)).active
    (reason,) = refused(OURS, geometry=geometry, kernels=EMULATED)
    assert reason == f"executor 'afd': {says}; use executor 'stock'"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "float16"}, "dtype float16, its kernels have bfloat16 and float32; use --dtype bfloat16"),
        ({"max_num_seqs": 4097}, "max_num_seqs 4097, its kernels take 4096 requests; set --max-num-seqs 4096 or less"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_before_a_worker_starts(changes, says):
    assert decide(COLOCATED, replace(PLAIN, **changes)).active
    assert refused(OURS, kernels=EMULATED, **changes) == (f"executor 'afd': {says}",)
    within = {"dtype": "float32", "max_num_seqs": 4096}
    assert decide(OURS, replace(PLAIN, kernels=EMULATED, **within)).active


def test_full_graphs_take_one_slot_more():
    facts = replace(PLAIN, covers=frozenset({gate.FULL_GRAPHS}))
    eager, graphs = (decide(COLOCATED, replace(facts, graphs=mode)).sizes for mode in ("NONE", "FULL_DECODE_ONLY"))
    assert eager is not None
    assert graphs is not None
    assert (eager.slots, graphs.slots) == (2, 3)
    assert graphs.device_bytes > eager.device_bytes


def test_where_full_graphs_are_covered_the_remedy_for_others_is_decode_only():
    (reason,) = refused(graphs="FULL_AND_PIECEWISE", covers=frozenset({gate.FULL_GRAPHS}))
    assert reason.endswith("""set --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}'""")


def test_a_decision_without_a_reason_cannot_be_made():
    with pytest.raises(ValueError, match="reason"):
        Decision(Mode.OFF, active=False, refused=False, reasons=())


@pytest.mark.parametrize(("active", "refused_too"), [(True, True), (True, False)])
def test_a_decision_cannot_be_active_and_refused_or_active_with_nothing_to_work_with(active, refused_too):
    with pytest.raises(ValueError, match="a decision"):
        Decision(Mode.AFD, active=active, refused=refused_too, reasons=("x",))


@given(
    names=st.lists(st.sampled_from(sorted(ALONE)), max_size=4),
    covers=st.frozensets(st.sampled_from(sorted(COVERABLE))),
    mode=st.sampled_from(list(Mode)),
    afd=st.sampled_from([None, ATTENTION, FFN, replace(ATTENTION, pin=None), replace(P2P, model=gate.CUDA_ONLY)]),
)
def test_it_is_never_on_with_an_objection_and_never_refused_without_one(names, covers, mode, afd):
    changes: dict[str, object] = {}
    for name in names:
        changes |= ALONE[name][0]
    facts = replace(PLAIN, **(changes | {"covers": covers, "afd": afd}))  # type: ignore[arg-type]
    settings = Settings(mode)
    decision = decide(settings, facts)
    against = tuple(gate.objections(settings, facts))
    if decision.active:
        assert not against
    if decision.refused:
        assert decision.reasons == against
    if mode is Mode.OFF or (mode is Mode.AFD and afd is FFN):
        assert not decision.active
        assert not decision.refused


@pytest.mark.parametrize("role", ["attn", "", "Attention", "FFN", "None"])
def test_a_role_that_afd_plugin_does_not_know_is_refused_by_name_and_not_taken_for_the_other(role: str) -> None:
    facts = replace(PLAIN, covers=COVERED, ubatches=2, afd=replace(ATTENTION, role=role))
    decision = decide(Settings(Mode.AFD), facts)
    assert not decision.active
    assert decision.refused
    assert f"AFD role: {role!r}; use 'attention' or 'ffn'" in decision.reasons


@pytest.mark.parametrize("mode", [Mode.AFD, Mode.COLOCATED])
@pytest.mark.parametrize("value", [None, "2", -1, True, 2.5, (), pytest.param(object(), id="object")], ids=repr)
def test_facts_that_nothing_can_be_are_refused_by_name_and_never_raise(mode: Mode, value: object) -> None:
    base = replace(PLAIN, covers=COVERED, ubatches=2, afd=ATTENTION if mode is Mode.AFD else None)
    for field in fields(EngineFacts):
        decision = decide(Settings(mode), replace(base, **{field.name: value}))
        assert decision.reasons
        wanted = {"int": (int,), "bool": (bool,), "str": (str,)}.get(str(field.type).split(" ")[0])
        if wanted and value is not None and (type(value) not in wanted or value == -1):
            assert decision.refused
            typed = value == -1 and wanted == (int,)
            todo = "correct or report it" if typed else "report it"
            assert any(f"facts.{field.name}: {value!r}; {todo}" in why for why in decision.reasons)
    for field in fields(AfdFacts):
        decision = decide(Settings(Mode.AFD), replace(base, afd=replace(ATTENTION, **{field.name: value})))
        assert decision.reasons


@pytest.mark.parametrize("facts", [None, {}, "facts"])
def test_no_facts_at_all_are_a_refusal(facts: EngineFacts) -> None:
    decision = decide(COLOCATED, facts)
    assert decision.refused
    assert "which is no EngineFacts" in decision.line()


def test_facts_of_the_right_type_that_cannot_be_judged_are_a_refusal() -> None:
    decision = decide(COLOCATED, replace(PLAIN, max_num_seqs=0))
    assert decision.refused
    assert "facts of this engine: cannot be judged: " in decision.line()
