#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
#
# DeepSeek-V4-Pro on two nodes of 16 910C dies, DP2 x TP16, with the plugin in mode colocated. See README.md.
#
#     MODEL_PATH=... LOCAL_IP=... NIC_NAME=... HEAD_IP=... ./launch.sh [--dry-run] [--native] 0|1

# shellcheck source=recipes/910c/common.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../../common.sh" || exit
read_options "$@"
node=${arguments[0]:-}
[[ ${#arguments[@]} == 1 && $node == [01] ]] || fail "say which node this is: 0, with the API server, or 1"
need path MODEL_PATH "the folder of DeepSeek-V4-Pro-w4a8-mtp"
need host HEAD_IP "the address of node 0"
host SERVER_HOST 0.0.0.0
port PORT 8900
port DP_RPC_PORT 13399
whole MAX_MODEL_LEN 135000
whole MAX_NUM_BATCHED_TOKENS 32768
whole MAX_NUM_SEQS 32
devices ASCEND_RT_VISIBLE_DEVICES 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15 16
number GPU_MEMORY_UTILIZATION 0.85 1
whole HCCL_BUFFSIZE 2048

environment=("ASCEND_RT_VISIBLE_DEVICES=$ASCEND_RT_VISIBLE_DEVICES")
base_environment afd_dsv4
network
environment+=(
    "HCCL_BUFFSIZE=$HCCL_BUFFSIZE"
    VLLM_ASCEND_ENABLE_FLASHCOMM1=0 # not tried with the plugin
    TASK_QUEUE_ENABLE=1
)

additional='{"multistream_dsv4_dsa_overlap": false, "enable_cpu_binding": true'
((native)) || additional+=", \"afd_dsv4\": $(settings colocated)"
additional+='}'

serve=(
    "$MODEL_PATH"
    --host "$SERVER_HOST"
    --port "$PORT"
    --served-model-name dsv4
    --data-parallel-size 2
    --data-parallel-size-local 1
    --data-parallel-start-rank "$node"
    --data-parallel-address "$HEAD_IP"
    --data-parallel-rpc-port "$DP_RPC_PORT"
    --tensor-parallel-size 16
    --enable-expert-parallel
    --quantization ascend
    --tokenizer-mode deepseek_v4
    --safetensors-load-strategy prefetch
    --block-size 128
    --max-model-len "$MAX_MODEL_LEN"
    --max-num-batched-tokens "$MAX_NUM_BATCHED_TOKENS"
    --max-num-seqs "$MAX_NUM_SEQS"
    --gpu-memory-utilization "$GPU_MEMORY_UTILIZATION"
    --no-enable-prefix-caching
    --speculative-config '{"method": "mtp", "num_speculative_tokens": 1, "enforce_eager": true}'
    --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}'
    --additional-config "$additional"
)
if [[ $node == 1 ]]; then
    serve+=(--headless)
else
    metrics_folder "$PORT"
fi
launch
