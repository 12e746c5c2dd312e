# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
#
# Sourced by every launch.sh. A script fills two arrays, `environment` (NAME=value) and `serve` (what follows
# `vllm serve`), and calls `launch`: with --dry-run that prints the one command that would run, to be read or pasted.

set -euo pipefail

environment=()
serve=()

# Plugins of vLLM by their names; the list is an allow-list, so Ascend's own have to be in it.
ASCEND_PLUGINS=ascend,ascend_kv_connector,ascend_model,ascend_model_loader,ascend_service_profiling

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

# Options that every script has; the others are left in `arguments`.
dry_run=0
native=0
arguments=()
new_metrics=0
read_options() {
    local argument
    whole SLOTS 1
    whole AFD_PORT 1
    for argument in "$@"; do
        case $argument in
            --dry-run) dry_run=1 ;;
            --native) native=1 ;;
            -*) fail "unknown option $argument; there are --dry-run and --native" ;;
            *) arguments+=("$argument") ;;
        esac
    done
}

# A variable that may be set is a whole number of at least so much.
whole() {
    [[ ! -v $1 || (${!1} =~ ^[0-9]{1,9}$ && $((10#${!1})) -ge $2) ]] || fail "$1=${!1}: give a whole number from $2 on"
}

need() {
    [[ -n ${!1:-} ]] || fail "set $1 to $2"
}

# A word as a shell reads it back, in quotes where it needs them.
quoted() {
    if [[ $1 =~ ^[A-Za-z0-9_.,:/=+@%-]+$ ]]; then
        printf '%s' "$1"
    else
        printf "'%s'" "${1//\'/\'\\\'\'}"
    fi
}

# The plugin's settings as they stand in additional_config; natively the environment switches it off.
settings() {
    printf '{"mode": "%s", "slots": %s, "fence_timeout_s": %s}' "$1" "${SLOTS:-2}" "${FENCE_TIMEOUT_S:-60.0}"
}

# Where workers write metrics if there is one API server only: a folder of this server alone, see docs/metrics.md.
metrics_folder() {
    METRICS_DIR=${METRICS_DIR:-/dev/shm/afd_dsv4_metrics_$1}
    environment+=("PROMETHEUS_MULTIPROC_DIR=$METRICS_DIR")
    new_metrics=1
}

# Everybody's environment.
base_environment() {
    local plugins=$ASCEND_PLUGINS,$1
    environment+=(
        "VLLM_PLUGINS=$plugins"
        VLLM_WORKER_MULTIPROC_METHOD=spawn
        VLLM_USE_V2_MODEL_RUNNER=0
        VLLM_ENGINE_READY_TIMEOUT_S=3600
        PYTORCH_NPU_ALLOC_CONF=expandable_segments:True
        HCCL_OP_EXPANSION_MODE=AIV
        OMP_PROC_BIND=false
        "OMP_NUM_THREADS=${OMP_NUM_THREADS:-10}"
    )
    if ((native)); then
        environment+=(AFD_DSV4_MODE=off)
    fi
}

# The network that the ranks meet on.
network() {
    need NIC_NAME "the network interface of the NPUs (see \`ip addr\`)"
    need LOCAL_IP "the address of this node on it"
    environment+=(
        "HCCL_IF_IP=$LOCAL_IP"
        "GLOO_SOCKET_IFNAME=$NIC_NAME"
        "TP_SOCKET_IFNAME=$NIC_NAME"
        "HCCL_SOCKET_IFNAME=$NIC_NAME"
    )
}

launch() {
    local word line=env
    if ((dry_run)); then
        for word in "${environment[@]}"; do
            line+=" "$(quoted "$word")
            printf '%s \\\n' "$line"
            line="   "
        done
        line="    vllm serve"
        for word in "${serve[@]}"; do
            if [[ $word == --* ]]; then
                printf '%s \\\n' "$line"
                line="       "
            fi
            line+=" "$(quoted "$word")
        done
        printf '%s\n' "$line"
        return
    fi
    command -v vllm >/dev/null || fail "there is no vllm on the PATH; activate its environment"
    if ((new_metrics)); then
        mkdir -p -- "$METRICS_DIR" || fail "cannot make METRICS_DIR=$METRICS_DIR; name another folder"
        rm -f -- "$METRICS_DIR"/*.db # of an earlier server
    fi
    exec env "${environment[@]}" vllm serve "${serve[@]}"
}
