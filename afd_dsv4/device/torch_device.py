# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Streams and events of torch.npu and torch.cuda behind `device/api.py`.

Both modules have the same classes with the same meaning; this only picks the module by device type.
"""

from __future__ import annotations

from typing import Any

import torch

from afd_dsv4.device.api import StreamId


class TorchDevice:
    """One accelerator.

    Args:
        device: "npu", "npu:0", "cuda", ...
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._module: Any = torch.get_device_module(self.device)
        # A device without an index is the one that is current now. Left to the module, it is looked for in every call.
        self._index = self._module.current_device() if self.device.index is None else self.device.index
        # torch.npu takes longer to say which stream is current than all else of a launch. torch.accelerator knows, too,
        # but has no streams that torch.npu's events take; what is underneath it saves another half.
        accelerator = torch.accelerator.current_accelerator()
        self._known = accelerator is not None and accelerator.type == self.device.type
        self._current: Any = getattr(torch._C, "_accelerator_getStream", torch.accelerator.current_stream)
        self._streams: dict[int, Any] = {}

    def stream_id(self, stream: Any) -> StreamId:
        """See `api.Device`. Unique among the streams of one device."""
        number: StreamId = stream.stream_id  # a call of a NewType is one of Python's, in every touch
        return number

    def event(self) -> Any:
        """See `api.Device`."""
        return self._module.Event()

    def capturing(self) -> bool:
        """See `api.Device`."""
        return bool(self._module.is_current_stream_capturing())

    def refused_by_capture(self, error: Exception) -> bool:
        """See `api.Device`. ACL says 107028 or 107030 (rt_error_codes.h), CUDA names the capture in words."""
        return any(word in str(error) for word in ("107028", "107030", "captur"))

    def current_stream(self) -> Any:
        """The stream that the calling thread queues on."""
        if not self._known:
            return self._module.current_stream(self._index)
        number = self._current(self._index).stream_id
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = self._module.current_stream(self._index)
        return stream
