"""The EVM client, the token's calls and the signer on a real node, and facts that payments rely on.

A fact that no longer holds after an upgrade of Anvil fails here by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from rpcsvc.domain import usdc
from rpcsvc.domain.usdc import Authorization, Permit
from rpcsvc.settlement.onchain.daemon_rpc import NodeError, NotSent, TimedOut, TooLarge
from rpcsvc.settlement.onchain.evm.keys import EvmSigner, HdKeys, SignedTransaction, TransactionPlan
from rpcsvc.settlement.onchain.evm.node import EvmClient, _submission
from rpcsvc.settlement.onchain.evm.node_types import (
    EvmCall,
    EvmSubmission,
    LogFilter,
    Reverted,
    Tag,
)
from tests.regtest.daemons import Anvil, AnvilControls, mined
from tests.regtest.token import Token, deploy

WORDS = "legal winner thank year wave sausage worth useful legal winner thank yellow"
KEYS = HdKeys(WORDS)
HOT, DEPOSIT, USER = KEYS.signer(0), KEYS.signer(1), KEYS.signer(2)
ETHER = 10**18
USDC = 10**6
FOREVER = 2**40


@pytest.fixture
async def funded(token: Token) -> Token:
    """The hot wallet has ether and 1,000 USDC; the deposit address 50 USDC and no ether."""
    await token.controls.set_ether(HOT.address, ETHER)
    await token.mint(HOT.address, 1000 * USDC)
    await token.mint(DEPOSIT.address, 50 * USDC)
    return token


async def signed(
    token: Token, data: bytes, *, nonce: int | None = None, gwei: int = 5, signer: EvmSigner = HOT
) -> SignedTransaction:
    """A signed transaction of the hot wallet to the token."""
    if nonce is None:
        nonce = await token.client.nonce(signer.address)
    plan = TransactionPlan(
        chain_id=await token.client.chain_id(), nonce=nonce, to=token.address, gas=200_000,
        max_fee=gwei * 10**9, tip=gwei * 10**8, data=data,
    )  # fmt: skip
    return signer.sign(plan)


async def pay(token: Token, to: str, units: int, *, nonce: int | None = None) -> SignedTransaction:
    return await signed(token, usdc.transfer(to, units), nonce=nonce)


async def carried_out(token: Token, data: bytes) -> bool:
    """Send a call from the hot wallet; whether it succeeded."""
    transaction = await signed(token, data)
    assert (await token.client.submit(transaction.raw)).submission is EvmSubmission.ACCEPTED
    return (await mined(token.client, transaction.txid)).ok


def authorization(units: int = 50 * USDC, to: str = HOT.address) -> Authorization:
    return Authorization(DEPOSIT.address, to, units, 0, FOREVER, os.urandom(32))


# --- the client ------------------------------------------------------------------------------


async def test_node_reports_its_chain_and_blocks_their_parents(evm: EvmClient) -> None:
    assert await evm.chain_id() == 42161
    await AnvilControls(evm).mine(2)
    latest, first = await evm.block(), await evm.block(1)
    assert latest is not None
    assert first is not None
    assert (latest.number, latest.parent) == (2, first.hash)
    assert await evm.block(10**6) is None


async def test_named_blocks_are_found(evm: EvmClient) -> None:
    await AnvilControls(evm).mine(100)
    for tag in Tag:
        assert await evm.block(tag) is not None


async def test_a_transfer_is_found_by_log_receipt_and_id(funded: Token) -> None:
    evm = funded.client
    transaction = await pay(funded, USER.address, 7 * USDC)
    assert (await evm.submit(transaction.raw)).txid == transaction.txid
    receipt = await mined(evm, transaction.txid)
    number = receipt.block_number
    (log,) = (await evm.logs(funded.transfers, number, number)).logs
    assert usdc.read_transfer(log.topics, log.data) == usdc.TransferEvent(
        HOT.address, USER.address, 7 * USDC
    )
    assert (log.txid, log.block_hash, log.address) == (
        transaction.txid, receipt.block_hash, funded.address,
    )  # fmt: skip
    assert receipt.position_of(log.log_index) == 0
    known = await evm.transaction(transaction.txid)
    assert known is not None
    assert (known.sender, known.to, known.nonce) == (HOT.address, funded.address, 0)
    assert known.data == usdc.transfer(USER.address, 7 * USDC)
    assert await funded.balance(USER.address) == 7 * USDC


async def test_the_place_of_a_log_counts_within_its_own_transaction(funded: Token) -> None:
    evm, controls = funded.client, funded.controls
    await controls.automine(enabled=False)
    first = await pay(funded, USER.address, 1, nonce=0)
    second = await pay(funded, USER.address, 2, nonce=1)
    for transaction in (first, second):
        await evm.submit(transaction.raw)
    await controls.mine()
    receipt = await mined(evm, second.txid)
    number = receipt.block_number
    logs = (await evm.logs(funded.transfers, number, number)).logs
    assert [log.log_index for log in logs] == [0, 1]
    assert receipt.position_of(1) == 0
    with pytest.raises(ValueError, match="not in list"):
        receipt.position_of(0)


async def test_a_transaction_nobody_knows_is_none(evm: EvmClient) -> None:
    assert await evm.transaction("0x" + "ab" * 32) is None
    assert await evm.receipt("0x" + "ab" * 32) is None


async def test_a_waiting_transaction_counts_in_the_pending_nonce_only(funded: Token) -> None:
    evm = funded.client
    await funded.controls.automine(enabled=False)
    transaction = await pay(funded, USER.address, 1)
    await evm.submit(transaction.raw)
    assert await evm.nonce(HOT.address) == 1
    assert await evm.nonce(HOT.address, Tag.LATEST) == 0
    waiting = await evm.transaction(transaction.txid)
    assert waiting is not None
    assert (waiting.block_number, waiting.block_hash) == (None, None)
    assert await evm.receipt(transaction.txid) is None


async def test_fees_and_ether_are_wei(funded: Token) -> None:
    fees = await funded.client.fees()
    assert fees.base_fee > 0
    assert fees.tip >= 0
    assert await funded.client.ether(HOT.address) == ETHER
    assert await funded.client.ether(DEPOSIT.address) == 0


async def test_gas_is_estimated_and_what_would_fail_says_why(funded: Token) -> None:
    evm = funded.client
    data = usdc.transfer(USER.address, USDC)
    gas = await evm.estimate_gas(EvmCall(funded.address, data, HOT.address))
    assert 21_000 < gas < 200_000
    poor = EvmCall(funded.address, data, USER.address)
    for trying in (evm.estimate_gas, evm.call):
        with pytest.raises(Reverted) as raised:
            await trying(poor)
        assert b"transfer amount exceeds balance" in raised.value.output


async def test_a_contract_has_code_and_an_account_has_none(funded: Token) -> None:
    assert len(await funded.client.code(funded.address)) > 1000
    assert await funded.client.code(USER.address) == b""


async def test_a_long_range_is_scanned_in_order_and_whole(funded: Token) -> None:
    evm = funded.client
    for units in range(1, 6):
        assert await carried_out(funded, usdc.transfer(USER.address, units))
    top = await evm.block()
    assert top is not None
    ranges = [part async for part in evm.scan(funded.transfers, 0, top.number, span=2)]
    assert [part.first for part in ranges] == list(range(0, top.number + 1, 2))
    assert ranges[-1].last == top.number
    logs = [log for part in ranges for log in part.logs]
    assert [usdc.read_uint(log.data) for log in logs][-5:] == [1, 2, 3, 4, 5]


async def test_a_scan_that_gives_too_much_goes_on_in_smaller_steps(
    funded: Token, monkeypatch: pytest.MonkeyPatch
) -> None:
    evm = funded.client
    real, asked = evm.logs, []

    async def limited(wanted: LogFilter, first: int, last: int, *_: object) -> object:
        asked.append((first, last))
        if last - first > 1:
            raise NodeError("node", "eth_getLogs", -32005, "query returned more than 10000 results")
        return await real(wanted, first, last)

    await funded.controls.mine(10)
    monkeypatch.setattr(evm, "logs", limited)
    ranges = [part async for part in evm.scan(funded.transfers, 0, 7)]
    assert asked[:3] == [(0, 7), (0, 3), (0, 1)]
    assert [(part.first, part.last) for part in ranges] == [(0, 1), (2, 3), (4, 5), (6, 7)]


async def test_a_single_block_that_gives_too_much_is_reported(
    funded: Token, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refusing(*_: object) -> object:
        raise TooLarge("node", "eth_getLogs", "the answer has over 5 bytes")

    monkeypatch.setattr(funded.client, "logs", refusing)
    with pytest.raises(TooLarge):
        _ = [part async for part in funded.client.scan(funded.transfers, 0, 7)]


@pytest.mark.parametrize(("first", "last"), [(-1, 0), (5, 4), (0, 2000)])
async def test_a_range_without_bounds_is_refused(funded: Token, first: int, last: int) -> None:
    with pytest.raises(ValueError, match="blocks at once"):
        await funded.client.logs(funded.transfers, first, last)


# --- the token and the encodings ---------------------------------------------------------------


async def test_the_token_agrees_with_our_domain_separator(token: Token) -> None:
    assert usdc.bytes32_word(await token.ask(usdc.DOMAIN_SEPARATOR)) == token.domain.separator()
    assert usdc.read_string(await token.ask(usdc.NAME)) == token.domain.name
    assert usdc.read_string(await token.ask(usdc.VERSION)) == token.domain.version
    assert usdc.read_uint(await token.ask(usdc.DECIMALS)) == 6


async def test_another_name_is_another_domain(evm: EvmClient, token_code: bytes) -> None:
    token = await deploy(evm, token_code, "USDC")
    assert usdc.bytes32_word(await token.ask(usdc.DOMAIN_SEPARATOR)) == token.domain.separator()
    assert (
        token.domain.separator() != usdc.Domain("USD Coin", "2", 42161, token.address).separator()
    )


@pytest.mark.parametrize("as_bytes", [False, True])
async def test_a_deposit_without_ether_is_swept_by_its_signature(
    funded: Token, as_bytes: bool
) -> None:
    sweep = authorization()
    signature = DEPOSIT.sign_digest(usdc.receive_digest(funded.domain, sweep))
    state = usdc.authorization_state(DEPOSIT.address, sweep.nonce)
    assert not usdc.read_bool(await funded.ask(state))
    data = (
        usdc.receive_with_authorization_bytes(sweep, signature.packed())
        if as_bytes
        else usdc.receive_with_authorization(sweep, signature)
    )
    assert await carried_out(funded, data)
    assert usdc.read_bool(await funded.ask(state))
    assert await funded.balance(DEPOSIT.address) == 0
    assert await funded.balance(HOT.address) == 1050 * USDC
    assert not await carried_out(funded, data)


@pytest.mark.parametrize("as_bytes", [False, True])
async def test_anyone_may_send_a_signed_transfer(funded: Token, as_bytes: bool) -> None:
    gift = authorization(to=USER.address)
    signature = DEPOSIT.sign_digest(usdc.transfer_digest(funded.domain, gift))
    data = (
        usdc.transfer_with_authorization_bytes(gift, signature.packed())
        if as_bytes
        else usdc.transfer_with_authorization(gift, signature)
    )
    assert await carried_out(funded, data)
    assert await funded.balance(USER.address) == 50 * USDC


async def test_a_permit_lets_the_hot_wallet_take_the_deposit(funded: Token) -> None:
    nonce = usdc.read_uint(await funded.ask(usdc.nonces(DEPOSIT.address)))
    permit = Permit(DEPOSIT.address, HOT.address, 50 * USDC, nonce, FOREVER)
    signature = DEPOSIT.sign_digest(usdc.permit_digest(funded.domain, permit))
    assert await carried_out(funded, usdc.permit_call(permit, signature))
    taking = usdc.transfer_from(DEPOSIT.address, HOT.address, 50 * USDC)
    assert await carried_out(funded, taking)
    assert await funded.balance(DEPOSIT.address) == 0


async def test_fact_a_sweep_is_taken_from_its_payee_only(funded: Token) -> None:
    sweep = authorization(to=USER.address)
    signature = DEPOSIT.sign_digest(usdc.receive_digest(funded.domain, sweep))
    assert not await carried_out(funded, usdc.receive_with_authorization(sweep, signature))
    assert await funded.balance(DEPOSIT.address) == 50 * USDC


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: Authorization(a.source, a.to, a.units - 1, 0, FOREVER, a.nonce),
        lambda a: Authorization(a.source, a.to, a.units, 0, FOREVER, bytes(32)),
        lambda a: Authorization(a.source, a.to, a.units, 0, FOREVER - 1, a.nonce),
    ],
)
async def test_a_signature_holds_for_what_was_signed_only(
    funded: Token, spoil: Callable[[Authorization], Authorization]
) -> None:
    sweep = authorization()
    signature = DEPOSIT.sign_digest(usdc.receive_digest(funded.domain, sweep))
    data = usdc.receive_with_authorization(spoil(sweep), signature)
    assert not await carried_out(funded, data)


async def test_paused_token_is_reported_and_moves_nothing(funded: Token) -> None:
    assert not usdc.read_bool(await funded.ask(usdc.PAUSED))
    await funded.pause()
    assert usdc.read_bool(await funded.ask(usdc.PAUSED))
    assert not await carried_out(funded, usdc.transfer(USER.address, 1))
    await funded.unpause()
    assert await carried_out(funded, usdc.transfer(USER.address, 1))


# --- facts that payments rely on ---------------------------------------------------------------


async def test_fact_blacklisted_payout_is_mined_fails_and_uses_a_nonce(
    funded: Token,
) -> None:
    await funded.blacklist(USER.address)
    assert usdc.read_bool(await funded.ask(usdc.is_blacklisted(USER.address)))
    assert not await carried_out(funded, usdc.transfer(USER.address, USDC))
    assert await funded.client.nonce(HOT.address, Tag.LATEST) == 1
    assert await funded.balance(HOT.address) == 1000 * USDC


async def test_fact_resent_bytes_are_known_then_nonce_too_low(
    funded: Token,
) -> None:
    evm = funded.client
    await funded.controls.automine(enabled=False)
    transaction = await pay(funded, USER.address, USDC)
    assert (await evm.submit(transaction.raw)).submission is EvmSubmission.ACCEPTED
    assert (await evm.submit(transaction.raw)).submission is EvmSubmission.KNOWN
    await funded.controls.mine()
    assert (await mined(evm, transaction.txid)).ok
    again = await evm.submit(transaction.raw)
    assert (again.submission, again.txid) == (EvmSubmission.NONCE_TOO_LOW, transaction.txid)
    assert await funded.balance(USER.address) == USDC


async def test_fact_other_transaction_on_a_mined_nonce_is_too_low(funded: Token) -> None:
    evm = funded.client
    first = await pay(funded, USER.address, 1, nonce=0)
    await evm.submit(first.raw)
    await mined(evm, first.txid)
    other = await pay(funded, USER.address, 2, nonce=0)
    assert (await evm.submit(other.raw)).submission is EvmSubmission.NONCE_TOO_LOW
    assert await evm.transaction(other.txid) is None


async def test_fact_without_ether_nothing_is_sent(funded: Token) -> None:
    transaction = await signed(funded, usdc.transfer(HOT.address, 1), signer=DEPOSIT)
    result = await funded.client.submit(transaction.raw)
    assert result.submission is EvmSubmission.INSUFFICIENT_FUNDS


async def test_fact_anvil_replaces_at_the_same_nonce(funded: Token) -> None:
    evm = funded.client
    await funded.controls.automine(enabled=False)
    data = usdc.transfer(USER.address, USDC)
    cheap = await signed(funded, data, nonce=0, gwei=5)
    dear = await signed(funded, data, nonce=0, gwei=10)
    assert (await evm.submit(cheap.raw)).submission is EvmSubmission.ACCEPTED
    assert (await evm.submit(dear.raw)).submission is EvmSubmission.ACCEPTED
    await funded.controls.mine()
    assert (await mined(evm, dear.txid)).ok
    assert await evm.receipt(cheap.txid) is None
    assert await funded.balance(USER.address) == USDC


async def test_fact_reorged_transaction_loses_receipt_and_pool_place(
    funded: Token,
) -> None:
    evm = funded.client
    transaction = await pay(funded, USER.address, USDC)
    await evm.submit(transaction.raw)
    receipt = await mined(evm, transaction.txid)
    await funded.controls.reorganise(1)
    replaced = await evm.block(receipt.block_number)
    assert replaced is not None
    assert replaced.hash != receipt.block_hash
    assert await evm.receipt(transaction.txid) is None
    number = receipt.block_number
    assert (await evm.logs(funded.transfers, number, number)).logs == ()
    await funded.controls.mine(2)
    assert await evm.receipt(transaction.txid) is None
    assert await evm.nonce(HOT.address) == 0
    assert (await evm.submit(transaction.raw)).submission is EvmSubmission.ACCEPTED
    assert (await mined(evm, transaction.txid)).ok
    assert await funded.balance(USER.address) == USDC


async def test_fact_dropped_transaction_is_accepted_as_the_same_bytes(
    funded: Token,
) -> None:
    evm = funded.client
    await funded.controls.automine(enabled=False)
    transaction = await pay(funded, USER.address, USDC)
    await evm.submit(transaction.raw)
    await funded.controls.drop(transaction.txid)
    assert await evm.transaction(transaction.txid) is None
    await funded.controls.mine()
    assert await evm.receipt(transaction.txid) is None
    assert (await evm.submit(transaction.raw)).submission is EvmSubmission.ACCEPTED
    await funded.controls.mine()
    assert (await mined(evm, transaction.txid)).ok
    assert await funded.balance(USER.address) == USDC


async def test_fact_a_transaction_beyond_the_next_nonce_waits(funded: Token) -> None:
    evm = funded.client
    later = await pay(funded, USER.address, 2, nonce=1)
    assert (await evm.submit(later.raw)).submission is EvmSubmission.ACCEPTED
    assert await evm.receipt(later.txid) is None
    await evm.submit((await pay(funded, USER.address, 1, nonce=0)).raw)
    assert (await mined(evm, later.txid)).ok


async def test_fact_a_transaction_of_another_chain_is_refused(funded: Token) -> None:
    plan = TransactionPlan(1, 0, funded.address, 100_000, 10**10, 10**9)
    result = await funded.client.submit(HOT.sign(plan).raw)
    assert result.submission not in (EvmSubmission.ACCEPTED, EvmSubmission.KNOWN)


async def test_bytes_that_are_no_transaction_are_refused(evm: EvmClient) -> None:
    assert (await evm.submit(b"\2\0")).submission is EvmSubmission.REFUSED


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("already known", EvmSubmission.KNOWN),
        ("transaction already imported", EvmSubmission.KNOWN),
        ("AlreadyKnown", EvmSubmission.KNOWN),
        ("nonce too low: next nonce 5, tx nonce 4", EvmSubmission.NONCE_TOO_LOW),
        ("OldNonce", EvmSubmission.NONCE_TOO_LOW),
        ("replacement transaction underpriced", EvmSubmission.REPLACEMENT_UNDERPRICED),
        ("transaction underpriced: tip needed 1", EvmSubmission.UNDERPRICED),
        ("max fee per gas less than block base fee: address 0x0", EvmSubmission.UNDERPRICED),
        ("insufficient funds for gas * price + value", EvmSubmission.INSUFFICIENT_FUNDS),
        ("Upfront cost exceeds account balance", EvmSubmission.INSUFFICIENT_FUNDS),
        ("nonce too high", EvmSubmission.NONCE_TOO_HIGH),
        ("txpool is full", EvmSubmission.REFUSED),
    ],
)
def test_what_other_nodes_say_is_understood(said: str, meant: EvmSubmission) -> None:
    assert _submission(said) is meant


# --- a node that fails -------------------------------------------------------------------------


async def test_a_dead_node_is_never_reached(funded: Token, anvil: Anvil) -> None:
    transaction = await pay(funded, USER.address, 1)
    anvil.kill()
    async with EvmClient(anvil.endpoint) as other:
        with pytest.raises(NotSent):
            await other.submit(transaction.raw)


async def test_a_silent_node_may_have_taken_the_payment(funded: Token, anvil: Anvil) -> None:
    transaction = await pay(funded, USER.address, USDC)
    anvil.freeze()
    with pytest.raises(TimedOut):
        await funded.client.rpc.act(
            "eth_sendRawTransaction", ["0x" + transaction.raw.hex()], seconds=0.2
        )
    anvil.thaw()
    await funded.client.submit(transaction.raw)
    assert (await mined(funded.client, transaction.txid)).ok
    assert await funded.balance(USER.address) == USDC
