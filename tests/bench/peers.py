"""Echo servers of other JSON-RPC libraries, each as its own documentation sets it up.

They do the least that any service on them does: parse, validate four params by the method's
signature, and send them back. Nothing is stored and nothing signed. The packages are in the extra
``bench``, which only ``make bench`` installs.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final

from aiohttp import web

METHOD: Final = "echo"
Echoed = dict[str, Any]


async def echo(direction: str, chain: int | str, amount: str, to: str) -> Echoed:
    """Send the params back."""
    return {"direction": direction, "chain": chain, "amount": amount, "to": to}


def serve_jsonrpcserver(host: str, port: int) -> None:
    """jsonrpcserver's defaults behind aiohttp."""
    import jsonrpcserver  # noqa: PLC0415 - warns when imported, and only this process needs it

    async def answered(**params: Any) -> Any:
        return jsonrpcserver.Success(await echo(**params))

    async def rpc(request: web.Request) -> web.Response:
        answer = await jsonrpcserver.async_dispatch(
            await request.text(), methods={METHOD: answered}
        )
        return web.Response(text=answer, content_type="application/json")

    app = web.Application()
    app.router.add_post("/rpc", rpc)
    _run(app, host, port)


def serve_pjrpc(host: str, port: int) -> None:
    """pjrpc's aiohttp application."""
    from pjrpc.server import MethodRegistry  # noqa: PLC0415 - only in the extra bench
    from pjrpc.server.integration.aiohttp import Application  # noqa: PLC0415 - as above

    methods = MethodRegistry()
    methods.add(METHOD)(echo)
    _run(Application().add_methods(methods, "/rpc").http_app, host, port)


def serve_fastapi(host: str, port: int) -> None:
    """fastapi-jsonrpc under uvicorn, with the HTTP parser in C if it is installed."""
    import fastapi_jsonrpc  # noqa: PLC0415 - only in the extra bench
    import uvicorn  # noqa: PLC0415 - as above

    entry = fastapi_jsonrpc.Entrypoint("/rpc")
    entry.add_method_route(echo, name=METHOD)
    app = fastapi_jsonrpc.API()
    app.bind_entrypoint(entry)
    app.add_api_route("/readyz", _up)
    uvicorn.run(app, host=host, port=port, loop="asyncio", log_level="error")


async def _up() -> Echoed:
    return {"status": "ok"}


async def _ready(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


def _run(app: web.Application, host: str, port: int) -> None:
    app.router.add_get("/readyz", _ready)
    web.run_app(app, host=host, port=port, access_log=None, print=None)


SERVERS: Final[dict[str, Callable[[str, int], None]]] = {
    "jsonrpcserver": serve_jsonrpcserver,
    "pjrpc": serve_pjrpc,
    "fastapi-jsonrpc": serve_fastapi,
}


def missing() -> list[str]:
    """The peers whose package is not installed."""
    return [name for name in SERVERS if find_spec(name.replace("-", "_")) is None]
