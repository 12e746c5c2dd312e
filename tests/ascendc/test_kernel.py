# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A whole kernel on the emulation: queues, metadata, rows split over blocks. The NumPy side works row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from afd_dsv4.compressor import reference
from tests.ascendc import emulation
from tests.ascendc.emulation import FORWARD, REVERSE, SHUFFLED

Array = NDArray[Any]
CAPACITY = 40


@pytest.fixture(autouse=True)
def options_as_they_were() -> Iterator[None]:
    yield
    for option in (b"order", b"seed", b"fuzz", b"saturate"):
        assert emulation.library().afd_dsv4_emulation_set(option, 0) == 0


def launch(rows: Array, offsets: Array, scale: Array, out: Array, blocks: int) -> int:
    pointers = (array.ctypes.data for array in (rows, offsets, scale, out))
    return int(emulation.library().ascendc_softmax(blocks, len(rows), len(scale), *pointers))


def expected(rows: Array, lengths: Sequence[int], scale: Array) -> Array:
    out = np.full((len(rows), 64), 0x4242, np.uint16)
    row = 0
    for request, length in enumerate(lengths):
        for _ in range(length):
            x = rows[row] * scale[request]
            weights = reference.exp32(x - x.max())
            out[row] = reference.bfloat16_bits(weights / reference.row_sum(weights))
            row += 1
    return out


def world(lengths: Sequence[int], capacity: int = CAPACITY) -> tuple[Array, Array, Array, Array]:
    rng = np.random.default_rng(len(lengths))
    rows = rng.standard_normal((capacity, 64)).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    scale = rng.random(len(lengths)).astype(np.float32)
    return rows, offsets, scale, np.full((capacity, 64), 0x4242, np.uint16)


@pytest.mark.parametrize("order", [FORWARD, REVERSE, SHUFFLED])
@pytest.mark.parametrize("blocks", [1, 3, 48])
def test_any_number_and_order_of_blocks_gives_the_same_bits(blocks: int, order: int) -> None:
    lengths = [7, 0, 1, 20, 0]
    rows, offsets, scale, out = world(lengths)
    emulation.library().afd_dsv4_emulation_set(b"order", order)
    emulation.library().afd_dsv4_emulation_set(b"seed", 5)
    assert launch(rows, offsets, scale, out, blocks) == 0
    np.testing.assert_array_equal(out, expected(rows, lengths, scale))


def test_a_replay_sees_only_the_metadata_that_changed() -> None:
    rows, offsets, scale, out = world([7, 9, 4])
    assert launch(rows, offsets, scale, out, 3) == 0
    for lengths in ([0, 33, 7], [1, 1, 1], [0, 0, 0]):
        offsets[1:] = np.cumsum(lengths)
        out[...] = 0x4242
        assert launch(rows, offsets, scale, out, 3) == 0
        np.testing.assert_array_equal(out, expected(rows, lengths, scale))


def test_metadata_that_leads_outside_ends_the_launch_with_a_name_and_writes_nothing_there() -> None:
    rows, offsets, scale, _ = world([7, 9, 4])
    offsets[3] = CAPACITY + 1
    larger = np.full((CAPACITY + 8, 64), 0x4242, np.uint16)
    assert launch(rows, offsets, scale, larger[:CAPACITY], 2) == 101
    message = emulation.library().ascendc_softmax_error().decode()
    assert "GM out of bounds" in message
    assert "of rows [10240 bytes]" in message
    assert "softmax.cpp:" in message
    np.testing.assert_array_equal(larger[CAPACITY:], 0x4242)


def test_fuzz_changes_few_bits_of_a_kernel_that_uses_exp() -> None:
    lengths = [3000]  # an ulp of fp32 shows in bfloat16 once in about 2**16 values
    rows, offsets, scale, out = world(lengths, 3000)
    emulation.library().afd_dsv4_emulation_set(b"fuzz", 1)
    assert launch(rows, offsets, scale, out, 3) == 0
    exact = expected(rows, lengths, scale)
    assert np.any(out != exact)
    assert np.all(np.abs(out.astype(int) - exact.astype(int)) <= 1)


def test_the_counters_say_what_was_done() -> None:
    library = emulation.library()
    rows, offsets, scale, out = world([5, 6])
    library.afd_dsv4_emulation_reset_counters()
    assert launch(rows, offsets, scale, out, 4) == 0
    assert launch(rows, offsets, scale, out, 1) == 0
    count = {name: library.afd_dsv4_emulation_counter(name) for name in
             library.afd_dsv4_emulation_counter_names().split(b",")}  # fmt: skip
    assert count[b"launches"] == 2
    assert count[b"blocks"] == 5
    assert count[b"bytes.mte2"] == 22 * 256
    assert count[b"bytes.mte3"] == 22 * 128
    assert count[b"transfers.mte2"] == count[b"transfers.mte3"] == 22
    assert (count[b"instructions.Exp"], count[b"repeats.Exp"], count[b"elements.Exp"]) == (22, 22, 22 * 64)
    assert count[b"instructions.Brcb"] == 44
    assert count[b"instructions.Add"] == 0
    assert count[b"ub_bytes"] == 2 * 256 + 2 * 128 + 3 * 256
    assert library.afd_dsv4_emulation_counter(b"no such counter") == -1
    assert library.afd_dsv4_emulation_set(b"no such option", 1) != 0
    assert library.afd_dsv4_emulation_set(b"order", 3) != 0


def test_threads_may_launch_at_the_same_time() -> None:
    lengths = [20, 20]
    worlds = [world(lengths) for _ in range(8)]
    emulation.library()
    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(lambda arrays: launch(*arrays, blocks=4), worlds))
    assert outcomes == [0] * len(worlds)
    for rows, _, scale, out in worlds:
        np.testing.assert_array_equal(out, expected(rows, lengths, scale))
