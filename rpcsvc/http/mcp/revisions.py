"""Revisions of MCP: finds which one a request uses, and checks its headers against its body.

2026-07-28 is stateless: every request carries revision and capabilities in ``_meta``, mirrored in
headers for proxies. In earlier revisions a client shakes hands first (``initialize``), here without
a session. Source: the MCP specification, "Streamable HTTP", "Request metadata" and "Versioning".
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any, Final, NamedTuple

from multidict import CIMultiDictProxy

from rpcsvc.errors import (
    HeaderMismatch,
    InvalidParams,
    MissingCapability,
    UnsupportedProtocolVersion,
)
from rpcsvc.strict_json import Json

STATELESS: Final = "2026-07-28"
# Newest first: the first is offered to a client that asks for an unsupported one.
HANDSHAKE: Final = ("2025-11-25", "2025-06-18")
SERVED: Final = (STATELESS, *HANDSHAKE)

_PREFIX: Final = "io.modelcontextprotocol/"
_VERSION_KEY: Final = f"{_PREFIX}protocolVersion"
_CAPABILITIES_KEY: Final = f"{_PREFIX}clientCapabilities"
SERVER_INFO_KEY: Final = f"{_PREFIX}serverInfo"

# The extension by which a client shows pages of a server (SEP-1865).
APPS: Final = f"{_PREFIX}ui"
# The extension by which a client waits for a call's end by polling (SEP-2663).
TASKS: Final = f"{_PREFIX}tasks"

_VERSION_HEADER: Final = "mcp-protocol-version"
_METHOD_HEADER: Final = "mcp-method"
_NAME_HEADER: Final = "mcp-name"
# The param that Mcp-Name repeats, by method.
_NAMED_BY: Final = {
    "tools/call": "name",
    "resources/read": "uri",
    "tasks/get": "taskId",
    "tasks/update": "taskId",
    "tasks/cancel": "taskId",
}
_BASE64: Final = re.compile(r"=\?base64\?(.*)\?=")

Headers = CIMultiDictProxy[str]


class McpClient(NamedTuple):
    """The client as its request describes it. ``capabilities`` are unknown after a handshake."""

    is_stateless: bool
    capabilities: Json

    @property
    def can_ask_user(self) -> bool:
        """Whether the client shows forms to its user (elicitation)."""
        declared = self.capabilities.get("elicitation")
        # Without a mode an old client means forms.
        return isinstance(declared, dict) and (not declared or "form" in declared)

    @property
    def can_show_apps(self) -> bool:
        """Whether the client may show apps; after a handshake its requests do not say."""
        return not self.is_stateless or self._has(APPS)

    @property
    def can_take_tasks(self) -> bool:
        """Whether the client accepts a task as an answer and polls it."""
        return self._has(TASKS)

    def require_tasks(self) -> None:
        """Raise MissingCapability for a client that does not declare tasks."""
        if not self.can_take_tasks:
            raise MissingCapability(
                "Declare the extension for tasks in the capabilities of the request.",
                details={"requiredCapabilities": {"extensions": {TASKS: {}}}},
            )

    def _has(self, extension: str) -> bool:
        extensions = self.capabilities.get("extensions")
        return isinstance(extensions, dict) and extension in extensions


def client_of(method: str, params: Json, headers: Headers) -> McpClient:
    """The client that sent a request.

    Raises HeaderMismatch, UnsupportedProtocolVersion, and InvalidParams if ``_meta`` lacks what its
    revision requires.
    """
    version = headers.get(_VERSION_HEADER)
    meta = params.get("_meta")
    meta = meta if isinstance(meta, dict) else {}
    if _VERSION_KEY not in meta and (version is None or version in HANDSHAKE):
        return McpClient(is_stateless=False, capabilities={})
    if version not in SERVED and _VERSION_KEY not in meta:
        raise _unsupported(version)
    named, capabilities = meta.get(_VERSION_KEY), meta.get(_CAPABILITIES_KEY)
    for key, value, kind in (
        (_VERSION_KEY, named, str),
        (_CAPABILITIES_KEY, capabilities, dict),
    ):
        if not isinstance(value, kind):
            what = "a string" if kind is str else "an object"
            raise InvalidParams(f'params._meta needs "{key}", {what}.')
    _require_header(headers, _VERSION_HEADER, named)
    _require_header(headers, _METHOD_HEADER, method)
    if method in _NAMED_BY and isinstance(params.get(_NAMED_BY[method]), str):
        _require_header(headers, _NAME_HEADER, params[_NAMED_BY[method]])
    if named != STATELESS:
        raise _unsupported(named)
    return McpClient(is_stateless=True, capabilities=capabilities or {})


def is_stateless(headers: Headers) -> bool:
    """Return whether a request claims a revision without handshake, by its header alone."""
    version = headers.get(_VERSION_HEADER)
    return version is not None and version not in HANDSHAKE


def mirrored(method: str, params: Json) -> dict[str, str]:
    """The headers that repeat what a message says; none for a message of an older revision."""
    meta = params.get("_meta")
    version = meta.get(_VERSION_KEY) if isinstance(meta, dict) else None
    if not isinstance(version, str):
        return {}
    named = {_VERSION_HEADER: version, _METHOD_HEADER: method}
    if isinstance(name := params.get(_NAMED_BY.get(method, "")), str):
        named[_NAME_HEADER] = name
    return {header: _encoded(value) for header, value in named.items()}


def _unsupported(version: Any) -> UnsupportedProtocolVersion:
    return UnsupportedProtocolVersion(
        "This revision of MCP is not served. Use one of those in supported.",
        details={"supported": list(SERVED), "requested": version},
    )


def _require_header(headers: Headers, name: str, wanted: Any) -> None:
    """Raise HeaderMismatch unless the header is there once and says what the body says."""
    given = headers.getall(name, [])
    if len(given) != 1 or _decoded(given[0]) != wanted:
        raise HeaderMismatch(
            f"The header {name} is missing, there twice, or says another thing than the body. Send"
            " it once, with the value that the body has."
        )


def _decoded(value: str) -> str | None:
    """A header's value; of the base64 form what it stands for, None where that is malformed."""
    match = _BASE64.fullmatch(value)
    if match is None:
        return value
    try:
        decoded = base64.b64decode(match[1], validate=True)
        # Canonical base64 only: a proxy would take two spellings of one name for two names.
        return decoded.decode() if base64.b64encode(decoded).decode() == match[1] else None
    except (binascii.Error, ValueError):
        return None


def _encoded(value: str) -> str:
    """A value as a header can carry it."""
    plain = value.isascii() and value.isprintable() and value == value.strip()
    if plain and not _BASE64.fullmatch(value):
        return value
    return f"=?base64?{base64.b64encode(value.encode()).decode()}?="
