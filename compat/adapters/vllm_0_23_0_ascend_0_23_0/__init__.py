# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
"""The adapter for vllm 0.23.0 with vllm-ascend 0.23.0: a worker whose compressors keep tails instead of paged states.

Problem: vllm-ascend keeps one FP32 row per token and compressor in the paged KV cache, and calls the compressor
operator inline at four places of its attention.
Way: nothing is patched but two names, and both where the worker runs. `worker.py` makes its runner from our
subclass; `runner.py` drops the state layers from the KV groups, gives them stand-ins, and begins and ends one execution
a forward; `launches.py` stands in for the operator and hands each launch to that execution. The engine core sees fewer
KV groups and needs no change.
Not here: context parallelism's own call sites (attention/context_parallel/dsa_cp.py), pipeline parallelism, KV
transfer, prefix caching, the second model runner: the gate refuses them.

`worker.py` and `runner.py` import the stack at their top; nothing imports them but vLLM, by name.
"""
