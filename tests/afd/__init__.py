# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""A double of the afd-plugin's protocol, a model that is driven through it, and the soak on both.

Problem: afd-plugin is in no registry, its NPU paths need operators of the device, and what can go wrong between
Attention and FFN is exactly what a test must be able to plant.
Way: the names, signatures, schedule, threads, payloads, pending queue and failures of afd-plugin 85e826e, written from
its recorded contract (`metadata.py`, `connectors.py`, `ubatching.py`, `schedule.py`), and stricter: what upstream would
let pass or hang on raises by name. `protocol.py` gives either the double or, where AFD_PLUGIN_PATH names a checkout,
that commit's own classes. Below both is a wire of operators (`wire.py`). `model.py` knows every right answer.
What only the double has shown says so; nothing here is evidence about a device.
"""
