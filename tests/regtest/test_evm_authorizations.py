"""Signed authorizations carried out by the hot wallet, on a real EVM node.

The tests count balances on the chain, never the service's database.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import AsyncMock

import eth_abi.abi
import pytest
from msgspec.structs import replace

from rpcsvc.domain import usdc
from rpcsvc.domain.authorizations import AuthorizationRefused, Reason, SignedAuthorization
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.wallets import Outcome
from rpcsvc.settlement.onchain.evm.authorizations import EvmAuthorizations, GasBudget, payment_id
from rpcsvc.settlement.onchain.evm.keys import EvmSigner
from rpcsvc.settlement.onchain.evm.node import EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Tag
from rpcsvc.settlement.onchain.evm.payments import EvmPayments
from rpcsvc.settlement.onchain.evm.records import EvmPayment, EvmPaymentState, EvmPurpose
from rpcsvc.store.authorizations import AuthorizationKey, AuthorizationRecord, AuthorizationState
from tests.regtest.daemons import Anvil, mined
from tests.regtest.evm_payer import (
    COIN_PRICE,
    ETHER,
    HOT,
    KEYS,
    NETWORK,
    OTHERS,
    USDC,
    EvmPayer,
    evm_payer,
)
from tests.regtest.token import CONTRACTS, Token, compiled, deployed
from tests.sandbox import ManualClock

pytestmark = pytest.mark.slow  # the quick tests must stay quick

DEPOSIT = KEYS.address(7)
WINDOW = 600
VALUE = 165 * USDC


@dataclass
class Rig:
    """The service's authorizations, and a payer who holds 1,000 USDC and no ether."""

    own: EvmPayer
    signer: EvmSigner
    budget_units: int = 25 * USDC
    is_paused: bool = False

    def __post_init__(self) -> None:
        own = self.own
        self.connection = EvmConnection(own.client, own.network)
        self.budget = GasBudget(self.budget_units, {NETWORK: COIN_PRICE}, own.ledger, own.clock)
        self.authorizations = EvmAuthorizations(
            self.connection,
            own.payments,
            own.ledger,
            self.budget,
            own.clock,
            lambda: self.is_paused,
        )

    def record(
        self, nonce: int = 1, *, to: str = DEPOSIT, units: int = VALUE, payer: str | None = None
    ) -> AuthorizationRecord:
        """A payment of an order, signed by the payer: by its key, or by that of its wallet."""
        now, own_key = self.own.clock.now_ms(), self.signer.address
        given = usdc.Authorization(
            payer or own_key, to, units, 0, now // 1000 + WINDOW, nonce.to_bytes(32, "big")
        )
        digest = usdc.transfer_digest(self.own.token.domain, given)
        signature = self.signer.sign_digest(digest).packed()
        if payer is not None:
            signature = usdc.address_word(own_key) + signature
        key = AuthorizationKey(NETWORK, self.own.token.address, given.source, given.nonce.hex())
        return AuthorizationRecord(key, "ord_1", SignedAuthorization(given, signature), now)

    async def wallet(self, owner: str | None = None) -> str:
        """A contract wallet of the payer, or of another, with 1,000 USDC."""
        token, word = self.own.token, usdc.address_word(owner or self.signer.address)
        code = compiled(CONTRACTS / "Wallet.vy") + word
        address = await deployed(token.client, token.controls, token.owner, code)
        await token.mint(address, 1000 * USDC)
        return address

    async def broadcast(self, record: AuthorizationRecord) -> str:
        """Send a signed authorization from another account; the transaction's id."""
        given, signed = record.signed.authorization, record.signed
        assert signed.vrs is not None
        data = usdc.transfer_with_authorization(given, signed.vrs)
        return await self.own.controls.send_from(self.own.token.owner, self.own.token.address, data)

    async def later(self, seconds: int) -> None:
        """Time passes for the service, and for the chain with its next block."""
        self.own.clock.now += seconds * 1000
        await self.own.token.client.rpc.act("evm_increaseTime", [seconds])

    async def outcome(self, record: AuthorizationRecord) -> tuple[Outcome, str | None]:
        carried = await self.authorizations.carry_out(record)
        return carried.outcome, carried.txid

    async def payment(self, record: AuthorizationRecord) -> EvmPayment | None:
        return await self.own.ledger.payment(payment_id(record))

    async def sent(self) -> int:
        """How many transactions the hot wallet has sent."""
        return await self.own.token.client.nonce(HOT, Tag.PENDING)

    async def balance(self, address: str = DEPOSIT) -> int:
        return await self.own.token.balance(address)


