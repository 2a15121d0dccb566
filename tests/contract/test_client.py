"""``rpcsvc.client`` on real sockets: complete swaps, lost connections, forged answers, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.client import (
    IdempotencyConflict,
    InputRefused,
    OrderNotFound,
    OutcomeUnknown,
    QuoteChanged,
    RateLimited,
    Retries,
    Swap,
    SwapClient,
    SyncSwapClient,
    Unreachable,
    Unverified,
)
from rpcsvc.client.aio import AioTransport
from rpcsvc.client.blocking import BlockingTransport, finished
from rpcsvc.client.calls import ROUTES
from rpcsvc.client.swap_client import CHAINS
from rpcsvc.client.transport import ServiceRequest, endpoint_of
from rpcsvc.operations.service import Effect
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.serving import listening
from rpcsvc.settings_onchain import read_chains
from tests.contract.faulty_line import (
    FaultyLine,
    bad_gateway,
    lost_after,
    lost_before,
)
from tests.contract.serving import EVM, MONERO, TOKEN, UNKNOWN_ORDER, Served, serving
from tests.contract.swap_clients import ISSUER, QUICK, client_of

WANTED: dict[str, Any] = {"direction": "x2u", "chain": "arbitrum", "amount": "0.8", "to": EVM}


async def swap_once(client: SwapClient, swap: Swap) -> str:
    """Quote, create, pay and wait; the order's id."""
    quote = await client.quote(swap)
    placed = await client.create(swap, quote=quote)
    assert placed.session_id == swap.session_id
    assert placed.quote.expected_output == quote.expected_output
    await client.sandbox_fund(placed.order_id)
    async with asyncio.timeout(60):
        done = await client.wait(placed.order_id)
    assert (done.state, done.outcome, done.is_over) == ("completed", "completed", True)
    assert done.transfers[0].amount == quote.expected_output
    return placed.order_id


# --- complete swaps ---


@pytest.mark.parametrize(
    "swap",
    [
        Swap(**WANTED, refund_address=MONERO),
        Swap(direction="u2x", chain=42161, amount="150", to=MONERO),
    ],
    ids=lambda swap: swap.direction,
)
async def test_client_swaps_over_the_agent_api(served: Served, swap: Swap) -> None:
    async with client_of(served.url) as client:
        await swap_once(client, swap)


async def test_client_swaps_over_rpc_with_a_token(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, {"AGENT_RPC_TOKEN": TOKEN}) as served,
        client_of(served.url, token=TOKEN) as client,
    ):
        await swap_once(client, Swap(**WANTED))
        with pytest.raises(OrderNotFound):
            await client.status(UNKNOWN_ORDER)


async def test_client_swaps_over_the_socket(served: Served) -> None:
    async with listening(served.up, tcp=False):
        data_dir = served.up.settings.data_dir
        client = await asyncio.to_thread(SwapClient.on_socket, data_dir, ISSUER)
        async with client:
            await swap_once(client, Swap(**WANTED))


async def test_sync_client_swaps_without_an_event_loop(served: Served) -> None:
    def run() -> list[str]:
        with SyncSwapClient(served.url, issuer=ISSUER) as client:
            swap = Swap(**WANTED)
            placed = client.create(swap, quote=client.quote(swap))
            client.sandbox_fund(placed.order_id)
            seen = [event.type for event in client.events(placed.order_id)]
            assert client.wait(placed.order_id).outcome == "completed"
            return seen

    assert (await asyncio.to_thread(run))[-1] == "transfer.settled"


async def test_sync_client_repeats_a_lost_create_with_its_key(
    served: Served, line: FaultyLine
) -> None:
    line.faults = [lost_after, bad_gateway]

    def run() -> str:
        with SyncSwapClient(line.url, issuer=ISSUER, retries=QUICK) as client:
            return client.create(Swap(**WANTED)).order_id

    order_id = await asyncio.to_thread(run)
    assert served.count("orders") == 1
    sent = [each for each in line.passed if each.method == "POST"]
    assert len(sent) == 3
    assert len({each.headers["idempotency-key"] for each in sent}) == 1
    assert (await served.http("GET", f"/agent/swap/status/{order_id}")).status == 200


