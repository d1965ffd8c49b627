#!/bin/bash
# Apache Kafka from its jars, told what to do as the official image is: KAFKA_SOME_SETTING=x is some.setting=x.
set -euo pipefail
properties=/tmp/server.properties
env | while IFS='=' read -r name value; do
  case "$name" in
    KAFKA_HEAP_OPTS) ;;
    KAFKA_*) name=${name#KAFKA_}; name=${name,,}; printf '%s=%s\n' "${name//_/.}" "$value" ;;
  esac
done >"$properties"
# Debian puts java on the path when it installs the package, not when it is only unpacked.
candidates=("$(command -v java || true)" /usr/lib/jvm/*/bin/java)
java=${candidates[0]:-${candidates[1]}}
# shellcheck disable=SC2086 # several options in one variable
run() { "${how[@]}" "$java" ${KAFKA_HEAP_OPTS:-} -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -cp '/opt/kafka/libs/*' "$@"; }
how=()
run kafka.tools.StorageTool format --ignore-formatted -t 5L6g3nShT-eMCtK--X86sw -c "$properties"
how=(exec)
run kafka.Kafka "$properties"
