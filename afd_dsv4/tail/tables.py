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
    """Logical pages of one chunk and ratio.

    Attributes:
        history: pages of the rows that the launch reads.
        tail: pages of the rows that a later forward may read.
        first_column: logical page at column 0 of the state table.
        start: re-based start.
    """

    history: range
    tail: range
    first_column: int
    start: int

    @property
    def fresh(self) -> range:
        """Tail pages that the launch does not read: they take pages that nobody reads in this launch."""
        return range(max(self.tail.start, self.history.stop), self.tail.stop)

    @property
    def kept(self) -> range:
        """Pages in both: a partial page that is continued in place."""
        return range(self.tail.start, min(self.tail.stop, self.history.stop))

    @property
    def left(self) -> range:
        """History pages that no later forward reads."""
        return range(self.history.start, min(self.history.stop, max(self.tail.start, self.history.start)))


def map_chunk(shape: TailShape, chunk: RequestChunk) -> Mapping:
    """The logical pages that a launch of `chunk` must map."""
    if chunk.drafts > shape.drafts:
        raise ValueError(f"chunk of {chunk.request!r} has {chunk.drafts} drafts; tails are sized for {shape.drafts}")
    base = shape.base(chunk.start)
    history = shape.pages(shape.need(chunk.start))
    tail = shape.pages(shape.live(chunk.low, chunk.end))
    if not tail:
        # An empty tail lies behind everything: then all history is left, nothing is kept.
        tail = range(history.stop, history.stop)
    return Mapping(history=history, tail=tail, first_column=base // shape.page_rows, start=chunk.start - base)


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
