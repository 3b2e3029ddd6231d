#!/usr/bin/env bash
# Makes sure that Spark finds Java 17 or newer: silent when it does, installs it through apt-get where that needs no
# password, and otherwise prints the one line to run.
set -euo pipefail

needed=17
package=openjdk-17-jre-headless

java_command() {
    if [[ -n "${JAVA_HOME:-}" ]]; then
        echo "$JAVA_HOME/bin/java"
    else
        command -v java || true
    fi
}

# Major version of the given java; nothing where it does not run. Knows 17.0.9, 21 and the old 1.8.0.
major_version() {
    [[ -n "$1" && -x "$1" ]] || return 0
    "$1" -version 2>&1 | sed -nE 's/.* version "(1\.)?([0-9]+).*/\2/p' | head -n 1 || true
}

java_is_good() {
    local version
    version="$(major_version "$(java_command)")"
    [[ -n "$version" && "$version" -ge "$needed" ]]
}

java_is_good && exit 0

if [[ -n "${JAVA_HOME:-}" ]]; then
    echo "JAVA_HOME=$JAVA_HOME holds no Java $needed or newer; point it at one, or unset it." >&2
    exit 1
fi

if command -v apt-get >/dev/null; then
    as_root=()
    if [[ "$(id -u)" -ne 0 ]]; then
        if ! { command -v sudo >/dev/null && sudo -n true 2>/dev/null; }; then
            echo "Java $needed or newer is missing; run: sudo apt-get install -y $package" >&2
            exit 1
        fi
        as_root=(sudo -n)
    fi
    echo "Java $needed or newer is missing; installing $package" >&2
    log="$(mktemp)"
    trap 'rm -f "$log"' EXIT
    # ${as_root[@]+...}: an empty array counts as unset in older versions of bash
    if ! { ${as_root[@]+"${as_root[@]}"} apt-get update -qq \
        && ${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package"; } >"$log" 2>&1
    then
        tail -n 5 "$log" >&2
    fi
    java_is_good && exit 0
    echo "Java $needed could not be installed; run: sudo apt-get update && sudo apt-get install -y $package" >&2
elif command -v brew >/dev/null; then
    echo "Java $needed or newer is missing; run: brew install openjdk@17" >&2
else
    echo "Java $needed or newer is missing; install a JRE $needed+ and put it on PATH, or set JAVA_HOME" >&2
fi
exit 1
