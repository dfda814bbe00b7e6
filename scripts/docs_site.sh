#!/usr/bin/env bash
# Builds the documentation site into site/; any warning is an error.
#
#   ./scripts/docs_site.sh                     site/index.html
#   ./scripts/docs_site.sh --site-dir FOLDER   a new folder
#   ./scripts/docs_site.sh --no-install        in the current interpreter, without installing
#
# REPOSITORY_URL=https://github.com/OWNER/NAME links the repository, and each page to the editor of its file. Readers'
# browsers then ask GitHub for the repository's release and stars; without it they ask no other server.
set -euo pipefail
source "$(dirname "$0")/_env.sh"

take_no_install "$@"
site=$root/site
case ${arguments[*]-} in
"") ;;
"--site-dir "?*) site=${arguments[1]} && [ ! -e "$site" ] || { echo "$0: $site exists. Name a new folder" >&2; exit 2; } ;;
*) echo "$0: unknown arguments '${arguments[*]}'. See the head of the file" >&2; exit 2 ;;
esac
use_environment docs

# zensical reads pages, theme and package from folders beside its settings.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" "$root/scripts/site_pages.py" "$work/docs"
cp "$root/mkdocs.yml" "$work"
ln -s "$root/roll_batching" "$root/scripts" "$work"
"$python" -m zensical build --strict --config-file "$work/mkdocs.yml" </dev/null
rm -rf "$site"
mkdir -p "$(dirname "$site")"
mv "$work/site" "$site"
