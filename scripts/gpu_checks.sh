#!/usr/bin/env bash
# Checks that need a GPU: about ten minutes on one H100 or H200. benchmarks/gpu/checks.py has the list.
#
#   ./scripts/gpu_checks.sh                    all checks, into results/<device>.json; then scripts/results_page.py
#   ./scripts/gpu_checks.sh --only attention   selected checks; the file keeps its other records
#   ./scripts/gpu_checks.sh --dry              all checks at tiny sizes on the CPU
#   ./scripts/gpu_checks.sh --no-install ...   in the current interpreter, without installing
set -euo pipefail
source "$(dirname "$0")/_env.sh"
cd "$root"
if [ "${1:-}" = --no-install ]; then INSTALL=no; shift; fi
use_environment megatron
exec "$python" scripts/gpu_checks.py "$@"
