#!/usr/bin/env bash
# Rollouts by engines: make a tiny Qwen3, start two servers that speak as SGLang documents it (the tests' own, over
# transformers on the CPU), and train with GRPO on two processes that ask them.
#
#   ./scripts/engines_demo.sh                 about five minutes on two CPU cores, once everything is installed
#   ./scripts/engines_demo.sh --no-install    in the current interpreter, without installing
#   ./scripts/engines_demo.sh max_steps=5     name.path=value changes any setting
set -euo pipefail
source "$(dirname "$0")/_env.sh"
cd "$root"

overrides=()
for argument in "$@"; do
    case $argument in
        --no-install) INSTALL=no ;;
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
        *=*) overrides+=("$argument") ;;
        *) echo "$0: what is '$argument'? See $0 --help" >&2; exit 2 ;;
    esac
done
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
