"""JSON-RPC 2.0 to the letter: the specification's own examples, and malformed requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.errors import (
    InternalError,
    MethodNotAllowed,
    OrderNotFound,
    PayloadTooLarge,
    RateLimited,
    ServiceError,
)
from rpcsvc.http.jsonrpc import (
    JsonRpcServer,
    RpcAnswer,
    RpcMethod,
    error_object,
    full_error,
)
from tests.contract.serving import Served
from tests.logs import logs_of


class Caller:
    """A caller's context; the methods below record their calls in it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str | None, dict[str, Any]]] = []
        self.running = 0
        self.most_running = 0
        self.eight_run = asyncio.Event()
        self.gate = asyncio.Event()


async def subtract(caller: Caller, hint: str | None, params: dict[str, Any]) -> Any:
    caller.calls.append(("subtract", hint, params))
    return params["minuend"] - params["subtrahend"]


async def echo(caller: Caller, hint: str | None, params: dict[str, Any]) -> Any:
    caller.calls.append(("echo", hint, params))
    return params


async def hello(caller: Caller, hint: str | None, params: dict[str, Any]) -> Any:
    caller.calls.append(("hello", hint, params))
    return ["hello", 5]


async def fragment(caller: Caller, hint: str | None, params: dict[str, Any]) -> Any:
    return orjson.Fragment(b'{"ok":true}')


async def crash(caller: Caller, hint: str | None, params: dict[str, Any]) -> Any:
    raise RuntimeError("secret: hunter2")


async def unwritable(caller: Caller, hint: str | None, params: dict[str, Any]) -> Any:
    return {"huge": 2**70}


async def limited(caller: Caller, hint: str | None, params: dict[str, Any]) -> Any:
    caller.calls.append(("limited", hint, params))
    raise RateLimited("Too many.", details={"limit": 30}, retry_after=2)


async def misplaced(caller: Caller, hint: str | None, params: dict[str, Any]) -> Any:
    raise OrderNotFound("secret: an operation's error is a result, not a fault")


async def cancelled(caller: Caller, hint: str | None, params: dict[str, Any]) -> Any:
    raise asyncio.CancelledError


async def wait(caller: Caller, hint: str | None, params: dict[str, Any]) -> Any:
    caller.running += 1
    caller.most_running = max(caller.most_running, caller.running)
    if caller.running == 8:
        caller.eight_run.set()
    try:
        await caller.gate.wait()
    finally:
        caller.running -= 1
    return params["n"]


METHODS = {
    function.__name__: RpcMethod(function, runs_as_notification=True)
    for function in (
        subtract, echo, hello, fragment, crash, unwritable, limited, misplaced, cancelled, wait
    )
} | {
    "sum": RpcMethod(echo, runs_as_notification=True),
    "get_data": RpcMethod(hello, runs_as_notification=True),
    "update": RpcMethod(echo, runs_as_notification=True),
    "notify_hello": RpcMethod(echo, runs_as_notification=True),
    "notify_sum": RpcMethod(echo, runs_as_notification=True),
    "create": RpcMethod(echo, runs_as_notification=False),
}  # fmt: skip
SERVER = JsonRpcServer(METHODS)


async def answer(body: bytes | str, caller: Caller | None = None) -> RpcAnswer:
    raw = body if isinstance(body, bytes) else body.encode()
    return await SERVER.answer(raw, caller or Caller())


async def reply(body: Any, caller: Caller | None = None) -> Any:
    """The parsed answer to a body of text, bytes or a value; it must be HTTP 200."""
    raw = body if isinstance(body, bytes | str) else json.dumps(body)
    status, sent = await answer(raw, caller)
    assert status == 200
    assert sent is not None
    return json.loads(sent)


def outline(response: Any) -> Any:
    """A response as the specification prints it: an error is its code and the id."""
    if isinstance(response, list):
        return [outline(one) for one in response]
    assert response["jsonrpc"] == "2.0"
    assert set(response) in ({"jsonrpc", "result", "id"}, {"jsonrpc", "error", "id"})
    if "error" in response:
        error = response["error"]
        assert set(error) == {"code", "message", "data"}
        assert isinstance(error["message"], str)
        return (error["code"], response["id"])
    return (response["result"], response["id"])


