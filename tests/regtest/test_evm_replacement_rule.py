"""Stuck payouts of USDC on a node with Geth's rule for the fees of a replacement.

Anvil accepts any higher fee; a proxy between it and the service enforces the rule (fee_rule.py).
The tests count balances on the chain, never the service's database.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpcsvc.domain import usdc
from rpcsvc.domain.order import Transfer
from rpcsvc.orders.ports.wallets import Outcome
from rpcsvc.settlement.onchain.daemon_rpc import NodeError, TimedOut
from rpcsvc.settlement.onchain.evm.keys import HOT_WALLET_INDEX, TransactionPlan
from rpcsvc.settlement.onchain.evm.node_types import (
    EvmSubmission,
    EvmSubmissionResult,
    EvmTransaction,
)
from rpcsvc.settlement.onchain.evm.records import Attempt, EvmNetwork
from tests.regtest.daemon_proxy import DaemonProxy
from tests.regtest.daemons import Anvil
from tests.regtest.evm_payer import (
    ETHER,
    FRIEND,
    GWEI,
    HOT,
    KEYS,
    MINUTE_MS,
    USDC,
    USER,
    EvmPayer,
    each_by,
    evm_payer,
)
from tests.regtest.fee_rule import KNOWN, UNDERPRICED, FeeRule
from tests.regtest.token import Token

pytestmark = pytest.mark.slow  # the quick tests must stay quick

BASE_FEE = 20 * GWEI


@dataclass
class Strict:
    """A service whose node has the rule. ``payer.token`` bypasses it, as a block producer can."""

    payer: EvmPayer
    rule: FeeRule
    line: DaemonProxy

    async def bump(self) -> None:
        """A pass of maintenance a minute later, when pending payments are due for a higher fee."""
        self.payer.clock.now += MINUTE_MS
        await self.payer.follow()

    async def attempts(self, transfer: Transfer) -> tuple[Attempt, ...]:
        return (await self.payer.payment(transfer)).attempts

    async def waits(self, txid: str) -> bool:
        """Whether the transaction is in the node's pool."""
        found = await self.payer.token.client.transaction(txid)
        return found is not None and found.block_number is None


@asynccontextmanager
async def strict(made: EvmPayer) -> AsyncIterator[Strict]:
    rule, line = FeeRule(made.token.client), DaemonProxy(made.anvil.url)
    line.stand_in = rule
    async with line.open():
        made.client.rpc.endpoint = replace(made.client.rpc.endpoint, url=line.url)
        yield Strict(made, rule, line)


@pytest.fixture
async def node(anvil: Anvil, token: Token, tmp_path: Path) -> AsyncIterator[Strict]:
    """A hot wallet with 1 ether and 1,000 USDC, on a node with the rule."""
    await token.controls.set_ether(HOT, ETHER)
    await token.mint(HOT, 1000 * USDC)
    async with evm_payer(anvil, token, tmp_path) as made, strict(made) as ready:
        yield ready


async def outpriced(node: Strict) -> Transfer:
    """A payout in the pool that is not mined: the base fee is above its maximum fee.

    Anvil drops it in that case, where other nodes keep it, so it is resubmitted.
    """
    own = node.payer
    await own.controls.automine(enabled=False)
    transfer = await own.prepared(own.transfer(USER, 7 * USDC))
    assert (await own.pay(transfer)).outcome is Outcome.PENDING
    await own.controls.drop(transfer.txid or "")
    await own.controls.set_next_base_fee(BASE_FEE)
    await own.controls.mine()
    await own.controls.set_next_base_fee(GWEI)
    await own.token.client.submit(bytes.fromhex((await own.payment(transfer)).attempts[0].raw))
    assert await node.waits(transfer.txid or "")
    return transfer


