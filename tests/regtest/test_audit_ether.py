"""The auditor on real daemons: the hot wallet's ether, to the wei."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.audit.evm_chain import EvmReader
from rpcsvc.audit.records import Books, Ether, OpeningEntry, PaymentEntry, Watched
from rpcsvc.domain import usdc
from rpcsvc.ids import system_random
from rpcsvc.settlement.onchain.evm.keys import EvmSigner, SignedTransaction, TransactionPlan
from rpcsvc.settlement.onchain.evm.node_types import EvmSubmission
from rpcsvc.settlement.onchain.pause import PauseSwitch
from tests.chain_options import evm_network
from tests.regtest.commands import command
from tests.regtest.daemons import mined
from tests.regtest.exchange import ETHER, XMR, Exchange, create, reaches
from tests.regtest.token import Token

pytestmark = pytest.mark.slow

OK, FAILED = 0, 1
GWEI = 10**9
NAME = "arbitrum"


# --- the reader's sums -----------------------------------------------------------------------


class Hot:
    """A hot wallet, and books with the transactions that it signed."""

    def __init__(self, token: Token) -> None:
        self.token = token
        self.signer = EvmSigner(system_random(32))
        self.network = evm_network(NAME, 42161, token.address, confirmations=3)
        self.books = Books()

    async def begin(self) -> None:
        """Fund the wallet with ether, and record the opening balance."""
        await self.token.controls.set_ether(self.signer.address, ETHER)
        await self.token.mint(self.signer.address, 100)
        head = await self.token.client.block()
        assert head is not None
        self.books = Books(
            watched={NAME: Watched(head.number + 1, head.number, head.hash)},
            evm_hot=self.signer.address,
            openings={NAME: OpeningEntry(head.number, head.hash, 0, ETHER)},
        )

    def signed(self, nonce: int, units: int, tip: int) -> SignedTransaction:
        data = usdc.transfer(self.token.owner, units)
        plan = TransactionPlan(
            42161, nonce, self.token.address, 100_000, 50 * GWEI + tip, tip, data
        )
        return self.signer.sign(plan)

    async def submit(self, *transactions: SignedTransaction) -> None:
        for item in transactions:
            reported = await self.token.client.submit(item.raw)
            assert reported.submission is EvmSubmission.ACCEPTED

    def on_record(self, nonce: int, *attempts: SignedTransaction) -> None:
        entry = PaymentEntry(
            f"payment-{nonce}", NAME, "transfer", self.token.owner, 1, "published",
            tuple(item.txid for item in attempts), nonce=nonce,
        )  # fmt: skip
        self.books = replace(self.books, payments=(*self.books.payments, entry))

    async def ether(self, reader: EvmReader) -> Ether:
        facts = await reader.facts(self.books, await reader.head())
        assert facts is not None
        assert facts.ether is not None
        found = facts.ether
        return replace(found, spent=dict(found.spent), cost_unknown=frozenset(found.cost_unknown))

    async def cost(self, txid: str) -> int:
        receipt = await mined(self.token.client, txid)
        return receipt.gas_used * receipt.gas_price


async def test_replaced_and_failed_payments_cost_what_is_mined_of_them(token: Token) -> None:
    hot = Hot(token)
    await hot.begin()
    reader = EvmReader(hot.network, token.client)
    await token.controls.automine(enabled=False)
    first, dearer = hot.signed(0, 1, GWEI), hot.signed(0, 1, 2 * GWEI)
    failing = hot.signed(1, 10**12, GWEI)
    hot.on_record(0, first, dearer)
    hot.on_record(1, failing)
    await hot.submit(first, dearer, failing)
    assert await hot.ether(reader) == Ether(ETHER), "what waits costs nothing yet"
    await token.controls.mine()
    assert not (await mined(token.client, failing.txid)).ok

    found = await hot.ether(reader)

    costs = {item.txid: await hot.cost(item.txid) for item in (dearer, failing)}
    assert found == Ether(ETHER - sum(costs.values()), spent=costs)
    await token.controls.reorganise(1)
    assert await hot.ether(reader) == Ether(ETHER), "it is all as it was"


async def test_replaced_opening_balance_is_compared_with_nothing(
    token: Token,
) -> None:
    hot = Hot(token)
    reader = EvmReader(hot.network, token.client)
    before = await reader.head()
    await hot.begin()
    facts = await reader.facts(hot.books, before)
    assert facts is not None
    assert facts.ether is not None
    assert facts.ether.replaced, "it is not there yet"
    assert await hot.ether(reader) == Ether(ETHER)
    await token.controls.reorganise(1)
    assert (await hot.ether(reader)).replaced


async def test_a_receipt_that_the_node_has_forgotten_is_no_difference(
    token: Token, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot = Hot(token)
    await hot.begin()
    paid = hot.signed(0, 1, GWEI)
    hot.on_record(0, paid)
    await hot.submit(paid)
    cost = await hot.cost(paid.txid)
    reader = EvmReader(hot.network, token.client)
    assert await hot.ether(reader) == Ether(ETHER - cost, spent={paid.txid: cost})

    async def forgotten(_: str) -> None:
        return None

    monkeypatch.setattr(token.client, "receipt", forgotten)
    found = await hot.ether(reader)
    assert not found.spent
    assert found.cost_unknown == {paid.txid}


# --- the command -------------------------------------------------------------------------------


async def audited(stack: Exchange) -> tuple[int, dict[str, dict[str, str]], list[str]]:
    """Exit status, differences by kind, notes."""
    said = await command(stack, "audit", "--json")
    found = said.json
    return said.status, {item["kind"]: item for item in found["differences"]}, found["notes"]


def gap(item: dict[str, str]) -> int:
    assert item["unit"] == "wei"
    return int(item["found"]) - int(item["expected"])


async def by_hand(stack: Exchange, sender: str, to: str, wei: int) -> tuple[str, int]:
    """Send plain ether outside of the service; the transaction and its fee."""
    await stack.controls.impersonate(sender)
    txid = await stack.controls.send_from(sender, to, value=wei)
    receipt = await mined(stack.evm, txid)
    return txid, receipt.gas_used * receipt.gas_price


async def test_unexpected_wei_both_ways_is_found_and_annotated(
    stack: Exchange,
) -> None:
    hot, user = stack.treasury, stack.user.address
    async with stack.serving() as at:
        made = await create(at, direction="x2u", amount="1", to=user)
        await stack.pay_xmr(made["data"]["order"]["depositAddress"], XMR)
        await reaches(stack, at, made["data"]["order"]["orderId"], "completed")
    assert await audited(stack) == (OK, {}, [])

    given, _ = await by_hand(stack, user, hot, 1)
    status, found, _ = await audited(stack)
    assert (status, [*found], gap(found["ether_income"])) == (FAILED, ["ether_income"], 1)
    assert f"rpcsvc treasury explain {NAME} TXID" in found["ether_income"]["hint"]

    reported = await command(stack, "treasury", "explain", NAME, given, "--note", "for gas")
    assert (reported.status, "received 1 wei" in reported.out) == (OK, True), reported
    assert await audited(stack) == (OK, {}, [])

    taken, fee = await by_hand(stack, hot, user, 1)
    status, found, _ = await audited(stack)
    assert (status, {*found}) == (FAILED, {"ether", "unrecorded_transaction"})
    assert gap(found["ether"]) == -(fee + 1)
    assert PauseSwitch(stack.data_dir).reason() is None, "the command changes nothing"

    reported = await command(stack, "treasury", "explain", NAME, taken, "--note", "out again")
    assert (reported.status, "sent 1 wei" in reported.out) == (OK, True), reported
    assert await audited(stack) == (OK, {}, [])
    said = await command(stack, "audit")
    assert f"{NAME} {taken}: sent {fee + 1} wei: out again" in said.out
