"""Headers that mirror an MCP message: client and server agree on their form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from rpcsvc.errors import HeaderMismatch
from rpcsvc.http.mcp.revisions import STATELESS, client_of, mirrored
from tests.mcp import meta


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_mirrored_headers_are_read_as_the_body_says(name: str) -> None:
    params = {"name": name, "_meta": meta()}
    headers = mirrored("tools/call", params)
    assert all(value.isascii() and value.isprintable() for value in headers.values())
    assert client_of("tools/call", params, CIMultiDictProxy(CIMultiDict(headers))).is_stateless


@given(st.text(max_size=20), st.text(max_size=20))
def test_a_name_header_stands_for_one_name_only(sent: str, wanted: str) -> None:
    headers = {**mirrored("tools/call", {"_meta": meta()}), "mcp-name": sent}
    params = {"name": wanted, "_meta": meta()}
    if sent == wanted and not sent.startswith("=?base64?"):
        assert client_of("tools/call", params, CIMultiDictProxy(CIMultiDict(headers)))
    elif not sent.startswith("=?base64?"):
        with pytest.raises(HeaderMismatch):
            client_of("tools/call", params, CIMultiDictProxy(CIMultiDict(headers)))


def test_messages_of_older_revisions_are_not_mirrored() -> None:
    assert mirrored("tools/call", {"name": "get_quote"}) == {}
    assert mirrored("tools/list", {"_meta": {"progressToken": 1}}) == {}


def test_a_header_that_comes_twice_is_refused() -> None:
    headers = CIMultiDict(mirrored("tools/list", {"_meta": meta()}))
    headers.add("mcp-protocol-version", STATELESS)
    with pytest.raises(HeaderMismatch):
        client_of("tools/list", {"_meta": meta()}, CIMultiDictProxy(headers))
