#!/usr/bin/env bash
# Puts a complete development environment into .venv. Does nothing when the lock file and pyproject.toml are the ones
# that the environment was made from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root="$(pwd -P)"

good_python='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'

# A virtual environment that happens to be active must neither be used nor changed.
unset VIRTUAL_ENV PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3 python; do
        if "$candidate" -c "$good_python" >/dev/null 2>&1; then
            # the interpreter below an active virtual environment
            "$candidate" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)'
            return
        fi
    done
    echo "Python 3.11, 3.12 or 3.13 is missing; install one, or name one: make setup PYTHON=/path/to/python3.11" >&2
    return 1
}

fingerprint() {
    # the folder is part of it: a moved environment holds wrong paths
    { echo "$root"; cat requirements.lock pyproject.toml bench/pyproject.toml scripts/*.sh scripts/*.xml; } | cksum
}

bash scripts/check_java.sh

stamp=.venv/.strandline-setup
if [[ -f "$stamp" && "$(cat "$stamp")" == "$(fingerprint)" ]] && .venv/bin/python -c "$good_python" 2>/dev/null; then
    exit 0
fi

python="$(find_python)"
echo "setting up .venv with $("$python" --version)" >&2
rm -f "$stamp"
# Servers for the tests, beside pip: they do not wait for each other.
{ bash scripts/get_chromium.sh; bash scripts/get_postgres.sh; } & # one after the other, because both use apt-get
packages=$!
bash scripts/get_kafka.sh &
kafka=$!
# keep an environment that can be brought up to date, replace one that is broken or was moved here
good_place='import os, pip, sys; sys.exit(os.path.realpath(sys.prefix) != sys.argv[1])'
if ! { .venv/bin/python -c "$good_python" && .venv/bin/python -c "$good_place" "$root/.venv"; } 2>/dev/null; then
    rm -rf .venv
    "$python" -m venv .venv
fi

# Without --no-compile, half of the time would go into bytecode of modules that nobody imports. Python writes the bytecode
# of the others when it imports them for the first time, which is at the end of this script.
install() {
    .venv/bin/python -m pip --disable-pip-version-check install --quiet --no-compile "$@"
}

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
# PySpark comes as source only. Its wheel is made here just to be unpacked again, so it is not worth compressing.
printf '[bdist_wheel]\ncompression = stored\n' >"$scratch/build.cfg"
export DIST_EXTRA_CONFIG="$scratch/build.cfg"
# The build tools first: an isolated build would fetch build tools that nobody pinned.
awk '/^[A-Za-z0-9]/ { wanted = /^(pip|setuptools|wheel|packaging)==/ } wanted' requirements.lock >"$scratch/build_tools"
install --require-hashes --no-deps -r "$scratch/build_tools"
install --require-hashes --no-build-isolation -r requirements.lock
install --no-deps --no-build-isolation -e . -e bench
.venv/bin/python -c 'import strandline as sl; [getattr(sl, name) for name in sl.__all__]'
.venv/bin/strandline checkpoints ls "$scratch" >/dev/null 2>&1 || true  # an empty folder: its exit code is 1
wait "$packages" "$kafka"
fingerprint >"$stamp"
