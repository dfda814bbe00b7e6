#!/usr/bin/env bash
# Half an hour on a borrowed GPU, in calls of less than ten minutes; `--help` and benchmarks/gpu/half_hour.py say more.
#
#   ./scripts/gpu_half_hour.sh prepare DIR     with network: wheels that such a machine lacks, in loads to carry there
#   ./scripts/gpu_half_hour.sh 1 --wheels DIR  there, without network: the first of four calls
#   ./scripts/gpu_half_hour.sh --dry           all four at tiny sizes on the CPU
#
# PYTHON names the interpreter that has torch (python3).
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in
    [0-9]*) set -- call "$@" ;;
    --dry) shift; set -- dry "$@" ;;
esac
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "${PYTHON:-python3}" -m benchmarks.gpu.half_hour "$@"
