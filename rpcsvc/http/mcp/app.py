"""The MCP App: a page that a host shows beside an order, with the QR code to pay by (SEP-1865).

The page loads nothing: the result of a tool tells it of the order, and has the code in ``_meta``.
"""

from __future__ import annotations

from typing import Final

import orjson

from rpcsvc.domain.money import USDC
from rpcsvc.http.pages.rendering import Renderer, qr_image
from rpcsvc.http.pages.texts import Texts
from rpcsvc.http.site import Site
from rpcsvc.operations.envelope import Json, Reply

MIME_TYPE: Final = "text/html;profile=mcp-app"
QR: Final = "order/qr"
_HEADING: Final = "checkout.heading_"
# The page needs no origin beside itself.
_META: Final[Json] = {"ui": {"csp": {}, "prefersBorder": True}}


class OrderApp:
    """The page of an order, and what the results of its tools tell it."""

    def __init__(self, site: Site, renderer: Renderer, texts: Texts) -> None:
        self.uri = f"ui://{site.brand.slug}/order"
        headings = {
            key.removeprefix(_HEADING): text
            for key, text in texts.entries.items()
            if key.startswith(_HEADING)
        }
        values = {
            "name": site.brand.name,
            "version": site.version,
            "tool": "get_swap_status",
            "qr": QR,
            "headings": headings,
            "stale": texts.say("common.stale"),
            "cancelled": texts.say("app.cancelled"),
        }
        self._html = renderer.app("app", texts, values)

    @property
    def tool_meta(self) -> Json:
        """``_meta`` of a tool whose results the page shows."""
        return {"ui": {"resourceUri": self.uri}}

    def resource(self) -> Json:
        """The page's entry in resources/list."""
        return {
            "uri": self.uri,
            "name": "order",
            "description": "an order: state, amount, address and QR code, shown by the host",
            "mimeType": MIME_TYPE,
            "_meta": _META,
        }

    def contents(self) -> Json:
        """The page as resources/read answers it."""
        return {"uri": self.uri, "mimeType": MIME_TYPE, "text": self._html, "_meta": _META}


def result_meta(reply: Reply) -> Json:
    """What the page is told beside the envelope: the QR code of the payment that is due, if any.

    Several wallets send an EIP-681 link to the token's contract, which loses the money: for USDC it
    is the code of the bare address.
    """
    funding = None if reply.error else orjson.loads(reply.body)["data"].get("fundingInstructions")
    if not funding:
        return {}
    is_usdc = funding["asset"] == USDC.symbol
    return {QR: qr_image(funding["depositAddress" if is_usdc else "paymentUri"])}
