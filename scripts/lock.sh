#!/usr/bin/env bash
# Writes requirements.lock from pyproject.toml: every dependency with all extras, pinned, with the hashes of its files
# for all platforms, but without the address of the index. What the second package, in bench/, needs is part of the dev
# extra.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ! -x .venv/bin/pip-compile ]]; then
    echo "pip-compile is missing in .venv; run: make setup" >&2
    exit 1
fi
CUSTOM_COMPILE_COMMAND="make lock" .venv/bin/pip-compile --quiet --all-extras --allow-unsafe --generate-hashes \
    --no-build-isolation --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --strip-extras \
    --output-file requirements.lock "$@" pyproject.toml

if grep -nE '://|@ file|^-' requirements.lock; then
    echo "requirements.lock names a place outside the package index (see above); do not commit it" >&2
    exit 1
fi
