# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The loads of the CUDA evidence on the software NPU's streams, small, and on a real device.

The software NPU computes most torch operators before it returns, so a missing wait shows in the trace here, and in rows
on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from afd_dsv4.evidence.cuda import staging
from afd_dsv4.evidence.cuda.replays import WIPED, replay_steps
from afd_dsv4.evidence.cuda.staging import Load, Reuse
from afd_dsv4.geometry import page_layout, preset

SMALL = replace(
    preset("flash"),
    name="small",
    num_layers=3,
    compress_ratios=(0, 4, 128),
    hidden_size=16,
    head_dim=64,
    index_head_dim=64,
)


@pytest.fixture(scope="module")
def load() -> Load:
    return Load(SMALL, 1024, "npu", 0)


@pytest.fixture
def small_hidden_size() -> Iterator[None]:
    torch.ops.softnpu.waive("compressor.hidden", True)
    yield
    torch.ops.softnpu.waive("compressor.hidden", False)


@pytest.mark.npu
@pytest.mark.parametrize("way", list(Reuse))
def test_every_way_of_reuse_gives_the_same_rows_and_slots_are_in_order(load: Load, way: Reuse) -> None:
    found = staging.rounds(load, staging.truth(load), way, 1, 0, forwards=2)
    assert [(one.bytes, one.unordered) for one in found] == [(0, 0)]


@pytest.mark.npu
@pytest.mark.parametrize("way", staging.LEASED)
def test_slots_without_waits_are_seen_to_be_out_of_order(load: Load, way: Reuse) -> None:
    (found,) = staging.rounds(load, staging.truth(load), way, 1, 0, ordered=False)
    # Two forwards of two layers in two uBatches: each reader, and each writer but the slots' first, comes unordered.
    assert found.unordered >= 2 * 2 * 2


@pytest.mark.npu
def test_a_byte_that_is_not_as_expected_is_counted(load: Load) -> None:
    expected = staging.truth(load)
    planted = expected.clone()
    planted.view(torch.int8)[[0, 1, 1024]] += 1  # the first row, and another
    assert staging.different(load, planted) == (2, 3)
    stress = staging.stress(load, planted, 10, 0, block=2)
    assert stress.wrong == 3 * stress.forwards
    assert (stress.forwards, stress.reuses, stress.unordered) == (4, 14, 0)


@pytest.mark.npu
def test_a_batch_too_short_for_its_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="512 tokens are too few"):
        Load(SMALL, 512, "npu", 0)


@pytest.mark.npu
@pytest.mark.usefixtures("small_hidden_size")
def test_replays_between_eager_executions_give_natives_rows_and_wiped_lists_do_not() -> None:
    geometry = replace(preset("flash"), name="small", num_layers=2, compress_ratios=(4, 128), hidden_size=16)
    layout = page_layout("vllm-ascend-0.23.0", 128)
    found = replay_steps(geometry, layout, torch.device("npu"), replays=6, eager=3, seed=1)
    assert (found.replays, found.eager) == (6, 2 + 3)
    assert found.rows >= 300
    assert (found.different, found.unordered, found.host_waits) == (0, 0, 0)
    assert found.control >= WIPED


@pytest.mark.device
def test_on_a_device_slots_give_the_rows_of_private_buffers_and_a_shared_one_does_not() -> None:
    load = Load(replace(preset("flash"), hidden_size=1024), 16384, "cuda", 0)
    expected = staging.truth(load)
    assert [one.bytes for one in staging.rounds(load, expected, Reuse.SLOTS, 3, 0, lag=True)] == [0, 0, 0]
    assert all(one.rows for one in staging.rounds(load, expected, Reuse.UNORDERED, 3, 0, lag=True))


@pytest.mark.device
def test_on_a_device_an_operation_that_makes_the_host_wait_is_counted() -> None:
    with staging.counted_synchronisations() as found:
        torch.ones(3, device="cuda").sum().item()
    assert found.count > 0