@pytest.fixture
async def rig(anvil: Anvil, token: Token, tmp_path: Path) -> AsyncIterator[Rig]:
    await token.controls.set_ether(HOT, ETHER)
    signer = OTHERS.signer(0)
    await token.mint(signer.address, 1000 * USDC)
    block = await token.client.block()
    assert block is not None
    clock = ManualClock(block.timestamp * 1000)
    async with evm_payer(anvil, token, tmp_path, clock=clock) as own:
        made = Rig(own, signer)
        await made.connection.check()
        yield made


async def test_an_authorization_is_sent_once_and_followed(rig: Rig) -> None:
    record = rig.record()
    assert rig.connection.domain == rig.own.token.domain
    await rig.authorizations.require_usable(record)
    assert await rig.sent() == 0
    await rig.own.controls.automine(enabled=False)
    for _ in range(3):
        assert await rig.outcome(record) == (Outcome.PENDING, None)
    assert await rig.sent() == 1
    await rig.own.controls.mine()
    outcome, txid = await rig.outcome(record)
    payment = await rig.payment(record)
    assert payment is not None
    assert (outcome, txid) == (Outcome.SETTLED, payment.latest.txid)
    sent = replace(record, state=AuthorizationState.SENT, txid=txid)
    assert await rig.outcome(sent) == (Outcome.SETTLED, txid)
    assert await rig.balance() == VALUE
    await rig.own.controls.mine(rig.own.network.settled_after)
    await rig.own.follow()
    after = await rig.payment(record)
    assert after is not None
    assert (after.state, after.order.purpose) == (EvmPaymentState.SETTLED, EvmPurpose.AUTHORIZATION)
    assert await rig.own.live() == []
    assert await rig.sent() == 1
    assert 0 < await rig.budget.refresh() < rig.budget_units


async def test_one_that_others_sent_first_costs_no_gas(rig: Rig) -> None:
    record = rig.record()
    theirs = await rig.broadcast(record)
    await mined(rig.own.token.client, theirs)
    await rig.authorizations.require_usable(record)
    assert await rig.outcome(record) == (Outcome.SETTLED, theirs)
    assert (await rig.balance(), await rig.sent()) == (VALUE, 0)


async def test_one_that_others_mine_first_is_paid_by_theirs(rig: Rig) -> None:
    """The service's own transaction is mined after theirs and reverts: one debit."""
    record, controls = rig.record(), rig.own.controls
    await controls.automine(enabled=False)
    await rig.outcome(record)
    payment = await rig.payment(record)
    assert payment is not None
    await controls.drop(payment.latest.txid)
    theirs = await rig.broadcast(record)
    await controls.mine()
    await rig.own.token.client.submit(bytes.fromhex(payment.latest.raw))
    await controls.mine()
    own = await rig.own.token.client.receipt(payment.latest.txid)
    assert own is not None
    assert not own.ok
    assert await rig.outcome(record) == (Outcome.SETTLED, theirs)
    assert await rig.balance() == VALUE


async def test_a_nonce_used_for_another_payment_fails_when_deep(rig: Rig) -> None:
    record, other = rig.record(), rig.record(to=KEYS.address(8))
    await rig.authorizations.require_usable(record)
    await mined(rig.own.token.client, await rig.broadcast(other))
    with pytest.raises(AuthorizationRefused) as refused:
        await rig.authorizations.require_usable(record)
    assert refused.value.refusal.reason is Reason.NONCE_USED
    # As if it was recorded before the other was mined.
    assert await rig.outcome(record) == (Outcome.PENDING, None)
    await rig.own.controls.mine(rig.own.network.failed_after - 2)
    assert await rig.outcome(record) == (Outcome.PENDING, None)
    await rig.own.controls.mine()
    assert (await rig.outcome(record))[0] is Outcome.FAILED
    assert (await rig.balance(), await rig.sent()) == (0, 0)


async def test_one_that_ran_out_fails_when_its_end_is_deep(rig: Rig) -> None:
    record = rig.record()
    await rig.later(WINDOW + 1)
    await rig.own.controls.mine()
    assert await rig.outcome(record) == (Outcome.PENDING, None)
    await rig.own.controls.mine(rig.own.network.failed_after - 2)
    assert await rig.outcome(record) == (Outcome.PENDING, None)
    await rig.own.controls.mine()
    assert (await rig.outcome(record))[0] is Outcome.FAILED
    assert await rig.sent() == 0


