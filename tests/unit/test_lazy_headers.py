"""No header is read by a property of aiohttp: these parse e-mails, dates, cookies and lists.

Their cost is not bounded: ``content_type`` takes a second for 8,000 quotation marks
(python/cpython#136063), and raises for some headers (python/cpython#151857).
"""

from __future__ import annotations

import ast
from pathlib import Path

from aiohttp import ClientResponse
from aiohttp.helpers import HeadersMixin
from aiohttp.web_request import BaseRequest

ROOT = Path(__file__).parents[2]
# Of requests and responses, whatever the variable's name is.
PROPERTIES = {
    "charset", "content_disposition", "content_type", "cookies", "forwarded", "http_range",
    "if_match", "if_modified_since", "if_none_match", "if_range", "if_unmodified_since", "links",
}  # fmt: skip
# Of what is called request where aiohttp's server is used; other objects have such names, too.
OF_REQUESTS = {"host", "json", "multipart", "post", "text", "url"}


def uses(source: str) -> list[str]:
    """The uses of a lazy property, as ``request.content_type``."""
    is_server = "web.Request" in source
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            is_request = is_server and owner.rpartition(".")[2].lstrip("_") == "request"
            if node.attr in PROPERTIES or (node.attr in OF_REQUESTS and is_request):
                found.append(f"{owner}.{node.attr}")
    return found


def test_no_lazy_property_of_a_message_is_read() -> None:
    found = [
        f"{file.name}: {use}"
        for file in (ROOT / "rpcsvc").rglob("*.py")
        for use in uses(file.read_text(encoding="utf-8"))
    ]

    assert found == []


def test_lazy_property_is_found_under_any_name() -> None:
    source = "of: web.Request\nwaiting.request.url\nr.content_type\nself._request.cookies\na.host"

    assert uses(source) == ["waiting.request.url", "r.content_type", "self._request.cookies"]


def test_listed_properties_are_those_of_aiohttp() -> None:
    """A new aiohttp that renames one would leave its successor unguarded."""
    offered = {*dir(BaseRequest), *dir(HeadersMixin), *dir(ClientResponse)}

    assert {*PROPERTIES, *OF_REQUESTS} <= offered
