"""The Monero clients against real daemons, and facts about the daemons that payments rely on.

A fact that no longer holds after an upgrade of Monero fails here by name.
"""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from msgspec.structs import replace

from rpcsvc.settlement.onchain.daemon_rpc import (
    AccessRefused,
    NodeError,
    NotSent,
    RpcOutcomeUnknown,
    TimedOut,
)
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient, MoneroSubmission, Spent
from rpcsvc.settlement.onchain.monero.wallet import WalletClient, read_held
from rpcsvc.settlement.onchain.monero.wallet_types import (
    Destination,
    OutputFilter,
    PreparedPayment,
    Subaddress,
    WalletCode,
    WalletTransfer,
    WalletTransferKind,
)
from tests.e2e.processes import TIMEOUT_SECONDS, until
from tests.regtest.daemons import (
    SPENDABLE_AGE,
    WALLET_PASSWORD,
    Miner,
    WalletRpc,
    kill_and_reopen,
    pop_blocks,
)

pytestmark = pytest.mark.slow  # the quick tests must stay quick

XMR = 10**12
# A node's answers to bytes that it accepted a moment before.
HAS_IT = (MoneroSubmission.KNOWN, MoneroSubmission.DOUBLE_SPEND)
SENT_KINDS = (WalletTransferKind.OUTGOING, WalletTransferKind.PENDING, WalletTransferKind.FAILED)


async def subaddress(wallet: WalletClient) -> Subaddress:
    """A new subaddress that is stored."""
    (made,) = await wallet.create_addresses(1)
    await wallet.store()
    return made


async def funded(wallet: WalletClient, miner: Miner, *amounts: int) -> None:
    """Give the wallet outputs that it can spend."""
    await miner.fund(await wallet.primary_address(), *amounts)
    await wallet.refresh()


