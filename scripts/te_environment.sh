#!/usr/bin/env bash
# Creates .venv-te, an environment with TransformerEngine and Megatron-Core, with or without a GPU:
#
#   ./scripts/te_environment.sh                compiles the torch extension: about 20 minutes of processor time
#   ./scripts/te_environment.sh --wheel FILE   installs your wheel of it (transformer-engine-torch)
#   .venv-te/bin/python -m pytest -m te        tests of TransformerEngine's layers; they run no kernel
#
# It is separate because Megatron-Core takes other code paths when TransformerEngine is installed. No CUDA toolkit and no
# driver are needed: headers and libraries come from NVIDIA's wheels. PYTHON selects an interpreter (python3.12). pip is
# called without an index, so that your pip settings decide where packages come from.
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
"$python" -m pip install onnxscript onnx einops nvidia-cudnn-frontend pybind11 </dev/null
# --no-deps: transformer-engine does not require its torch extension, and the extension accepts any torch.
"$python" -m pip install --no-deps "transformer-engine==$engine" "transformer-engine-cu13==$engine" </dev/null
# Models that others build (tests/te/test_bridges.py); what else they require is not needed to build one.
"$python" -m pip install --no-deps megatron-bridge==0.6.2 mbridge==0.15.1 </dev/null
if [ -z "$wheel" ]; then
    say "compiling transformer-engine-torch $engine"
    "$python" -m pip install setuptools wheel ninja pybind11 packaging \
        "nvidia-cuda-crt==13.0.*" "nvidia-cuda-cccl==13.0.*" "nvidia-cuda-nvcc==13.0.*" </dev/null
    export NVTE_BUILD_USE_NVIDIA_WHEELS=1 CUDA_HOME=$site/nvidia/cu13 MAX_JOBS=${MAX_JOBS:-2}
    wheel="transformer-engine-torch==$engine"
fi
"$python" -m pip install --no-deps --no-build-isolation "$wheel" </dev/null
"$python" -c 'import torch, transformer_engine.pytorch; print("transformer_engine", transformer_engine.__version__)'