async def test_sync_client_follows_events_from_where_the_stream_broke(
    served: Served, line: FaultyLine
) -> None:
    async with client_of(served.url) as client:
        placed = await client.create(Swap(**WANTED))
        await client.sandbox_fund(placed.order_id)
    line.faults = [lost_before]

    def run() -> list[int]:
        with SyncSwapClient(line.url, issuer=ISSUER, retries=QUICK) as sync:
            return [event.cursor for event in sync.events(placed.order_id)]

    async with asyncio.timeout(60):
        seen = await asyncio.to_thread(run)
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) > 2


def test_sync_client_and_commands_load_no_aiohttp() -> None:
    """Importing it would take longer than the rest of a command."""
    loaded = (
        "import sys, rpcsvc.client.swap_client, rpcsvc.cli.main, rpcsvc.cli.agent.operations;"
        "sys.exit('aiohttp' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", loaded], check=True)


async def test_create_without_a_key_is_not_repeated(line: FaultyLine) -> None:
    line.faults = [lost_after]
    async with client_of(line.url) as client:
        with pytest.raises(Unreachable) as lost:
            await client.call("swap.create", **WANTED)
    assert lost.value.may_be_done
    assert [each.method for each in line.passed].count("POST") == 1


def test_sync_client_refuses_what_needs_an_event_loop() -> None:
    with pytest.raises(RuntimeError, match="use SwapClient"):
        finished(asyncio.sleep(0))


