#!/bin/sh
# Lints an OpenAPI document; any finding, a hint included, fails.
# Usage: run.sh [DOCUMENT], by default docs/generated/openapi.json. Needs node, and npm once.
set -eu

document=$(realpath "${1:-$(dirname "$0")/../../docs/generated/openapi.json}")
cd "$(dirname "$0")"
if ! cmp -s package-lock.json node_modules/.installed; then
    npm ci --no-audit --no-fund --ignore-scripts
    cp package-lock.json node_modules/.installed
fi
exec node_modules/.bin/spectral lint --ruleset ruleset.yaml --fail-severity hint "$document"
