"""The outcome of a signed authorization by the node's answers; sending is in tests/regtest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from rpcsvc.domain import usdc
from rpcsvc.domain.addresses import evm_checksum
from rpcsvc.domain.authorizations import AuthorizationRefused, Reason, SignedAuthorization
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.wallets import Outcome
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint, NodeError
from rpcsvc.settlement.onchain.evm.authorizations import EvmAuthorizations, GasBudget, payment_id
from rpcsvc.settlement.onchain.evm.gas import CallCost
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.node_types import (
    Block,
    EvmCall,
    Log,
    LogFilter,
    LogRange,
    Receipt,
    Tag,
)
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.records import EvmPaymentState, EvmPurpose, GasUse
from rpcsvc.store.authorizations import AuthorizationKey, AuthorizationRecord, AuthorizationState
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.chain_options import evm_network
from tests.sandbox import ManualClock
from tests.unit.evm_chain import CheckedConnection
from tests.unit.evm_payments import NET, payment

TOKEN, PAYER, TO, OTHER = (evm_checksum(f"0x{n:040x}") for n in (0xA0B8, 0x05E2, 0xDE60, 0x57A6))
NETWORK = evm_network(NET, 42161, TOKEN, settled_after=3, failed_after=5, block_seconds=10)
NOW, TOP, UNITS, WINDOW = 1_700_000_000, 100, 165_000_000, 600
NONCE = b"\7" * 32
TXID = "0x" + "ab" * 32
USED, CANCELED = usdc.AUTHORIZATION_USED, usdc.AUTHORIZATION_CANCELED


class Node(EvmClient):
    """``top`` is at ``now``, and blocks are 10 s apart. ``used``: the event of the nonce, with the
    payee and the block; ``hides``: the node has no logs. ``wallet``: the answer of the payer's
    contract to a signature.
    """

    def __init__(self) -> None:
        super().__init__(DaemonEndpoint("node", "http://127.0.0.1:1"))
        self.top, self.now = TOP, NOW
        self.wallet: bytes | None = None
        self.used: tuple[bytes, str, int] | None = None
        self.hides = False

    async def block(self, at: Any = Tag.LATEST) -> Block | None:
        number = self.top if at is Tag.LATEST else at
        return Block(number, f"0x{number}", "0x", self.now - 10 * (self.top - number), None)

    async def code(self, address: str, at: Any = Tag.LATEST) -> bytes:
        assert address == PAYER
        return b"" if self.wallet is None else b"\1"

    async def call(self, call: EvmCall, at: Any = Tag.LATEST) -> bytes:
        if call.to == PAYER:
            assert self.wallet is not None
            return self.wallet
        if call.data == usdc.is_blacklisted(PAYER):
            return bytes(32)
        if call.data == usdc.balance_of(PAYER):
            return usdc.uint_word(UNITS)
        if call.sender is not None:
            raise NodeError("node", "eth_call", -32000, "out of gas")
        assert call.data == usdc.authorization_state(PAYER, NONCE)
        return usdc.uint_word(int(self.used is not None and self.used[2] <= at))

    async def logs(self, wanted: LogFilter, first: int, last: int, *_: Any) -> LogRange:
        assert wanted == LogFilter(TOKEN, (None, usdc.address_word(PAYER), NONCE))
        if self.used is None or self.hides or not first <= self.used[2] <= last:
            return LogRange(first, last, (), None)
        event = self._log(self.used[0], (usdc.address_word(PAYER), NONCE), b"")
        return LogRange(first, last, (event,), None)

    async def receipt(self, txid: str) -> Receipt | None:
        assert txid == TXID
        if self.used is None:
            return None
        words = (usdc.address_word(PAYER), usdc.address_word(self.used[1]))
        moved = self._log(usdc.TRANSFER_TOPIC, words, usdc.uint_word(UNITS))
        return Receipt(TXID, True, self.used[2], "0x", 1, 1, (moved,))

    def _log(self, topic: bytes, words: tuple[bytes, bytes], data: bytes) -> Log:
        assert self.used is not None
        return Log(TOKEN, (topic, *words), data, TXID, self.used[2], "0x", 1)


class TokenConnection(CheckedConnection):
    """A checked connection that knows the EIP-712 domain of its token."""

    domain = usdc.Domain("USD Coin", "2", 42161, TOKEN)


@dataclass
class Rig:
    """Authorizations with a node and a database; ``record``: a recorded one."""

    ledger: EvmPaymentLedger
    node: Node = field(default_factory=Node)
    clock: ManualClock = field(default_factory=lambda: ManualClock(NOW * 1000))

    def __post_init__(self) -> None:
        given = usdc.Authorization(PAYER, TO, UNITS, 0, NOW + WINDOW, NONCE)
        key = AuthorizationKey(NET, TOKEN, PAYER, NONCE.hex())
        signed = SignedAuthorization(given, b"\1" * 65)
        self.record = AuthorizationRecord(key, "ord_1", signed, NOW * 1000)
        self.budget = GasBudget(1_000_000, {NET: 2_000_000_000}, self.ledger, self.clock)
        self.connection = TokenConnection(self.node, NETWORK)
        payments = cast("Any", SimpleNamespace(hot_wallet=OTHER))
        self.authorizations = EvmAuthorizations(
            self.connection, payments, self.ledger, self.budget, self.clock, lambda: False
        )

    async def outcome(self) -> Outcome:
        return (await self.authorizations.carry_out(self.record)).outcome


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    database = await SqliteDatabase.open(tmp_path)
    made = Rig(EvmPaymentLedger(database))
    name = payment_id(made.record)
    await made.ledger.add_payment(payment(name, 0, purpose=EvmPurpose.AUTHORIZATION))
    yield made
    await database.close()


@pytest.mark.parametrize(
    ("topic", "paid", "at", "outcome"),
    [
        (USED, TO, TOP, Outcome.SETTLED),
        (USED, TO, TOP - 361, Outcome.PENDING),
        (USED, OTHER, TOP - 3, Outcome.PENDING),
        (USED, OTHER, TOP - 4, Outcome.FAILED),
        (CANCELED, TO, TOP - 3, Outcome.PENDING),
        (CANCELED, TO, TOP - 4, Outcome.FAILED),
    ],
    ids=["paid", "before the hour", "other", "other, deep", "cancelled", "cancelled, deep"],
)
async def test_a_used_nonce_is_judged_by_what_was_paid(
    rig: Rig, topic: bytes, paid: str, at: int, outcome: Outcome
) -> None:
    rig.node.top += 10_000
    rig.node.used = (topic, paid, at + 10_000)
    assert await rig.outcome() is outcome


@pytest.mark.parametrize(
    ("seconds", "outcome"),
    [
        (WINDOW - 1, Outcome.PENDING),
        (WINDOW + 39, Outcome.PENDING),
        (WINDOW + 40, Outcome.FAILED),
    ],
)
async def test_an_unused_one_fails_when_its_end_is_deep(
    rig: Rig, seconds: int, outcome: Outcome
) -> None:
    """Five confirmations are needed: the fifth block from the top is 40 s old."""
    rig.node.now += seconds
    assert await rig.outcome() is outcome


async def test_one_that_is_sent_is_found_by_its_transaction(rig: Rig) -> None:
    rig.node.used, rig.node.hides = (USED, TO, TOP), True
    sent = replace(rig.record, state=AuthorizationState.SENT, txid=TXID)
    assert await rig.authorizations.carry_out(sent) == (Outcome.SETTLED, TXID, None)


async def test_use_without_an_event_is_reported(rig: Rig) -> None:
    rig.node.used, rig.node.hides = (USED, TO, TOP - 50), True
    assert await rig.outcome() is Outcome.PENDING
    assert rig.authorizations.conditions() == []
    rig.clock.now += 601_000
    assert await rig.outcome() is Outcome.PENDING
    (text,) = [each.text for each in rig.authorizations.conditions()]
    assert "shows no event of it" in text
    rig.node.hides = False
    assert await rig.outcome() is Outcome.SETTLED
    assert rig.authorizations.conditions() == []


async def test_a_nonce_used_before_is_refused_unless_it_paid(rig: Rig) -> None:
    rig.node.wallet = usdc.VALID_SIGNATURE
    rig.node.used = (USED, TO, TOP)
    await rig.authorizations.require_usable(rig.record)
    rig.node.used = (USED, OTHER, TOP)
    with pytest.raises(AuthorizationRefused) as refused:
        await rig.authorizations.require_usable(rig.record)
    assert refused.value.refusal.reason is Reason.NONCE_USED


async def test_one_answer_without_the_event_refuses_no_paid_nonce(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused, its payer would sign another authorization and pay twice."""
    rig.node.wallet, rig.node.used, real = usdc.VALID_SIGNATURE, (USED, TO, TOP), rig.node.logs

    async def late(_: LogFilter, first: int, last: int, *_after: Any) -> LogRange:
        monkeypatch.setattr(rig.node, "logs", real)
        return LogRange(first, last, (), None)

    monkeypatch.setattr(rig.node, "logs", late)
    await rig.authorizations.require_usable(rig.record)