def test_slow_answer_times_out_as_a_whole() -> None:
    """Each byte arrives within the read timeout, and the answer never ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        transport = BlockingTransport(endpoint_of(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        with pytest.raises(Unreachable, match=r"no whole answer|timed out") as slow:
            finished(transport.exchange(ServiceRequest("POST", "/rpc", b"{}", seconds=0.3)))
        thread.join()
    assert slow.value.may_be_done


def drip(listener: socket.socket) -> None:
    """Answer a byte at a time until the caller hangs up."""
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(b" ")
                connection.settimeout(0.01)
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(65_536):
                        return


async def test_client_cancels_and_names_a_refund_address(served: Served) -> None:
    async with client_of(served.url) as client:
        swap = Swap(**WANTED)
        placed = await client.create(swap)
        ended = await client.cancel(placed.order_id, swap.session_id)
        assert ended.outcome == "expired"
        assert not await client.set_refund_address(placed.order_id, swap.session_id, MONERO)


async def test_wait_returns_when_the_owner_has_to_act(served: Served) -> None:
    async with client_of(served.url) as client:
        swap = Swap(**WANTED)
        placed = await client.create(swap)
        await client.call("sandbox.fault", fault="payout_fails", orderId=placed.order_id)
        await client.sandbox_fund(placed.order_id)
        async with asyncio.timeout(60):
            stuck = await client.wait(placed.order_id)
        assert (stuck.is_over, stuck.action_required) == (False, "refund_address")
        assert await client.set_refund_address(placed.order_id, swap.session_id, MONERO)
        async with asyncio.timeout(60):
            async for event in client.events(placed.order_id, after=stuck.cursor):
                last = event
        assert last.type == "transfer.settled"


# --- lost connections ---


@pytest.mark.parametrize("fault", [lost_before, lost_after, bad_gateway], ids=lambda f: f.__name__)
async def test_lost_create_is_repeated_and_makes_one_order(
    served: Served, line: FaultyLine, fault: Any
) -> None:
    line.faults = [fault, fault]
    async with client_of(line.url) as client:
        placed = await client.create(Swap(**WANTED))
    assert served.count("orders") == 1
    assert (await served.http("GET", f"/agent/swap/status/{placed.order_id}")).status == 200
    sent = [each for each in line.passed if each.method == "POST"]
    assert len(sent) == 3
    assert len({(each.body, each.headers["idempotency-key"]) for each in sent}) == 1
    assert len({each.headers["x-request-id"] for each in sent}) == 3


async def test_create_without_an_answer_can_be_resumed(served: Served, line: FaultyLine) -> None:
    swap = Swap(**WANTED)
    async with client_of(line.url) as client:
        quote = await client.quote(swap)
        line.faults = [lost_after] * QUICK.attempts
        with pytest.raises(OutcomeUnknown) as unknown:
            await client.create(swap, quote=quote)
    kept = Swap.model_validate_json(unknown.value.swap.model_dump_json())
    assert kept == swap.held_to(quote)
    async with client_of(served.url) as client:
        placed = await client.create(kept)
    assert served.count("orders") == 1
    assert placed.session_id == swap.session_id


async def test_payment_is_not_repeated_when_its_answer_is_lost(
    served: Served, line: FaultyLine
) -> None:
    async with client_of(line.url) as client:
        placed = await client.create(Swap(**WANTED))
        line.faults = [lost_after]
        with pytest.raises(Unreachable) as lost:
            await client.sandbox_fund(placed.order_id, "0.1")
        assert lost.value.may_be_done
        assert [each.target for each in line.passed].count("/api/v1/sandbox/fund") == 1


async def test_payment_is_not_repeated_when_keys_are_lost(served: Served, line: FaultyLine) -> None:
    async with client_of(served.url) as client:
        placed = await client.create(Swap(**WANTED))
    line.loses_keys = True
    async with client_of(line.url, jwks={"keys": []}) as client:
        with pytest.raises(Unreachable) as lost:
            await client.sandbox_fund(placed.order_id, "0.1")
        assert lost.value.may_be_done
    assert [each.target for each in line.passed].count("/api/v1/sandbox/fund") == 1
    async with client_of(line.url) as client:
        with pytest.raises(Unreachable) as unsent:
            await client.sandbox_fund(placed.order_id, "0.1")
        assert not unsent.value.may_be_done
    assert [each.target for each in line.passed].count("/api/v1/sandbox/fund") == 1


async def test_unsent_call_is_not_said_to_be_done() -> None:
    async with client_of("http://127.0.0.1:1") as client:
        with pytest.raises(Unreachable) as error:
            await client.create(Swap(**WANTED))
    assert not error.value.may_be_done


async def test_call_may_be_done_if_any_attempt_was_sent(
    line: FaultyLine,
) -> None:
    async def gone(_seconds: float) -> None:
        await client._calls.transport.close()
        client._calls.transport = AioTransport(endpoint_of("http://127.0.0.1:1"))

    async with client_of(line.url, retries=Retries(attempts=2, sleep=gone)) as client:
        await client.quote(Swap(**WANTED))
        line.faults = [lost_after]
        with pytest.raises(OutcomeUnknown):
            await client.create(Swap(**WANTED))


async def test_events_go_on_where_the_stream_broke(served: Served, line: FaultyLine) -> None:
    async with client_of(line.url) as client:
        placed = await client.create(Swap(**WANTED))
        await client.sandbox_fund(placed.order_id)
        line.faults = [lost_before]
        async with asyncio.timeout(60):
            seen = [event async for event in client.events(placed.order_id)]
    assert [event.cursor for event in seen] == list(range(1, len(seen) + 1))
    assert seen[-1].type == "transfer.settled"


async def test_events_are_polled_where_no_stream_gets_through(
    served: Served, line: FaultyLine
) -> None:
    async with client_of(line.url) as client:
        placed = await client.create(Swap(**WANTED))
        await client.sandbox_fund(placed.order_id)
        line.faults = [bad_gateway]
        async with asyncio.timeout(60):
            seen = [event async for event in client.events(placed.order_id)]
    assert seen[-1].type == "transfer.settled"
    assert any("waitSec=25" in each.target for each in line.passed)


# --- forged answers ---


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"0.8"', b'"0.9"'), (b'"ok":true', b'"ok":true,"x":1')],
    ids=["amount", "more"],
)
async def test_changed_answer_is_not_believed(line: FaultyLine, old: bytes, new: bytes) -> None:
    line.change = lambda body: body.replace(old, new)
    async with client_of(line.url) as client:
        with pytest.raises(Unverified) as error:
            await client.create(Swap(**WANTED))
    assert error.value.cause.code == "digest_mismatch"


async def test_answers_of_another_key_are_not_believed(served: Served) -> None:
    async with client_of(served.url, kid="A" * 43) as client:
        with pytest.raises(Unverified) as error:
            await client.status(UNKNOWN_ORDER)
    assert error.value.cause.code == "unpinned_key"


async def test_order_of_another_issuer_is_not_believed(served: Served) -> None:
    async with client_of(served.url, issuer="https://swap.example") as client:
        with pytest.raises(Unverified) as error:
            await client.create(Swap(**WANTED))
    assert error.value.cause.code == "terms_mismatch"


async def test_old_answer_given_again_is_not_believed(served: Served, line: FaultyLine) -> None:
    async with client_of(line.url) as client:
        placed = await client.create(Swap(**WANTED))
        await client.status(placed.order_id)
        old = (await served.http("GET", f"/agent/swap/status/{placed.order_id}")).body
        line.change = lambda _body: json.dumps(old).encode()
        with pytest.raises(Unverified):
            await client.status(placed.order_id)


def rotate(served: Served, *, revoke: bool = False) -> None:
    signer = served.up.signer
    assert signer is not None
    signer._ring.rotate(revoke=revoke)
    signer._begin(signer._second)


async def test_new_key_of_the_issuer_is_learnt(served: Served) -> None:
    async with client_of(served.url) as client:
        await client.quote(Swap(**WANTED))
        for _ in range(2):
            rotate(served)
            assert (await client.create(Swap(**WANTED))).order.status == "awaiting_deposit"


async def test_client_refuses_a_new_key_once_the_pinned_one_is_revoked(served: Served) -> None:
    async with client_of(served.url) as client:
        await client.quote(Swap(**WANTED))
        rotate(served, revoke=True)
        for _ in range(2):  # a refusal pins nothing
            with pytest.raises(Unverified) as error:
                await client.create(Swap(**WANTED))
            assert error.value.cause.code == "unpinned_key"
    async with client_of(served.url) as client:
        assert (await client.create(Swap(**WANTED))).order.status == "awaiting_deposit"


async def test_client_without_keys_pins_those_that_it_fetches(served: Served) -> None:
    async with client_of(served.url, jwks={"keys": []}) as client:
        await client.quote(Swap(**WANTED))
        rotate(served, revoke=True)
        with pytest.raises(Unverified):
            await client.quote(Swap(**WANTED))


# --- refusals ---


async def test_refusals_have_types_of_their_own(served: Served) -> None:
    async with client_of(served.url) as client:
        with pytest.raises(InputRefused) as wrong:
            await client.create(Swap(**{**WANTED, "to": "0x" + "0" * 40}))
        assert wrong.value.problems[0]["field"] == "to"
        with pytest.raises(OrderNotFound):
            await client.status(UNKNOWN_ORDER)
        with pytest.raises(OrderNotFound):
            await client.wait(UNKNOWN_ORDER)
        swap = Swap(**WANTED)
        await client.create(swap)
        with pytest.raises(IdempotencyConflict):
            await client.create(swap.model_copy(update={"amount": "0.9"}))
        quote = await client.quote(swap)
        await client.call("sandbox.fault", fault="set_rate", rate="100")
        with pytest.raises(QuoteChanged):
            await client.create(Swap(**WANTED), quote=quote)


async def test_limits_are_waited_out_as_long_as_asked(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"rate_limit__enabled": True, "rate_limit__orders_per_minute": 1}
    pauses: list[float] = []

    async def note(seconds: float) -> None:
        pauses.append(seconds)

    async with serving(tmp_path, **limits) as served:
        retries = Retries(attempts=3, longest=120, sleep=note)
        async with client_of(served.url, retries=retries) as client:
            await client.create(Swap(**WANTED))
            with pytest.raises(RateLimited) as error:
                await client.create(Swap(**WANTED))
        assert len(pauses) == 2
        assert all(30 < seconds <= 60 for seconds in pauses)
        short = Retries(attempts=3, longest=5, sleep=note)
        async with client_of(served.url, retries=short) as client:
            with pytest.raises(RateLimited):
                await client.create(Swap(**WANTED))
        assert len(pauses) == 2
        assert error.value.retry_after == pauses[-1]


def test_pauses_double_up_to_the_longest() -> None:
    retries = Retries(attempts=9, first=1, longest=10, draw=lambda: 1.0)
    lost = Unreachable("gone", may_be_done=False)
    assert [retries.pause(n, lost) for n in range(1, 7)] == [1, 2, 4, 8, 10, 10]
    assert retries.pause(9, lost) is None


# --- the client's tables agree with the service ---


def test_client_knows_operations_as_the_service_has_them() -> None:
    offered = {operation.name: (operation.method, operation.path) for operation in OPERATIONS}
    assert {name: (route.method, route.path) for name, route in ROUTES.items()} == offered
    for operation in OPERATIONS:
        if operation.effect is Effect.MOVES_MONEY and operation.name in ROUTES:
            is_once = operation.idempotent or operation.payable  # by its key or its payment
            assert ROUTES[operation.name].repeatable == is_once


def test_client_knows_the_number_of_every_chain() -> None:
    chains = read_chains(None)
    assert {
        chain.name: (
            chain.chain_id,
            chain.usdc_contract,
            chain.test_chain_id,
            chain.test_usdc_contract,
        )
        for chain in chains.all()
    } == CHAINS


def test_each_swap_has_a_session_and_key_of_its_own() -> None:
    first, second = Swap(**WANTED), Swap(**WANTED)
    assert first.session_id != second.session_id
    assert first.idempotency_key != second.idempotency_key
    assert uuid.UUID(first.session_id).version == 4


# --- a secret ---


SECRET = bytes(range(32)).hex()


async def test_client_without_state_restores_all_orders_of_its_secret(served: Served) -> None:
    made: dict[str, str] = {}
    async with client_of(served.url, secret=SECRET) as client:
        assert await client.restore() == []
        for _ in range(3):
            swap = await client.new_swap(**WANTED)
            made[(await client.create(swap)).order_id] = swap.session_id
        await client.new_swap(**WANTED)  # derived and never ordered, as before a crash
        made[(await client.create(await client.new_swap(**WANTED))).order_id] = ""
    assert len(set(made.values())) == 4
    async with client_of(served.url) as other:
        await other.create(Swap(**WANTED))
    async with client_of(served.url, secret=SECRET) as again:
        found = {order.order_id: order for order in await again.restore()}
        assert set(found) == set(made)
        first, session = next(iter(made.items()))
        assert found[first].session_id == session
        assert (found[first].to_address, found[first].deposit_amount) == (EVM, "0.8")
        assert (await again.cancel(first, session)).outcome == "expired"
        swap = await again.new_swap(**WANTED)
        assert swap.session_id not in {order.session_id for order in found.values()}


async def test_clients_that_share_a_secret_restore_each_others_orders(served: Served) -> None:
    async with (
        client_of(served.url, secret=SECRET) as one,
        client_of(served.url, secret=SECRET) as other,
    ):
        swaps = [await client.new_swap(**WANTED) for client in (one, other)]
        assert swaps[0].session_id == swaps[1].session_id
        placed = [await one.create(swaps[0]), await other.create(swaps[1])]
        assert len({each.order_id for each in placed}) == 2
        for _ in range(25):
            await one.create(await one.new_swap(**WANTED))
        late = await one.new_swap(**WANTED)
        await other.create(late)  # the other one has to learn of 25 orders first
        assert len(await other.restore()) == 28
    assert served.count("orders") == 28


async def test_create_refuses_a_session_that_is_not_of_the_secret(
    served: Served, line: FaultyLine
) -> None:
    async with client_of(line.url, secret=SECRET) as client:
        with pytest.raises(ValueError, match="new_swap"):
            await client.create(Swap(**WANTED))
    assert served.count("orders") == 0
    assert [each for each in line.passed if each.method == "POST"] == []
    async with client_of(served.url) as client:
        with pytest.raises(ValueError, match="has no secret"):
            await client.restore()
        with pytest.raises(ValueError, match="has no secret"):
            await client.new_swap(**WANTED)


async def test_secret_is_never_sent_and_sessions_differ_by_service(
    served: Served, line: FaultyLine
) -> None:
    async with client_of(line.url, secret=SECRET) as client:
        swap = await client.new_swap(**WANTED)
        await client.create(swap)
    for each in line.passed:
        sent = f"{each.target} {each.headers}".encode() + each.body
        assert SECRET.encode() not in sent
        assert bytes.fromhex(SECRET) not in sent
    async with client_of(served.url, secret=SECRET, issuer="https://other.example") as elsewhere:
        sessions = {(await elsewhere.new_swap(**WANTED)).session_id for _ in range(20)}
    assert swap.session_id not in sessions


async def test_search_has_sessions_in_urls_unless_a_token_is_given(line: FaultyLine) -> None:
    for token, is_in_url in ((None, True), (TOKEN, False)):
        line.passed.clear()
        async with client_of(line.url, secret=SECRET, token=token) as client:
            swap = await client.new_swap(**WANTED)
        targets = [each.target for each in line.passed]
        assert any(swap.session_id in each for each in targets) == is_in_url
        assert any("sessionId" in each for each in targets) == is_in_url


async def test_restored_order_of_a_stranger_shows_its_destination(served: Served) -> None:
    async with client_of(served.url, secret=SECRET) as client, client_of(served.url) as stranger:
        seen = await client.new_swap(**WANTED)
        elsewhere = "0x" + "1" * 40
        await stranger.create(
            seen.model_copy(update={"to": elsewhere, "idempotency_key": "k" * 20})
        )
        (found,) = await client.restore()
        assert (found.session_id, found.to_address) == (seen.session_id, elsewhere)
        placed = await client.create(seen)
        assert placed.order_id != found.order_id
        assert {order.to_address for order in await client.restore()} == {EVM, elsewhere}


async def test_restore_waits_for_limits_as_each_call_does(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"rate_limit__enabled": True, "rate_limit__requests_per_minute": 10}
    pauses: list[float] = []

    async with serving(tmp_path, **limits) as served:

        async def note(seconds: float) -> None:
            pauses.append(seconds)

        retries = Retries(attempts=3, longest=120, sleep=note)
        async with client_of(served.url, retries=retries, secret=SECRET) as client:
            with pytest.raises(RateLimited):
                await client.restore()
    assert len(pauses) == 2


async def test_sync_client_restores_over_rpc(tmp_path: Path) -> None:
    async with serving(tmp_path, {"AGENT_RPC_TOKEN": TOKEN}) as served:

        def run() -> None:
            options: dict[str, Any] = {"issuer": ISSUER, "token": TOKEN, "secret": SECRET}
            with SyncSwapClient(served.url, **options) as client:
                placed = client.create(client.new_swap(**WANTED))
            with SyncSwapClient(served.url, **options) as client:
                assert [each.order_id for each in client.restore()] == [placed.order_id]

        await asyncio.to_thread(run)
