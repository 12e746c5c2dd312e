# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
#
# Sourced by every launch.sh. A script reads what the operator may set, each variable with one of the functions below,
# fills two arrays, `environment` (NAME=value) and `serve` (what follows `vllm serve`), and calls `launch`: with --dry-run
# that prints what would run, to be read or pasted. Nothing is printed or started with a variable that
# is refused.

set -euo pipefail

environment=()
serve=()
before=()
cleared=()

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
read_options() {
    local argument
    whole SLOTS 2
    number FENCE_TIMEOUT_S 60.0 999999999
    for argument in "$@"; do
        case $argument in
            --dry-run) dry_run=1 ;;
            --native) native=1 ;;
            -*) fail "unknown option $argument; there are --dry-run and --native" ;;
            *) arguments+=("$argument") ;;
        esac
    done
}

# One function for each kind of variable: NAME DEFAULT .... Each leaves in NAME what is used, as JSON and vLLM read it.
# What is set to nothing is not set.

whole() { # NAME DEFAULT [MOST]: from 1 on
    local most=${3:-999999999}
    local what="a whole number from 1 to $most"
    variable "$1" "$2" '[0-9]{1,9}' "$what"
    printf -v "$1" %d "$((10#${!1}))"
    ((${!1} >= 1 && ${!1} <= most)) || refuse "$1" "$what"
}

port() { # NAME DEFAULT
    whole "$1" "$2" 65535
}