@pytest.mark.parametrize(
    ("wallet", "signature", "reason"),
    [
        (None, b"\1" * 65, Reason.SIGNATURE),
        (None, b"\1" * 97, Reason.UNDEPLOYED),
        (None, b"\1" * 33 + bytes.fromhex("6492" * 16), Reason.UNDEPLOYED),
        (b"", b"\1" * 97, Reason.SIGNATURE),
        (usdc.VALID_SIGNATURE + b"\0", b"\1" * 97, Reason.SIGNATURE),
        (bytes(32), b"\1" * 65, Reason.SIGNATURE),
    ],
    ids=["key", "long", "wrapped", "nothing", "too much", "zero"],
)
async def test_what_its_owner_did_not_sign_is_refused(
    rig: Rig, wallet: bytes | None, signature: bytes, reason: Reason
) -> None:
    """The signature is checked first, also if the nonce is used."""
    rig.node.wallet, rig.node.used = wallet, (USED, TO, TOP)
    record = replace(rig.record, signed=replace(rig.record.signed, signature=signature))
    with pytest.raises(AuthorizationRefused) as refused:
        await rig.authorizations.require_usable(record)
    assert refused.value.refusal.reason is reason


async def test_gas_that_a_wallet_burns_is_no_fault_of_the_node(rig: Rig) -> None:
    """Some nodes have their own error texts for a simulated call that needs too much gas."""
    rig.node.wallet = usdc.VALID_SIGNATURE
    with pytest.raises(AuthorizationRefused) as refused, rig.connection.watched():
        await rig.authorizations.require_usable(rig.record)
    assert refused.value.refusal.reason is Reason.SIMULATION


