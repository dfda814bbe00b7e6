#!/usr/bin/env bash
# Runs the demo with three seeds and a control, and says whether it teaches what it claims. Exits 0 when all holds.
#
#   ./scripts/check_demo.sh                 about 25 minutes on two cores
#   ./scripts/check_demo.sh --judge-only    judge the runs that are there
#   ./scripts/check_demo.sh --no-install    in the current interpreter, as it is
set -euo pipefail
source "$(dirname "$0")/_env.sh"
cd "$root"

arguments=()
for argument in "$@"; do
    if [ "$argument" = --no-install ]; then INSTALL=no; else arguments+=("$argument"); fi
done
use_environment megatron
export INSTALL=${INSTALL:-yes}
exec "$python" scripts/check_demo.py ${arguments[@]+"${arguments[@]}"} </dev/null
