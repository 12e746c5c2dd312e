# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""From chunks to page lists: what one execution's launches map, layer by layer.

A launch of the stock operator writes only rows whose state-table entry is not 0 and reads only rows before its start.
So a table that maps the history of the start and the tail of the end, and nothing else, bounds the state. All layers of
one ratio share the logical picture (which pages are history, which tail) and differ only in physical ids; a `PageList`
therefore holds one set of columns and one id array per layer.

This module says what is mapped where. Which physical page it is, `store.py` decides; whether the result obeys the
operator's rules, `rules.py` checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NewType

import numpy as np
import numpy.typing as npt

from afd_dsv4.tail.rows import TailShape

RequestId = NewType("RequestId", str)
PageId = NewType("PageId", int)

NULL_PAGE = PageId(0)
NO_COLUMN = -1

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RequestChunk:
    """Rows `[start, end)` of one request in one forward; the last `drafts` of them may be taken back.

    The request's next start is in `[end - drafts, end]`, and at least one row stays.
    """

    request: RequestId
    start: int
    end: int
    drafts: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"chunk of {self.request!r}: 0 <= start < end must hold, got [{self.start}, {self.end})")
        if not 0 <= self.drafts < self.end - self.start:
            raise ValueError(
                f"chunk of {self.request!r}: {self.drafts} drafts in {self.tokens} rows; at least one must stay"
            )

    @property
    def tokens(self) -> int:
        """Rows in this chunk."""
        return self.end - self.start

    @property
    def low(self) -> int:
        """The smallest position at which the request may go on."""
        return self.end - self.drafts


@dataclass(frozen=True)
class Mapping:
    """Logical pages of the chunks of one execution and ratio; every field has one entry a chunk.

    Attributes:
        history: first page of the rows that the launch reads, and the one behind the last; int64 [2, requests].
        tail: the same of the rows that a later forward may read.
        first_column: logical page at column 0 of the state table.
        start: re-based start.
    """

    history: Int64Array
    tail: Int64Array
    first_column: Int64Array
    start: Int64Array


def map_chunks(shape: TailShape, chunks: Sequence[RequestChunk]) -> Mapping:
    """The logical pages that a launch of `chunks` must map: `TailShape.need`, `live`, `pages` and `base`, for arrays.

    Raises:
        ValueError: a chunk has more drafts than the tails are sized for.
    """
    rows = [(chunk.start, chunk.end, chunk.drafts) for chunk in chunks]
    start, end, drafts = np.array(rows, np.int64).reshape(-1, 3).T
    if (beyond := drafts > shape.drafts).any():
        chunk = chunks[int(beyond.argmax())]
        raise ValueError(f"chunk of {chunk.request!r} has {chunk.drafts} drafts; tails are sized for {shape.drafts}")
    rows_of, pages_of = shape.ratio, shape.page_rows
    first = np.stack([start, end - drafts])  # the oldest row that is read from the start on, and from the next one
    first = np.maximum(first // rows_of * rows_of - shape.reach, 0)
    last = np.stack([start, end])
    # Without rows: no page of the history; and a tail behind everything, so that all history is left, nothing is kept.
    spans = np.stack([first // pages_of, np.where(first < last, -(-last // pages_of), last // pages_of)])
    history, tail = spans[:, 0], np.where(first[1] < end, spans[:, 1], spans[1, 0])
    base = np.maximum(start - shape.reach, 0) // shape.period * shape.period
    return Mapping(history=history, tail=tail, first_column=base // pages_of, start=start - base)


@dataclass(frozen=True)
class PageList:
    """What the launches of one execution map, for one ratio.

    Attributes:
        shape: windows, pages and layers of the ratio.
        chunks: one per request, in batch order.
        columns: int32 [requests, list_ids], the table column of each id; -1 where the list is padded.
        ids: int32 [layers, requests, list_ids], physical pages; 0 where the list is padded.
        starts: int32 [requests], re-based.
    """

    shape: TailShape
    chunks: tuple[RequestChunk, ...]
    columns: Int32Array
    ids: Int32Array
    starts: Int32Array

    def padded(self, requests: int) -> PageList:
        """The same with rows behind it that map nothing, as a graph captured for `requests` launches it (rule 5)."""
        more = requests - len(self.starts)
        if more < 0:
            raise ValueError(f"a list of {len(self.starts)} requests cannot be padded to {requests}")
        return replace(
            self,
            columns=np.pad(self.columns, ((0, more), (0, 0)), constant_values=NO_COLUMN),
            ids=np.pad(self.ids, ((0, 0), (0, more), (0, 0))),
            starts=np.pad(self.starts, (0, more)),
        )

    def table(self, layer: int, columns: int) -> Int32Array:
        """The state table of one layer as the device builds it: int32 [requests, columns].

        Args:
            layer: index among the layers of this ratio.
            columns: width of the table.
        """
        table = np.zeros((len(self.chunks), columns), np.int32)
        rows, places = np.nonzero(self.columns != NO_COLUMN)
        table[rows, self.columns[rows, places]] = self.ids[layer, rows, places]
        return table
