#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
#
# DeepSeek-V4-Flash on one node of 16 910C dies with CAMAsyncAFDConnector: Attention DP4 x TP2 on dies 0 to 7, FFN DP8
# (EP8) on dies 8 to 15, with the plugin in mode afd. See README.md: with afd-plugin 85e826e alone it cannot start.
#
#     MODEL_PATH=... LOCAL_IP=... NIC_NAME=... ./launch.sh [--dry-run] [--native] attention|ffn

# shellcheck source=recipes/910c/common.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../../common.sh" || exit
read_options "$@"
role=${arguments[0]:-}
[[ ${#arguments[@]} == 1 && $role =~ ^(attention|ffn)$ ]] || fail "say which role this is: attention or ffn"
need path MODEL_PATH "the folder of DeepSeek-V4-Flash-w8a8-mtp"
host SERVER_HOST 127.0.0.1
port PORT 8900
port FFN_PORT 8901
whole MAX_MODEL_LEN 70000
whole MAX_NUM_BATCHED_TOKENS 65536
whole MAX_NUM_SEQS 128
number GPU_MEMORY_UTILIZATION 0.8 1
whole HCCL_BUFFSIZE 4096
word MODEL_PLUGIN ''

if [[ $role == attention ]]; then
    devices ATTENTION_DEVICES 0,1,2,3,4,5,6,7 8
    environment=("ASCEND_RT_VISIBLE_DEVICES=$ATTENTION_DEVICES" VLLM_ASCEND_ENABLE_FLASHCOMM1=1)
    parallel=(--data-parallel-size 4 --tensor-parallel-size 2 --port "$PORT")
else
    devices FFN_DEVICES 8,9,10,11,12,13,14,15 8
    environment=("ASCEND_RT_VISIBLE_DEVICES=$FFN_DEVICES" VLLM_ASCEND_ENABLE_FLASHCOMM1=0)
    parallel=(--data-parallel-size 8 --tensor-parallel-size 1 --port "$FFN_PORT")
fi
base_environment "afd,afd_dsv4${MODEL_PLUGIN:+,$MODEL_PLUGIN}"
network
host AFD_HOST "$LOCAL_IP"
port AFD_PORT 1239
environment+=(
    "HCCL_BUFFSIZE=$HCCL_BUFFSIZE" # afd-plugin: 2048 is too small for 24 attention ranks at 65,536 tokens
)

# The native tail mode is off: two must not bound the same state, and the gate refuses both at once.
# No hccl_buffer_size: this commit refuses the key, and takes HCCL_BUFFSIZE.
additional=$(
    cat <<JSON
{"enable_force_load_balance": false,
 "multistream_dsv4_dsa_overlap": false,
 "enable_dsv4_shared_compressor_workspace": false,
 "afd": {
   "role": "$role",
   "connector": "CAMAsyncAFDConnector",
   "async": true,
   "host": "$AFD_HOST",
   "port": $AFD_PORT,
   "num_attention_ranks": 8,
   "num_ffn_ranks": 8,
   "compute_gate_on_attention": true,
   "connector_extra_config": {
     "dynamicQuant": 1,
     "attn_ranks_per_dp": 2,
     "async_moe_ubatching": true,
     "async_moe_num_ubatches": 2,
     "async_moe_split": "token"}}
JSON
)
((native)) || additional+=", \"afd_dsv4\": $(settings afd)"
additional=$(tr -s '\n ' ' ' <<<"$additional}")

# No --worker-cls: afd-plugin enters its own, and the plugin ours where it is on. No --enable-dbo either.
serve=(
    "$MODEL_PATH"
    --host "$SERVER_HOST"
    --served-model-name dsv4
    "${parallel[@]}"
    --enable-expert-parallel
    --enforce-eager
    --quantization ascend
    --tokenizer-mode deepseek_v4
    --model-loader-extra-config '{"enable_multithread_load": true, "num_threads": 16}'
    --block-size 128
    --max-model-len "$MAX_MODEL_LEN"
    --max-num-batched-tokens "$MAX_NUM_BATCHED_TOKENS" # the same in both roles
    --max-num-seqs "$MAX_NUM_SEQS"
    --gpu-memory-utilization "$GPU_MEMORY_UTILIZATION"
    --no-enable-prefix-caching
    --enable-chunked-prefill
    --trust-remote-code
    --seed 1024
    --additional-config "${additional% }"
)
launch
