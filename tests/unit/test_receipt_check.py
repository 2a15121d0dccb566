"""Proofs by receipts: with fake nodes, on honest and forged receipts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rpcsvc.cli.agent.receipt import (
    NotProven,
    Proven,
    check_evm,
    check_monero,
)
from rpcsvc.cli.context import Json
from rpcsvc.domain import usdc
from rpcsvc.domain.money import USDC, XMR
from rpcsvc.settlement.onchain.daemon_rpc import NodeError
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.node_types import Log, Receipt
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import TxCheck, WalletCode
from tests.unit.evm_chain import TOKEN, USER

TXID = "ab" * 32
HOT = "0x" + "22" * 20
PAID = TxCheck(valid=True, received=15 * 10**11, confirmations=7, in_pool=False)

# --- XMR -----------------------------------------------------------------------------------------

RECEIPT = {
    "asset": "XMR", "txid": TXID, "address": "4user", "amount": "1.5", "transactionKey": "key",
    "transactionProof": "proof", "proofMessage": "ord_1/payout/1",
}  # fmt: skip


@dataclass
class Wallet:
    """Scripted answers for one key and one proof; keeps the calls. ``error``: raised instead."""

    by_key: TxCheck = PAID
    by_proof: TxCheck = PAID
    error: WalletCode | None = None
    asked: list[tuple[str, ...]] = field(default_factory=list)

    async def check_key(self, *asked: str) -> TxCheck:
        self._note(asked)
        return self.by_key

    async def check_proof(self, *asked: str) -> TxCheck:
        self._note(asked)
        return self.by_proof

    def _note(self, asked: tuple[str, ...]) -> None:
        self.asked.append(asked)
        if self.error is not None:
            raise NodeError("wallet-rpc", "check", self.error, "its own words")


async def check(wallet: Wallet, receipt: Json = RECEIPT) -> Proven:
    return await check_monero(receipt, cast("WalletClient", wallet))


async def test_xmr_receipt_is_proven_by_its_own_key_and_proof() -> None:
    wallet = Wallet()
    assert await check(wallet) == Proven(XMR, TXID, "4user", 15 * 10**11, 7)
    assert wallet.asked == [
        (TXID, "key", "4user"), (TXID, "4user", "proof", "ord_1/payout/1"),
    ]  # fmt: skip


async def test_a_receipt_without_a_proof_is_proven_by_the_key() -> None:
    wallet = Wallet()
    await check(wallet, {**RECEIPT, "transactionProof": None})
    assert len(wallet.asked) == 1


@pytest.mark.parametrize(
    ("differs", "why"),
    [
        ({"received": 15 * 10**11 - 1}, "received 1499999999999"),
        ({"received": 15 * 10**11 + 1}, "received 1500000000001"),
        ({"received": 0}, "received 0"),
        ({"in_pool": True}, "in no block"),
        ({"confirmations": 0}, "in no block"),
        ({"valid": False}, "not one of this"),
    ],
)
@pytest.mark.parametrize("which", ["by_key", "by_proof"])
async def test_receipt_needs_key_and_proof_to_agree(
    which: str, differs: dict[str, Any], why: str
) -> None:
    wallet = Wallet()
    setattr(wallet, which, replace(PAID, **differs))
    with pytest.raises(NotProven, match=why):
        await check(wallet)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"txid": None}, "no txid"), ({"address": 4}, "no address"), ({"amount": 1.5}, "no amount"),
        ({"amount": "0"}, "is zero"), ({"amount": "1.5000000000001"}, "13 decimals"),
        ({"transactionKey": None}, "no transactionKey"), ({"proofMessage": None}, "proofMessage"),
    ],
)  # fmt: skip
async def test_a_receipt_that_lacks_something_is_not_proven(
    wrong: dict[str, Any], why: str
) -> None:
    with pytest.raises(NotProven, match=why):
        await check(Wallet(), {**RECEIPT, **wrong})


@pytest.mark.parametrize("code", [WalletCode.UNKNOWN, WalletCode.WRONG_TX_KEY])
async def test_receipt_that_the_wallet_refuses_is_not_proven(code: WalletCode) -> None:
    with pytest.raises(NotProven, match="its own words"):
        await check(Wallet(error=code))


@pytest.mark.parametrize(
    "code", [WalletCode.NOT_OPEN, WalletCode.NO_DAEMON, WalletCode.DAEMON_BUSY]
)
async def test_wallet_that_can_not_check_proves_nothing(code: WalletCode) -> None:
    with pytest.raises(NodeError):
        await check(Wallet(error=code))


# --- USDC ----------------------------------------------------------------------------------------

TX = f"0x{TXID}"
PAYOUT = {
    "asset": "USDC", "txid": TX, "address": USER, "amount": "7.5", "chainId": 42161, "logIndex": 3,
}  # fmt: skip


def transfer(units: int = 7_500_000, to: str = USER, index: int = 3, token: str = TOKEN) -> Log:
    topics = (usdc.TRANSFER_TOPIC, *map(usdc.address_word, (HOT, to)))
    return Log(token, topics, usdc.uint_word(units), TX, 90, "0xb", index)


@dataclass
class Node:
    """A node with one mined transaction with these events."""

    logs: tuple[Log, ...] = (transfer(1, index=2), transfer())
    ok: bool = True
    is_known: bool = True
    chain: int = 42161
    top: int = 99

    async def chain_id(self) -> int:
        return self.chain

    async def receipt(self, txid: str) -> Receipt | None:
        assert txid == TX, "no other form is asked for"
        return Receipt(txid, self.ok, 90, "0xb", 1, 1, self.logs) if self.is_known else None

    async def block(self) -> Any:
        return SimpleNamespace(number=self.top)


async def check_usdc(node: Node, receipt: Json = PAYOUT) -> Proven:
    return await check_evm(receipt, cast("EvmClient", node), TOKEN)


@pytest.mark.parametrize(("top", "confirmations"), [(90, 1), (99, 10)])
async def test_usdc_is_proven_by_its_event(top: int, confirmations: int) -> None:
    proven = await check_usdc(Node(top=top))
    assert proven == Proven(USDC, TX, USER, 7_500_000, confirmations)


async def test_an_address_in_any_case_is_the_same() -> None:
    lower = {**PAYOUT, "address": USER.lower()}
    assert (await check_usdc(Node(), lower)).address == USER


APPROVAL = replace(transfer(), topics=(b"\x8c" * 32, *transfer().topics[1:]))
NO_ADDRESS = replace(transfer(), topics=(*transfer().topics[:2], b"\xff" * 32))


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (Node(logs=(transfer(7_499_999),)), "is 7499999 units"),
        (Node(logs=(transfer(7_500_001),)), "is 7500001 units"),
        (Node(logs=(transfer(to=HOT),)), "units to 0x2222"),
        (Node(logs=(transfer(token=HOT),)), "not of the USDC contract"),
        (Node(logs=(transfer(index=4),)), "no event 3"),
        (Node(logs=(APPROVAL,)), "no transfer"),
        (Node(logs=(NO_ADDRESS,)), "no transfer"),
        (Node(logs=(replace(transfer(), data=b""),)), "no transfer"),
        (Node(ok=False), "it moved nothing"),
        (Node(is_known=False), "no mined transaction"),
        (Node(chain=1), "on chain 1, not on"),
    ],
)
async def test_usdc_receipt_needs_the_transfer_event(node: Node, why: str) -> None:
    with pytest.raises(NotProven, match=why):
        await check_usdc(node)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"address": "4user"}, "address"), ({"address": None}, "no address"),
        ({"txid": TX[:-1]}, "no transaction id"), ({"txid": TXID}, "no transaction id"),
        ({"txid": 7}, "no txid"), ({"amount": "7.5000001"}, "7 decimals"),
        ({"logIndex": None}, "no event None"), ({"chainId": "42161"}, "on chain 42161"),
    ],
)  # fmt: skip
async def test_a_receipt_that_names_nothing_is_not_proven(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(NotProven, match=why):
        await check_usdc(Node(), {**PAYOUT, **wrong})
