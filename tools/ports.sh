# SPDX-License-Identifier: Apache-2.0
# Sourced by gin-check and nvshmem-check, which test ports through a library on a GPU machine without a network:
# folders, CUDA's C++ headers, the build, and the run.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=.gpu/gin  # what `prepare` brings

# Wheels of PyPI, unpacked into $folder/wheels.
download() {
  mkdir -p "$folder/wheels"
  "${PYTHON:-python3}" -m pip download --quiet --no-deps --dest "$folder/wheels" "$@"
  for wheel in "$folder"/wheels/*.whl; do "${PYTHON:-python3}" -m zipfile -e "$wheel" "$folder/wheels"; done
}

# Those of the wheel nvidia-cuda-cccl, in $folder/cccl: kernels take cuda/ alone.
keep_cuda_headers() {
  rm -rf "$folder/cccl"
  cp -r "$(dirname "$(find "$folder/wheels" -path '*cuda/atomic' | head -n 1)")/.." "$folder/cccl"
  rm -r "$folder/cccl/thrust" "$folder/cccl/cub"
}

# Where CUDA's own folder lacks its C++ headers, those of `prepare` stand in (WEFT_CUDA_INCLUDE takes one folder).
use_cuda_headers() {
  local first all
  all=$("$python" -c 'from weft.runtime import nvrtc; print(*nvrtc.find().include_dirs, sep="\n")')
  while read -r first; do [ ! -f "$first/cuda/atomic" ] || return 0; done <<<"$all"
  first=${all%%$'\n'*}
  rm -rf "$folder/include" && mkdir -p "$folder/include"
  for part in "$first"/* "$PWD/$folder"/cccl/*; do ln -sfn "$part" "$folder/include/"; done
  export WEFT_CUDA_INCLUDE=$PWD/$folder/include
}

# build_for_gpus [1: take what is built]
build_for_gpus() {
  export CC=/usr/bin/gcc CXX=/usr/bin/g++
  export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
  export PYTHONPATH=python:tests/gpu:tests/system
  python=${PYTHON:-$(command -v python3)}
  [ -n "$1" ] || tools/dev-build "$python"
  use_cuda_headers
}

# run_gpu_tests SECONDS ARGUMENTS: pytest, ended after that long.
run_gpu_tests() {
  local budget_s=$1
  shift
  exec timeout "$budget_s" "$python" -m pytest -p no:cacheprovider -rP --durations=0 "$@"
}
