#!/usr/bin/env bash
# From a model directory to a trained one: create a tiny Qwen3 with transformers, train it with GRPO on two processes,
# export it, and load the export in transformers.
#
#   ./examples/train_hf_model.sh                 about two minutes on two CPU cores, once everything is installed
#   ./examples/train_hf_model.sh --no-install    in the current interpreter, without installing
#   ./examples/train_hf_model.sh max_steps=5     name.path=value changes any setting
set -euo pipefail
source "$(dirname "$0")/../scripts/_env.sh"
cd "$root"

take_overrides "$@"
use_environment megatron,dev # dev brings transformers

export PYTHONWARNINGS=${PYTHONWARNINGS:-"ignore:Transformer Engine and Apex,ignore:Apex is not installed,ignore:MimoModelConfig is experimental"}
say "making data/hf_model/tiny-qwen3"
"$python" examples/hf_model/make_model.py
say "training: runs/hf_model"
"$python" -m roll_batching.cli train --config examples/hf_model/config.yaml \
    ${overrides[@]+"${overrides[@]}"} </dev/null
say "the model of the last checkpoint, written by roll-batching export"
rm -rf runs/hf_model/exported
"$python" -m roll_batching.cli export runs/hf_model --to runs/hf_model/exported
for folder in runs/hf_model/model runs/hf_model/exported; do
    say "$folder in transformers"
    "$python" examples/hf_model/check_export.py "$folder" data/hf_model/tiny-qwen3
done