def request(method: Any = "echo", **members: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": method, "id": 1} | members


# The examples of the specification, section 7. Its params by position are valid JSON-RPC that no
# method of this service takes, so those are answered with -32602 instead of a result.
SPECIFICATION = [
    pytest.param(
        '{"jsonrpc": "2.0", "method": "subtract", "params": [42, 23], "id": 1}',
        (-32602, 1),
        id="positional parameters",
    ),
    pytest.param(
        '{"jsonrpc": "2.0", "method": "subtract", "params": [23, 42], "id": 2}',
        (-32602, 2),
        id="positional parameters, swapped",
    ),
    pytest.param(
        '{"jsonrpc": "2.0", "method": "subtract",'
        ' "params": {"subtrahend": 23, "minuend": 42}, "id": 3}',
        (19, 3),
        id="named parameters",
    ),
    pytest.param(
        '{"jsonrpc": "2.0", "method": "subtract",'
        ' "params": {"minuend": 42, "subtrahend": 23}, "id": 4}',
        (19, 4),
        id="named parameters, swapped",
    ),
    pytest.param(
        '{"jsonrpc": "2.0", "method": "update", "params": [1,2,3,4,5]}', None, id="notification"
    ),
    pytest.param(
        '{"jsonrpc": "2.0", "method": "foobar"}', None, id="notification of an unknown method"
    ),
    pytest.param(
        '{"jsonrpc": "2.0", "method": "foobar", "id": "1"}',
        (-32601, "1"),
        id="non-existent method",
    ),
    pytest.param(
        '{"jsonrpc": "2.0", "method": "foobar, "params": "bar", "baz]',
        (-32700, None),
        id="invalid JSON",
    ),
    pytest.param(
        '{"jsonrpc": "2.0", "method": 1, "params": "bar"}',
        (-32600, None),
        id="invalid request object",
    ),
    pytest.param(
        '[{"jsonrpc": "2.0", "method": "sum", "params": [1,2,4], "id": "1"},'
        ' {"jsonrpc": "2.0", "method"]',
        (-32700, None),
        id="batch, invalid JSON",
    ),
    pytest.param("[]", (-32600, None), id="empty array"),
    pytest.param("[1]", [(-32600, None)], id="invalid batch, not empty"),
    pytest.param("[1,2,3]", [(-32600, None)] * 3, id="invalid batch"),
    pytest.param(
        """[
        {"jsonrpc": "2.0", "method": "sum", "params": [1,2,4], "id": "1"},
        {"jsonrpc": "2.0", "method": "notify_hello", "params": [7]},
        {"jsonrpc": "2.0", "method": "subtract", "params": [42,23], "id": "2"},
        {"foo": "boo"},
        {"jsonrpc": "2.0", "method": "foo.get", "params": {"name": "myself"}, "id": "5"},
        {"jsonrpc": "2.0", "method": "get_data", "id": "9"}
    ]""",
        [(-32602, "1"), (-32602, "2"), (-32600, None), (-32601, "5"), (["hello", 5], "9")],
        id="batch",
    ),
    pytest.param(
        """[
        {"jsonrpc": "2.0", "method": "notify_sum", "params": [1,2,4]},
        {"jsonrpc": "2.0", "method": "notify_hello", "params": [7]}
    ]""",
        None,
        id="batch of notifications",
    ),
]


@pytest.mark.parametrize(("body", "expected"), SPECIFICATION)
async def test_the_specifications_own_example_is_answered_as_it_says(
    body: str, expected: Any
) -> None:
    if expected is None:
        assert await answer(body) == (204, None)
    else:
        assert outline(await reply(body)) == expected


async def test_response_keeps_member_order_and_the_fragment_verbatim() -> None:
    assert await answer('{"id":"a","method":"fragment","jsonrpc":"2.0"}') == (
        200,
        b'{"jsonrpc":"2.0","result":{"ok":true},"id":"a"}',
    )


@pytest.mark.parametrize(
    "call_id",
    ["", "a", "\u00e9\U0001f600\x00", 0, -1, 2**63 - 1, -(2**63), 1.5, -0.5, 1e300, None],
)
async def test_an_id_that_is_a_string_number_or_null_is_given_back(call_id: Any) -> None:
    assert outline(await reply(request("hello", id=call_id))) == (["hello", 5], call_id)
    assert outline(await reply(request("nope", id=call_id))) == (-32601, call_id)


@pytest.mark.parametrize("call_id", [True, False, {}, {"a": 1}, [], [1]])
async def test_an_id_of_another_kind_makes_the_request_invalid(call_id: Any) -> None:
    caller = Caller()

    response = await reply(request(id=call_id), caller)

    assert outline(response) == (-32600, None)
    assert '"id" is a' in response["error"]["message"]
    assert caller.calls == []


@pytest.mark.parametrize("literal", ["1e400", "NaN", "Infinity", "9223372036854775808", "9" * 5000])
async def test_an_id_that_is_no_safe_number_is_not_json(literal: str) -> None:
    body = f'{{"jsonrpc":"2.0","method":"echo","id":{literal}}}'

    assert outline(await reply(body)) == (-32700, None)


async def test_id_null_is_answered_and_a_missing_id_is_not() -> None:
    caller = Caller()

    assert outline(await reply(request("create", id=None), caller)) == ({}, None)
    assert len(caller.calls) == 1


@pytest.mark.parametrize(
    ("members", "word"),
    [
        ({"jsonrpc": "1.0"}, '"jsonrpc"'),
        ({"jsonrpc": 2.0}, '"jsonrpc"'),
        ({"jsonrpc": None}, '"jsonrpc"'),
        ({"method": None}, '"method" is null'),
        ({"method": ["echo"]}, '"method" is a list'),
        ({"method": {}}, '"method" is an object'),
        ({"method": True}, '"method" is a boolean'),
        ({"params": "bar"}, '"params" is a string'),
        ({"params": 1}, '"params" is a number'),
        ({"params": True}, '"params" is a boolean'),
    ],
)
async def test_wrong_member_of_a_request_is_named(members: dict[str, Any], word: str) -> None:
    response = await reply(request(**members))

    assert outline(response) == (-32600, 1)
    assert word in response["error"]["message"]
    assert response["error"]["data"]["code"] == "invalid_request"


@pytest.mark.parametrize("missing", ["jsonrpc", "method"])
async def test_missing_member_of_a_request_is_named(missing: str) -> None:
    message = request()
    del message[missing]

    response = await reply(message)

    assert outline(response) == (-32600, 1)
    assert f'"{missing}" is missing' in response["error"]["message"]


@pytest.mark.parametrize("body", ["1", "null", "true", '"x"', "{}", "1.5"])
async def test_json_that_is_no_request_is_an_invalid_request(body: str) -> None:
    assert outline(await reply(body)) == (-32600, None)


@pytest.mark.parametrize("inner", ["[]", "[[]]", "[1]", '[{"jsonrpc":"2.0","method":"echo"}]'])
async def test_a_batch_within_a_batch_is_one_invalid_request(inner: str) -> None:
    assert outline(await reply(f"[{inner}]")) == [(-32600, None)]


@pytest.mark.parametrize("params", [[1], [{}], [{"minuend": 1}, 2, 3]])
async def test_a_list_of_params_is_refused_and_an_object_asked_for(params: list[Any]) -> None:
    caller = Caller()

    response = await reply(request(params=params), caller)

    assert outline(response) == (-32602, 1)
    assert "Send an object" in response["error"]["message"]
    assert response["error"]["data"]["code"] == "invalid_request"
    assert caller.calls == []


async def test_method_that_was_found_before_refuses_a_list() -> None:
    server, caller = JsonRpcServer(METHODS), Caller()
    for params, code in (({"a": 1}, None), ([1], -32602), ({"a": 2}, None)):
        body = orjson.dumps(request(params=params, id=1))
        answered = orjson.loads((await server.answer(body, caller))[1] or b"")
        assert answered.get("error", {}).get("code") == code
    assert [params for _, _, params in caller.calls] == [{"a": 1}, {"a": 2}]


async def test_absent_params_are_an_empty_object() -> None:
    assert outline(await reply(request())) == ({}, 1)


async def test_null_stands_for_absent_params() -> None:
    """The npm package json-rpc-2.0 sends it."""
    caller = Caller()

    assert outline(await reply(request(params=None), caller)) == ({}, 1)
    assert await answer('{"jsonrpc":"2.0","method":"echo","params":null}', caller) == (204, None)
    assert [params for _, _, params in caller.calls] == [{}, {}]


@pytest.mark.parametrize("call_id", ["a", "", 7, -1.5, 2**63 - 1])
@pytest.mark.parametrize("members", [{"method": 1}, {"jsonrpc": "1.0"}, {"params": "x"}])
async def test_invalid_request_is_answered_with_its_id(
    members: dict[str, Any], call_id: Any
) -> None:
    """A client that matches answers by id would wait for ever."""
    invalid = request(id=call_id, **members)

    assert outline(await reply(invalid)) == (-32600, call_id)
    assert outline(await reply([invalid, request("hello")])) == [
        (-32600, call_id),
        (["hello", 5], 1),
    ]


@pytest.mark.parametrize("call_id", [None, True, [1], {"a": 1}, 2**63])
async def test_invalid_request_without_a_readable_id_gets_null(call_id: Any) -> None:
    body = json.dumps(request(id=call_id, method=1))

    assert outline(await reply(body)) == (-32600, None)


PYTHON_NAMES = ["self", "cls", "context", "call", "caller", "params", "request", "method", "id"]
OTHER_NAMES = ["func", "args", "kwargs", "hint", "return", "idempotency-key", "__class__", "\u00e9"]


@pytest.mark.parametrize("name", [*PYTHON_NAMES, *OTHER_NAMES, ""])
async def test_no_param_name_meets_a_python_name(name: str) -> None:
    assert outline(await reply(request(params={name: 1}))) == ({name: 1}, 1)


async def test_many_params_are_taken() -> None:
    params = {f"p{n}": n for n in range(2_000)}

    assert outline(await reply(request(params=params))) == (params, 1)


async def test_unknown_members_are_ignored() -> None:
    assert outline(await reply(request(extra=1, result=2, error=3))) == ({}, 1)


@pytest.mark.parametrize(
    ("call_id", "hint"), [("abc", "abc"), ("", ""), (7, None), (None, None), (1.5, None)]
)
async def test_method_gets_the_request_id_if_it_is_a_string(call_id: Any, hint: str | None) -> None:
    caller = Caller()

    await reply(request(id=call_id, params={"a": 1}), caller)

    assert caller.calls == [("echo", hint, {"a": 1})]


async def test_unknown_method_gets_the_nearest_names() -> None:
    response = await reply(request("substract", id="s-1"))

    assert outline(response) == (-32601, "s-1")
    data = response["error"]["data"]
    assert data["code"] == "unknown_method"
    assert data["retryable"] is False
    assert data["requestId"] == "s-1"
    assert data["details"]["nearest"][0] == "subtract"
    assert "subtract" in data["message"]
    assert data["message"] == response["error"]["message"]


@pytest.mark.parametrize("name", ["", "\x00\x01", "rpc.?!", "__init__", "x" * 60_000])
async def test_method_without_near_names_gets_the_short_list(name: str) -> None:
    status, body = await answer(json.dumps(request(name)))

    assert status == 200
    assert body is not None
    assert len(body) < 2_000
    assert json.loads(body)["error"]["code"] == -32601


async def test_a_notification_runs_and_gets_no_answer() -> None:
    caller = Caller()
    body = '{"jsonrpc":"2.0","method":"echo","params":{"a":1}}'

    assert await answer(body, caller) == (204, None)
    assert caller.calls == [("echo", None, {"a": 1})]


async def test_notification_of_an_order_making_method_does_not_run() -> None:
    caller = Caller()
    body = '{"jsonrpc":"2.0","method":"create","params":{"a":1}}'

    assert await answer(body, caller) == (204, None)
    assert await answer(f"[{body},{body}]", caller) == (204, None)
    assert caller.calls == []


async def test_failing_notification_gets_no_answer_but_is_logged() -> None:
    caller = Caller()
    with logs_of("rpcsvc.http.jsonrpc", "_logger") as logs:
        for method in ("limited", "crash", "unwritable"):
            body = f'{{"jsonrpc":"2.0","method":"{method}"}}'
            assert await answer(body, caller) == (204, None)

    assert [entry["method"] for entry in logs] == ["crash"]
    assert caller.calls == [("limited", None, {})]


async def test_an_invalid_request_without_an_id_is_answered() -> None:
    assert outline(await reply('{"jsonrpc":"2.0","method":1}')) == (-32600, None)


async def test_a_service_error_becomes_an_error_object() -> None:
    assert await reply(request("limited", id="r:1")) == {
        "jsonrpc": "2.0",
        "error": {
            "code": -32029,
            "message": "Too many.",
            "data": {
                "code": "rate_limited",
                "message": "Too many.",
                "retryable": True,
                "requestId": "r:1",
                "details": {"limit": 30},
            },
        },
        "id": "r:1",
    }


@pytest.mark.parametrize("method", ["crash", "unwritable", "misplaced"])
@pytest.mark.parametrize("call_id", ["req-1", 7, "not fit for a log\n"])
async def test_a_fault_is_logged_with_its_cause_and_none_of_it_is_sent(
    method: str, call_id: Any
) -> None:
    with logs_of("rpcsvc.http.jsonrpc", "_logger") as logs:
        response = await reply(request(method, id=call_id))

    data = response["error"]["data"]
    assert outline(response) == (-32603, call_id)
    assert data["message"] == InternalError(data["requestId"]).message
    assert data["code"] == "internal_error"
    assert data["retryable"] is True
    assert set(data) == {"code", "message", "retryable", "requestId"}
    assert data["requestId"] == call_id or data["requestId"].isalnum()
    assert "secret" not in json.dumps(response)
    [entry] = logs
    assert entry["log_level"] == "error"
    assert entry["exc_info"]
    assert (entry["method"], entry["request_id"]) == (method, data["requestId"])


@pytest.mark.parametrize("body", ["[%s]", "%s", "[%s,%s]"])
async def test_a_cancelled_method_cancels_the_answer(body: str) -> None:
    element = json.dumps(request("cancelled"))

    with pytest.raises(asyncio.CancelledError):
        await answer(body.replace("%s", element))


async def test_cancelling_the_answer_cancels_the_methods_that_run() -> None:
    caller = Caller()
    batch = json.dumps([request("wait", params={"n": n}) for n in range(20)])
    task = asyncio.create_task(answer(batch, caller))
    await caller.eight_run.wait()

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert caller.running == 0


async def test_a_batch_runs_eight_at_once_and_answers_in_order() -> None:
    caller = Caller()
    batch = json.dumps([request("wait", id=n, params={"n": n}) for n in range(50)])
    task = asyncio.create_task(reply(batch, caller))
    await caller.eight_run.wait()
    assert caller.running == 8

    caller.gate.set()

    assert outline(await task) == [(n, n) for n in range(50)]
    assert caller.most_running == 8


async def test_each_element_of_a_batch_is_judged_by_itself() -> None:
    mixed = [
        request("unwritable", id=1),
        request("crash", id=2),
        {"jsonrpc": "2.0", "method": "crash"},
        request("echo", id={}),
        request("limited", id=3),
        None,
        request("create", id=4, params={"a": 1}),
    ]
    with logs_of("rpcsvc.http.jsonrpc", "_logger"):
        response = await reply(mixed)

    assert outline(response) == [
        (-32603, 1),
        (-32603, 2),
        (-32600, None),
        (-32029, 3),
        (-32600, None),
        ({"a": 1}, 4),
    ]


async def test_batch_of_50_is_answered_and_of_51_runs_nothing() -> None:
    caller = Caller()
    assert len(await reply([request("hello")] * 50, caller)) == 50
    caller.calls.clear()

    status, body = await answer(json.dumps([request("hello")] * 51), caller)

    assert status == 413
    assert body is not None
    response = json.loads(body)
    assert outline(response) == (-32600, None)
    assert response["error"]["data"]["code"] == "payload_too_large"
    assert response["error"]["data"]["details"] == {"received": 51, "allowed": 50}
    assert caller.calls == []


@pytest.mark.parametrize(
    "params",
    [
        b'{"amount":1e400}',
        b'{"amount":NaN}',
        b'{"amount":-Infinity}',
        b'{"amount":1_000}',
        b'{"amount":"1","amount":"2"}',
        b'{"to":"\\ud800"}',
        b'{"\\udc00":1}',
        b'{"to":"\xff"}',
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b"[" * 100_000,
    ],
)
async def test_unsafe_json_is_a_parse_error_and_runs_nothing(params: bytes) -> None:
    caller = Caller()
    element = b'{"jsonrpc":"2.0","method":"echo","id":1,"params":%b}' % params

    for body in (element, b"[%b,%b]" % (element, element)):
        response = await reply(body, caller)
        assert outline(response) == (-32700, None)
        assert response["error"]["data"]["code"] == "invalid_json"
    assert caller.calls == []


MEMBERS = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.sampled_from(["2.0", "2", 2, None]),
        "method": st.sampled_from(["echo", "create", "nope", "", 1, None, []]),
        "params": st.sampled_from([{}, {"self": 1}, [], [1], None, "x", 1]),
        "id": st.sampled_from(["a", "", 1, 1.5, None, True, [], {}]),
    },
)


