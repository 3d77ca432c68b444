#!/usr/bin/env bash
# Runs the tests of what the package uses of Ray's internals on each minor version of Ray, from the oldest that
# pyproject.toml allows to the newest there is; and on the oldest a selection of the tests with a running Ray, and the
# quickstart.
#
#   bash tests/ray_versions.sh [VERSION ...]    the versions; the first one is the one that runs
#   PYTHON=.venv/bin/python                     which has the package, what it needs, and pytest
#
# A Ray is installed into a folder that PYTHONPATH puts before site-packages. Ray's workers inherit that, and refuse a
# driver of another version.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1

# Prints the first version that is allowed, and the latest of each later minor version.
versions() {
    "$python" -m pip index versions ray 2>/dev/null | "$python" -c '
import re, sys
from pathlib import Path
oldest = tuple(map(int, re.search(r"\"ray>=([0-9.]+)\"", Path("pyproject.toml").read_text())[1].split(".")))
listed = re.search(r"Available versions: (.*)", sys.stdin.read())[1].split(", ")
known = sorted(tuple(map(int, one.split("."))) for one in listed)
latest = {one[:2]: one for one in known if one[:2] > oldest}
print(*[".".join(map(str, one)) for one in (next(one for one in known if one >= oldest), *latest.values())])'
}

# Runs a command with a Ray in the place of the installed one.
with_ray() {
    local version=$1
    shift
    PYTHONPATH="$work/$version" RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 "$@"
}

tried=("$@")
if [[ ${#tried[@]} -eq 0 ]]; then
    listed=$(versions) # by itself, as bash ignores a failure in a here-string
    read -ra tried <<<"$listed"
fi
if [[ ${#tried[@]} -eq 0 ]]; then
    echo "no versions of Ray are listed" >&2
    exit 1
fi
for version in "${tried[@]}"; do
    echo "Ray $version"
    "$python" -m pip install --quiet --no-deps --no-compile --target "$work/$version" "ray==$version"
    with_ray "$version" "$python" -c "import ray; assert ray.__version__ == '$version', ray.__version__"
    with_ray "$version" "$python" -m pytest -q -p no:cacheprovider tests/pure/ray_bridge/test_ray.py
    if [[ $version == "${tried[0]}" ]]; then
        with_ray "$version" "$python" examples/quickstart.py | tee "$work/said"
        grep -q '^A: \[2\. 2\.' "$work/said"
        grep -q '^B: \[2\. 2\.' "$work/said"
        with_ray "$version" "$python" -m pytest -q -p no:cacheprovider tests/contract/test_{values,mismatches}.py \
            tests/ray/test_{lent_tokens,program_order,direct_transport}.py \
            -k "shm or lent_tokens or program_order or direct_transport"
    fi
    rm -rf "${work:?}/$version"
done
