# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The tail of one request as versioned bytes: everything a compressor needs to go on, and nothing else.

Problem: compressed KV alone does not resume a request; who stores or sends it (a prefix cache, a transfer from prefill
to decode, host offload) needs the open windows' rows too, and a wrong, cut or old one gives plausible wrong numbers.
Way: a header that says what it is of (geometry, position, generation) and proves itself and the payload; then exactly
the values that some resume reads, little-endian float32, layer by layer. Of a window that is complete only the left
half of each row is read again (`compressor/reference.py:pooled_windows`), so only that half is kept; what is not kept
comes back as NaN, so that whoever reads it all the same gets no plausible number. `docs/checkpoint.md` has the format.
Not here: pages and devices (`compressor/tails.py`), compressed KV, sliding-window KV, and which weights made the rows.
It imports NumPy only.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from afd_dsv4.geometry import CompressorKind, ModelGeometry
from afd_dsv4.tail.rows import TailShape

Float32Array = npt.NDArray[np.float32]

MAGIC: Final = b"\x89AFDTAIL"
VERSION: Final = 1
MAX_HEADER_BYTES: Final = 4096
#: What stands in for values that were not kept: a quiet NaN that no arithmetic makes.
POISON_BITS: Final = 0x7FCAFD04
_LITTLE: Final = ord("<")
_FLOAT32: Final = 1
_CODES: Final = {CompressorKind.C4: 1, CompressorKind.C4_INDEXER: 2, CompressorKind.C128: 3}
# Of every version, so that an older reader can name a newer one: magic, version, byte order, nothing, bytes of the
# header, bytes of the payload; then CRC-32 of these.
_PREFIX: Final = struct.Struct("<8sHBBIQ")
_CRC: Final = struct.Struct("<I")
_FIXED: Final = struct.Struct("<32sQIIQ")  # geometry, position, drafts, tables, generation
_TABLE: Final = struct.Struct("<BBHIIIIQ")  # kind, element type, ratio, layers, values a row, rows, whole rows, first
_DIGEST: Final = hashlib.sha256().digest_size


class CheckpointError(ValueError):
    """Bytes that must not become a tail. Nothing was changed."""


class DamagedCheckpoint(CheckpointError):
    """Not the bytes that were written."""


class ShortCheckpoint(CheckpointError):
    """The end is missing."""


class ForeignCheckpoint(CheckpointError):
    """No checkpoint, or one of another geometry or layout."""


class StaleCheckpoint(CheckpointError):
    """A whole checkpoint, of another position or generation than the one asked for."""


class NewerCheckpoint(CheckpointError):
    """Written by a later version of this format."""


@dataclass(frozen=True)
class Kept:
    """Which values of one compressor a resume anywhere in `[low, high]` reads.

    Attributes:
        rows: the tail (`TailShape.live`).
        whole: bool [rows], all values of the row; of the others the left halves, or nothing without overlap.
        cells: where the values lie in the rows of one layer: int64 [values].
    """

    rows: range
    whole: npt.NDArray[np.bool_]
    cells: npt.NDArray[np.int64]


