#!/usr/bin/env bash
# Everything that only a GPU can show, in about ten minutes on one H100 or H200; see scripts/gpu_checks.py.
#
#   ./scripts/gpu_checks.sh                    all checks, into results/<device>.json; then scripts/results_page.py
#   ./scripts/gpu_checks.sh --only attention   some of them; the others stay as the file has them
#   ./scripts/gpu_checks.sh --dry              everything tiny on the CPU
#   ./scripts/gpu_checks.sh --no-install ...   in the current interpreter, as it is
set -euo pipefail
source "$(dirname "$0")/_env.sh"
cd "$root"
if [ "${1:-}" = --no-install ]; then INSTALL=no; shift; fi
use_environment megatron
exec "$python" scripts/gpu_checks.py "$@"
