#!/bin/sh
# Generates clients from the OpenAPI document of a sandbox of its own, compiles them strictly, and
# makes a swap each way and an order of the BFF with each; then gives the MCP tools to the models of
# three providers, none of which is called. Needs npm and pip once.
set -eu

cd "$(dirname "$0")"
./install
PATH=$PWD/node_modules/.bin:$PWD/.venv/bin:$PATH
made=./generated
rm -rf "$made"
mkdir -p "$made/python"

data=$(mktemp -d)
port=${PORT:-18481}
SITE=http://127.0.0.1:$port
export SITE
RPCSVC_RATE_LIMIT__ENABLED=false ../../.venv/bin/rpcsvc serve --port "$port" --data-dir "$data" 2>"$data/log" &
service=$!
trap 'kill "$service"; wait "$service" || true; rm -rf "$data"' EXIT
tries=0
until ../../.venv/bin/rpcsvc health --url "$SITE" >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ "$tries" -lt 100 ] || { cat "$data/log" >&2; exit 1; }
    sleep 0.1
done
python -c 'import os, urllib.request as r; r.urlretrieve(os.environ["SITE"] + "/openapi.json", "generated/openapi.json")'

# Runs one step, and shows what it said if it failed.
step() {
    label=$1
    shift
    "$@" >"$data/report" 2>&1 || { echo "failed: $label" >&2; cat "$data/report" >&2; exit 1; }
    echo "made $label"
}

generator() {
    openapi-generator-cli generate --input-spec "$made/openapi.json" "$@"
}

step openapi-typescript openapi-typescript "$made/openapi.json" \
    --output "$made/openapi-typescript.ts"
step hey-api openapi-ts --input "$made/openapi.json" --output "$made/hey-api"
step orval orval --config orval.config.mjs
step openapi-python-client openapi-python-client generate --path "$made/openapi.json" \
    --config openapi-python-client.yaml --meta none --fail-on-warning \
    --output-path "$made/python/openapi_python_client_made"
step "openapi-generator typescript-fetch" generator --generator-name typescript-fetch \
    --output "$made/typescript-fetch"
step "openapi-generator python" generator --generator-name python \
    --package-name openapi_generator_made --output "$made/python"

step "TypeScript" tsc --project .
step "Python" mypy python "$made/python/openapi_python_client_made" \
    "$made/python/openapi_generator_made"

for client in openapi-fetch hey-api orval typescript-fetch; do
    node "$made/js/typescript/$client.js"
done
export PYTHONPATH=$made/python
for client in python/with_*.py; do
    python "$client"
done
node agents.mjs
