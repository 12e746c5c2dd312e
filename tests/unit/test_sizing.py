# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The sizing expression against sums written out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from afd_dsv4.geometry import CompressorKind, page_layout, preset
from afd_dsv4.workspace.sizing import size_workspace, tail_shapes

FLASH = preset("flash")
LAYOUT = page_layout("vllm-ascend-0.23.0", 128)


def test_flash_at_block_size_128_written_out() -> None:
    sizes = size_workspace(FLASH, LAYOUT, max_num_seqs=4, max_num_batched_tokens=32768, slots=2)
    c4_page, indexer_page, c128_page = 8 * 8192, 8 * 2048, 32 * 4096
    request = 21 * 2 * (c4_page + indexer_page) + 20 * 4 * c128_page
    assert sizes.tail_bytes_per_request == request == 13_926_400
    assert sizes.tail_bytes == 4 * request + c4_page + indexer_page + c128_page
    assert sizes.spare_bytes == 2 * 4 * (2 * (c4_page + indexer_page) + 4 * c128_page)
    assert sizes.list_bytes == 2 * 4 * (21 * 4 * 4 + 20 * 4 * 8)
    # C4 tables reach row 7 + 4 + 32768, C128 tables row 127 + 32768; one table more than slots, one cell behind each.
    assert sizes.table_bytes == 3 * 4 * ((4 * 4098 + 1) + (4 * 1028 + 1))
    assert sizes.staging_bytes == 2 * (4 * (8 * 4 + 4) + 4 * (8 * 8 + 4)) + 4 * 4
    assert sizes.device_bytes == (
        sizes.tail_bytes + sizes.spare_bytes + sizes.list_bytes + sizes.table_bytes + sizes.staging_bytes
    )


@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("model", ["flash", "pro"])
@pytest.mark.parametrize("drafts", [0, 1, 9])
def test_tails_and_spares_are_the_pages_of_the_pools(model: str, block_size: int, drafts: int) -> None:
    geometry, layout = preset(model), page_layout("vllm-ascend-0.23.0", block_size)
    sizes = size_workspace(geometry, layout, max_num_seqs=3, max_num_batched_tokens=999, drafts=drafts, slots=2)
    shapes = tail_shapes(geometry, layout, drafts)
    pools = sum(
        shapes[kind.ratio].pool_pages(3, 2) * layout.page_rows(kind) * geometry.row_bytes(kind)
        for kind in CompressorKind
    )
    assert sizes.tail_bytes + sizes.spare_bytes == pools


def afd_rows(tokens: int, tile_tokens: int | None, *, seqs: int = 4, drafts: int = 0) -> int:
    """Bytes of the staging rows of one slot."""
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "drafts": drafts}
    return size_workspace(FLASH, LAYOUT, **limits, slots=3, tile_tokens=tile_tokens).rows_bytes // 3


def test_the_stock_executor_has_no_staging_rows_and_the_afd_executor_adds_them_and_what_kernels_find() -> None:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32768, "slots": 3}
    stock, afd = (size_workspace(FLASH, LAYOUT, **limits, tile_tokens=tile) for tile in (None, 2048))
    assert stock.rows_bytes == 0
    # On the host, twice what kernels found in both areas of each slot.
    assert replace(afd, rows_bytes=0, host_bytes=afd.host_bytes - 3 * 2 * 2 * 8192) == stock
    assert afd.device_bytes - stock.device_bytes == afd.rows_bytes == 3 * (afd.slot_bytes - stock.slot_bytes) > 0


def test_whole_chunks_stage_all_rows_of_a_layer_and_tiles_stage_as_many_at_any_chunk() -> None:
    # C128's rows of 4,096 bytes, and 2,048 a window, lie where C4's do; each area has the faults of its kernels.
    whole = 32768 * (8192 + 2048) + 2 * 8192
    assert afd_rows(32768, 32768) == afd_rows(32768, 1 << 20) == whole == (320 << 20) + 16384
    tile = (2048 + 4) * (8192 + 2048) + 2 * 8192  # and the 4 rows of the window before
    assert [afd_rows(tokens, 2048) for tokens in (2049, 32768, 1 << 20)] == [tile] * 3
    assert tile < 24 << 20


def test_a_model_of_c128_alone_stages_its_rows_and_one_more_for_each_window_and_request() -> None:
    one = replace(FLASH, num_layers=1, compress_ratios=(128,))
    sizes = size_workspace(one, LAYOUT, max_num_seqs=3, max_num_batched_tokens=4096, slots=1, tile_tokens=256)
    assert sizes.rows_bytes == 256 * 4096 + 8192 + (256 // 128 + 3) * 2048
    sizes = size_workspace(one, LAYOUT, max_num_seqs=500, max_num_batched_tokens=400, slots=1, tile_tokens=256)
    assert sizes.rows_bytes == 400 * 4096 + 8192 + 400 * 2048


def test_a_batch_of_decodes_with_drafts_is_one_tile() -> None:
    assert afd_rows(32768, 128, seqs=100, drafts=2) == (300 + 4) * 10240 + 16384
    assert afd_rows(256, 128, seqs=100, drafts=2) == 256 * 10240 + 16384  # a batch cannot be larger than that


@pytest.mark.parametrize("times", [2, 4])
def test_spares_and_staging_do_not_grow_with_layers_nor_tails_with_the_chunk(times: int) -> None:
    def sizes(layers: int, chunk: int):
        ratios = FLASH.compress_ratios * layers
        model = replace(FLASH, num_layers=len(ratios), compress_ratios=ratios)
        return size_workspace(model, LAYOUT, max_num_seqs=4, max_num_batched_tokens=8192 * chunk)

    one, layers, chunk = sizes(1, 1), sizes(times, 1), sizes(1, times)
    assert (layers.spare_bytes, layers.staging_bytes) == (one.spare_bytes, one.staging_bytes)
    assert layers.tail_bytes_per_request == times * one.tail_bytes_per_request
    assert replace(chunk, table_bytes=0) == replace(one, table_bytes=0)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "slots"])
def test_a_limit_below_one_is_refused_by_name(name: str) -> None:
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "slots": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        size_workspace(FLASH, LAYOUT, **limits)