async def settles_once(node: Strict, transfer: Transfer, attempt: Attempt) -> None:
    """Require that this attempt settles, that the user is paid once, and that lookups repeat."""
    own = node.payer
    await own.controls.mine(own.network.settled_after)
    for _ in range(2):
        assert (await own.payments.look_up(transfer)).outcome is Outcome.SETTLED
        assert (await own.payments.publish(transfer)).outcome is Outcome.SETTLED
    await node.bump()
    assert (await own.payments.receipt(transfer))["txid"] == attempt.txid
    assert [item.txid for item in await own.receipts(transfer)] == [attempt.txid]
    assert await own.token.balance(USER) == 7 * USDC
    assert await own.token.balance(HOT) == 993 * USDC
    assert await own.payments.conditions() == []
    assert await own.live() == []


# --- the rule itself ---------------------------------------------------------------------------


def same_nonce(max_fee: int, tip: int, network: EvmNetwork, to: str = FRIEND) -> bytes:
    plan = TransactionPlan(
        chain_id=network.chain_id, nonce=0, to=network.token, gas=100_000, max_fee=max_fee,
        tip=tip, data=usdc.transfer(to, USDC),
    )  # fmt: skip
    return KEYS.signer(HOT_WALLET_INDEX).sign(plan).raw


async def test_the_rule_bites_below_ten_percent_on_either_fee(node: Strict) -> None:
    own = node.payer
    await own.controls.automine(enabled=False)
    submit, network = own.client.submit, own.network
    first = same_nonce(10 * GWEI, GWEI, network)
    assert (await submit(first)).submission is EvmSubmission.ACCEPTED
    again = await submit(first)
    assert (again.submission, again.text) == (EvmSubmission.KNOWN, KNOWN)
    nine, ten = 109, 110
    for max_fee, tip in ((nine, nine), (ten, nine), (nine, ten), (ten, 100), (100, ten)):
        offer = same_nonce(max_fee * GWEI // 10, tip * GWEI // 100, network)
        said = await submit(offer)
        assert (said.submission, said.text) == (EvmSubmission.REPLACEMENT_UNDERPRICED, UNDERPRICED)
        assert not await node.waits(said.txid)
    assert await node.waits((await submit(first)).txid)
    enough = await submit(same_nonce(ten * GWEI // 10, ten * GWEI // 100, network))
    assert enough.submission is EvmSubmission.ACCEPTED
    assert await node.waits(enough.txid)
    assert len(node.rule.refused) == 5


async def test_the_rule_answers_in_the_form_of_geth(node: Strict) -> None:
    own = node.payer
    await own.controls.automine(enabled=False)
    first, second = (same_nonce(10 * GWEI, GWEI, own.network, to) for to in (FRIEND, USER))
    await own.client.submit(first)
    for raw, said in ((second, UNDERPRICED), (first, KNOWN)):
        with pytest.raises(NodeError) as caught:
            await own.client.rpc.act("eth_sendRawTransaction", ["0x" + raw.hex()])
        assert (caught.value.code, caught.value.text) == (-32000, said)


async def test_without_the_rule_one_wei_more_replaces(node: Strict) -> None:
    """Shows why the proxy is needed; it can be removed once Anvil has the rule itself."""
    own = node.payer
    await own.controls.automine(enabled=False)
    node.line.stand_in = None
    for more in range(3):
        offer = same_nonce(10 * GWEI + more, GWEI - more, own.network)
        assert (await own.client.submit(offer)).submission is EvmSubmission.ACCEPTED


async def test_what_is_mined_or_dropped_is_not_outbid(node: Strict) -> None:
    own = node.payer
    await own.controls.automine(enabled=False)
    dear, cheap = (same_nonce(gwei * GWEI, GWEI, own.network) for gwei in (30, 10))
    dropped = await own.client.submit(dear)
    await own.controls.drop(dropped.txid)
    assert (await own.client.submit(cheap)).submission is EvmSubmission.ACCEPTED
    await own.controls.mine()
    assert (await own.client.submit(dear)).submission is EvmSubmission.NONCE_TOO_LOW
    assert node.rule.refused == []


# --- a stuck payout ----------------------------------------------------------------------------


async def test_stuck_payout_is_replaced_by_the_rule_and_settles(
    node: Strict,
) -> None:
    transfer = await outpriced(node)
    await node.bump()
    first, second = await node.attempts(transfer)
    assert first.txid == transfer.txid
    assert node.rule.refused == []
    assert (await node.waits(first.txid), await node.waits(second.txid)) == (False, True)
    assert second.max_fee > BASE_FEE > first.max_fee
    await node.payer.controls.set_next_base_fee(BASE_FEE)
    await settles_once(node, transfer, second)


async def test_the_first_is_mined_after_all_and_settles_it(node: Strict) -> None:
    transfer = await outpriced(node)
    await node.bump()
    first, second = await node.attempts(transfer)
    # The block producer lacks the second attempt; the base fee has fallen again.
    await node.payer.controls.drop(second.txid)
    await node.payer.token.client.submit(bytes.fromhex(first.raw))
    await settles_once(node, transfer, first)


async def test_both_reach_the_pool_in_the_wrong_order_and_one_is_mined(node: Strict) -> None:
    transfer = await outpriced(node)
    await node.bump()
    first, second = await node.attempts(transfer)
    said = await node.payer.client.submit(bytes.fromhex(first.raw))
    assert said.submission is EvmSubmission.REPLACEMENT_UNDERPRICED
    assert await node.waits(second.txid)
    await settles_once(node, transfer, second)


# --- a node with a higher minimum raise --------------------------------------------------------


@pytest.mark.parametrize(("percent", "tries"), [(25, 1), (26, 2), (100, 4)])
async def test_refused_replacement_is_raised_until_the_node_accepts(
    node: Strict, percent: int, tries: int
) -> None:
    own, node.rule.percent = node.payer, percent
    await own.controls.automine(enabled=False)
    transfer = await own.prepared(own.transfer(USER, 7 * USDC))
    await own.pay(transfer)
    for refusals in range(1, tries):
        await node.bump()
        assert len(await node.attempts(transfer)) == 1 + refusals
        (reported,) = [each.text for each in await own.payments.conditions()]
        assert (transfer.transfer_id in reported, UNDERPRICED in reported) == (True, True)
        assert "the next attempt will offer more" in reported
        assert (await own.payments.look_up(transfer)).outcome is Outcome.PENDING
    await node.bump()
    assert await own.payments.conditions() == []
    fees = [(item.max_fee, item.tip) for item in await node.attempts(transfer)]
    assert len(fees) == len(set(fees)) == 1 + tries
    assert fees == sorted(fees)
    last = (await node.attempts(transfer))[-1]
    assert await node.waits(last.txid)
    await settles_once(node, transfer, last)


async def test_a_refused_attempt_is_not_raised_before_its_time(node: Strict) -> None:
    own, node.rule.percent = node.payer, 100
    await own.controls.automine(enabled=False)
    transfer = await own.prepared(own.transfer(USER))
    await own.pay(transfer)
    await node.bump()
    own.clock.now += MINUTE_MS - 1
    await own.follow()
    assert len(await node.attempts(transfer)) == 2
    own.clock.now += 1
    await own.follow()
    assert len(await node.attempts(transfer)) == 3


async def test_raising_ends_at_the_highest_fee_and_warns(node: Strict) -> None:
    own, node.rule.percent = node.payer, 10_000
    await own.controls.automine(enabled=False)
    transfer = await own.prepared(own.transfer(USER, 7 * USDC))
    await own.pay(transfer)
    for _ in range(40):
        await node.bump()
    payment = await own.payment(transfer)
    assert 3 < len(payment.attempts) < 20
    assert payment.most_fee <= own.network.highest_fee < payment.most_fee * 11 // 10
    _overdue, reported = [each.text for each in await own.payments.conditions()]
    assert (UNDERPRICED in reported, "highest_fee" in reported) == (True, True)
    assert (await own.payments.look_up(transfer)).outcome is Outcome.PENDING
    # The operator lowers the node's minimum: the last signed attempt is enough.
    node.rule.percent = 10
    await node.bump()
    assert (await own.payment(transfer)).attempts == payment.attempts
    assert await node.waits(payment.latest.txid)
    await settles_once(node, transfer, payment.latest)


async def test_the_first_settles_it_though_all_others_were_refused(node: Strict) -> None:
    own, node.rule.percent = node.payer, 10_000
    await own.controls.automine(enabled=False)
    transfer = await own.prepared(own.transfer(USER, 7 * USDC))
    await own.pay(transfer)
    for _ in range(3):
        await node.bump()
    assert len(await node.attempts(transfer)) == 4
    await settles_once(node, transfer, (await node.attempts(transfer))[0])


async def test_a_dearer_one_that_is_not_on_record_is_outbid_in_the_end(node: Strict) -> None:
    """The same key elsewhere has a pending transaction with fees above all recorded ones."""
    own = node.payer
    await own.controls.automine(enabled=False)
    transfer = await own.prepared(own.transfer(USER, 7 * USDC))
    await own.client.submit(same_nonce(10 * GWEI, 2 * GWEI, own.network))
    assert (await own.pay(transfer)).outcome is Outcome.UNKNOWN
    for _ in range(10):
        await node.bump()
        if await node.waits((await node.attempts(transfer))[-1].txid):
            break
    assert node.rule.refused
    last = (await node.attempts(transfer))[-1]
    await settles_once(node, transfer, last)
    assert await own.token.balance(FRIEND) == 0


# --- refusals that a higher fee does not solve -------------------------------------------------


async def test_lost_replacement_is_resent_and_not_raised(
    node: Strict, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, transfer = node.payer, await outpriced(node)

    async def lose(raw: bytes) -> EvmSubmissionResult:
        raise TimedOut("node", "eth_sendRawTransaction", "no answer in time")

    with monkeypatch.context() as patched:
        patched.setattr(own.client, "submit_each", each_by(lose))
        await node.bump()
        (reported,) = [each.text for each in await own.payments.conditions()]
        assert ("no answer in time" in reported, "handed over again" in reported) == (True, True)
    await node.bump()
    _, second = await node.attempts(transfer)
    assert await own.payments.conditions() == []
    await own.follow()
    assert await node.waits(second.txid)
    await settles_once(node, transfer, second)


async def test_replacement_waits_for_the_ether_that_it_costs(
    node: Strict,
) -> None:
    own, transfer = node.payer, await outpriced(node)
    await own.controls.set_ether(HOT, (await own.payment(transfer)).most_fee)
    for _ in range(3):
        await node.bump()
    _, second = await node.attempts(transfer)
    (reported,) = [each.text for each in await own.payments.conditions()]
    assert "insufficient_funds" in reported
    await own.controls.set_ether(HOT, ETHER)
    await node.bump()
    await settles_once(node, transfer, second)


# --- a node that does not show its pool --------------------------------------------------------


async def test_a_node_that_has_it_and_does_not_show_it_is_offered_more(
    node: Strict, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = node.payer
    await own.controls.automine(enabled=False)
    transfer = await own.prepared(own.transfer(USER, 7 * USDC))
    shown = own.client.transaction

    async def mined_only(txid: str) -> EvmTransaction | None:
        found = await shown(txid)
        return None if found is None or found.block_number is None else found

    monkeypatch.setattr(own.client, "transaction", mined_only)
    assert "not on the network yet" in (await own.pay(transfer)).reason
    await node.bump()
    first, second = await node.attempts(transfer)
    assert (await node.waits(first.txid), await node.waits(second.txid)) == (False, True)
    await settles_once(node, transfer, second)
