"""The auditor's reads of real chains: its progress between audits, and when it rereads."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.audit.evm_chain import EvmReader
from rpcsvc.audit.monero_chain import MoneroReader
from rpcsvc.audit.records import (
    MONERO,
    Books,
    ChainMoved,
    EvmFacts,
    MoneroFacts,
    PaymentEntry,
    Unfit,
    Watched,
)
from rpcsvc.domain import usdc
from rpcsvc.ids import system_random
from rpcsvc.settlement.onchain.evm.keys import EvmSigner
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.node_types import Block
from rpcsvc.settlement.onchain.evm.records import EvmNetwork
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import Destination
from rpcsvc.settlement.onchain.thresholds import Threshold
from tests.chain_options import evm_network, monero_options
from tests.regtest.daemons import SPENDABLE_AGE, Miner, mined
from tests.regtest.token import Token

pytestmark = pytest.mark.slow  # the quick tests must stay quick

XMR = 10**12
NAME = "arbitrum"


# --- EVM -------------------------------------------------------------------------------------


def network(token: Token, chain_id: int = 42161) -> EvmNetwork:
    return evm_network(NAME, chain_id, token.address, confirmations=3)


def fresh_address() -> str:
    return EvmSigner(system_random(32)).address


def evm_books(head: Block, hot: str, *addresses: str) -> Books:
    """Books of a service that has scanned the chain up to ``head``."""
    watched = Watched(head.number + 1, head.number, head.hash)
    return Books(watched={NAME: watched}, evm_hot=hot, evm_addresses=frozenset(addresses))


async def looked(reader: EvmReader, books: Books) -> EvmFacts:
    facts = await reader.facts(books, await reader.head())
    assert facts is not None
    return facts


async def test_events_and_balances_of_our_addresses_are_read(token: Token) -> None:
    hot, ours, stranger = fresh_address(), fresh_address(), fresh_address()
    await token.mint(hot, 11)
    reader = EvmReader(network(token), token.client)
    begin = await reader.head()
    await token.mint(ours, 5)
    await token.mint(stranger, 7)
    books = evm_books(begin, hot, ours)

    first = await looked(reader, books)
    assert [(move.recipient, move.units) for move in first.moves] == [(ours.lower(), 5)]
    assert first.balances == {hot.lower(): 11, ours.lower(): 5}
    assert (first.opening, first.nonce, first.deposit_depth) == (11, 0, 3)
    assert not first.stale

    reader.accept()
    await token.mint(hot, 1)
    second = await looked(reader, books)
    assert [move.units for move in second.moves] == [5, 1]
    assert second.balances == {hot.lower(): 12}, "of the others nothing has moved"


async def test_blocks_that_were_replaced_are_read_again(token: Token) -> None:
    hot, ours = fresh_address(), fresh_address()
    await token.controls.mine(3)
    reader = EvmReader(network(token), token.client)
    books = evm_books(await reader.head(), hot, ours)
    await token.mint(ours, 5)
    assert len((await looked(reader, books)).moves) == 1

    await token.controls.reorganise(1)

    facts = await looked(reader, books)
    assert list(facts.moves) == []
    assert facts.balances == {hot.lower(): 0, ours.lower(): 0}
    assert not facts.stale, "what the service has seen is there"

    await token.controls.reorganise(2)
    assert (await looked(reader, books)).stale


async def test_block_replaced_during_a_scan_is_noticed(token: Token) -> None:
    hot = fresh_address()
    reader = EvmReader(network(token), token.client)
    books = evm_books(await reader.head(), hot)
    await token.mint(hot, 5)
    head = await reader.head()
    await token.controls.reorganise(1)
    with pytest.raises(ChainMoved):
        await reader.facts(books, head)


async def test_transfers_of_nothing_are_nobodys(token: Token) -> None:
    hot, stranger = fresh_address(), token.owner
    reader = EvmReader(network(token), token.client)
    books = evm_books(await reader.head(), hot)
    words = usdc.transfer_from(hot, stranger, 0)
    txid = await token.controls.send_from(stranger, token.address, words)
    assert len((await mined(token.client, txid)).logs) == 1
    assert len((await looked(reader, books)).moves) == 0


async def test_addresses_beyond_one_request_are_all_queried(token: Token) -> None:
    hot, last = fresh_address(), "0x" + "ff" * 20
    many = ["0x" + f"{number:040x}" for number in range(10**6, 10**6 + 600)]
    reader = EvmReader(network(token), token.client)
    books = evm_books(await reader.head(), hot, *many, last)
    await token.mint(many[0], 1)
    await token.mint(last, 2)
    facts = await looked(reader, books)
    assert {move.recipient: move.units for move in facts.moves} == {many[0]: 1, last: 2}


async def test_a_contract_that_is_no_token_is_unfit(token: Token) -> None:
    nowhere = evm_network(NAME, 42161, fresh_address(), confirmations=3)
    reader = EvmReader(nowhere, token.client)
    with pytest.raises(Unfit, match="is no token"):
        await looked(reader, evm_books(await reader.head(), fresh_address()))


async def test_a_node_of_another_chain_is_unfit(token: Token, evm: EvmClient) -> None:
    with pytest.raises(Unfit, match="on chain 42161, not on 1"):
        await EvmReader(network(token, 1), evm).head()


# --- Monero ----------------------------------------------------------------------------------


OPTIONS = monero_options(nettype="fakechain", thresholds=(Threshold(0, 3), Threshold(XMR, 5)))


def monero_books(primary: str, *payments: PaymentEntry) -> Books:
    return Books(watched={MONERO: Watched(1, 1, "")}, monero_primary=primary, payments=payments)


async def read(reader: MoneroReader, books: Books) -> MoneroFacts:
    facts = await reader.facts(books, await reader.head())
    assert facts is not None
    return facts


async def test_what_came_what_went_and_what_is_there_is_read(
    own_wallet: WalletClient, wallet: WalletClient, miner: Miner, node: MonerodClient
) -> None:
    primary = await own_wallet.primary_address()
    (sub,) = await own_wallet.create_addresses(1)
    to = await wallet.primary_address()
    reader = MoneroReader(node, own_wallet, OPTIONS)
    came = await miner.pay(sub.address, 2 * XMR)
    (waits,) = (await read(reader, monero_books(primary))).arrivals
    assert (waits.txid, waits.address, waits.block) == (came, sub.address, None)
    await miner.mine(SPENDABLE_AGE)

    first = await read(reader, monero_books(primary))
    assert [(a.txid, a.address, a.units) for a in first.arrivals] == [(came, sub.address, 2 * XMR)]
    assert (len(first.departures), first.balance, first.deposit_depth) == (0, 2 * XMR, 5)

    paid = await own_wallet.prepare([Destination(to, XMR // 2)])
    payment = PaymentEntry(
        "ord/payout/1", MONERO, "transfer", to, XMR // 2, "prepared", (paid.txid,), fee=paid.fee,
        tx_key=paid.tx_key,
    )  # fmt: skip
    books = monero_books(primary, payment)
    assert (await read(reader, books)).payments == {}

    await own_wallet.relay(paid.metadata)
    waiting = await read(reader, books)
    seen = waiting.payments["ord/payout/1"]
    assert (seen.block, seen.paid, seen.fee) == (None, XMR // 2, paid.fee)
    assert waiting.balance == 2 * XMR, "blocks alone count"

    await miner.mine(1)
    done = await read(reader, books)
    assert [(d.txid, d.units, d.fee) for d in done.departures] == [(paid.txid, XMR // 2, paid.fee)]
    assert done.balance == 2 * XMR - XMR // 2 - paid.fee
    assert done.payments["ord/payout/1"].block == done.top

    await miner.mine(70)
    listed = [*done.arrivals], [*done.departures]
    for _ in range(2):
        kept = await read(reader, books)
        assert ([*kept.arrivals], [*kept.departures]) == listed, (
            "what is deep is kept, and the same"
        )
        assert (kept.payments, kept.balance) == (done.payments, done.balance)


async def test_what_is_held_back_in_the_wallet_is_there(
    own_wallet: WalletClient, miner: Miner, node: MonerodClient
) -> None:
    primary = await own_wallet.primary_address()
    await miner.fund(primary, 2 * XMR, XMR)
    await own_wallet.refresh()
    await own_wallet.freeze((await own_wallet.outputs())[0].key_image)
    facts = await read(MoneroReader(node, own_wallet, OPTIONS), monero_books(primary))
    assert facts.balance == 3 * XMR


async def test_wallet_is_audited_though_its_outputs_cannot_be_listed(
    own_wallet: WalletClient, miner: Miner, node: MonerodClient
) -> None:
    primary = await own_wallet.primary_address()
    (customers,) = await own_wallet.create_addresses(1)
    for _ in range(3):
        await miner.fund(customers.address, *([XMR // 1000] * 14))
    await miner.fund(primary, 2 * XMR, XMR)
    await own_wallet.refresh()
    own = next(item for item in await own_wallet.outputs() if item.amount == 2 * XMR)
    await own_wallet.freeze(own.key_image)
    whole = await read(MoneroReader(node, own_wallet, OPTIONS), monero_books(primary))

    endpoint = replace(own_wallet.rpc.endpoint, max_response_bytes=12_000)
    async with WalletClient(endpoint, account=own_wallet.account) as small:
        part = await read(MoneroReader(node, small, OPTIONS), monero_books(primary))

    assert (whole.is_complete, part.is_complete) == (True, False)
    assert [*part.arrivals] == [*whole.arrivals]
    assert (part.top, part.balance) == (whole.top, whole.balance)
    assert part.balance == 3 * XMR + 42 * (XMR // 1000)


async def test_payment_recorded_with_another_address_paid_it_nothing(
    own_wallet: WalletClient, wallet: WalletClient, miner: Miner, node: MonerodClient
) -> None:
    primary, to = await own_wallet.primary_address(), await wallet.primary_address()
    reader = MoneroReader(node, own_wallet, OPTIONS)
    await miner.fund(primary, 2 * XMR)
    await own_wallet.refresh()
    paid = await own_wallet.prepare([Destination(to, XMR // 2)])
    await own_wallet.relay(paid.metadata)
    await miner.mine(1)
    (other,) = await wallet.create_addresses(1)
    for recipient in (other.address, "not an address"):
        payment = PaymentEntry(
            "p", MONERO, "transfer", recipient, XMR // 2, "settled", (paid.txid,), fee=paid.fee,
            tx_key=paid.tx_key,
        )  # fmt: skip
        reader = MoneroReader(node, own_wallet, OPTIONS)
        facts = await read(reader, monero_books(primary, payment))
        assert facts.payments["p"].paid == 0


async def test_another_wallet_is_unfit(
    own_wallet: WalletClient, miner: Miner, node: MonerodClient
) -> None:
    reader = MoneroReader(node, own_wallet, OPTIONS)
    with pytest.raises(Unfit, match="another XMR wallet"):
        await read(reader, monero_books("4" + "x" * 94))