def runnable(element: Any) -> bool:
    return (
        isinstance(element, dict)
        and element.get("jsonrpc") == "2.0"
        and isinstance(element.get("method"), str)
        and isinstance(element.get("params"), dict | list | None)
        and not isinstance(element.get("id"), bool | list | dict)
    )


def readable_id(element: Any) -> Any:
    call_id = element.get("id") if isinstance(element, dict) else None
    return None if isinstance(call_id, bool | list | dict) else call_id


@given(st.lists(MEMBERS | st.sampled_from([1, None, "x", []]), min_size=1, max_size=8))
def test_batch_answers_each_element_that_is_no_notification(
    elements: list[Any],
) -> None:
    answered = [e for e in elements if not (runnable(e) and "id" not in e)]

    status, body = asyncio.run(answer(json.dumps(elements)))

    if not answered:
        assert (status, body) == (204, None)
        return
    assert body is not None
    outlines = outline(json.loads(body))
    assert [call_id for _, call_id in outlines] == [readable_id(e) for e in answered]
    assert [code == -32600 for code, _ in outlines] == [not runnable(e) for e in answered]


async def test_caller_chooses_the_error_form_and_its_request_id() -> None:
    seen: list[tuple[str, str, str | None]] = []

    def describe(caller: str, error: ServiceError, request_id: str | None) -> dict[str, Any]:
        seen.append((caller, error.code, request_id))
        return error_object(error, request_id)

    async def fail(caller: str, hint: str | None, params: dict[str, Any]) -> Any:
        raise RuntimeError

    server: JsonRpcServer[str] = JsonRpcServer(
        {"fail": RpcMethod(fail, runs_as_notification=True)},
        max_batch=1,
        max_depth=3,
        describe_error=describe,
        request_id=lambda caller, hint: f"{caller}/{hint}",
    )
    bodies: list[Any] = [[], [1, 2], [[[[]]]], request("fail", id="h"), request("nope"), [1]]
    with logs_of("rpcsvc.http.jsonrpc", "_logger") as logs:
        answers = [await server.answer(json.dumps(body).encode(), "me") for body in bodies]

    assert [status for status, _ in answers] == [200, 413, 200, 200, 200, 200]
    assert seen == [
        ("me", "invalid_request", "me/None"),
        ("me", "payload_too_large", "me/None"),
        ("me", "invalid_json", "me/None"),
        ("me", "internal_error", "me/h"),
        ("me", "unknown_method", "me/None"),
        ("me", "invalid_request", "me/None"),
    ]
    assert logs[0]["request_id"] == "me/h"
    assert b"request id to the operator: me/h" in (answers[3][1] or b"")