async def test_a_reverted_one_fails_only_once_it_ran_out(rig: Rig) -> None:
    """The payer moves the USDC away: anyone could still use the authorization in its window."""
    record, controls = rig.record(), rig.own.controls
    await controls.automine(enabled=False)
    await rig.outcome(record)
    payment = await rig.payment(record)
    assert payment is not None
    await controls.drop(payment.latest.txid)
    away = rig.record(2, to=KEYS.address(8), units=1000 * USDC)
    await rig.broadcast(away)
    await controls.mine()
    await rig.own.token.client.submit(bytes.fromhex(payment.latest.raw))
    await controls.mine(rig.own.network.failed_after + 1)
    await rig.own.follow()
    reverted = await rig.payment(record)
    assert reverted is not None
    assert reverted.state is EvmPaymentState.FAILED
    assert await rig.outcome(record) == (Outcome.PENDING, None)
    await rig.later(WINDOW + 1)
    await controls.mine(rig.own.network.failed_after + 1)
    assert (await rig.outcome(record))[0] is Outcome.FAILED
    assert (await rig.balance(), await rig.sent()) == (0, 1)


async def test_one_that_a_reorg_took_is_mined_again(rig: Rig) -> None:
    record, controls = rig.record(), rig.own.controls
    await rig.outcome(record)
    outcome, txid = await rig.outcome(record)
    assert outcome is Outcome.SETTLED
    sent = replace(record, state=AuthorizationState.SENT, txid=txid)
    await controls.automine(enabled=False)
    await controls.reorganise(1)
    assert await rig.balance() == 0
    assert (await rig.outcome(sent))[0] is Outcome.PENDING
    await rig.own.follow()
    await controls.mine(2)
    assert (await rig.outcome(sent))[0] is Outcome.SETTLED
    assert (await rig.balance(), await rig.sent()) == (VALUE, 1)


