# Sourced by the other scripts: sets up their Python environment.
#
#   take_no_install "$@"        sets INSTALL=no for --no-install; the other arguments become the array `arguments`
#   take_overrides "$@"         the same for scripts with --help and overrides, which become the array `overrides`
#   use_environment EXTRAS      for example `use_environment megatron,dev`; sets $python
#
# The environment is .venv in the repository's root. It is created if absent, and updated if pyproject.toml or
# constraints.txt has changed. PYTHON=python3.12 selects another interpreter with its own folder (.venv-3.12).
# INSTALL=no (option --no-install) uses the current interpreter without installing.
# pip is called without an index, so that your pip settings decide where packages come from.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # one process per core: further threads would compete with it

say() { printf '\n== %s\n' "$*" >&2; }

usable() { # usable INTERPRETER: it exists and is Python 3.11 or newer
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_interpreter() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" || { say "PYTHON=$PYTHON does not run, or is older than Python 3.11"; return 1; }
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3 python; do
        if usable "$candidate"; then echo "$candidate"; return; fi
    done
    say "No Python 3.11 or newer was found. Install one, or name it: PYTHON=/path/to/python3.12 $0"
    return 1
}

take_overrides() { # for scripts whose other arguments are overrides of settings; --help prints the script's head
    local argument
    overrides=()
    for argument in "$@"; do
        case $argument in
        --no-install) INSTALL=no ;;
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
        *=*) overrides+=("$argument") ;;
        *) echo "$0: unknown argument '$argument'. See $0 --help" >&2; exit 2 ;;
        esac
    done
}

take_no_install() {
    local argument
    arguments=()
    for argument in "$@"; do
        if [ "$argument" = --no-install ]; then INSTALL=no; else arguments+=("$argument"); fi
    done
}

use_environment() {
    local extras=$1 interpreter folder stamp wanted
    if [ "${INSTALL:-yes}" = no ]; then
        python=${PYTHON:-python3}
        usable "$python" || { say "--no-install: $python does not run, or is older than Python 3.11"; exit 1; }
        say "using $(command -v "$python") without installing"
        return
    fi
    folder=$root/.venv
    if [ -n "${PYTHON:-}" ]; then
        folder=$folder-$(basename "$PYTHON" | sed 's/^python//; s/^$/custom/')
    fi
    if [ ! -x "$folder/bin/python" ]; then
        interpreter=$(find_interpreter) || exit 1
        say "making ${folder#"$root"/} with $("$interpreter" --version)"
        rm -rf "$folder"
        "$interpreter" -m venv "$folder" || {
            say "could not make a virtual environment (on Debian and Ubuntu: apt install python3-venv)"
            exit 1
        }
    fi
    python=$folder/bin/python
    usable "$python" || { say "${folder#"$root"/} is broken or too old: delete it and run again"; exit 1; }
    # The stamp has the installed extras and a checksum of their sources. The extra dev includes all others.
    wanted=$({ cat "$root/pyproject.toml" "$root/constraints.txt"; echo "$root"; } | cksum)
    stamp=$folder/installed
    if [ -f "$stamp" ] && [ "$(tail -n 1 "$stamp")" = "$wanted" ]; then
        case ",$(head -n 1 "$stamp")," in *",$extras,"* | *,dev,*) return ;; esac
    fi
    say "installing roll-batching[$extras] into ${folder#"$root"/} (torch is large: minutes on a first run)"
    rm -f "$stamp"
    # Python compiles what is imported: compiling all of torch takes a third of the installation.
    "$python" -m pip install --no-compile --editable "$root[$extras]" --constraint "$root/constraints.txt" </dev/null
    printf '%s\n%s\n' "$extras" "$wanted" >"$stamp"
}
