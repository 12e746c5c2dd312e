# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Laws of checkpoints: what is kept is what a resume reads, it comes back to the bit, and nothing else is accepted."""

from __future__ import annotations

import hashlib
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_dsv4.compressor import reference
from afd_dsv4.geometry import CompressorKind, ModelGeometry, preset
from afd_dsv4.tail import checkpoint
from afd_dsv4.tail.checkpoint import (
    CheckpointError,
    DamagedCheckpoint,
    ForeignCheckpoint,
    NewerCheckpoint,
    ShortCheckpoint,
    StaleCheckpoint,
    decode,
    encode,
)

Rows = dict[CompressorKind, checkpoint.Float32Array]

SMALL = [
    ModelGeometry("both", 8, 3, (4, 128, 4), head_dim=4, index_head_dim=2, qk_rope_head_dim=2),
    ModelGeometry("C4 alone", 8, 2, (0, 4), head_dim=6, index_head_dim=4, qk_rope_head_dim=2),
    ModelGeometry("C128 alone", 8, 4, (128, 0, 0, 128), head_dim=2, index_head_dim=2, qk_rope_head_dim=2),
]


def some_rows(geometry: ModelGeometry, position: int, drafts: int = 0, seed: int = 0) -> Rows:
    """Rows in which no two values are equal."""
    rng = np.random.default_rng(seed)
    found = {}
    for kind in CompressorKind:
        if geometry.layers_of(kind):
            shape = (
                len(geometry.layers_of(kind)),
                len(checkpoint.tail_rows(kind, position, drafts)),
                geometry.row_bytes(kind) // 4,
            )
            found[kind] = rng.standard_normal(shape, np.float32)
    return found


def read_by(kind: CompressorKind, position: int, row: int) -> str:
    """What a resume at `position` reads of a row, the long way: nothing, the left half, or all of it."""
    window, of = position // kind.ratio, row // kind.ratio
    if row >= position:
        return "nothing"
    if of == window:
        return "all"
    return "left" if kind.overlap and of == window - 1 else "nothing"


