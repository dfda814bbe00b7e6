#!/usr/bin/env bash
# Makes .venv-te, an environment of its own with TransformerEngine beside Megatron-Core, with or without a GPU:
#
#   ./scripts/te_environment.sh                compiles the part that binds to torch: some 20 minutes of processor time
#   ./scripts/te_environment.sh --wheel FILE   takes a wheel of that part (transformer-engine-torch) that you have
#   .venv-te/bin/python -m pytest -m te        the tests of TransformerEngine's layers; none of them runs a kernel
#
# An environment of its own, because Megatron-Core takes other paths where TransformerEngine is installed. Neither a
# CUDA toolkit nor a driver is needed: headers and libraries come from NVIDIA's wheels. PYTHON names another
# interpreter than python3.12. pip is called without any index: your own pip settings decide where packages come from.
set -euo pipefail
source "$(dirname "$0")/_env.sh"
cd "$root"

engine=2.20.2
wheel=""
if [ "${1:-}" = --wheel ]; then wheel=$(realpath "$2"); fi

folder=$root/.venv-te
say "making .venv-te"
"${PYTHON:-python3.12}" -m venv "$folder"
python=$folder/bin/python
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$python" -m pip install --editable "$root[megatron,dev]" --constraint "$root/constraints.txt" </dev/null
"$python" -m pip install onnxscript onnx einops nvidia-cudnn-frontend </dev/null
# Without their dependencies: transformer-engine asks for no part that binds to torch, and that one for any torch.
"$python" -m pip install --no-deps "transformer-engine==$engine" "transformer-engine-cu13==$engine" </dev/null
if [ -z "$wheel" ]; then
    say "compiling transformer-engine-torch $engine"
    "$python" -m pip install setuptools wheel ninja pybind11 packaging \
        "nvidia-cuda-crt==13.0.*" "nvidia-cuda-cccl==13.0.*" "nvidia-cuda-nvcc==13.0.*" </dev/null
    export NVTE_BUILD_USE_NVIDIA_WHEELS=1 CUDA_HOME=$site/nvidia/cu13 MAX_JOBS=${MAX_JOBS:-2}
    wheel="transformer-engine-torch==$engine"
fi
"$python" -m pip install --no-deps --no-build-isolation "$wheel" </dev/null
"$python" -c 'import torch, transformer_engine.pytorch; print("transformer_engine", transformer_engine.__version__)'
