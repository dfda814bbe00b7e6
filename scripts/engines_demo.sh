#!/usr/bin/env bash
# Rollouts by engines: create a tiny Qwen3, start two servers with SGLang's documented API (the tests' servers, which run
# transformers on the CPU), and train with GRPO on two ranks that sample from them.
#
#   ./scripts/engines_demo.sh                 about five minutes on two CPU cores, once everything is installed
#   ./scripts/engines_demo.sh --no-install    in the current interpreter, without installing
#   ./scripts/engines_demo.sh max_steps=5     name.path=value changes any setting
set -euo pipefail
source "$(dirname "$0")/_env.sh"
cd "$root"

take_overrides "$@"
use_environment megatron,dev # dev brings transformers and aiohttp

export PYTHONWARNINGS=${PYTHONWARNINGS:-"ignore:Transformer Engine and Apex,ignore:Apex is not installed,ignore:MimoModelConfig is experimental"}
say "making data/hf_model/tiny-qwen3"
"$python" examples/hf_model/make_model.py
say "two servers on ports 30000 and 30001"
coproc servers { exec "$python" -m tests.jobs.engines.server data/hf_model/tiny-qwen3 --replicas 2 --port 30000; }
servers_id=$servers_PID
trap 'kill "$servers_id" 2>/dev/null || true' EXIT
read -r urls <&"${servers[0]}" || { say "the servers did not start: are the ports in use?"; exit 1; }
say "training: runs/grpo_engines_demo, rollouts by $urls"
"$python" -m roll_batching.cli train --config configs/grpo_engines_demo.yaml \
    ${overrides[@]+"${overrides[@]}"} </dev/null
