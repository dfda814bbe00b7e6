#!/usr/bin/env bash
# Trains the demo with three seeds and a control, and checks that only the seeds learn. Exits 0 if all checks hold.
#
#   ./scripts/check_demo.sh                 about 25 minutes on two cores
#   ./scripts/check_demo.sh --judge-only    check existing runs
#   ./scripts/check_demo.sh --no-install    in the current interpreter, without installing
set -euo pipefail
source "$(dirname "$0")/_env.sh"
cd "$root"

take_no_install "$@"
use_environment megatron
export INSTALL=${INSTALL:-yes}
exec "$python" scripts/check_demo.py ${arguments[@]+"${arguments[@]}"} </dev/null