number() { # NAME DEFAULT MOST: above 0
    local what="a number above 0 and at most $3, such as $2" fraction='' nanos
    variable "$1" "$2" '[0-9]{1,9}|[0-9]{0,9}\.[0-9]{1,9}' "$what"
    [[ ${!1} != *.* ]] || fraction=.${!1#*.}
    printf -v "$1" %d%s "$((10#0${!1%%.*}))" "$fraction"
    nanos=${fraction#.}000000000
    nanos=$((${!1%%.*} * 1000000000 + 10#${nanos:0:9}))
    ((nanos > 0 && nanos <= $3 * 1000000000)) || refuse "$1" "$what"
}

host() { # NAME DEFAULT
    variable "$1" "$2" '[A-Za-z0-9:][A-Za-z0-9.:_%-]{0,252}' "a host's name or its address"
}

word() { # NAME DEFAULT
    variable "$1" "$2" '[A-Za-z0-9_][A-Za-z0-9_.,:@-]{0,199}' "a name of letters, digits and any of _ . , : @ -"
}

path() { # NAME DEFAULT
    variable "$1" "$2" '[^-[:cntrl:]][^[:cntrl:]]*' "a path of one line that does not begin with -"
}

devices() { # NAME DEFAULT COUNT
    local what="$3 different numbers of devices with commas between, one for each rank here" each device list=''
    variable "$1" "$2" '[0-9]{1,4}(,[0-9]{1,4})*' "$what"
    IFS=, read -ra each <<<"${!1}"
    for device in "${each[@]}"; do
        device=$((10#$device))
        [[ ,$list, != *,$device,* ]] || refuse "$1" "$what"
        list+=${list:+,}$device
    done
    ((${#each[@]} == $3)) || refuse "$1" "$what"
    printf -v "$1" %s "$list"
}

need() { # KIND NAME WHAT: one that has no default
    [[ -n ${!2:-} ]] || fail "set $2 to $3"
    "$1" "$2" ''
}

variable() { # NAME DEFAULT PATTERN WHAT
    local LC_ALL=C
    [[ -n ${!1:-} ]] || printf -v "$1" %s "$2"
    [[ -z ${!1} || ${!1} =~ ^($3)$ ]] || refuse "$1" "$4"
}

refuse() { # NAME WHAT
    local value=${!1:0:80}
    fail "$1=${value@Q}: give $2"
}

# Append a word to `line` as a shell reads it back, in quotes where it needs them.
append() {
    if [[ $1 =~ ^[A-Za-z0-9_.,:/=+@%-]+$ ]]; then
        line+=" $1"
    else
        line+=" '${1//\'/\'\\\'\'}'"
    fi
}

# A command that goes before.
shown() {
    local word line=''
    for word in "$@"; do
        append "$word"
    done
    printf '%s &&\n' "${line# }"
}

# The plugin's settings as they stand in additional_config; natively the environment switches it off.
settings() {
    printf '{"mode": "%s", "slots": %s, "fence_timeout_s": %s}' "$1" "$SLOTS" "$FENCE_TIMEOUT_S"
}

# Where workers write metrics if there is one API server only: a folder of this server alone, see docs/metrics.md. On a
# disk, and not in memory that others fill. prometheus_client's own files of an earlier server are removed from it; a
# server that runs holds a lock on its folder, as long as its process lives.
OWN_METRICS=(-type f -regextype posix-extended -regex '.*/(counter|histogram|summary|gauge_[a-z]+)_[0-9]+\.db')
metrics_folder() {
    local other
    path METRICS_DIR "/var/tmp/afd_dsv4_metrics_$1"
    [[ $METRICS_DIR == /* ]] || METRICS_DIR=$PWD/$METRICS_DIR
    [[ $METRICS_DIR != *[*?[]* ]] || refuse METRICS_DIR "a folder without * ? [ in its name"
    if [[ -e $METRICS_DIR ]]; then
        other=$(find "$METRICS_DIR/" -mindepth 1 -maxdepth 1 ! \( "${OWN_METRICS[@]}" \) -print -quit) ||
            refuse METRICS_DIR "a folder that can be read"
        [[ -z $other ]] || refuse METRICS_DIR "a folder of this server's metrics alone; ${other@Q} is none"
    fi
    environment+=("PROMETHEUS_MULTIPROC_DIR=$METRICS_DIR")
    before=(mkdir -p "$METRICS_DIR")
    cleared=(find "$METRICS_DIR/" -mindepth 1 -maxdepth 1 "${OWN_METRICS[@]}" -delete)
}

# Everybody's environment.
base_environment() {
    local plugins=$ASCEND_PLUGINS,$1
    whole OMP_NUM_THREADS 10
    environment+=(
        "VLLM_PLUGINS=$plugins"
        VLLM_WORKER_MULTIPROC_METHOD=spawn
        VLLM_USE_V2_MODEL_RUNNER=0
        VLLM_ENGINE_READY_TIMEOUT_S=3600
        PYTORCH_NPU_ALLOC_CONF=expandable_segments:True
        HCCL_OP_EXPANSION_MODE=AIV
        OMP_PROC_BIND=false
        "OMP_NUM_THREADS=$OMP_NUM_THREADS"
    )
    if ((native)); then
        environment+=(AFD_DSV4_MODE=off)
    fi
}

# The network that the ranks meet on.
network() {
    need word NIC_NAME "the network interface of the NPUs (see \`ip addr\`)"
    need host LOCAL_IP "the address of this node on it"
    environment+=(
        "HCCL_IF_IP=$LOCAL_IP"
        "GLOO_SOCKET_IFNAME=$NIC_NAME"
        "TP_SOCKET_IFNAME=$NIC_NAME"
        "HCCL_SOCKET_IFNAME=$NIC_NAME"
    )
}

launch() {
    local word line=env lock
    if ((dry_run)); then
        if ((${#before[@]})); then
            shown "${before[@]}"
            shown "${cleared[@]}"
        fi
        for word in "${environment[@]}"; do
            append "$word"
            printf '%s \\\n' "$line"
            line="   "
        done
        line="    vllm serve"
        for word in "${serve[@]}"; do
            if [[ $word == --* ]]; then
                printf '%s \\\n' "$line"
                line="       "
            fi
            append "$word"
        done
        printf '%s\n' "$line"
        return
    fi
    command -v vllm >/dev/null || fail "there is no vllm on the PATH; activate its environment"
    if ((${#before[@]})); then
        "${before[@]}" || refuse METRICS_DIR "a folder that can be written"
        exec {lock}<"$METRICS_DIR" # and so vllm has it, too
        # 1: somebody else has it. Where there is no flock, or none on this file system, nobody can know.
        flock -n "$lock" 2>/dev/null || (($? != 1)) || refuse METRICS_DIR "a folder of no server that runs"
        "${cleared[@]}" || refuse METRICS_DIR "a folder that can be written"
    fi
    exec env "${environment[@]}" vllm serve "${serve[@]}"
}
