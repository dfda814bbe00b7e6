#!/usr/bin/env bash
# Runs a fixed set of tests on several releases of Megatron-Core, and prints a table:
#
#   ./scripts/megatron_versions.sh                          0.16.1, 0.17.1, 0.18.2 and 0.19.2
#   ./scripts/megatron_versions.sh 0.18.2 ../Megatron-LM    these, where a folder is a checkout of Megatron-LM
#
# Each release is unpacked below build/megatron, and stands before the installed one on PYTHONPATH; other packages are
# those of .venv. pip is called without an index, so that your pip settings decide where packages come from. PYTHON and
# --no-install work as in test.sh.
set -euo pipefail
source "$(dirname "$0")/_env.sh"
cd "$root"

take_no_install "$@"
use_environment megatron,dev

tests=(tests/strategy/test_adoption.py tests/strategy/test_equality.py tests/strategy/test_from_parts.py
    tests/strategy/test_steps.py tests/strategy/test_pipeline.py tests/strategy/test_mtp.py
    tests/strategy/test_checkpoint.py tests/strategy/test_cp_per_pack.py tests/integrations/test_host_model.py
    tests/integrations/test_prefixes.py tests/modeling/test_layers.py tests/huggingface/test_equality.py)
versions=(${arguments[@]+"${arguments[@]}"})
[ ${#versions[@]} -gt 0 ] || versions=(0.16.1 0.17.1 0.18.2 0.19.2)

table=$(printf '%-24s %s' megatron-core result) failed=0
for version in "${versions[@]}"; do
    folder=$version
    if [ ! -d "$version" ]; then
        folder=$root/build/megatron/$version
        # Releases name one Python each, and run on both. From 0.18 they import triton, which torch's CPU builds lack.
        if [ ! -d "$folder" ]; then
            needed=("megatron-core==$version")
            "$python" -c 'import triton' 2>/dev/null || needed+=("triton>=3.0")
            rm -rf "$folder.part" # of an installation that was interrupted
            "$python" -m pip install --no-deps --ignore-requires-python --target "$folder.part" "${needed[@]}" </dev/null
            mv "$folder.part" "$folder"
        fi
    fi
    log=$(mktemp)
    say "megatron-core $version"
    PYTHONPATH=$(realpath "$folder") "$python" -m pytest -q -m "not slow" "${tests[@]}" </dev/null 2>&1 |
        tee "$log" || failed=1
    table+=$(printf '\n%-24s %s' "$version" "$(tail -n 1 "$log" | tr -d =)")
    rm "$log"
done
printf '\n%s\n' "$table"
exit "$failed"
