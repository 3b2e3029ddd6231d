#!/usr/bin/env bash
# Installs PostgreSQL for the tests of its sink where apt-get needs no password. Those tests are skipped without it, so
# this script never fails.
set -uo pipefail

command -v postgres >/dev/null && exit 0
compgen -G "/usr/lib/postgresql/*/bin/postgres" >/dev/null && exit 0

without="without it, the tests with PostgreSQL are skipped"
if ! command -v apt-get >/dev/null || [[ "$(id -u)" -ne 0 ]]; then
    echo "PostgreSQL is missing ($without); on Debian: sudo apt-get install -y postgresql" >&2
    exit 0
fi
echo "installing PostgreSQL for the tests with it" >&2
export DEBIAN_FRONTEND=noninteractive
# Debian's package makes a cluster and starts a server, which the tests do not use: they make their own.
timeout 240 bash -c 'apt-get update -qq && apt-get install -y -qq --no-install-recommends postgresql-common \
    && sed -i "s/^#*create_main_cluster.*/create_main_cluster = false/" /etc/postgresql-common/createcluster.conf \
    && apt-get install -y -qq --no-install-recommends postgresql' >/dev/null 2>&1 \
    || echo "PostgreSQL could not be installed ($without)" >&2
exit 0
