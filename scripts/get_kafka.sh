#!/usr/bin/env bash
# Fetches a Kafka broker into .tools/kafka, Spark's connector into .tools/spark-kafka, and Iceberg's Java library with a
# catalogue server into .tools/iceberg-java, with Maven. The tests with Kafka, and some with Iceberg, are skipped without
# them, so this script never fails. `strandline bench sinks` needs PostgreSQL's driver for Spark in .tools/spark-jdbc.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The jars that a POM names, into a folder, for the tests with something. The folder appears when it is complete.
fetch() {
    local pom="scripts/$1.xml" folder=".tools/$2" log
    cmp -s "$pom" "$folder/pom.xml" && return
    if ! command -v mvn >/dev/null; then
        echo "Maven is missing (without $folder, the tests with $3 are skipped); on Debian: sudo apt-get install -y maven" >&2
        return
    fi
    echo "fetching $folder for the tests with $3" >&2
    rm -rf "$folder" "$folder.new"
    if log="$(timeout 240 mvn -q -B -f "$pom" dependency:copy-dependencies -DincludeScope=runtime \
        -DoutputDirectory="$PWD/$folder.new" 2>&1)"; then
        cp "$pom" "$folder.new/pom.xml"
        mv "$folder.new" "$folder"
    else
        rm -rf "$folder.new"
        echo "$folder could not be fetched (without it, the tests with $3 are skipped): $(head -n 1 <<<"$log")" >&2
    fi
}

fetch kafka kafka Kafka
fetch spark_kafka spark-kafka Kafka
fetch iceberg_java iceberg-java "Iceberg's Java library"
fetch spark_jdbc spark-jdbc PostgreSQL
exit 0