async def test_one_that_its_order_has_spent_is_never_replaced(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deposit is known by its transaction: another would be a new deposit, and sent back."""
    record, own = rig.record(), rig.own
    await rig.outcome(record)
    await own.controls.mine(own.network.settled_after)
    await own.follow()
    made = await rig.payment(record)
    assert made is not None
    assert made.state is EvmPaymentState.SETTLED
    monkeypatch.setattr(own.ledger, "paid_out_attempt", AsyncMock(return_value=made.latest))
    await own.controls.automine(enabled=False)
    await own.controls.reorganise(own.network.settled_after + 1)
    for _ in range(3):
        own.clock.now += own.network.bump_after_ms
        await own.follow()
    after = await rig.payment(record)
    assert after is not None
    assert after.attempts == made.attempts
    assert "its fees stay" in (await own.payments.conditions())[0].text
    await own.controls.mine(own.network.settled_after)
    await own.follow()
    assert await rig.balance() == VALUE
    assert not await own.payments.conditions()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("poor", Reason.BALANCE),
        ("blacklisted", Reason.SIMULATION),
        ("signed by another", Reason.SIGNATURE),
    ],
)
async def test_what_the_token_would_refuse_is_refused(rig: Rig, case: str, reason: Reason) -> None:
    record = rig.record(units=1001 * USDC if case == "poor" else VALUE)
    if case == "blacklisted":
        await rig.own.token.blacklist(rig.signer.address)
    if case == "signed by another":
        rig.signer = OTHERS.signer(1)
        signed = replace(record.signed, signature=rig.record().signed.signature)
        record = replace(record, signed=signed)
    with pytest.raises(AuthorizationRefused) as refused:
        await rig.authorizations.require_usable(record)
    assert refused.value.refusal.reason is reason
    # Even on record nothing is sent that fails when it is tried out.
    assert await rig.outcome(record) == (Outcome.PENDING, None)
    assert await rig.sent() == 0


# --- contract wallets: ERC-1271, ERC-6492 ----------------------------------------------------


def wrapped(record: AuthorizationRecord) -> AuthorizationRecord:
    """The same as wallets sign that do not know if they are deployed (ERC-6492)."""
    signature = record.signed.signature
    parts = eth_abi.abi.encode(["address", "bytes", "bytes"], [DEPOSIT, b"\1\2\3", signature])
    signed = replace(record.signed, signature=parts + bytes.fromhex("6492" * 16))
    return replace(record, signed=signed)


async def reason_of(rig: Rig, record: AuthorizationRecord) -> Reason:
    with pytest.raises(AuthorizationRefused) as refused:
        await rig.authorizations.require_usable(record)
    # Even on record nothing is sent that fails when it is tried out.
    assert await rig.outcome(record) == (Outcome.PENDING, None)
    assert await rig.sent() == 0
    return refused.value.refusal.reason


@pytest.mark.parametrize("is_wrapped", [False, True])
async def test_a_contract_wallet_pays_by_its_own_signature(rig: Rig, is_wrapped: bool) -> None:
    wallet = await rig.wallet()
    record = rig.record(payer=wallet)
    if is_wrapped:
        record = wrapped(record)
    await rig.authorizations.require_usable(record)
    assert await rig.outcome(record) == (Outcome.PENDING, None)
    assert (await rig.outcome(record))[0] is Outcome.SETTLED
    assert (await rig.balance(), await rig.balance(wallet)) == (VALUE, 1000 * USDC - VALUE)
    assert await rig.sent() == 1


async def test_what_a_contract_wallet_did_not_sign_is_refused(rig: Rig) -> None:
    wallet = await rig.wallet(OTHERS.address(1))
    assert await reason_of(rig, rig.record(payer=wallet)) is Reason.SIGNATURE
    assert await reason_of(rig, wrapped(rig.record(2, payer=wallet))) is Reason.SIGNATURE


async def test_a_wallet_that_is_not_deployed_is_refused(rig: Rig) -> None:
    nowhere = OTHERS.address(9)
    assert await reason_of(rig, rig.record(payer=nowhere)) is Reason.UNDEPLOYED
    assert await reason_of(rig, wrapped(rig.record(2, payer=nowhere))) is Reason.UNDEPLOYED


async def test_a_wallet_that_burns_gas_is_refused(rig: Rig) -> None:
    """And the node is not taken to be faulty for what the payer's code does."""
    wallet = await rig.wallet("0x" + "00" * 20)
    with rig.connection.watched():
        assert await reason_of(rig, rig.record(payer=wallet)) is Reason.SIGNATURE
    assert rig.connection.problem is None


async def test_gas_beyond_the_daily_budget_is_not_spent(rig: Rig) -> None:
    await rig.outcome(rig.record())
    spent = await rig.budget.refresh()
    tight = Rig(rig.own, rig.signer, budget_units=spent + 1)
    await tight.connection.check()
    second = tight.record(2)
    with pytest.raises(Unavailable, match="no more gas"):
        await tight.authorizations.require_usable(second)
    with pytest.raises(Unavailable, match="no more gas"):
        await tight.authorizations.carry_out(second)
    assert tight.budget.problem() is not None
    assert await tight.sent() == 1
    rig.own.clock.now += 86_400_001
    assert await tight.budget.refresh() == 0


async def test_gas_in_a_quote_covers_what_was_spent(rig: Rig) -> None:
    await rig.own.refresh()
    quoted = rig.own.payments.gas.authorization_cost()
    assert quoted > rig.own.payments.gas.payout_cost()
    record = rig.record()
    await rig.outcome(record)
    await rig.own.controls.mine()
    await rig.own.follow()
    payment = await rig.payment(record)
    assert payment is not None
    assert payment.inclusion is not None
    assert 0 < payment.inclusion.gas_used * payment.inclusion.gas_price <= quoted


async def test_nothing_new_is_sent_while_money_is_paused(rig: Rig) -> None:
    rig.is_paused = True
    record = rig.record()
    assert await rig.outcome(record) == (Outcome.PENDING, None)
    assert await rig.payment(record) is None
    rig.is_paused = False
    await rig.outcome(record)
    assert (await rig.outcome(record))[0] is Outcome.SETTLED


async def test_one_that_is_signed_too_late_is_not_sent(rig: Rig) -> None:
    record = rig.record()
    await rig.later(WINDOW - 10)
    assert await rig.outcome(record) == (Outcome.PENDING, None)
    assert await rig.sent() == 0


async def test_a_committed_payment_is_published_after_a_crash(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = rig.record()

    async def dies(*_args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(EvmPayments, "hand_over", dies)
        with pytest.raises(KeyboardInterrupt):
            await rig.authorizations.carry_out(record)
    assert await rig.sent() == 0
    async with rig.own.again() as own:
        later = Rig(own, rig.signer)
        await own.follow()
        assert (await later.outcome(record))[0] is Outcome.SETTLED
        assert (await later.balance(), await later.sent()) == (VALUE, 1)
