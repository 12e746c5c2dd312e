# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""vllm-project/vllm-metal#479: six requests wait for capacity at 0 % usage, for an hour, and nothing says why.

Symptom: `num_requests_waiting_by_reason{reason="capacity"}` is 6, nothing runs, `kv_cache_usage_perc` is 0.
Here: the doctor reads those numbers from the metrics page and says that the queue looks stuck, and what a second page
must show to prove it; beside a log in which nothing was computed, that it is stuck and nobody will free anything. The
server of the report has another model, whose blocks are not counted; that is said, too. The words of
`plan` about such a request are in tests/unit/test_admission.py:
`test_the_words_about_a_waiting_request_name_need_free_share_and_ways_out`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from afd_dsv4.doctor import metrics, queue
from afd_dsv4.doctor.facts import Engine, Finding, Server, first_known

MODEL = "mlx-community/Qwen3.6-27B-5bit"
PAGE = """
vllm:num_requests_running{engine="0",model_name="MODEL"} 0.0
vllm:num_requests_waiting{engine="0",model_name="MODEL"} 6.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="MODEL",reason="capacity"} 6.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="MODEL",reason="deferred"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="MODEL"} 0.0
vllm:cache_config_info{engine="0",kv_cache_max_concurrency="1.0",num_gpu_blocks="118",kv_cache_size_tokens="90000"} 1.0
""".replace("MODEL", MODEL)


def found_in(page: str) -> list[Finding]:
    return list(queue.findings(None, metrics.server(metrics.parse(page, "page"))))


def test_one_page_is_said_to_look_stuck_and_what_a_second_one_must_show_is_named() -> None:
    (found,) = found_in(PAGE)
    assert found.code == "looks-stuck"
    assert "6 requests waiting for capacity, none running, 0 % of the KV cache in use" in found.title
    assert found.why[0].startswith("Nobody runs, so all 117 blocks are free")
    assert "take a second page 10 s later" in found.remedies[0]
    assert f"{MODEL} is not called so" in found.why[-1]
    assert "vllm-project/vllm-metal#479" in found.issues
    assert found.numbers == {"engines": {"0": 6}, "free_blocks": 117}


def test_beside_a_log_that_agrees_it_is_stuck() -> None:
    page = metrics.server(metrics.parse(PAGE, "page"))
    log = Server(engines=(Engine("0", 0, 6, 0, 0.0, prompt_throughput=0.0, generation_throughput=0.0),))
    (found,) = queue.findings(None, first_known([("metrics", page), ("log", log)]))
    assert found.code == "stuck-queue"
    assert found.why[0].startswith("Nobody runs and nothing was computed, so all 117 blocks are free")


def test_a_page_that_was_abbreviated_by_hand_is_read_as_far_as_it_goes() -> None:
    """As people paste it: labels replaced by three dots."""
    pasted = PAGE.replace(f'engine="0",model_name="{MODEL}",reason', "...,reason").replace('engine="0",kv', "...,kv")
    assert pasted.count("{...,") == 3
    (found,) = found_in(pasted)
    assert (found.code, found.numbers["free_blocks"]) == ("looks-stuck", None)


@pytest.mark.parametrize("change", [{"running": 1}, {"usage": 0.5}, {"waiting": 0}, {"deferred": 6}])
def test_with_any_other_number_it_is_not(change: dict[str, float]) -> None:
    """Negative control."""
    server = metrics.server(metrics.parse(PAGE, "page"))
    (engine,) = server.engines
    assert engine.looks_stuck
    other = replace(server, engines=(replace(engine, **change),))
    assert {found.code for found in queue.findings(None, other)}.isdisjoint({"stuck-queue", "looks-stuck"})
