# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""Which worker classes afd-plugin's own choice is not asked about."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from afd_dsv4 import gate
from afd_dsv4.compat import afd
from afd_dsv4.compat.adapters import ADAPTERS


@pytest.mark.parametrize("name", [*ADAPTERS, "auto"])
def test_only_workers_for_afd_stand_where_afd_plugin_chooses_one(name: str) -> None:
    """A colocated one in a configuration with AFD is a mistake, and afd-plugin says so."""
    (patch,) = afd._CHOICE.patches
    asked: list[str] = []
    select = patch.make(lambda config: asked.append(config.parallel_config.worker_cls))
    worker = ADAPTERS[name].worker if name in ADAPTERS else name
    select(SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=worker)))
    stands = name in ADAPTERS and gate.AFD in ADAPTERS[name].covers
    assert asked == ([] if stands else [worker])
