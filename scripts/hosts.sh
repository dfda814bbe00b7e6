#!/usr/bin/env bash
# Tests the integrations against a host's own code, in an environment with the host's pins (.venv-verl, ...):
#
#   ./scripts/hosts.sh verl CHECKOUT      verl's batching tests, plain and with our planner, and its loss in our passes
#   ./scripts/hosts.sh nemo-rl CHECKOUT   NeMo-RL's loss and log-probs in our passes
#   ./scripts/hosts.sh slime CHECKOUT     slime's schedule tests, plain and with our planner
#   ./scripts/hosts.sh roll CHECKOUT      ROLL's RLVR actor: three steps by its own strategy and by ours
#
# CHECKOUT is a clone of the host. Further arguments go to pytest. No GPU is needed; losses run in six layouts of two
# processes, for about half an hour on two cores. PYTHON selects an interpreter (python3.11).
set -euo pipefail
source "$(dirname "$0")/_env.sh"
cd "$root"

host=${1:-} checkout=${2:-}
case $host in
verl) pins=("tensordict<=0.10" "transformers<5.11" verl==0.9.1) ;;
nemo-rl)
    pins=("tensordict<=0.10" "transformers>=5,<5.12" ray omegaconf hydra-core datasets accelerate torchdata math-verify
        matplotlib nvidia-ml-py pyzmq num2words sacrebleu nvtx tensorboard wandb)
    ;;
slime) pins=() ;;
roll)
    pins=("tensordict>=0.10" "transformers==4.57.0" "numpy<2" "pyarrow<20" "datasets==3.1.0" "ray[default]" accelerate peft
        codetiming dacite more_itertools deprecated isort einops jsonlines pybase64 hydra-core omegaconf tyro loralib
        math-verify nltk gym modelscope swanlab trackio wandb opentelemetry-exporter-otlp)
    ;;
*)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
    exit 2
    ;;
esac
[ -d "$checkout" ] || { say "'$checkout' is no folder: give a checkout of $host"; exit 2; }
checkout=$(realpath "$checkout")
shift 2

folder=$root/.venv-$host
if [ ! -x "$folder/ready" ]; then
    say "making $folder"
    "${PYTHON:-python3.11}" -m venv "$folder"
    "$folder/bin/python" -m pip install torch==2.13.0 megatron-core==0.16.1 numba pydantic pyyaml rich "typer<0.20" \
        pytest hypothesis pytest-timeout "${pins[@]}" </dev/null
    printf '#!/bin/sh\n' >"$folder/ready" && chmod +x "$folder/ready"
fi
python=$folder/bin/python
export PYTHONPATH=$root:$checkout

own_tests() { # own_tests LABEL PYTEST_ARGUMENTS: tests of the host, in its checkout
    say "$1"
    shift
    (cd "$checkout" && "$python" -m pytest -q -p no:cacheprovider -W ignore "$@")
}

case $host in
verl)
    export VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cpu VERL_CHECKOUT=$checkout
    export VERL_USE_EXTERNAL_MODULES=tests.hosts.verl_cpu_platform
    batching=(tests/utils/test_seqlen_balancing.py tests/utils/test_prepare_micro_batches_with_group_size.py)
    # verl has a package `tests` too: its tests run from a copy outside of the checkout.
    copy=$(mktemp -d) && trap 'rm -rf "$copy"' EXIT
    cp "${batching[@]/#/$checkout/}" "$copy" && checkout=$copy
    own_tests "verl's batching tests" .
    VERL_USE_EXTERNAL_MODULES+=,roll_batching.integrations.verl own_tests "the same with our planner" .
    "$python" -m pytest -q tests/hosts/test_verl.py "$@"
    ;;
nemo-rl)
    NEMO_RL_CHECKOUT=$checkout "$python" -m pytest -q tests/hosts/test_nemo_rl.py "$@"
    ;;
slime)
    own_tests "slime's schedule tests" tests/test_dp_schedule.py
    own_tests "the same with our planner" -p roll_batching.integrations.slime tests/test_dp_schedule.py "$@"
    ;;
roll)
    ROLL_CHECKOUT=$checkout "$python" -m pytest -q tests/hosts/test_roll.py "$@"
    ;;
esac
