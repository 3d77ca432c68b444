# shellcheck shell=bash
# Sourced by the scripts of this folder that test in an environment of their own.

# environment VENV PYTHON OLDEST NEWEST INSTALL...
#
# Makes the environment VENV with PYTHON by the command INSTALL, if VENV is older than pyproject.toml or the script. Sets
# `is_ready`. It is false, with a line that says why, on a Python outside of OLDEST to NEWEST, and where no package index
# can be reached and there is no environment of an earlier run. All else ends the script: in a release (RELEASE=1), also
# that no index can be reached.
environment() {
    local venv=$1 python=$2 oldest=$3 newest=$4 last=$1-last
    shift 4
    is_ready=true
    if [[ -d $last ]]; then # an earlier run was interrupted
        rm -rf "$venv"
        mv "$last" "$venv"
    fi
    if [[ -f $venv/.installed && ! pyproject.toml -nt $venv/.installed && ! $0 -nt $venv/.installed ]]; then
        return
    fi
    if ! "$python" -c '
import sys
oldest, newest = (tuple(map(int, version.split("."))) for version in sys.argv[1:])
sys.exit(not oldest <= sys.version_info[:2] <= newest)' "$oldest" "$newest"; then
        echo "not tested: $venv is for Python $oldest to $newest, and $python is $("$python" --version)"
        is_ready=false
        return
    fi
    if [[ -d $venv ]]; then # set aside: programs of an environment contain its path
        mv "$venv" "$last"
    fi
    echo "installing into $venv"
    "$python" -m venv "$venv"
    if PIP_LOG="$venv/pip.log" "$@" >"$venv/pip.said" 2>&1; then
        touch "$venv/.installed"
        rm -rf "$last"
        return
    fi
    local said is_offline=false
    said=$(tail -n 3 "$venv/pip.said")
    if grep -qE "connection error|connection broken|Max retries exceeded|Temporary failure in name" "$venv/pip.log"; then
        is_offline=true
    fi
    if [[ -d $last ]]; then
        rm -rf "$venv"
        mv "$last" "$venv"
    fi
    if [[ $is_offline == false || ${RELEASE:-} == 1 ]]; then
        printf 'the packages of %s were not installed:\n%s\n' "$venv" "$said" >&2
        exit 1
    fi
    if [[ -f $venv/.installed ]]; then
        echo "no package index can be reached: $venv has the packages of an earlier run"
    else
        echo "not tested: no package index can be reached for the packages of $venv"
        is_ready=false
    fi
}
