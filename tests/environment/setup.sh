#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright the afd-dsv4 contributors
#
# Makes .venv (the exact test environment: real vLLM, vllm-ascend and torch-npu, no NPU, no CANN) and builds the
# software NPU into build/softnpu, with our kernels in emulation.
#
# Every step leaves a stamp that holds the hash of what went into it: a second run takes about a second, a run after a
# failure goes on where the last one stopped, and a changed requirement file runs its step again. Everything is checked
# before anything is written. It installs no system package; what the Python index has not (a C++ compiler) it names.
#
# Environment:
#   PYTHON       interpreter to use; otherwise the first of python3.11, python3.12, python3.10, python3 that fits
#   TORCH_INDEX  index to take the CPU build of torch from where the configured one has none
#   CXX, CC      C++ and C compilers, otherwise g++ and gcc
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=$root/.venv
stamps=$venv/afd-setup
log=$root/build/setup.log
total=7

# fail WHAT FOUND REMEDY: the only way out with an error that the user can act on.
fail() {
    printf 'setup: %s\n  found:  %s\n  remedy: %s\n' "$1" "$2" "$3" >&2
    exit 2
}

# --- checks: nothing is written before all of them pass ---------------------------------------------------------------

[ "$(uname -s)" = Linux ] || fail "needs Linux" "$(uname -s)" "use a Linux machine or container"
machine=$(uname -m)
case $machine in
    x86_64 | aarch64) ;;
    *) fail "needs an x86_64 or aarch64 processor" "$machine" "use such a machine: torch-npu has wheels for no other" ;;
esac

# fits INTERPRETER: prints "X.Y" when it runs and is CPython 3.10 to 3.12.
fits() {
    "$1" -c 'import sys
v = sys.version_info
ok = sys.implementation.name == "cpython" and (3, 10) <= v[:2] <= (3, 12)
print("%d.%d" % v[:2]) if ok else sys.exit(1)' 2>/dev/null
}

describe() {
    "$1" -c 'import sys; print(sys.implementation.name, sys.version.split()[0])' 2>/dev/null || echo "does not run"
}

has_pip() { "$venv/bin/python" -c 'import pip' 2>/dev/null; }

if [ -n "${PYTHON:-}" ]; then
    version=$(fits "$PYTHON") || fail "needs CPython 3.10, 3.11 or 3.12" "PYTHON=$PYTHON: $(describe "$PYTHON")" \
        "set PYTHON to such an interpreter, or leave it unset"
    python=$PYTHON
elif version=$(fits "$venv/bin/python") && has_pip; then
    python=$venv/bin/python # a whole environment decides, so that a second run never mixes versions
else
    python=
    seen=
    for candidate in python3.11 python3.12 python3.10 python3; do
        if command -v "$candidate" >/dev/null && version=$(fits "$candidate"); then
            python=$candidate
            break
        fi
        command -v "$candidate" >/dev/null && seen="$seen $candidate ($(describe "$candidate"))"
    done
    [ -n "$python" ] || fail "needs CPython 3.10, 3.11 or 3.12" "${seen:-no python3 on PATH}" \
        "install one (with its venv module) and run again, or set PYTHON=/path/to/python3.11"
fi
"$python" -c 'import ensurepip, venv' 2>/dev/null || fail "needs the venv and ensurepip modules of Python $version" \
    "$python lacks them" "install them (Debian, Ubuntu: python$version-venv) and run again"
if has_pip; then
    have=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    [ "$have" = "$version" ] || fail ".venv must be of Python $version" "it holds Python $have" \
        "run 'make clean-all' and then this again"
fi

# The headers of torch 2.13 need C++20.
cxx=${CXX:-g++}
cc=${CC:-gcc}
for compiler in "$cxx" "$cc"; do
    command -v "$compiler" >/dev/null || fail "needs a C++20 and a C compiler to build the software NPU" \
        "no $compiler on PATH" "install g++ (Debian, Ubuntu: apt-get install g++), or set CXX and CC"
done
echo '#include <concepts>' | "$cxx" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null ||
    fail "needs a C++20 compiler" "$cxx: $("$cxx" --version 2>&1 | head -n 1)" "install g++ 11 or newer, or set CXX"

if [ ! -e "$stamps/5" ]; then # the large packages are not in yet
    free_mib=$(df -Pm "$root" | awk 'NR == 2 { print $4 }')
    [ "$free_mib" -ge 4000 ] || fail "needs 4,000 MiB of disk for .venv" "$free_mib MiB free at the checkout" \
        "free some, or clone elsewhere"
fi

# --- steps ------------------------------------------------------------------------------------------------------------

began=$SECONDS
mkdir -p "$root/build"
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --no-compile --progress-bar off -c "$here/lock.txt")

# built LINE: how far make or ninja has come by the last line of the log, from LINE on, that says so: " [ 45%]".
built() {
    tail -n "+$1" "$log" | sed -n 's|^\(\[ *[0-9]*%\]\) .*| \1|p; s|^\(\[[0-9]*/[0-9]*\]\) .*| \1|p' | tail -n 1
}

