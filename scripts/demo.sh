#!/usr/bin/env bash
# The demo: GRPO of a small model on Megatron-Core with packing, on two CPU cores or GPUs.
#
#   ./scripts/demo.sh                          seed 1; writes runs/demo-seed1
#   ./scripts/demo.sh --seed 2                 another seed; writes runs/demo-seed2
#   ./scripts/demo.sh --control shuffled       control: advantages shuffled among samples, nothing is learned
#   ./scripts/demo.sh --seed 2 --resume        resume that run from its last checkpoint
#   ./scripts/demo.sh --name mine max_steps=5  name of the run; name.path=value changes any setting
#   ./scripts/demo.sh --launcher ray           ranks are actors of a Ray that ends with the run
#   ./scripts/demo.sh --no-install             in the current interpreter, without installing
#   PYTHON=python3.12 ./scripts/demo.sh        another interpreter, in .venv-3.12
set -euo pipefail
source "$(dirname "$0")/_env.sh"
cd "$root"

seed=1 control=none name= launcher=local overrides=()
while [ $# -gt 0 ]; do
    case $1 in
        --seed) seed=${2:?--seed needs a number}; shift 2 ;;
        --control) control=${2:?--control needs a word: shuffled}; shift 2 ;;
        --name) name=${2:?--name needs a word}; shift 2 ;;
        --launcher) launcher=${2:?--launcher needs a word: local or ray}; shift 2 ;;
        --resume) overrides+=(resume_from_checkpoint=true); shift ;;
        --no-install) INSTALL=no; shift ;;
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
        *=*) overrides+=("$1"); shift ;;
        *) echo "$0: unknown argument '$1'. See $0 --help" >&2; exit 2 ;;
    esac
done
if [ -z "$name" ]; then
    name=demo-seed$seed
    [ "$control" = none ] || name=$name-$control
fi
extras=megatron
[ "$launcher" = local ] || extras=megatron,ray
use_environment "$extras"

data=data/ledger/seed$seed
version=$(cksum <examples/ledger/make_data.py)
if [ "$(cat "$data/version" 2>/dev/null)" != "$version" ]; then
    say "writing the data of the task into $data"
    "$python" examples/ledger/make_data.py --out "$data" --seed "$seed"
    echo "$version" >"$data/version"
fi

# Megatron warns on every import that these are missing; on a CPU they always are.
export PYTHONWARNINGS=${PYTHONWARNINGS:-"ignore:Transformer Engine and Apex,ignore:Apex is not installed,ignore:MimoModelConfig is experimental"}
say "training: runs/$name"
exec "$python" -m roll_batching.cli train --config configs/demo_grpo.yaml --launcher "$launcher" \
    exp_name="$name" seed="$seed" control="$control" \
    actor_train.data_args.file_name="$data/prompts.jsonl" \
    actor_train.data_args.eval_file_name="$data/heldout.jsonl" \
    warmup.file_name="$data/corpus.jsonl" \
    ${overrides[@]+"${overrides[@]}"} </dev/null
