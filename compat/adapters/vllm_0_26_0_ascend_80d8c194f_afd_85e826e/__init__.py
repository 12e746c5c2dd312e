# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The adapter for vllm 0.26.0, vllm-ascend 80d8c194f and vllm-project/afd-plugin 85e826e, in the Attention role.

Problem: afd-plugin's worker, runner and connectors derive from vllm-ascend's, cut forwards into uBatches (threads) or
stages (one thread), check their own class names, and send what attention computes to another process.
Way: classes of ours that are theirs by inheritance, with the methods of the colocated adapter in front: the worker by
name in the configuration, the runner in place of the name that their worker makes one of, the connectors in their
factory. Each is put there while the worker's device is made ready and taken back behind it.
Not here: the FFN role, which has no compressor: the gate leaves it alone. Graphs, drafts and vllm-ascend's second
stream, which nobody has run with AFD: refused (`compat/adapters/__init__.py`). And a model: the one of this commit that
is registered for DeepSeek-V4 runs on CUDA only (docs/compat.md).

Its modules import the stack at their tops; nothing imports them but vLLM and afd-plugin's factory, by name.
"""