@pytest.mark.parametrize("geometry", SMALL, ids=lambda g: g.name)
@pytest.mark.parametrize("drafts", [0, 1, 5])
def test_what_is_kept_is_what_some_resume_reads_and_it_comes_back_to_the_bit(
    geometry: ModelGeometry, drafts: int
) -> None:
    for position in range(270):
        rows = some_rows(geometry, position, drafts)
        data = encode(geometry, position, rows, drafts=drafts, generation=7)
        read = decode(data, geometry, position=position, drafts=drafts, generation=7)
        assert (read.position, read.drafts, read.generation) == (position, drafts, 7)
        kept = 0
        for kind, values in rows.items():
            half = values.shape[2] // 2
            for index, row in enumerate(checkpoint.tail_rows(kind, position, drafts)):
                uses = {read_by(kind, later, row) for later in range(position, position + drafts + 1)}
                want = np.full(values[:, index].shape, np.nan, np.float32)
                if "left" in uses:
                    for part in (0, half):
                        want[:, part : part + half // 2] = values[:, index, part : part + half // 2]
                if "all" in uses:
                    want = values[:, index]
                assert np.array_equal(read.rows[kind][:, index], want, equal_nan=True), (kind, position, row)
                kept += want.size - int(np.isnan(want).sum())
        assert checkpoint.payload_bytes(geometry, position, drafts) == 4 * kept
        assert len(data) - 4 * kept <= 4096


@pytest.mark.parametrize("kind", CompressorKind)
def test_every_value_that_is_kept_decides_a_compressed_row_and_no_other_does(kind: CompressorKind) -> None:
    """NaN in one value is NaN in what is computed from it; so the values that matter are found one by one."""
    spec = reference.PoolSpec(kind.ratio, kind.coff, head_dim=4, rope_head_dim=2)
    for position in {4, 5, 7, 8, 10, 127, 128, 129, 132, 255} if kind.overlap else {1, 127, 128, 130}:
        end = (position // kind.ratio + 2) * kind.ratio
        whole = np.random.default_rng(position).standard_normal((end, spec.row_dim), np.float32)
        windows = range(position // kind.ratio, end // kind.ratio)
        kept = checkpoint.kept(kind, spec.row_dim, position, position)
        matters = np.zeros((len(kept.rows), spec.row_dim), np.bool_)
        for row in kept.rows:
            for value in range(spec.row_dim):
                changed = whole.copy()
                changed[row, value] = np.nan
                matters[row - kept.rows.start, value] = np.isnan(
                    reference.pooled_windows(changed, 0, windows, spec)
                ).any()
        assert np.array_equal(np.flatnonzero(matters), kept.cells), position


@pytest.mark.parametrize(("name", "size"), [("flash", 430_080), ("pro", 614_400)])
def test_at_aligned_positions_the_payload_has_the_published_size(name: str, size: int) -> None:
    geometry = preset(name)
    assert {checkpoint.payload_bytes(geometry, 128 * at) for at in (1, 2, 100, 8191)} == {size}
    data = encode(geometry, 128, some_rows(geometry, 128))
    assert size < len(data) <= size + 4096


def test_the_values_that_are_not_kept_do_not_matter_and_come_back_as_one_nan() -> None:
    geometry = SMALL[0]
    rows = some_rows(geometry, 9)
    other = {kind: given.copy() for kind, given in rows.items()}
    half = geometry.row_bytes(CompressorKind.C4) // 8
    other[CompressorKind.C4][:, :4, half // 2 : half] = 0  # right halves of a complete window
    data = encode(geometry, 9, rows)
    assert encode(geometry, 9, other) == data
    read = decode(data, geometry, position=9).rows[CompressorKind.C4]
    assert set(read[:, :4, half // 2 : half].view(np.uint32).ravel().tolist()) == {0x7FCAFD04}


def refused(data: bytes, geometry: ModelGeometry, position: int, **asked: int) -> type[CheckpointError]:
    with pytest.raises(CheckpointError) as error:
        decode(data, geometry, position=position, **asked)
    return type(error.value)


@settings(max_examples=30)
@given(st.sampled_from(SMALL), st.integers(0, 300), st.integers(0, 3), st.data())
def test_a_flipped_byte_anywhere_is_damage(
    geometry: ModelGeometry, position: int, drafts: int, data: st.DataObject
) -> None:
    written = encode(geometry, position, some_rows(geometry, position, drafts), drafts=drafts)
    for _ in range(40):
        at = data.draw(st.integers(0, len(written) - 1))
        flip = data.draw(st.integers(1, 255))
        flipped = written[:at] + bytes([written[at] ^ flip]) + written[at + 1 :]
        assert refused(flipped, geometry, position, drafts=drafts) is DamagedCheckpoint


def test_each_single_byte_of_a_checkpoint_flipped_is_damage() -> None:
    geometry = SMALL[1]
    written = encode(geometry, 6, some_rows(geometry, 6))
    for at in range(len(written)):
        for flip in (0x01, 0x80, 0xFF):
            flipped = written[:at] + bytes([written[at] ^ flip]) + written[at + 1 :]
            assert refused(flipped, geometry, 6) is DamagedCheckpoint, at


@pytest.mark.parametrize("geometry", SMALL, ids=lambda g: g.name)
def test_a_checkpoint_cut_anywhere_is_short_and_one_with_more_behind_it_damaged(geometry: ModelGeometry) -> None:
    written = encode(geometry, 6, some_rows(geometry, 6))
    for size in range(len(written)):
        assert refused(written[:size], geometry, 6) is ShortCheckpoint, size
    assert refused(written + b"\0", geometry, 6) is DamagedCheckpoint


@settings(max_examples=60)
@given(st.binary(max_size=600))
def test_other_bytes_are_foreign(data: bytes) -> None:
    if data[:8] != checkpoint.MAGIC[: len(data)]:
        assert refused(data, SMALL[0], 6) is ForeignCheckpoint


def test_a_checkpoint_of_another_geometry_is_foreign_whatever_differs() -> None:
    mine = SMALL[0]
    written = encode(mine, 6, some_rows(mine, 6))
    sizes = {"head_dim": 4, "index_head_dim": 2, "qk_rope_head_dim": 2}
    for ratios, changed in (
        ((4, 4, 128), {}),  # the same compressors in other layers
        ((4, 128, 4), {"head_dim": 6}),
        ((4, 128, 4), {"index_head_dim": 3}),
        ((4, 128, 4, 4), {}),
        ((0, 4, 128, 4), {}),
    ):
        other = ModelGeometry("both", 8, len(ratios), ratios, **{**sizes, **changed})
        assert refused(written, other, 6) is ForeignCheckpoint, (ratios, changed)
    named = ModelGeometry("another name", 16, 3, (4, 128, 4), **sizes)  # a name and a hidden size change no tail
    assert decode(written, named, position=6).position == 6


def test_a_checkpoint_of_another_position_draft_count_or_generation_is_stale() -> None:
    geometry = SMALL[0]
    written = encode(geometry, 6, some_rows(geometry, 6, 1), drafts=1, generation=3)
    assert refused(written, geometry, 7, drafts=1) is StaleCheckpoint
    assert refused(written, geometry, 6) is StaleCheckpoint
    assert refused(written, geometry, 6, drafts=1, generation=4) is StaleCheckpoint
    assert decode(written, geometry, position=6, drafts=1, generation=3).generation == 3


def test_a_checkpoint_of_a_later_version_says_so_whatever_else_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = SMALL[0]
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "VERSION", 2)
        written = encode(geometry, 6, some_rows(geometry, 6))
    assert refused(written, geometry, 6) is NewerCheckpoint
    assert refused(written[:100] + b"anything", geometry, 6) is NewerCheckpoint  # its header may be another one


def test_what_is_to_be_written_is_looked_at_first() -> None:
    geometry = SMALL[0]
    rows = some_rows(geometry, 6)
    with pytest.raises(ValueError, match=r"c4 rows are float32 \[2, 6, 16\]; a checkpoint at 9 with 0 drafts takes"):
        encode(geometry, 9, rows)
    with pytest.raises(ValueError, match="float64"):
        encode(geometry, 6, {**rows, CompressorKind.C4: rows[CompressorKind.C4].astype(np.float64)})  # type: ignore[dict-item]
    del rows[CompressorKind.C128]
    with pytest.raises(ValueError, match="give those of each"):
        encode(geometry, 6, rows)


@pytest.mark.parametrize("more", [-4, 4096])
def test_a_payload_of_another_size_is_foreign_even_with_every_checksum_right(more: int) -> None:
    rows = some_rows(SMALL[0], 5)
    right = checkpoint.payload_bytes(SMALL[0], 5)
    data = encode(SMALL[0], 5, rows, generation=1)
    head = len(data) - right
    body = data[head:][:more] if more < 0 else data[head:] + bytes(more)
    prefix = checkpoint._PREFIX.size
    *fields, size, _ = checkpoint._PREFIX.unpack(data[:prefix])
    first = checkpoint._PREFIX.pack(*fields, size, len(body))
    rest = data[prefix + checkpoint._CRC.size : head - 2 * checkpoint._DIGEST]
    whole = first + checkpoint._CRC.pack(zlib.crc32(first)) + rest + hashlib.sha256(body).digest()
    crafted = whole + hashlib.sha256(whole).digest() + body
    assert decode(data, SMALL[0], position=5).position == 5
    with pytest.raises(ForeignCheckpoint, match=f"keep {right} bytes has {right + more} of payload"):
        decode(crafted, SMALL[0], position=5)
