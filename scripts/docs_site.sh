#!/usr/bin/env bash
# Builds the documentation site into site/; any warning is an error. Further arguments go to mkdocs build:
#
#   ./scripts/docs_site.sh                     site/index.html
#   ./scripts/docs_site.sh --site-dir FOLDER   another folder
#   ./scripts/docs_site.sh --no-install        in the current interpreter, without installing
set -euo pipefail
source "$(dirname "$0")/_env.sh"
cd "$root"

take_no_install "$@"
use_environment docs
exec "$python" -m mkdocs build --strict ${arguments[@]+"${arguments[@]}"} </dev/null
