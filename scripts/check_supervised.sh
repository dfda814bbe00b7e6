#!/usr/bin/env bash
# Trains the SFT and DPO demos and a control of each, and checks that only the demos learn. Exits 0 if all checks hold.
#
#   ./scripts/check_supervised.sh                 about 6 minutes on two cores
#   ./scripts/check_supervised.sh --judge-only    check existing runs
#   ./scripts/check_supervised.sh --no-install    in the current interpreter, without installing
set -euo pipefail
source "$(dirname "$0")/_env.sh"
cd "$root"

take_no_install "$@"
use_environment megatron
export INSTALL=${INSTALL:-yes}
exec "$python" scripts/check_supervised.py ${arguments[@]+"${arguments[@]}"} </dev/null
