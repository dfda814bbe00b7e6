#!/usr/bin/env bash
# Creates .venv-gym, an environment with NeMo-Gym's servers, about 1.5 GB:
#
#   ./scripts/gym_environment.sh
#   ./scripts/slow_suite.sh engines        with tests of our rollout function against Gym's real servers
#
# It is separate because NeMo-Gym needs Python 3.13; PYTHON selects an interpreter. 0.7.0 asks for 3.13.14, and its
# servers also run on earlier releases of 3.13, so pip ignores that. All servers share the environment: Gym reuses one
# that it finds where it would install a server's own.
set -euo pipefail
source "$(dirname "$0")/_env.sh"
cd "$root"

folder=$root/.venv-gym
say "making .venv-gym"
"${PYTHON:-python3.13}" -m venv "$folder"
python=$folder/bin/python
"$python" -m pip install --ignore-requires-python "nemo-gym==0.7.0" "ray[default]==2.60.0" </dev/null
"$python" -c 'import nemo_gym; print("nemo-gym", nemo_gym.__version__)'
