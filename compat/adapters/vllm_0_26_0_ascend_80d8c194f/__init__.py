# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The adapter for vllm 0.26.0 with vllm-ascend at commit 80d8c194f (releases/v0.26.0rc).

Problem: this stack is three minor releases ahead of 0.23.0, and three weeks of one branch lie between 80d8c194f and
cf0baa38d; an adapter that is right with one of them is right with the others by luck only.
Way: what the adapter of 0.23.0 overrides, reads and patches was compared with this stack's code, symbol by symbol
(docs/compat.md has the table). Where the code differs, it does not differ in anything that the adapter relies on: the
same methods are called with the same keywords in the same order, the same four places launch the compressor with the
same arguments, and pages have the same sizes. So the worker here is that worker, over this stack's `NPUWorker`, for
this exact tuple and no other. What the comparison rests on is held by tests/unit/test_adapter_0_26.py.
Not here: what 0.23.0's adapter does not do either, and cf0baa38d, which adds `sparse_kv_offload_config`.

`worker.py` imports the stack at its top; nothing imports it but vLLM, by name.
"""
