#!/usr/bin/env bash
# Runs the demos of fine-tuning and of learning from pairs, and a control of each, and says whether they learn. Exits 0
# when all holds.
#
#   ./scripts/check_supervised.sh                 about 6 minutes on two cores
#   ./scripts/check_supervised.sh --judge-only    judge the runs that are there
#   ./scripts/check_supervised.sh --no-install    in the current interpreter, as it is
set -euo pipefail
source "$(dirname "$0")/_env.sh"
cd "$root"

arguments=()
for argument in "$@"; do
    if [ "$argument" = --no-install ]; then INSTALL=no; else arguments+=("$argument"); fi
done
use_environment megatron
export INSTALL=${INSTALL:-yes}
exec "$python" scripts/check_supervised.py ${arguments[@]+"${arguments[@]}"} </dev/null
