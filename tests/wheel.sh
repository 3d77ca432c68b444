#!/usr/bin/env bash
# Builds the sdist and the wheel into dist/, checks what is in them, and tries the installed wheel in a fresh
# environment of each Python that is found: the quickstart, and a selection of the tests.
#
#   bash tests/wheel.sh [VERSION ...]    the Pythons; 3.10 to 3.14 where none is named
#   PYTHON=python3.12                    what builds
#   WHEEL_TESTS=                         the arguments of pytest; empty: the quickstart alone
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

versions=("$@")
if [[ ${#versions[@]} -eq 0 ]]; then
    versions=(3.10 3.11 3.12 3.13 3.14)
fi
tests=(
    tests/pure/project/test_facade.py tests/pure/errors/test_errors.py tests/pure/planner/test_{plan,verify}.py
    tests/pure/pos/test_{store,claims}.py tests/pure/engine/test_value_codec.py tests/ray/test_collectives.py
    -k "not gloo and not torch"
)
if [[ -v WHEEL_TESTS ]]; then
    read -ra tests <<<"$WHEEL_TESTS"
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH

# Prints the path of a Python that really runs (a pyenv shim may exist without one behind it), or nothing.
find_python() {
    local ask="import sys; print(sys.executable if '%d.%d' % sys.version_info[:2] == '$1' else '')"
    local version found
    for version in "" $(pyenv versions --bare 2>/dev/null | grep "^$1\." || true); do
        found=$(${version:+env PYENV_VERSION="$version"} "python$1" -c "$ask" 2>/dev/null || true)
        if [[ -n $found ]]; then
            echo "$found"
            return
        fi
    done
}

echo "building"
"${PYTHON:-python3}" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet build twine
rm -f dist/raycollect-*
"$work/tools/bin/python" -m build --outdir dist . >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }
"$work/tools/bin/twine" check --strict dist/raycollect-*
"$work/tools/bin/python" tests/wheel_files.py dist

wheel=$(echo dist/raycollect-*.whl)
mkdir "$work/source"
tar -xzf dist/raycollect-*.tar.gz -C "$work/source" --strip-components=1
rm -rf "$work/source/raycollect"  # what is installed is tried, not what lies here

# Tries the wheel with the Python of a version.
try() {
    local version=$1 python home="$work/$1"
    python=$(find_python "$version")
    if [[ -z $python ]]; then
        echo "Python $version: not found, the wheel was not tried with it"
        return
    fi
    "$python" -m venv "$home"
    "$home/bin/pip" install --quiet "$wheel" 'pytest>=8' 'pytest-timeout>=2.2' 'hypothesis>=6.90'
    cd "$work/source"
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 "$home/bin/python" examples/quickstart.py | tee "$home/said"
    grep -q '^A: \[2\. 2\.' "$home/said"
    grep -q '^B: \[2\. 2\.' "$home/said"
    if [[ ${#tests[@]} -gt 0 ]]; then
        "$home/bin/python" -m pytest -q -p no:cacheprovider "${tests[@]}"
    fi
    echo "Python $version: well"
    rm -rf "$home"
}

# Two at a time, as an installation waits much; what each says is printed when it has ended.
failed=0
tries=()
for version in "${versions[@]}"; do
    if [[ ${#tries[@]} -ge 2 ]]; then
        wait "${tries[0]}" || failed=1
        tries=("${tries[@]:1}")
    fi
    echo "Python $version: trying"
    (
        trap 'cat "$work/$version.log"' EXIT
        try "$version" >"$work/$version.log" 2>&1
    ) &
    tries+=($!)
done
for one in "${tries[@]}"; do
    wait "$one" || failed=1
done
exit "$failed"