def kept(kind: CompressorKind, row_values: int, low: int, high: int) -> Kept:
    """The values that a checkpoint holds.

    A row's right half goes into its own window, its left half into the next one. So once a window is complete, which
    its last row makes it, nobody reads a right half of it again.

    Args:
        kind: the compressor.
        row_values: float32 values of one row, `[kv | score + APE]`.
        low: the smallest position at which the request may go on.
        high: the largest; more than `low` while the accept length of drafts is open.
    """
    # Windows alone decide which rows are read; pages and layers do not matter here.
    rows = TailShape(kind.ratio, kind.overlap, page_rows=2, layers=0).live(low, high)
    at = np.arange(rows.start, rows.stop, dtype=np.int64)
    whole = (at >= low // kind.ratio * kind.ratio) & ((at + 1) % kind.ratio != 0)
    value = np.arange(row_values, dtype=np.int64)
    # Of kv, and of the score; without overlap a complete window is not read at all.
    left = value % (row_values // 2) < (row_values // 4 if kind.overlap else 0)
    place = np.arange(len(at), dtype=np.int64)[:, None] * row_values + value
    return Kept(rows, whole, place[whole[:, None] | left])


def geometry_hash(geometry: ModelGeometry) -> bytes:
    """32 bytes that differ for models whose tails differ: compressors by layer, width and meaning of their rows.

    Neither the weights nor the pages are in it: a checkpoint may be restored into pages of another size.
    """
    lines = [f"kv|score+APE left|right, layer by layer, version {VERSION}"]
    for each in geometry.compressors:
        kind = each.kind
        lines.append(f"{each.layer} {kind.value} ratio {kind.ratio} overlap {kind.overlap} values {each.state_dim} <f4")
    return hashlib.sha256("\n".join(lines).encode()).digest()


@dataclass(frozen=True)
class Checkpoint:
    """A tail, read back.

    Attributes:
        position: the smallest position at which the request may go on.
        drafts: by how much it may still be larger; 0 where the accept length was known.
        generation: the forward that had written the tail last, as its worker counted; a restore is one, a save is not.
        rows: of each compressor the model has, float32 [layers, rows, values]; NaN where nothing was kept.
    """

    position: int
    drafts: int
    generation: int
    rows: dict[CompressorKind, Float32Array]


def tail_rows(kind: CompressorKind, position: int, drafts: int = 0) -> range:
    """The rows that `Checkpoint.rows` has of a compressor."""
    return TailShape(kind.ratio, kind.overlap, page_rows=2, layers=0).live(position, position + drafts)


def encode(
    geometry: ModelGeometry,
    position: int,
    rows: Mapping[CompressorKind, Float32Array],
    *,
    drafts: int = 0,
    generation: int = 0,
) -> bytes:
    """Write a checkpoint.

    Args:
        geometry: the model.
        position: the smallest position at which the request may go on.
        rows: see `Checkpoint`; values that nobody reads are not looked at.
        drafts: see `Checkpoint`.
        generation: see `Checkpoint`.

    Raises:
        ValueError: rows that are missing, too many or of another shape or type.
    """
    kinds = _kinds(geometry)
    if set(rows) != set(kinds):
        raise ValueError(
            f"rows of {[k.value for k in rows]} for a model with {[k.value for k in kinds]}; give those of each"
        )
    tables, payload = [], []
    for kind in kinds:
        values, layers = geometry.row_bytes(kind) // 4, len(geometry.layers_of(kind))
        keep = kept(kind, values, position, position + drafts)
        given = rows[kind]
        if given.shape != (layers, len(keep.rows), values) or given.dtype != np.float32:
            raise ValueError(
                f"{kind.value} rows are {given.dtype} {list(given.shape)}; a checkpoint at {position} with {drafts} "
                f"drafts takes float32 {[layers, len(keep.rows), values]}"
            )
        tables.append(_table(kind, layers, values, keep))
        payload.append(given.reshape(layers, -1)[:, keep.cells].astype("<f4", copy=False).tobytes())
    body = b"".join(payload)
    fixed = _FIXED.pack(geometry_hash(geometry), position, drafts, len(tables), generation)
    head = fixed + b"".join(tables) + hashlib.sha256(body).digest()
    size = _PREFIX.size + _CRC.size + len(head) + _DIGEST
    assert size <= MAX_HEADER_BYTES
    prefix = _PREFIX.pack(MAGIC, VERSION, _LITTLE, 0, size, len(body))
    head = prefix + _CRC.pack(zlib.crc32(prefix)) + head
    return head + hashlib.sha256(head).digest() + body


def decode(
    data: bytes, geometry: ModelGeometry, *, position: int, drafts: int = 0, generation: int | None = None
) -> Checkpoint:
    """Read a checkpoint, and refuse whatever is not exactly what was asked for.

    Args:
        data: all of it.
        geometry: the model that goes on.
        position: where it goes on: what the checkpoint was written for.
        drafts: see `Checkpoint`.
        generation: what must have written it; None for any.

    Raises:
        ShortCheckpoint: the end is missing.
        DamagedCheckpoint: a byte is not what was written, or there are too many.
        NewerCheckpoint: written by a later version.
        ForeignCheckpoint: no checkpoint, or one of another model or layout.
        StaleCheckpoint: of another position, draft count or generation.
    """
    header, size = _header(data)
    geometry_found, position_found, drafts_found, count, generation_found = _FIXED.unpack_from(
        header, _PREFIX.size + _CRC.size
    )
    if geometry_found != geometry_hash(geometry):
        raise ForeignCheckpoint(
            f"a checkpoint of geometry {geometry_found.hex()[:16]} for {geometry.name!r}, which is "
            f"{geometry_hash(geometry).hex()[:16]}; restore it into the model that wrote it"
        )
    found = (position_found, drafts_found, generation_found)
    asked = (position, drafts, generation_found if generation is None else generation)
    if found != asked:
        raise StaleCheckpoint(
            f"a checkpoint of position, drafts and generation {found}, where {asked} was asked for; find the right "
            f"one, or compute the request anew"
        )
    kinds = _kinds(geometry)
    keeps = {kind: kept(kind, geometry.row_bytes(kind) // 4, position, position + drafts) for kind in kinds}
    tables = b"".join(_table(k, len(geometry.layers_of(k)), geometry.row_bytes(k) // 4, keeps[k]) for k in kinds)
    written = len(header) - _PREFIX.size - _CRC.size - _FIXED.size - 2 * _DIGEST
    begin = _PREFIX.size + _CRC.size + _FIXED.size
    if count != len(kinds) or header[begin : begin + written] != tables:
        raise ForeignCheckpoint("a checkpoint whose tables keep other values than this version does; write it anew")
    if size != (right := payload_bytes(geometry, position, drafts)):
        raise ForeignCheckpoint(f"a checkpoint whose tables keep {right} bytes has {size} of payload; write it anew")
    body = memoryview(data)[len(header) : len(header) + size]
    if hashlib.sha256(body).digest() != header[-2 * _DIGEST : -_DIGEST]:
        raise DamagedCheckpoint("the payload of a checkpoint is not what was written; fetch it again")
    rows, at = {}, 0
    for kind in kinds:
        keep, layers, values = keeps[kind], len(geometry.layers_of(kind)), geometry.row_bytes(kind) // 4
        flat = np.full((layers, len(keep.rows) * values), POISON_BITS, np.uint32)
        end = at + 4 * layers * len(keep.cells)
        flat[:, keep.cells] = np.frombuffer(body[at:end], "<u4").reshape(layers, -1)
        rows[kind] = flat.view(np.float32).reshape(layers, len(keep.rows), values)
        at = end
    return Checkpoint(position, drafts, generation_found, rows)


def payload_bytes(geometry: ModelGeometry, position: int, drafts: int = 0) -> int:
    """Bytes behind the header."""
    return sum(
        4
        * len(geometry.layers_of(kind))
        * len(kept(kind, geometry.row_bytes(kind) // 4, position, position + drafts).cells)
        for kind in _kinds(geometry)
    )


def _header(data: bytes) -> tuple[bytes, int]:
    """The header, proved, and the bytes of the payload, which are there and nothing behind them."""
    ours = data[: len(MAGIC)] == MAGIC[: len(data)]
    foreign = ForeignCheckpoint(f"no checkpoint: it begins with {bytes(data[:8])!r} and not with {MAGIC!r}")
    if len(data) < _PREFIX.size + _CRC.size:
        raise ShortCheckpoint(f"{len(data)} bytes, no whole header of a checkpoint; fetch all") if ours else foreign
    prefix = MAGIC + data[len(MAGIC) : _PREFIX.size]
    right = _CRC.unpack_from(data, _PREFIX.size) == (zlib.crc32(prefix),)
    if not ours and not right:
        raise foreign
    if not ours or not right:
        raise DamagedCheckpoint("the first bytes of a checkpoint are not what was written; fetch it again")
    _, version, order, _, size, payload = _PREFIX.unpack(prefix)
    if version > VERSION:
        raise NewerCheckpoint(f"a checkpoint of version {version}, and this reads {VERSION}; upgrade the reader")
    least = _PREFIX.size + _CRC.size + _FIXED.size + 2 * _DIGEST
    if version < 1 or order != _LITTLE or not least <= size <= MAX_HEADER_BYTES:
        raise ForeignCheckpoint(
            f"a checkpoint of version {version}, byte order {chr(order)!r} and {size} bytes of header; this reads "
            f"version {VERSION}, '<', at most {MAX_HEADER_BYTES}"
        )
    if len(data) < size + payload:
        raise ShortCheckpoint(f"{len(data)} bytes of a checkpoint of {size + payload}; fetch all of it")
    header = data[:size]
    if hashlib.sha256(header[:-_DIGEST]).digest() != header[-_DIGEST:]:
        raise DamagedCheckpoint("the header of a checkpoint is not what was written; fetch it again")
    if len(data) > size + payload:
        raise DamagedCheckpoint(f"{len(data)} bytes where a checkpoint of {size + payload} ends; give it alone")
    return header, payload


def _kinds(geometry: ModelGeometry) -> tuple[CompressorKind, ...]:
    return tuple(kind for kind in CompressorKind if geometry.layers_of(kind))


def _table(kind: CompressorKind, layers: int, values: int, keep: Kept) -> bytes:
    whole = int(keep.whole.sum())
    return _TABLE.pack(_CODES[kind], _FLOAT32, kind.ratio, layers, values, len(keep.rows), whole, keep.rows.start)
