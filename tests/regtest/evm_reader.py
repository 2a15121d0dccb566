"""The scanner of USDC deposits on a node of the test's own, and payments by its users.

The scanner may be killed, and its node may give wrong answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from aiohttp import ClientSession, web
from msgspec.structs import replace

from rpcsvc.domain import usdc
from rpcsvc.domain.order import DepositKey, DepositState
from rpcsvc.orders.ports.wallets import DepositSighting
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint
from rpcsvc.settlement.onchain.evm.addresses import EvmAddressPool
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.deposits import EvmDepositScanner
from rpcsvc.settlement.onchain.evm.keys import HdKeys, SignedTransaction, TransactionPlan
from rpcsvc.settlement.onchain.evm.node import EvmClient, EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import EvmSubmission
from rpcsvc.settlement.onchain.evm.records import EvmNetwork
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.chain_options import evm_network
from tests.recording import record_calls
from tests.regtest.daemons import mined
from tests.regtest.token import Token, contract_address
from tests.sandbox import ManualClock
from tests.waiting import record_deposits

SEEN, CONFIRMED, REMOVED = DepositState.SEEN, DepositState.CONFIRMED, DepositState.REMOVED
KEYS = HdKeys("letter advice cage absurd amount doctor acoustic avoid letter advice cage above")
USERS = HdKeys("legal winner thank year wave sausage worth useful legal winner thank yellow")
USER = USERS.signer(0)
STRANGER = USERS.address(1)
ETHER, USDC, SECOND = 10**18, 10**6, 1000
States = dict[DepositKey, DepositState]


@dataclass
class EvmReader:
    """The deposit scanner as a service runs it. ``calls``: the methods that it called."""

    token: Token
    endpoint: DaemonEndpoint
    network: EvmNetwork
    data_dir: Path
    clock: ManualClock
    database: SqliteDatabase
    ledger: EvmDepositLedger
    pool: EvmAddressPool
    connection: EvmConnection
    scanner: EvmDepositScanner
    calls: list[str] = field(default_factory=list)
    is_open: bool = True

    async def poll(self) -> dict[DepositKey, DepositSighting]:
        """One pass without a commit; the deposits found."""
        return {item.key: item for item in await self.scanner.observe()}

    async def reconcile(self) -> States:
        """One pass, committed; the states found."""
        seen = await self.poll()
        await self.commit(list(seen.values()))
        return {key: item.state for key, item in seen.items()}

    async def commit(self, sightings: Sequence[DepositSighting]) -> None:
        """Record deposits as their orders would, if they have any, and acknowledge all."""
        await record_deposits(self.database, sightings)
        await self.scanner.acknowledge(sightings)

    def key(self, txid: str, position: int = 0) -> DepositKey:
        return DepositKey(self.network.name, txid, position)

    async def kill(self) -> None:
        """Close as if killed: no work is finished and nothing is given back."""
        if self.is_open:
            self.is_open = False
            await self.connection.client.rpc.close()
            await self.database.close()

    @asynccontextmanager
    async def again(self, **options: Any) -> AsyncIterator[EvmReader]:
        """Kill this one, and start another on its database."""
        await self.kill()
        network = replace(self.network, **options)
        async with reader_on(
            self.token, self.endpoint, network, self.data_dir, self.clock
        ) as later:
            yield later


@asynccontextmanager
async def reader_on(
    token: Token, endpoint: DaemonEndpoint, network: EvmNetwork, data_dir: Path, clock: ManualClock
) -> AsyncIterator[EvmReader]:
    await asyncio.to_thread(data_dir.mkdir, exist_ok=True)
    database = await SqliteDatabase.open(data_dir)
    ledger = EvmDepositLedger(database)
    pool = EvmAddressPool(KEYS, ledger, 8)
    await pool.load()
    await pool.refill()
    client = EvmClient(endpoint)
    client.rpc.open()
    connection = EvmConnection(client, network)
    scanner = EvmDepositScanner(connection, ledger, clock)
    reader = EvmReader(
        token, endpoint, network, data_dir, clock, database, ledger, pool, connection, scanner
    )  # fmt: skip
    record_calls(client.rpc, reader.calls)
    try:
        yield reader
    finally:
        await reader.kill()


def network_of(token: Token, **options: Any) -> EvmNetwork:
    made = evm_network(
        "arbitrum", 42161, token.address, confirmations=3, tracked_blocks=30, block_seconds=10
    )  # fmt: skip
    return replace(made, **options)


# --- payments by users -------------------------------------------------------------------------


async def sent(token: Token, data: bytes) -> SignedTransaction:
    """Send a call of the token from the user; it is in the pool or mined."""
    plan = TransactionPlan(
        chain_id=42161, nonce=await token.client.nonce(USER.address), to=token.address,
        gas=500_000, max_fee=5 * 10**9, tip=10**8, data=data,
    )  # fmt: skip
    signed = USER.sign(plan)
    assert (await token.client.submit(signed.raw)).submission is EvmSubmission.ACCEPTED
    return signed


async def pay(token: Token, address: str, units: int = USDC) -> SignedTransaction:
    """Pay from the user, and wait until it is mined."""
    signed = await sent(token, usdc.transfer(address, units))
    assert (await mined(token.client, signed.txid)).ok
    return signed


async def resubmit(token: Token, signed: SignedTransaction) -> None:
    assert (await token.client.submit(signed.raw)).submission is EvmSubmission.ACCEPTED
    assert (await mined(token.client, signed.txid)).ok


async def pay_in_a_row(token: Token, *transfers: tuple[str, int]) -> str:
    """One transaction with several transfers: made by the constructor of a contract."""
    payer = (await token.controls.accounts())[1]
    await token.mint(payer, sum(units for _, units in transfers))
    contract = contract_address(payer, await token.client.nonce(payer) + 1)
    allow = usdc.selector("approve(address,uint256)") + usdc.address_word(contract)
    allow += usdc.uint_word(10**12)
    # Without an allowance the calls fail, and Anvil estimates the gas of the failure.
    await mined(token.client, await token.controls.send_from(payer, token.address, allow))
    calls = [usdc.transfer_from(payer, to, units) for to, units in transfers]
    txid = await token.controls.send_from(payer, None, making(token.address, calls))
    assert (await mined(token.client, txid)).ok
    return txid


def making(target: str, calls: list[bytes]) -> bytes:
    """The creation code of a contract that makes these calls."""
    step, code, at = 44, b"", 44 * len(calls) + 1
    for call in calls:
        size, start = (b"\x61" + number.to_bytes(2, "big") for number in (len(call), at))
        # CODECOPY the call to memory, CALL with it, POP the outcome.
        code += size + start + b"\x60\x00\x39"
        code += b"\x60\x00\x60\x00" + size + b"\x60\x00\x60\x00"
        code += b"\x73" + bytes.fromhex(target[2:]) + b"\x5a\xf1\x50"
        at += len(call)
    assert len(code) == step * len(calls)
    return code + b"\x00" + b"".join(calls)


# --- a node with wrong answers ---------------------------------------------------------------


class AnswerChangingProxy:
    """A proxy before a node that may change answers. ``twist`` gets method and answer."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.twist: Callable[[str, Any], Any] = lambda _, answer: answer

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        headers = {"content-type": "application/json"}
        async with (
            ClientSession() as session,
            session.post(self._url, data=body, headers=headers) as response,
        ):
            answer = await response.json()
        asked = orjson.loads(body)
        calls, answers = ([x] if isinstance(x, dict) else x for x in (asked, answer))
        for call, each in zip(calls, answers, strict=True):
            if "result" in each:
                each["result"] = self.twist(call["method"], each["result"])
        return web.Response(body=orjson.dumps(answer), content_type="application/json")


@asynccontextmanager
async def crooked(reader: EvmReader) -> AsyncIterator[tuple[AnswerChangingProxy, EvmReader]]:
    """Restart the scanner on a node whose answers may be changed."""
    node, app = AnswerChangingProxy(reader.endpoint.url), web.Application()
    app.router.add_post("/", node.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    await reader.kill()
    endpoint = DaemonEndpoint("crooked", f"http://127.0.0.1:{port}")
    try:
        async with reader_on(
            reader.token, endpoint, reader.network, reader.data_dir, reader.clock
        ) as behind:
            yield node, behind
    finally:
        await runner.cleanup()