async def prepared(wallet: WalletClient, to: str, amount: int = XMR // 10) -> PreparedPayment:
    return await wallet.prepare([Destination(to, amount)])


async def sent(wallet: WalletClient, txid: str) -> list[WalletTransfer]:
    return [item for item in await wallet.transfers(0, SENT_KINDS) if item.txid == txid]


# --- the clients -----------------------------------------------------------------------------


async def test_node_reports_its_network_and_its_tip(node: MonerodClient, miner: Miner) -> None:
    (newest,) = await miner.mine()
    info = await node.info()
    top = await node.header_at(info.height - 1)
    assert info.nettype == "fakechain"
    assert top is not None
    assert top.hash == newest == info.top_hash
    before = await node.header_at(top.height - 1)
    assert before is not None
    assert before.hash == top.previous


async def test_a_block_that_is_not_there_is_none(node: MonerodClient) -> None:
    assert await node.header_at(10**9) is None
    assert await node.block_at(10**9) is None
    assert await node.headers(1, 10**9) == []


async def test_restricted_node_shows_what_is_in_a_block(
    wallet: WalletClient, node: MonerodClient, miner: Miner
) -> None:
    await miner.mine()
    empty = (await node.info()).height - 1
    txid = await miner.pay(await wallet.primary_address(), XMR)
    await miner.mine(3)
    async with MonerodClient(miner.monerod.restricted_endpoint) as restricted:
        info = await restricted.info()
        listed = await restricted.headers(empty, info.height - 1)
        assert [item.height for item in listed] == list(range(empty, info.height))
        assert [item.hash for item in listed[:-1]] == [item.previous for item in listed[1:]]
        assert listed[-1].hash == info.top_hash
        for header, txids in zip(listed, [(), (txid,), (), ()], strict=True):
            block = await restricted.block_at(header.height)
            assert block is not None
            assert (block.header, block.txids) == (header, txids)
            assert (await restricted.transactions([block.miner_txid])) != {}


async def test_a_wrong_wallet_password_never_reaches_the_wallet(wallet_rpc: WalletRpc) -> None:
    wrong = replace(wallet_rpc.endpoint, password="wrong")
    async with WalletClient(wrong) as client:
        with pytest.raises(AccessRefused, match="401"):
            await client.create("never", WALLET_PASSWORD)
    assert not (wallet_rpc.directory / "never").exists()


async def test_concurrent_calls_get_their_own_answers(wallet: WalletClient) -> None:
    """Digest nonces belong to a connection and are counted: requests must go one by one."""
    made = await asyncio.gather(*(wallet.create_addresses(2) for _ in range(8)))
    assert sorted(item.index.minor for some in made for item in some) == list(range(1, 17))


async def test_addresses_come_64_at_a_time_and_can_be_read_back(wallet: WalletClient) -> None:
    made = await wallet.create_addresses(64)
    assert [item.index.minor for item in made] == list(range(1, 65))
    assert await wallet.addresses([1, 64]) == [made[0], made[63]]
    with pytest.raises(ValueError, match="not 65"):
        await wallet.create_addresses(65)


async def test_the_wallet_itself_refuses_65_addresses(wallet: WalletClient) -> None:
    with pytest.raises(NodeError):
        await wallet.rpc.act("create_address", {"account_index": 0, "count": 65})


async def test_the_wallet_knows_addresses_of_each_network(wallet: WalletClient) -> None:
    own = await subaddress(wallet)
    check = await wallet.validate(own.address)
    assert (check.valid, check.subaddress, check.integrated) == (True, True, False)
    other = own.address[:-1] + ("1" if own.address[-1] != "1" else "2")
    assert not (await wallet.validate(other)).valid


async def test_a_deposit_is_seen_in_the_pool_then_in_its_block(
    wallet: WalletClient, node: MonerodClient, miner: Miner
) -> None:
    at = await subaddress(wallet)
    units = 1_234_567_890_123
    txid = await miner.pay(at.address, units)
    height = (await node.info()).height
    await wallet.refresh()
    (pooled,) = await wallet.transfers(height)
    assert (pooled.kind, pooled.txid, pooled.amount) == (WalletTransferKind.POOL, txid, units)
    assert (pooled.index, pooled.address, pooled.height) == (at.index, at.address, None)
    await miner.mine()
    await wallet.refresh()
    (mined,) = await wallet.transfers(height)
    assert (mined.kind, mined.height, mined.amount) == (WalletTransferKind.INCOMING, height, units)
    assert mined.confirmations == 1
    assert await wallet.transfer(txid) == [mined]


async def test_transfers_from_a_height_include_that_block(
    wallet: WalletClient, miner: Miner
) -> None:
    txid = await miner.fund(await wallet.primary_address(), XMR)
    await wallet.refresh()
    (found,) = await wallet.transfers(0)
    assert found.txid == txid
    assert found.height is not None
    assert await wallet.transfers(found.height) == [found]
    assert await wallet.transfers(found.height + 1) == []


async def test_two_outputs_to_one_address_sum_to_one_transfer(
    wallet: WalletClient, miner: Miner
) -> None:
    await miner.fund(await wallet.primary_address(), XMR, 2 * XMR)
    await wallet.refresh()
    (found,) = await wallet.transfers(0)
    assert found.amount == 3 * XMR
    assert sorted(item.amount for item in await wallet.outputs()) == [XMR, 2 * XMR]


async def test_wallet_balance_is_known_though_outputs_are_unlistable(
    wallet: WalletClient, miner: Miner
) -> None:
    customers = await subaddress(wallet)
    await miner.fund(customers.address, *([XMR // 1000] * 14))
    await miner.fund(customers.address, *([XMR // 1000] * 14))
    await funded(wallet, miner, XMR, 2 * XMR)
    await miner.pay(await wallet.primary_address(), 4 * XMR)
    await miner.mine(2)
    await wallet.refresh()
    height = await wallet.height()
    whole = await read_held(wallet, height)
    endpoint = replace(wallet.rpc.endpoint, max_response_bytes=8000)
    async with WalletClient(endpoint, account=wallet.account) as small:
        part = await read_held(small, height)
    assert sorted(item.amount for item in part.outputs) == [XMR, 2 * XMR, 4 * XMR]
    assert (whole.is_complete, part.is_complete) == (True, False)
    assert part == dataclasses.replace(whole, outputs=part.outputs, is_complete=False)
    assert (whole.unlocked, whole.locked) == (3 * XMR + 28 * (XMR // 1000), 4 * XMR)
    assert 0 < whole.blocks_to_unlock <= SPENDABLE_AGE


async def test_an_unknown_transaction_is_empty_and_not_an_error(
    wallet: WalletClient, node: MonerodClient
) -> None:
    assert await wallet.transfer("ab" * 32) == []
    assert await node.transactions(["ab" * 32]) == {}


async def test_balances_say_what_is_locked_and_for_how_long(
    wallet: WalletClient, miner: Miner
) -> None:
    at = await subaddress(wallet)
    await miner.pay(at.address, XMR)
    await miner.mine()
    await wallet.refresh()
    balance = await wallet.balance([at.index.minor])
    assert (balance.total, balance.unlocked) == (XMR, 0)
    assert balance.blocks_to_unlock == SPENDABLE_AGE - 1
    assert [item.index for item in balance.subaddresses] == [at.index]
    await miner.mine(SPENDABLE_AGE - 1)
    await wallet.refresh()
    assert (await wallet.balance()).unlocked == XMR


async def test_total_names_the_wallet_that_tells_it(wallet: WalletClient, miner: Miner) -> None:
    own = await wallet.primary_address()
    assert await wallet.total() == (0, own)
    await miner.pay((await subaddress(wallet)).address, XMR)
    await wallet.refresh()
    assert await wallet.total() == (XMR, own)


async def test_fifteen_recipients_fit_one_transaction_and_sixteen_fail(
    wallet: WalletClient, miner: Miner
) -> None:
    await funded(wallet, miner, XMR)
    to = [Destination(item.address, XMR // 100) for item in await wallet.create_addresses(16)]
    payment = await wallet.prepare(to[:15])
    assert payment.amount == 15 * (XMR // 100)
    with pytest.raises(ValueError, match="not 16"):
        await wallet.prepare(to)


@pytest.mark.parametrize("amount", [0, -1, 2**64, True, 1.0])
async def test_an_amount_that_is_none_is_never_sent(wallet: WalletClient, amount: int) -> None:
    with pytest.raises(ValueError, match="whole number of piconero"):
        await wallet.prepare([Destination(await wallet.primary_address(), amount)])


async def test_an_empty_wallet_says_that_it_is_empty(wallet: WalletClient) -> None:
    with pytest.raises(NodeError) as raised:
        await prepared(wallet, await wallet.primary_address())
    assert raised.value.code in (WalletCode.NOT_ENOUGH_MONEY, WalletCode.NOT_ENOUGH_UNLOCKED)


async def test_a_closed_wallet_says_so(own_wallet: WalletClient) -> None:
    await own_wallet.close()
    with pytest.raises(NodeError) as raised:
        await own_wallet.primary_address()
    assert raised.value.code == WalletCode.NOT_OPEN


async def test_a_frozen_output_is_not_spent(wallet: WalletClient, miner: Miner) -> None:
    await funded(wallet, miner, XMR)
    (output,) = await wallet.outputs()
    await wallet.freeze(output.key_image)
    with pytest.raises(NodeError):
        await prepared(wallet, await wallet.primary_address())
    await wallet.thaw(output.key_image)
    payment = await prepared(wallet, await wallet.primary_address())
    assert payment.key_images == (output.key_image,)


async def test_a_payment_can_be_proved_by_its_key_and_by_a_signature(
    wallet: WalletClient, node: MonerodClient, miner: Miner
) -> None:
    await funded(wallet, miner, XMR)
    to = (await subaddress(wallet)).address
    payment = await prepared(wallet, to, XMR // 3)
    await wallet.relay(payment.metadata)
    await miner.mine()
    by_key = await wallet.check_key(payment.txid, payment.tx_key, to)
    assert (by_key.received, by_key.confirmations) == (XMR // 3, 1)
    signature = await wallet.prove_payment(payment.txid, to, "order 1")
    by_proof = await wallet.check_proof(payment.txid, to, signature, "order 1")
    assert (by_proof.valid, by_proof.received) == (True, XMR // 3)
    assert not (await wallet.check_proof(payment.txid, to, signature, "order 2")).valid
    assert await wallet.tx_key(payment.txid) == payment.tx_key


async def test_a_wallet_restored_from_its_words_finds_its_money(
    own_wallet: WalletClient, miner: Miner
) -> None:
    await funded(own_wallet, miner, XMR)
    words, address = await own_wallet.seed(), await own_wallet.primary_address()
    await own_wallet.restore("restored", WALLET_PASSWORD, words, 0)
    await own_wallet.refresh()
    assert await own_wallet.primary_address() == address
    assert (await own_wallet.balance()).total == XMR


async def test_an_output_can_be_swept_back_by_its_key_image(
    wallet: WalletClient, node: MonerodClient, miner: Miner
) -> None:
    await funded(wallet, miner, XMR, XMR)
    output = (await wallet.outputs())[0]
    sweep = await wallet.prepare_sweep(output.key_image, await wallet.primary_address())
    assert sweep.key_images == (output.key_image,)
    assert (await node.submit(sweep.raw)).submission is MoneroSubmission.ACCEPTED


async def test_fees_are_whole_piconero_per_byte(node: MonerodClient) -> None:
    fees = await node.fees()
    assert len(fees.per_byte) == 4
    assert list(fees.per_byte) == sorted(fees.per_byte)
    assert fees.quantum > 0


async def test_pool_weighs_what_its_transactions_weigh(
    wallet: WalletClient, node: MonerodClient, miner: Miner
) -> None:
    await miner.mine()
    assert await node.pool_weight() == 0
    await funded(wallet, miner, XMR)
    await node.submit((await prepared(wallet, await wallet.primary_address())).raw)
    (waiting,) = await node.pool()
    assert 1000 < await node.pool_weight() == waiting.weight
    assert (await node.info()).block_weight_limit == 600_000


# --- facts that payments rely on ---------------------------------------------------------------


async def test_fact_priority_sets_the_fee(
    wallet: WalletClient, node: MonerodClient, miner: Miner
) -> None:
    """Left to itself, priority 0, the wallet takes the first of the node's rates."""
    await funded(wallet, miner, 2 * XMR)
    to = [Destination(await wallet.primary_address(), XMR)]
    rates = (await node.fees()).per_byte
    for priority, rate in enumerate((rates[0], *rates)):
        signed = await wallet.prepare(to, priority=priority)
        assert signed.fee == rate * signed.weight, priority


async def test_fact_prepared_payments_reserve_nothing(wallet: WalletClient, miner: Miner) -> None:
    await funded(wallet, miner, XMR)
    to = await wallet.primary_address()
    payments = [await prepared(wallet, to) for _ in range(4)]
    assert len({payment.txid for payment in payments}) == 4
    assert len({payment.key_images for payment in payments}) == 1


async def test_fact_one_of_two_payments_on_the_same_inputs_can_be_sent(
    wallet: WalletClient, node: MonerodClient, miner: Miner
) -> None:
    await funded(wallet, miner, XMR)
    to = await wallet.primary_address()
    first, second = await prepared(wallet, to), await prepared(wallet, to)
    assert (await node.submit(first.raw)).submission is MoneroSubmission.ACCEPTED
    in_pool = await node.submit(second.raw)
    await miner.mine()
    in_chain = await node.submit(second.raw)
    assert in_pool.submission is in_chain.submission is MoneroSubmission.DOUBLE_SPEND
    assert set(await node.transactions([first.txid, second.txid])) == {first.txid}


async def test_fact_the_same_bytes_may_be_sent_again_in_pool_and_chain(
    wallet: WalletClient, node: MonerodClient, miner: Miner
) -> None:
    await funded(wallet, miner, XMR)
    payment = await prepared(wallet, await wallet.primary_address())
    assert (await node.submit(payment.raw)).submission is MoneroSubmission.ACCEPTED
    # While Dandelion++ hides it, the node rejects the same bytes as a double spend.
    assert (await node.submit(payment.raw)).submission in HAS_IT
    await miner.mine()
    assert (await node.submit(payment.raw)).submission is MoneroSubmission.KNOWN
    assert await node.pool() == []
    await wallet.refresh()
    assert len(await sent(wallet, payment.txid)) == 1


async def test_fact_wallet_learns_of_an_unsent_spend_from_the_chain(
    wallet: WalletClient, node: MonerodClient, miner: Miner
) -> None:
    await funded(wallet, miner, XMR, XMR)
    payment = await prepared(wallet, (await subaddress(wallet)).address)
    await node.submit(payment.raw)
    await miner.mine()
    await wallet.refresh()
    (seen,) = await sent(wallet, payment.txid)
    assert seen.kind is WalletTransferKind.OUTGOING
    assert (await wallet.balance()).total == 2 * XMR - payment.fee
    unspent = {output.key_image for output in await wallet.outputs(OutputFilter.AVAILABLE)}
    assert unspent.isdisjoint(payment.key_images)


async def test_fact_relaying_a_mined_payment_inflates_the_balance(
    wallet: WalletClient, node: MonerodClient, miner: Miner
) -> None:
    await funded(wallet, miner, XMR)
    payment = await prepared(wallet, await wallet.primary_address())
    await wallet.relay(payment.metadata)
    await miner.mine(SPENDABLE_AGE)
    await wallet.refresh()
    true_total = (await wallet.balance()).total
    assert await wallet.relay(payment.metadata) == payment.txid
    await miner.mine(SPENDABLE_AGE)
    await wallet.refresh()
    assert {item.kind for item in await sent(wallet, payment.txid)} >= {WalletTransferKind.PENDING}
    assert (await wallet.balance()).total > true_total


async def test_fact_a_prepared_payment_survives_a_kill_of_the_wallet(
    own_wallet: WalletClient, wallet_rpc: WalletRpc, node: MonerodClient, miner: Miner
) -> None:
    await funded(own_wallet, miner, XMR)
    payment = await prepared(own_wallet, await own_wallet.primary_address())
    await kill_and_reopen(wallet_rpc, own_wallet)
    # Before that the wallet publishes, but can't record its spent outputs, and returns an error.
    await own_wallet.refresh()
    assert await own_wallet.relay(payment.metadata) == payment.txid
    assert payment.txid in await node.transactions([payment.txid])


async def test_fact_kill_before_store_forgets_what_was_relayed(
    own_wallet: WalletClient, wallet_rpc: WalletRpc, node: MonerodClient, miner: Miner
) -> None:
    await funded(own_wallet, miner, XMR)
    await own_wallet.store()
    to = await own_wallet.primary_address()
    payment = await prepared(own_wallet, to)
    await own_wallet.relay(payment.metadata)
    await kill_and_reopen(wallet_rpc, own_wallet)
    again = await prepared(own_wallet, to)
    assert again.key_images == payment.key_images
    with pytest.raises(NodeError) as raised:
        await own_wallet.relay(again.metadata)
    assert raised.value.code == WalletCode.TRANSFER_FAILED
    with pytest.raises(NodeError) as forgotten:
        await own_wallet.tx_key(payment.txid)
    assert forgotten.value.code == WalletCode.NO_TX_KEY


async def test_fact_after_relay_and_store_a_kill_forgets_nothing(
    own_wallet: WalletClient, wallet_rpc: WalletRpc, miner: Miner
) -> None:
    await funded(own_wallet, miner, XMR)
    payment = await prepared(own_wallet, await own_wallet.primary_address())
    await own_wallet.relay(payment.metadata)
    await own_wallet.store()
    await kill_and_reopen(wallet_rpc, own_wallet)
    assert await own_wallet.tx_key(payment.txid) == payment.tx_key
    (pending,) = await sent(own_wallet, payment.txid)
    assert pending.kind is WalletTransferKind.PENDING


async def test_fact_kill_before_store_hands_the_address_out_again(
    own_wallet: WalletClient, wallet_rpc: WalletRpc
) -> None:
    await own_wallet.store()
    (first,) = await own_wallet.create_addresses(1)
    await kill_and_reopen(wallet_rpc, own_wallet)
    (again,) = await own_wallet.create_addresses(1)
    assert again == first
    await own_wallet.store()
    await kill_and_reopen(wallet_rpc, own_wallet)
    (other,) = await own_wallet.create_addresses(1)
    assert other != first


async def test_fact_key_images_distinguish_pool_from_chain(
    wallet: WalletClient, node: MonerodClient, miner: Miner
) -> None:
    await funded(wallet, miner, XMR)
    payment = await prepared(wallet, await wallet.primary_address())
    image = payment.key_images[0]
    assert await node.key_images([image]) == {image: Spent.UNSPENT}
    await node.submit(payment.raw)
    assert await node.key_images([image]) == {image: Spent.IN_POOL}
    assert (await node.transactions([payment.txid]))[payment.txid].in_pool
    await miner.mine()
    assert await node.key_images([image]) == {image: Spent.IN_CHAIN}
    assert not (await node.transactions([payment.txid]))[payment.txid].in_pool


@pytest.mark.parametrize("raw", ["00", "zz", ""])
async def test_fact_bytes_that_are_no_transaction_are_refused(
    node: MonerodClient, raw: str
) -> None:
    assert (await node.submit(raw)).submission is MoneroSubmission.REFUSED


async def test_fact_popped_blocks_return_transactions_to_the_pool(
    wallet: WalletClient, node: MonerodClient, miner: Miner
) -> None:
    await funded(wallet, miner, XMR)
    payment = await prepared(wallet, await wallet.primary_address())
    await node.submit(payment.raw)
    await miner.mine(3)
    before = (await node.info()).height
    assert await pop_blocks(node, 3) == before - 3
    assert [item.txid for item in await node.pool()] == [payment.txid]
    assert (await node.submit(payment.raw)).submission is MoneroSubmission.KNOWN
    await miner.mine()
    assert not (await node.transactions([payment.txid]))[payment.txid].in_pool


async def test_fact_popped_and_flushed_payment_is_accepted_again(
    wallet: WalletClient, node: MonerodClient, miner: Miner
) -> None:
    await funded(wallet, miner, XMR)
    payment = await prepared(wallet, await wallet.primary_address())
    await node.submit(payment.raw)
    await miner.mine()
    await pop_blocks(node, 1)
    await node.flush_pool([payment.txid])
    image = payment.key_images[0]
    assert await node.transactions([payment.txid]) == {}
    assert await node.key_images([image]) == {image: Spent.UNSPENT}
    assert (await node.submit(payment.raw)).submission is MoneroSubmission.ACCEPTED


async def test_fact_deep_reorg_refuses_the_bytes_now_and_not_later(
    wallet: WalletClient, node: MonerodClient, miner: Miner
) -> None:
    """Its inputs were reorged out; a payment signed again would spend others and pay twice."""
    await funded(wallet, miner, XMR)
    payment = await prepared(wallet, await wallet.primary_address())
    await pop_blocks(node, SPENDABLE_AGE)
    refused = await node.submit(payment.raw)
    assert refused.submission is MoneroSubmission.INVALID
    await miner.mine(SPENDABLE_AGE)
    assert (await node.submit(payment.raw)).submission is MoneroSubmission.ACCEPTED


async def test_fact_wallet_keeps_its_height_until_the_next_block(
    wallet: WalletClient, node: MonerodClient, miner: Miner
) -> None:
    await miner.mine()
    txid = await miner.fund(await wallet.primary_address(), XMR)
    await wallet.refresh()
    (seen,) = await wallet.transfers(0)
    await pop_blocks(node, SPENDABLE_AGE + 1)
    await node.flush_pool()
    await wallet.refresh()
    (still,) = await wallet.transfers(0)
    assert (still.txid, still.confirmations) == (txid, seen.confirmations)
    assert await node.transactions([txid]) == {}
    assert await wallet.height() > (await node.info()).height
    await miner.mine(2)
    await wallet.refresh()
    assert await wallet.transfers(0) == []


async def test_fact_a_wallet_scans_to_the_height_of_its_node(
    wallet: WalletClient, node: MonerodClient, miner: Miner
) -> None:
    await miner.mine()
    await wallet.refresh()
    assert await wallet.height() == (await node.info()).height


# --- daemons that fail -------------------------------------------------------------------------


async def test_a_dead_daemon_is_never_reached(
    own_wallet: WalletClient, wallet_rpc: WalletRpc
) -> None:
    wallet_rpc.kill()
    async with WalletClient(wallet_rpc.endpoint) as other:
        with pytest.raises(NotSent):
            await other.create_addresses(1)


async def test_daemon_killed_during_a_call_leaves_it_unknown(
    own_wallet: WalletClient, wallet_rpc: WalletRpc
) -> None:
    async def is_idle() -> bool:
        return not wallet_rpc.has_unread()

    async def is_sent() -> bool:
        return wallet_rpc.has_unread()

    await until(is_idle)  # what a connection before this one left unread is not this call
    wallet_rpc.freeze()
    call = asyncio.ensure_future(own_wallet.create_addresses(1))
    await until(is_sent)
    wallet_rpc.kill()
    with pytest.raises(RpcOutcomeUnknown):
        await call


async def test_a_daemon_that_never_answers_leaves_the_outcome_unknown(
    own_wallet: WalletClient, wallet_rpc: WalletRpc
) -> None:
    wallet_rpc.freeze()
    hasty = WalletClient(replace(wallet_rpc.endpoint, total_seconds=0.2))
    async with hasty:
        with pytest.raises(TimedOut):
            await hasty.create_addresses(1)
    wallet_rpc.thaw()
    # It had received the request, and carried it out after the time-out.
    assert await own_wallet.addresses([0])


async def test_a_queue_behind_a_stuck_call_gives_up_without_sending(
    own_wallet: WalletClient, wallet_rpc: WalletRpc
) -> None:
    async with WalletClient(replace(wallet_rpc.endpoint, total_seconds=0.2)) as hasty:
        wallet_rpc.freeze()
        slow = asyncio.ensure_future(hasty.rpc.act("store", seconds=TIMEOUT_SECONDS))
        await asyncio.wait([slow], timeout=0.01)
        with pytest.raises(NotSent, match="busy"):
            await hasty.create_addresses(1)
        wallet_rpc.thaw()
        await slow
