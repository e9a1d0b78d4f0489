#!/bin/sh
# Check that a GPU machine has what vLLM's CUDA build needs. setup.sh calls it with PYTHON and VENV:
#   sh gpu_check.sh before      the install of 10 GB: the driver, and the compiler that Triton needs
#   sh gpu_check.sh after       the install: whether torch finds the GPU
set -eu

least_driver=580 # CUDA 13 needs it; torch 2.13 and vLLM 0.32 are built for CUDA 13
on_cpu="or take the CPU build: make setup EXTRA=cpu"

missing() {
    echo "set-up failed: $1; $2, $on_cpu" >&2
    exit 1
}

before() {
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) ||
        missing "nvidia-smi does not run" "install the NVIDIA driver, $least_driver or newer"
    driver=${driver%%
*} # first line: all GPUs have the same driver
    case ${driver%%.*} in
    '' | *[!0-9]*) missing "nvidia-smi names no driver version ('$driver')" "install the driver again" ;;
    esac
    [ "${driver%%.*}" -ge "$least_driver" ] ||
        missing "the NVIDIA driver is $driver, CUDA 13 needs $least_driver or newer" "update the driver"
    command -v "${CC:-gcc}" >/dev/null || command -v "${CC:-clang}" >/dev/null ||
        missing "there is no C compiler (${CC:-gcc or clang}), with which Triton compiles kernels" "install gcc, or set CC"
    headers=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$headers/Python.h" ] ||
        missing "$headers/Python.h is missing, with which Triton compiles kernels" \
            "install Python's headers (python3-dev), or name another Python with PYTHON=..."
}

after() {
    found=$("$VENV/bin/python" -c '
import torch

try:
    torch.cuda.init()
    print("found")
except Exception as error:
    print(f"torch {torch.__version__} for CUDA {torch.version.cuda}: {error}".partition("\n")[0])
' 2>/dev/null) || found="torch cannot be imported"
    [ "$found" = found ] || missing "torch finds no GPU ($found)" "see whether nvidia-smi shows one"
}

"$1"
