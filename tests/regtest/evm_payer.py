"""The paying half of the EVM adapter on a chain of its own; it can be killed and restarted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpcsvc.domain.chains import load_chains
from rpcsvc.domain.money import USDC as USDC_ASSET
from rpcsvc.domain.order import Transfer, TransferKind, TransferState
from rpcsvc.orders.ports.wallets import Outcome, PreparedTransfer, Verdict
from rpcsvc.settings_onchain import OnchainSettings, chains_toml
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.settlement.onchain.evm.adapter import EvmAdapter, EvmNode, Ledgers
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.gas import OpeningLedger
from rpcsvc.settlement.onchain.evm.keys import HOT_WALLET_INDEX, HdKeys
from rpcsvc.settlement.onchain.evm.node import EvmClient, EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import EvmSubmission, EvmSubmissionResult, Receipt
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.payments import EvmNonces, EvmPayments
from rpcsvc.settlement.onchain.evm.records import (
    EvmNetwork,
    EvmPayment,
    EvmPaymentState,
    Inclusion,
)
from rpcsvc.settlement.onchain.evm.sweeps import EvmSweeps
from rpcsvc.settlement.onchain.evm.upkeep import EvmUpkeep
from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.settlement.onchain.unrecorded import UnrecordedLedger
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.chain_options import evm_network
from tests.recording import Recorder
from tests.regtest.daemons import Anvil, AnvilControls, mined
from tests.regtest.token import Token
from tests.rows import statement
from tests.sandbox import ManualClock

KEYS = HdKeys("legal winner thank year wave sausage worth useful legal winner thank yellow")
HOT = KEYS.address(HOT_WALLET_INDEX)
OTHERS = HdKeys("letter advice cage absurd amount doctor acoustic avoid letter advice cage above")
USER, FRIEND = OTHERS.address(0), OTHERS.address(1)
ETHER = 10**18
GWEI = 10**9
USDC = 10**6
COIN_PRICE = 2500 * USDC
NETWORK = "arbitrum"
MINUTE_MS = 60_000
LIVE = (EvmPaymentState.PREPARED, EvmPaymentState.PUBLISHED)


def network_of(token: Token) -> EvmNetwork:
    return evm_network(
        NETWORK, token.domain.chain_id, token.address, settled_after=3, failed_after=5,
        tracked_blocks=30, bump_after_ms=MINUTE_MS, sweep_units=USDC, sweep_batch=20,
    )  # fmt: skip


async def _is_first(address: str) -> bool:
    """Whether it is the only deposit address that the service has in these tests."""
    return address == KEYS.address(1)


def each_by(
    submit: Callable[[bytes], Awaitable[EvmSubmissionResult]],
) -> Callable[[Sequence[bytes]], Awaitable[list[EvmSubmissionResult | RpcFailure]]]:
    """``submit_each`` of a client, by a stand-in that submits one."""

    async def one(raw: bytes) -> EvmSubmissionResult | RpcFailure:
        try:
            return await submit(raw)
        except RpcFailure as failure:
            return failure

    async def each(raws: Sequence[bytes]) -> list[EvmSubmissionResult | RpcFailure]:
        return [await one(raw) for raw in raws]

    return each


@dataclass
class EvmPayer:
    """Payments and sweeps over a database. ``client`` is theirs, ``token.client`` the test's."""

    anvil: Anvil
    token: Token
    data_dir: Path
    network: EvmNetwork
    clock: ManualClock
    database: SqliteDatabase
    ledger: EvmPaymentLedger
    client: EvmClient
    connection: EvmConnection
    payments: EvmPayments
    upkeep: EvmUpkeep
    sweeps: EvmSweeps
    is_open: bool = True
    transfers: int = field(default=0)

    @property
    def switch(self) -> PauseSwitch:
        return PauseSwitch(self.data_dir)

    @property
    def controls(self) -> AnvilControls:
        return self.token.controls

    def transfer(self, address: str, units: int = USDC) -> Transfer:
        """A planned payout."""
        self.transfers += 1
        name, kind = f"tr_{self.transfers}", TransferKind.PAYOUT
        return Transfer(name, kind, NETWORK, USDC_ASSET, address, units, 0)

    async def sign(self, transfer: Transfer) -> PreparedTransfer:
        """The recorded payment of the transfer; signs it if there is none."""
        known = await self.payments.recorded(transfer)
        if known is not None:
            return known
        record = Recorder()
        await self.payments.prepare(transfer, [], record, {})
        return record.signed[0]

    async def prepared(self, transfer: Transfer) -> Transfer:
        """The transfer as the order layer has it once it is prepared."""
        signed = await self.sign(transfer)
        return replace(transfer, state=TransferState.PREPARED, txid=signed.txid, raw=signed.raw)

    async def pay(self, transfer: Transfer) -> Verdict:
        """Publish as the order layer does: only if the transaction is absent from the node."""
        verdict = await self.payments.look_up(transfer)
        if verdict.outcome is Outcome.ABSENT:
            verdict = await self.payments.publish(transfer)
        return verdict

    async def paid(self, transfer: Transfer) -> Transfer:
        """Prepared, published and mined."""
        ready = await self.prepared(transfer)
        await self.pay(ready)
        await mined(self.token.client, ready.txid or "")
        return ready

    async def follow(self) -> None:
        """Run one round of upkeep."""
        await self.upkeep.maintain(await self.connection.check())

    async def sweep(self) -> None:
        """Run one round of sweeps."""
        await self.sweeps.maintain(await self.connection.check())

    async def refresh(self) -> None:
        """Note fees and balances as of now."""
        self.payments.gas.forget()
        await self.payments.gas.poll(await self.connection.check())

    async def settle(self, transfer: Transfer) -> Verdict:
        """Mine until it is deep enough to settle, and look it up."""
        await self.controls.mine(self.network.settled_after)
        return await self.payments.look_up(transfer)

    async def require_settled(self, transfer: Transfer) -> None:
        """Wait until it is mined, and raise AssertionError unless it settles."""
        await mined(self.token.client, transfer.txid or "")
        assert (await self.settle(transfer)).outcome is Outcome.SETTLED

    async def payment(self, transfer: Transfer) -> EvmPayment:
        found = await self.ledger.payment(transfer.transfer_id)
        assert found is not None
        return found

    async def live(self) -> list[EvmPayment]:
        return await self.ledger.payments_in(NETWORK, *LIVE)

    async def inclusion(self, transfer: Transfer) -> Inclusion:
        """Where the transfer's payment was mined."""
        mined = (await self.payment(transfer)).inclusion
        assert mined is not None
        return mined

    async def receipts(self, transfer: Transfer) -> list[Receipt]:
        """Receipts of all attempts that are mined."""
        found = [
            await self.token.client.receipt(a.txid) for a in (await self.payment(transfer)).attempts
        ]
        return [item for item in found if item is not None]

    def refuse(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Have the node refuse all bytes; the seconds after now at which it was given some."""
        since, submitted = self.clock.now, list[int]()

        async def refused(_raw: bytes) -> EvmSubmissionResult:
            submitted.append((self.clock.now - since) // 1000)
            return EvmSubmissionResult(EvmSubmission.REFUSED, "0x", "its own words")

        monkeypatch.setattr(self.client, "submit_each", each_by(refused))
        return submitted

    async def give(self, index: int, units: int, *, state: str | None = "confirmed") -> str:
        """A deposit on the chain and in the database; its address."""
        address = KEYS.address(index)
        txid = await self.token.mint(address, units)
        made = "INSERT OR IGNORE INTO evm_addresses (address_index, address) VALUES (?, ?)"
        deposit = (
            "INSERT INTO evm_deposits (network, txid, position, address_index, units, sender,"
            " first_seen_at, block_number, block_hash, acknowledged, watched)"
            " VALUES (?, ?, 0, ?, ?, ?, ?, 1, '0x', ?, 1)"
        )
        values = (NETWORK, txid, index, units, HOT, self.clock.now, state)
        await self.database.write(
            [statement(made, (index, address), first=True), statement(deposit, values)]
        )
        return address

    async def end(self) -> None:
        """Close as if killed: no work is finished and nothing is given back."""
        if self.is_open:
            self.is_open = False
            await self.client.rpc.close()
            await self.database.close()

    @asynccontextmanager
    async def again(
        self, change: Callable[[EvmNetwork], EvmNetwork] = lambda same: same
    ) -> AsyncIterator[EvmPayer]:
        """End this one, and start another on its database."""
        await self.end()
        network = change(self.network)
        async with evm_payer(self.anvil, self.token, self.data_dir, network, self.clock) as later:
            later.transfers = self.transfers
            yield later


@asynccontextmanager
async def evm_payer(
    anvil: Anvil,
    token: Token,
    data_dir: Path,
    network: EvmNetwork | None = None,
    clock: ManualClock | None = None,
) -> AsyncIterator[EvmPayer]:
    chosen, hands = network or network_of(token), clock or ManualClock(1_800_000_000_000)
    database = await SqliteDatabase.open(data_dir)
    ledger, client = EvmPaymentLedger(database), EvmClient(anvil.endpoint)
    client.rpc.open()
    connection = EvmConnection(client, chosen)
    signer = KEYS.signer(HOT_WALLET_INDEX)
    unrecorded, switch = UnrecordedLedger(database), PauseSwitch(data_dir)
    nonces = EvmNonces(connection, signer.address, ledger, unrecorded, switch)
    payments = EvmPayments(connection, signer, ledger, hands, _is_first, nonces, hands.now_ms)
    upkeep = EvmUpkeep(connection, payments, ledger, hands)
    sweeps = EvmSweeps(connection, payments, ledger, KEYS, hands)
    made = EvmPayer(
        anvil,
        token,
        data_dir,
        chosen,
        hands,
        database,
        ledger,
        client,
        connection,
        payments,
        upkeep,
        sweeps,
    )
    try:
        yield made
    finally:
        await made.end()


@asynccontextmanager
async def adapter_on(own: EvmPayer, network: EvmNetwork) -> AsyncIterator[EvmAdapter]:
    """The USDC adapter, which quotes the fee."""
    node = EvmNode(network, EvmClient(own.anvil.endpoint), COIN_PRICE)
    unrecorded = UnrecordedLedger(own.database)
    deposits, openings = EvmDepositLedger(own.database), OpeningLedger(own.database)
    ledgers = Ledgers(deposits, own.ledger, unrecorded, openings)
    chains = load_chains(chains_toml(None))
    made = EvmAdapter([node], chains, KEYS, ledgers, own.clock, OnchainSettings(), own.switch)
    await made.start()
    await made.networks[network.name].observe()
    try:
        yield made
    finally:
        await made.close()
