"""jsonrpcserver's part of a call: which method it is, and whether its params are given by name.

The library is driven one request at a time through the synchronous steps of its dispatch,
``get_method`` and ``call``. Its table holds one ``_Entry`` per method: an entry only notes that its
method was found, and the wrapper (jsonrpc.py) runs it afterwards. The step between the two, binding
the params to the method's signature, is left out: every entry takes any params, as one argument,
and the operation's model validates them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

from rpcsvc.errors import InvalidParams, ServiceError, UnknownMethod
from rpcsvc.http.jsonrpc import shown

with warnings.catch_warnings():
    # On import the library reads its schema (unused here) by functions deprecated in Python 3.11.
    warnings.filterwarnings("ignore", "(read|open)_text is deprecated", DeprecationWarning)
    import jsonrpcserver
    from jsonrpcserver.dispatcher import call, get_method
    from jsonrpcserver.request import Request

M = TypeVar("M")


_LONGEST_GUESSED_NAME: Final = 48
_LIKENESS: Final = 0.4
# The result that an entry returns to the library; the wrapper makes the real one later.
_FOUND: Final = jsonrpcserver.Success(None)


class Found(NamedTuple, Generic[M]):
    """A method, and the params of a call of it."""

    method: M
    params: dict[str, Any]


class MethodTable(Generic[M]):
    """The methods by name."""

    def __init__(self, methods: Mapping[str, M]) -> None:
        self._entries: dict[str, Callable[..., jsonrpcserver.Result]] = {
            name: _Entry(method) for name, method in methods.items()
        }

    def find(self, name: str, params: Any, call_id: Any) -> Found[M]:
        """The method of that name. Raises UnknownMethod and InvalidParams."""
        found: list[Found[M]] = []
        # One positional argument: a name in the params can't clash with a Python parameter.
        request = Request(name, [params], call_id)
        outcome = get_method(self._entries, name).bind(partial(call, request, found))
        if not found:
            raise self._fault(name, outcome)
        return found[0]

    def _fault(self, name: str, outcome: Any) -> ServiceError:
        """The error that tells the caller why jsonrpcserver found no method to run."""
        code = outcome._error.code
        if code == UnknownMethod.rpc_code:
            return self._unknown_method(name)
        if code == InvalidParams.rpc_code:
            return InvalidParams(
                'The member "params" is a list. Send an object: params are given by name.'
            )
        raise RuntimeError(f"jsonrpcserver refused a call: {outcome._error!r}")

    def _unknown_method(self, name: str) -> UnknownMethod:
        guessable = name if len(name) <= _LONGEST_GUESSED_NAME else ""
        near = get_close_matches(guessable, self._entries, n=3, cutoff=_LIKENESS)
        if near:
            offer = f"The nearest: {', '.join(near)}."
            return UnknownMethod(
                f'There is no method "{shown(name)}". {offer}', details={"nearest": near}
            )
        known = sorted(self._entries)
        return UnknownMethod(
            f'There is no method "{shown(name)}", nor one like it. See details for all methods.',
            details={"methods": known},
        )


class _Entry(Generic[M]):
    """A method as jsonrpcserver knows it: called with its params, it notes that it was found."""

    __slots__ = ("_method",)

    def __init__(self, method: M) -> None:
        self._method = method

    def __call__(self, found: list[Found[M]], params: Any, /) -> jsonrpcserver.Result:
        if type(params) is not dict and params != []:
            return jsonrpcserver.InvalidParams()
        found.append(Found(self._method, params or {}))
        return _FOUND
