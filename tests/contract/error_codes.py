"""Every error that an operation can answer."""

from __future__ import annotations

from typing import Any

from rpcsvc import errors


def all_errors(root: type[errors.ServiceError]) -> list[Any]:
    found: list[Any] = [root] if hasattr(root, "code") else []
    for cls in root.__subclasses__():
        found += all_errors(cls)
    return found