# step NUMBER "TITLE (usual time)" HASH COMMAND...: runs the command unless its stamp holds the hash; shows that time
# passes.
step() {
    local number=$1 title=$2 hash=$3
    shift 3
    [ "$(cat "$stamps/$number" 2>/dev/null)" = "$hash" ] && return 0
    printf '[%s/%s] %s ...\n' "$number" "$total" "$title"
    local start=$SECONDS pid before
    touch "$log"
    before=$(wc -l <"$log")
    printf '\n===== [%s/%s] %s\n' "$number" "$total" "$title" >>"$log"
    set -m # a process group of its own, so that an interrupt ends pip or the compiler too
    "$@" >>"$log" 2>&1 </dev/null &
    pid=$!
    set +m
    trap 'kill -- -"$pid" 2>/dev/null; echo "setup: interrupted; run again to go on" >&2; exit 130' INT TERM
    local shown=$start
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        if [ $((SECONDS - shown)) -ge 20 ]; then
            shown=$SECONDS
            printf '        %s s%s\n' $((SECONDS - start)) "$(built $((before + 3)))"
        fi
    done
    if ! wait "$pid"; then
        tail -n "+$((before + 3))" "$log" | tail -n 25 | sed 's/^/    | /' >&2
        fail "step $number, $title, failed after $((SECONDS - start)) s" \
            "the lines above; all of them in build/setup.log" "mend the cause and run again: it goes on at this step"
    fi
    trap - INT TERM
    mkdir -p "$stamps"
    printf '%s' "$hash" >"$stamps/$number"
    printf '        done in %s s\n' $((SECONDS - start))
}

# digest FILE...: hash of the files, of Python's version and of the processor.
digest() { { echo "$version $machine"; cat "$here/setup.sh" "$@"; } | sha256sum | cut -d ' ' -f 1; }

# A .venv without pip is what an interrupted first step leaves.
make_venv() { has_pip || "$python" -m venv --clear "$venv"; }

# Beside a torch with CUDA, torch-npu 2.13.0 aborts when it is imported ("Duplicated key
# 'pinned_reserve_segment_size_mb'"), and the default index serves that build. So the CPU build is asked for by name,
# first wherever pip is told to look.
install_torch() {
    if ! "${pip[@]}" --no-deps torch==2.13.0+cpu; then
        if [ -z "${TORCH_INDEX:-}" ]; then
            echo "needs torch 2.13.0+cpu; the configured package index has none, and TORCH_INDEX is not set."
            echo "Set TORCH_INDEX to the URL of an index with the CPU builds of torch (its install page names one)."
            return 1
        fi
        "${pip[@]}" --no-deps --index-url "$TORCH_INDEX" torch==2.13.0+cpu
    fi
    "${pip[@]}" -r "$here/torch.txt"
}

# VLLM_VERSION_OVERRIDE: otherwise the version becomes 0.23.0+empty and pip refuses its own archive. CARGO_NET_OFFLINE:
# the Rust front end is optional and fails at once this way. No build isolation: its setup.py imports torch.
install_vllm() {
    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.23.0 CARGO_NET_OFFLINE=true PATH="$venv/bin:$PATH" \
        "${pip[@]}" --no-deps --no-build-isolation --no-binary vllm -r "$here/vllm.txt"
}

install_runtime() { "${pip[@]}" -r "$here/runtime.txt"; }

install_nodeps() { "${pip[@]}" --no-deps -r "$here/nodeps.txt"; }

# 3.21 is the oldest cmake that reads our presets.
has_cmake() {
    command -v cmake >/dev/null || return 1
    local have
    have=$(cmake --version | awk 'NR == 1 { print $3 }')
    [ "$(printf '%s\n' 3.21 "$have" | sort -V | head -n 1)" = 3.21 ]
}

install_tools() {
    "${pip[@]}" -r "$here/tools.txt"
    has_cmake || "${pip[@]}" -r "$here/build.txt"
    "${pip[@]}" --no-deps --no-build-isolation -e "$root"
}

build_softnpu() {
    cd "$root"
    export PATH="$venv/bin:$PATH"
    export CXX="$cxx" CC="$cc"
    cmake --preset host -DPython_EXECUTABLE="$venv/bin/python" -DSOFTNPU=ON
    cmake --build --preset host --parallel "$(nproc)"
}

# Hash of all native sources, so that an edit is built again and nothing else is.
native_digest() {
    local files
    mapfile -t files < <(find "$root/kernels_ascendc" -type f | LC_ALL=C sort)
    digest "$root/CMakeLists.txt" "$root/CMakePresets.json" "${files[@]}"
}

step 1 "Python $version environment in .venv (8 s)" "$version" make_venv
torch_digest=$(digest "$here/torch.txt" "$here/lock.txt")
step 2 "torch 2.13.0 (1 min)" "$torch_digest" install_torch
step 3 "vLLM 0.23.0 from source, without kernels (30 s)" "$(digest "$here/vllm.txt")$torch_digest" install_vllm
step 4 "libraries that the stack imports (1.5 min)" "$(digest "$here/runtime.txt" "$here/lock.txt")" install_runtime
step 5 "vllm-ascend 0.23.0 and torch-npu 2.13.0 (20 s)" "$(digest "$here/nodeps.txt" "$here/lock.txt")" install_nodeps
tools_digest=$(digest "$here/tools.txt" "$here/build.txt" "$here/lock.txt" "$root/pyproject.toml")
step 6 "test tools and afd-dsv4 itself (30 s)" "$tools_digest" install_tools
[ -d "$root/build/softnpu" ] || rm -f "$stamps/7" # 'make clean' took the build away
step 7 "software NPU, kernels in emulation (1.5 min)" "$(native_digest)" build_softnpu
printf 'setup: ready, %s s (Python %s, %s)\n' $((SECONDS - began)) "$version" "$machine"
