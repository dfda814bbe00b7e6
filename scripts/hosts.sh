#!/usr/bin/env bash
# Tests the integrations against a host's own code, in an environment with the host's pins (.venv-verl, ...):
#
#   ./scripts/hosts.sh verl CHECKOUT      verl's batching tests, plain and with our planner, its loss and its trainer
#   ./scripts/hosts.sh nemo-rl CHECKOUT   NeMo-RL's packing and sharding tests likewise, and its loss in our passes
#   ./scripts/hosts.sh slime CHECKOUT     slime's schedule tests, plain and with our planner
#   ./scripts/hosts.sh roll CHECKOUT      ROLL's batching tests likewise, and three steps of its RLVR actor
#   ./scripts/hosts.sh megatron-lm CHECKOUT    the schedules of Megatron-LM's main or dev, beside ours; where
#                                              te_environment.sh has run, and for dev, also its pretrain_gpt.py
#
# CHECKOUT is a clone of the host. Further arguments go to pytest. No GPU is needed; losses run in seven layouts of two
# processes, for about half an hour on two cores. PYTHON selects an interpreter (python3.11, for NeMo-RL and Megatron-LM
# python3.12).
set -euo pipefail
source "$(dirname "$0")/_env.sh"
cd "$root"

host=${1:-} checkout=${2:-} interpreter=python3.11 megatron=(megatron-core==0.16.1)
case $host in
verl) pins=("tensordict<=0.10" "transformers<5.11" verl==0.9.1 mbridge==0.15.1 einops cachetools) ;;
nemo-rl)
    pins=("tensordict<=0.10" "transformers>=5,<5.12" ray omegaconf hydra-core datasets accelerate torchdata math-verify
        matplotlib nvidia-ml-py pyzmq num2words sacrebleu nvtx tensorboard wandb)
    interpreter=python3.12 megatron=(megatron-core==0.19.2 triton) # its packs have total_tokens
    ;;
slime) pins=() ;;
megatron-lm) pins=() interpreter=python3.12 megatron=(megatron-core==0.19.2 triton) ;; # what its checkout imports
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
    "${PYTHON:-$interpreter}" -m venv "$folder"
    "$folder/bin/python" -m pip install torch==2.13.0 "${megatron[@]}" numba pydantic pyyaml rich "typer<0.20" \
        pytest hypothesis pytest-timeout "${pins[@]}" </dev/null
    printf '#!/bin/sh\n' >"$folder/ready" && chmod +x "$folder/ready"
fi
python=$folder/bin/python
export PYTHONPATH=$root:$checkout

own_tests() { # own_tests LABEL PYTEST_ARGUMENTS: tests of the host, outside of its checkout: hosts have a `tests` too
    say "$1"
    shift
    (cd "$copies" && "$python" -m pytest -q -p no:cacheprovider -p tests.hosts.own_tests -W ignore "$@")
}

copies=$(mktemp -d) && trap 'rm -rf "$copies"' EXIT
copy_tests() { # copy_tests FILES_OF_THE_CHECKOUT
    cp "${@/#/$checkout/}" "$copies"
}

case $host in
verl)
    export VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cpu VERL_CHECKOUT=$checkout
    export VERL_USE_EXTERNAL_MODULES=tests.hosts.verl_cpu_platform
    copy_tests tests/utils/test_seqlen_balancing.py tests/utils/test_prepare_micro_batches_with_group_size.py
    own_tests "verl's batching tests"
    VERL_USE_EXTERNAL_MODULES+=,roll_batching.integrations.verl BEHIND=roll_batching.integrations.verl \
        own_tests "the same with our planner"
    "$python" -m pytest -q tests/hosts/test_verl*.py "$@"
    ;;
nemo-rl)
    copy_tests tests/unit/{data/packing/test_algorithms,distributed/test_batched_data_dict,data/test_multimodal_dict}.py
    # The first needs a newer Megatron; the second states which sequences NeMo-RL's own packer puts together.
    newer=test_dynamic_resolution_padding_is_cropped_before_radio_patchification
    literal=test_sequence_packing_executes_bins_largest_first
    own_tests "NeMo-RL's packing and sharding tests" -k "not $newer"
    BEHIND=roll_batching.integrations.nemo_rl PACKER=roll_batching \
        own_tests "the same with our packer and our cuts" -k "not $newer and not $literal"
    NEMO_RL_CHECKOUT=$checkout "$python" -m pytest -q tests/hosts/test_nemo_rl.py "$@"
    ;;
megatron-lm)
    export MEGATRON_CHECKOUT=$checkout
    "$python" -m pytest -q tests/hosts/test_megatron_lm.py "$@"
    if [ -x .venv-te/bin/python ]; then
        say "pretrain_gpt.py, plain and with us behind"
        .venv-te/bin/python -m pytest -q tests/hosts/test_megatron_lm_training.py "$@"
    fi
    ;;
slime)
    copy_tests tests/test_dp_schedule.py
    own_tests "slime's schedule tests"
    BEHIND=roll_batching.integrations.slime own_tests "the same with our planner" "$@"
    ;;
roll)
    copy_tests tests/utils/test_{sequence_packing,dynamic_batching}.py
    own_tests "ROLL's packing and dynamic batching tests"
    BEHIND=roll_batching.integrations.roll own_tests "the same with our planner"
    ROLL_CHECKOUT=$checkout "$python" -m pytest -q tests/hosts/test_roll.py "$@"
    ;;
esac
