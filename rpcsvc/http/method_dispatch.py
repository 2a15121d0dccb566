"""The methods as jsonrpcserver runs them: an async function each, which returns Success or Error.

The library finds a method and calls it with the params as keywords. A function here raises nothing,
since the library would log an exception and send its text. This module is imported with the first
call: the library brings jsonschema, which takes 20 ms.
"""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Iterable
from difflib import get_close_matches
from typing import Any, Final, TypeAlias

from rpcsvc.errors import InvalidParams, UnknownMethod
from rpcsvc.strict_json import shown

with warnings.catch_warnings():
    # On import the library reads its schema (unused here) by functions deprecated in Python 3.11.
    warnings.filterwarnings("ignore", "(read|open)_text is deprecated", DeprecationWarning)
    from jsonrpcserver import Error, Result, Success
    from jsonrpcserver.async_dispatcher import call
    from jsonrpcserver.dispatcher import get_method
    from jsonrpcserver.request import Request
    from oslash.either import Left

__all__ = ["Error", "Method", "Result", "Success", "dispatch"]

# Called with a context by position, and with the params of the call as keywords.
Method: TypeAlias = Callable[..., Awaitable[Result]]

_LONGEST_GUESSED_NAME: Final = 48
_LIKENESS: Final = 0.4


async def dispatch(
    methods: dict[str, Method], name: str, params: Any, call_id: Any, context: Any
) -> dict[str, Any]:
    """Run the method of that name; return the member ``result`` or ``error`` of its answer.

    Raises UnknownMethod and InvalidParams.

    The library's own binding of params to a signature is left out: every method takes all
    keywords, and the model of its operation validates them.
    """
    found = get_method(methods, name)
    if isinstance(found, Left):
        raise _unknown_method(name, methods)
    if type(params) is list and params:
        raise InvalidParams(
            'The member "params" is a list. Send an object: params are given by name.'
        )
    outcome = await call(Request(name, params or {}, call_id), context, found._value)
    if isinstance(outcome, Left):
        return {"error": outcome._error._asdict()}
    return {"result": outcome._value.result}


def _unknown_method(name: str, methods: Iterable[str]) -> UnknownMethod:
    guessable = name if len(name) <= _LONGEST_GUESSED_NAME else ""
    near = get_close_matches(guessable, methods, n=3, cutoff=_LIKENESS)
    if near:
        offer = f"The nearest: {', '.join(near)}."
        return UnknownMethod(
            f'There is no method "{shown(name)}". {offer}', details={"nearest": near}
        )
    return UnknownMethod(
        f'There is no method "{shown(name)}", nor one like it. See details for all methods.',
        details={"methods": sorted(methods)},
    )
