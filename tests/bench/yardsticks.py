"""The servers that the service is measured against, each a process of its own.

    python -m tests.bench.yardsticks raw --port P
    python -m tests.bench.yardsticks naive --port P --db FILE
    python -m tests.bench.yardsticks PEER --port P

raw     the ceiling: a bare aiohttp handler that parses the request with orjson and answers
        ``{"jsonrpc", "result": {"ok": true, "method": <as sent>, "params": <how many>}, "id"}``.
        No token check, no validation, no storage, a small body.
naive   the floor: ``service.swap.create`` as a straightforward build has it (naive.py).
PEER    an echo on another JSON-RPC library (peers.py).

Nothing of the service is imported here: a yardstick must not change when the service does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import orjson
from aiohttp import web

from tests.bench import peers
from tests.bench.naive import naive_app

HOST = "127.0.0.1"


async def raw_rpc(request: web.Request) -> web.Response:
    """Parse, answer; the least that a JSON-RPC server over aiohttp does."""
    call = orjson.loads(await request.read())
    result = {"ok": True, "method": call["method"], "params": len(call["params"])}
    answer = {"jsonrpc": "2.0", "result": result, "id": call["id"]}
    return web.Response(body=orjson.dumps(answer), content_type="application/json")


def raw_app() -> web.Application:
    """The bare handler."""
    app = web.Application()
    app.router.add_post("/rpc", raw_rpc)
    return app


async def ready(_: web.Request) -> web.Response:
    """Answer the readiness probe of the driver."""
    return web.json_response({"status": "ok"})


def main() -> None:
    """Serve one yardstick on the loopback until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.yardsticks")
    parser.add_argument("kind", choices=("raw", "naive", *peers.SERVERS))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--db", type=Path, help="where naive keeps its orders")
    args = parser.parse_args()
    if args.kind == "naive" and args.db is None:
        parser.error("naive needs --db FILE")
    if args.kind in peers.SERVERS:
        peers.SERVERS[args.kind](HOST, args.port)
        return
    app = raw_app() if args.kind == "raw" else naive_app(args.db)
    app.router.add_get("/readyz", ready)
    web.run_app(app, host=HOST, port=args.port, access_log=None, print=None)


if __name__ == "__main__":
    main()