async def test_library_failure_is_logged_and_its_text_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, caller = JsonRpcServer(METHODS), Caller()

    def failing(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("jsonrpcserver.async_dispatcher.call", failing)
    with logs_of("rpcsvc.http.jsonrpc", "_logger") as logs:
        _, sent = await server.answer(json.dumps(request("echo", id="r-1")).encode(), caller)

    assert outline(json.loads(sent or b"")) == (-32603, "r-1")
    assert b"secret" not in (sent or b"")
    assert (logs[0]["event"], logs[0]["exc_info"]) == ("rpc_method_failed", True)
    assert caller.calls == []


def test_a_whole_error_has_the_id_null() -> None:
    body = full_error(PayloadTooLarge("Too large.", details={"allowed": 65_536}), "r-1")

    assert json.loads(body) == {
        "jsonrpc": "2.0",
        "error": {
            "code": -32600,
            "message": "Too large.",
            "data": {
                "code": "payload_too_large",
                "message": "Too large.",
                "retryable": False,
                "requestId": "r-1",
                "details": {"allowed": 65_536},
            },
        },
        "id": None,
    }


def test_error_without_a_json_rpc_code_is_an_invalid_request() -> None:
    assert error_object(MethodNotAllowed("Use POST."), None) == {
        "code": -32600,
        "message": "Use POST.",
        "data": {"code": "invalid_request", "message": "Use POST.", "retryable": False},
    }


async def test_empty_params_list_and_json_rpc_media_type_are_accepted(
    served: Served,
) -> None:
    message = b'{"jsonrpc":"2.0","id":1,"method":"service.capabilities","params":[]}'
    for media_type in ("application/json", "application/json-rpc; charset=utf-8"):
        answer = await served.raw(message, content_type=media_type)
        assert (answer.status, answer.body["result"]["ok"]) == (200, True)
    refused = await served.raw(message.replace(b"[]", b"[1]"))
    assert refused.body["error"]["code"] == -32602


async def test_a_batch_has_a_request_id_of_its_own(served: Served) -> None:
    call = b'{"jsonrpc":"2.0","id":"%b","method":"service.capabilities"}'
    answer = await served.raw(b"[%b,%b]" % (call % b"one", call % b"two"))
    reported = {each["result"]["requestId"] for each in answer.body}
    assert reported == {"one", "two"}
    assert answer.headers["x-request-id"].startswith("req_")


async def test_a_preflight_has_a_request_id_and_the_bff_its_own_errors(served: Served) -> None:
    asked = {"origin": "http://localhost", "access-control-request-method": "POST"}
    response = await served.client.options("/api/v1/agent/swap/plan", headers=asked)
    assert (response.status, "x-request-id" in response.headers) == (204, True)
    for path in ("/bff/v1", "/bff/v1/", "/bff/v1/none"):
        answer = await (await served.client.get(path)).json()
        assert set(answer) == {"error"}
    for name in ("plan", "create"):
        wrong = await (await served.client.get(f"/api/v1/agent/swap/{name}")).json()
        assert (wrong["operation"], wrong["error"]["code"]) == (f"swap.{name}", "invalid_request")
