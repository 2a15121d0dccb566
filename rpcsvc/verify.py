"""Checking what the service signed: a response, or the terms of an order.

Needs the standard library and PyNaCl only, so that a client can use it, or copy it, without the
rest. What does not live here: keys and signing (signing.py).
"""

from __future__ import annotations


def signature_headers(slug: str = "service") -> tuple[str, str, str, str, str, str]:
    """The names of the six headers of a signed response (spec 5.3), in the spec's order."""
    return (
        f"x-{slug}-signing-version",
        f"x-{slug}-signing-alg",
        f"x-{slug}-signing-kid",
        f"x-{slug}-content-sha256",
        f"x-{slug}-signed-at",
        f"x-{slug}-signature",
    )