async def test_refused_authorization_rests_between_tries(rig: Rig) -> None:
    """The token refuses it now; each try asks the node some eight times."""
    record, tries, real = replace(rig.record, order_id="ord_2"), [], rig.node.call

    async def tried(call: EvmCall, at: Any = Tag.LATEST) -> bytes:
        if call.sender is not None:
            tries.append(rig.clock.now // 1000 - NOW)
        return await real(call, at)

    rig.node.call = tried  # type: ignore[method-assign] # counts the simulations
    for _ in range(60):
        assert (await rig.authorizations.carry_out(record)).outcome is Outcome.PENDING
        rig.clock.now += 2000
    assert tries == [0, 4, 12, 28, 58, 88, 118]


async def test_the_l1_fee_of_each_counts_in_the_budget(rig: Rig) -> None:
    """1 USD at 2,000 USD a coin: 5 * 10**14 wei."""
    rig.clock.now = 1000
    spent = await rig.budget.refresh()
    assert spent > 0
    half = 25 * 10**13
    with pytest.raises(Unavailable, match="no more gas"):
        await rig.budget.require(NET, CallCost(0, half), is_paid=False)
    assert await rig.budget.refresh() == spent + 500_000
    assert "1.15 of the 1 USD" in (rig.budget.problem() or "")
    await rig.budget.require(NET, CallCost(1, 0), is_paid=False)


@pytest.mark.parametrize("is_paid", [False, True])
async def test_calls_at_the_same_moment_never_pass_the_budget(rig: Rig, is_paid: bool) -> None:
    """Each costs 0.6 of 1 USD, and neither is recorded yet."""
    rig.clock.now += 48 * 3_600_000  # recorded ones are too old to count
    cost = CallCost(3 * 10**14, 0)
    async with rig.budget.spending(NET, cost, is_paid=is_paid):
        with pytest.raises(Unavailable, match="no more gas"):
            await rig.budget.require(NET, cost, is_paid=is_paid)
        await rig.budget.require(NET, cost, is_paid=not is_paid)
    await rig.budget.require(NET, cost, is_paid=is_paid)


class Uses(EvmPaymentLedger):
    """Records gas of 0.6 USD for each use."""

    def __init__(self, *uses: tuple[bool, EvmPaymentState]) -> None:
        self._uses = [GasUse(3 * 10**14, is_paid, state) for is_paid, state in uses]

    async def authorization_gas(self, network: str, at: int) -> list[GasUse]:
        return self._uses


@pytest.mark.parametrize(
    ("uses", "given", "has_room"),
    [
        ([(False, EvmPaymentState.SETTLED)], 600_000, {True}),
        ([(True, EvmPaymentState.SETTLED)] * 9, 0, {True, False}),
        ([(True, EvmPaymentState.PUBLISHED)], 0, {False}),
        ([(True, EvmPaymentState.FAILED)], 600_000, {True}),
        ([(True, EvmPaymentState.FAILED)] * 2, 1_200_000, set()),
    ],
    ids=["given away", "borne by orders", "may yet fail", "failed", "failed, beyond the budget"],
)
async def test_gas_that_an_order_bears_is_not_given_away(
    uses: list[tuple[bool, EvmPaymentState]], given: int, has_room: set[bool]
) -> None:
    """Budgets of 1 USD each for gas given away, and for paid gas that may still fail."""
    budget = GasBudget(1_000_000, {NET: 2_000_000_000}, Uses(*uses), ManualClock())
    cost, found = CallCost(3 * 10**14, 0), set()
    for is_paid in (True, False):
        with suppress(Unavailable):
            await budget.require(NET, cost, is_paid=is_paid)
            found.add(is_paid)
    assert (budget.spent, found) == (given, has_room)
