#!/usr/bin/env bash
# Slow tests, which scripts/test.sh skips. Further arguments go to pytest:
#
#   ./scripts/slow_suite.sh cluster      one whole suite: layouts, models, streams, rehearse, cluster,
#                                        engines, benchmarks, rest, te, pages, versions
#   ./scripts/slow_suite.sh              the turn selected by the number of commits, as in .ci/run
#   ./scripts/slow_suite.sh --turn 3     another turn
#   ./scripts/slow_suite.sh --turns      lists all turns
#   ./scripts/slow_suite.sh --all        all suites but te and pages, one after the other, and a table of them
#
# A turn is a suite or a part of a long one. After SLOW_SUITE_MINUTES (15) pytest is interrupted, and the exit status is
# 124. Parts have equal numbers of tests, not equal times. `rest` has the slow tests without a suite. `te` needs the
# environment of te_environment.sh, `engines` that of engine_environment.sh; they have a turn only if it exists. Tests
# of NeMo-Gym in `engines` also need that of gym_environment.sh. `versions` runs megatron_versions.sh, in its turn on
# one release. `pages` types the commands of README and docs, for about an hour, and has no turn. PYTHON and --no-install
# work as in test.sh.
set -euo pipefail
source "$(dirname "$0")/_env.sh"
cd "$root"

suites=(layouts models streams rehearse cluster engines benchmarks pages)
turns=("layouts 1/6" "cluster 1/4" "rest 1/4" "models 1/2" "layouts 2/6" "rehearse 1/2" "cluster 2/4" "rest 2/4"
    "streams 1/2" "layouts 3/6" "models 2/2" "cluster 3/4" "layouts 4/6" "rest 3/4" "rehearse 2/2" "layouts 5/6"
    "cluster 4/4" "streams 2/2" "rest 4/4" "layouts 6/6" "benchmarks 1/4" "benchmarks 2/4"
    "benchmarks 3/4" "benchmarks 4/4" "versions 0.17.1" "versions 0.18.2" "versions 0.19.2")
if [ -x .venv-te/bin/python ]; then turns+=("te 1/1"); fi
if [ -x .venv-engines/bin/vllm ]; then turns+=("engines 1/1"); fi

suite="" turn="" arguments=()
while [ $# -gt 0 ]; do
    case $1 in
    --no-install) INSTALL=no ;;
    --turns)
        printf '%s\n' "${turns[@]}"
        exit
        ;;
    --all) suite=all ;;
    --turn)
        turn=${2:-}
        [[ $turn =~ ^[0-9]+$ ]] || { say "--turn needs a number, not '$turn'"; exit 2; }
        shift
        ;;
    layouts | models | streams | rehearse | cluster | engines | benchmarks | pages | rest | te | versions) suite=$1 ;;
    *)
        if [[ $1 != -* && ${#arguments[@]} -eq 0 ]]; then
            say "There is no suite '$1': layouts, models, streams, rehearse, cluster, engines, benchmarks, pages, rest, te, versions"
            exit 2
        fi
        arguments+=("$1")
        ;;
    esac
    shift
done

if [ "$suite" = all ]; then
    table=$(printf '%-12s %8s  %s' suite minutes result)
    failed=0
    if [ "${INSTALL:-}" = no ]; then arguments=(--no-install ${arguments[@]+"${arguments[@]}"}); fi
    for name in layouts models streams rehearse cluster benchmarks rest; do
        log=$(mktemp) begun=$SECONDS
        "$0" "$name" ${arguments[@]+"${arguments[@]}"} 2>&1 | tee "$log" || failed=1
        table+=$(printf '\n%-12s %8.1f  %s' "$name" "$(((SECONDS - begun) * 10 / 60))e-1" "$(tail -n 1 "$log" | tr -d =)")
        rm "$log"
    done
    printf '%s\n' "$table"
    exit "$failed"
fi

part=1/1 limit=0
if [ -z "$suite" ]; then
    turn=$((${turn:-$(git rev-list --count HEAD)} % ${#turns[@]}))
    read -r suite part <<<"${turns[$turn]}"
    limit=${SLOW_SUITE_MINUTES:-15}
fi

case $suite in
te)
    python=$root/.venv-te/bin/python
    [ -x "$python" ] || { say "te needs .venv-te: make it with ./scripts/te_environment.sh"; exit 2; }
    marks=te
    ;;
engines)
    [ -x .venv-engines/bin/vllm ] || { say "engines needs .venv-engines: make it with ./scripts/engine_environment.sh"; exit 2; }
    marks="slow and engines"
    ;;
versions)
    [[ $part == */* ]] || arguments=("$part")
    if [ "${INSTALL:-}" = no ]; then arguments+=(--no-install); fi
    exec timeout --kill-after=60 "${limit}m" ./scripts/megatron_versions.sh ${arguments[@]+"${arguments[@]}"}
    ;;
rest)
    printf -v marks ' or %s' "${suites[@]}"
    marks="slow and not (${marks# or })"
    ;;
*) marks="slow and $suite" ;;
esac
[ "$suite" = te ] || use_environment megatron,dev
say "pytest: the slow tests of $suite, part $part"
exec timeout --signal=INT --kill-after=60 "${limit}m" \
    "$python" -m pytest -m "$marks" --part "$part" ${arguments[@]+"${arguments[@]}"} </dev/null
