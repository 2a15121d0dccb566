"""Adopting payments, without daemons: which transactions are accepted as a transfer's payment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from msgspec.structs import replace

from rpcsvc.domain import usdc
from rpcsvc.domain.money import USDC, XMR
from rpcsvc.domain.order import Transfer, TransferKind, TransferState
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable, NodeError
from rpcsvc.settlement.onchain.evm.adoption import EvmAdoption
from rpcsvc.settlement.onchain.evm.keys import signed_fields
from rpcsvc.settlement.onchain.evm.node import EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Block, Log, Receipt
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.records import EvmPaymentOrder, EvmPaymentState, EvmPurpose
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import NodeBytes
from rpcsvc.settlement.onchain.monero.records import (
    MoneroPayment,
    MoneroPaymentState,
    MoneroPurpose,
)
from rpcsvc.settlement.onchain.monero.unrecorded import MoneroAdoption
from rpcsvc.settlement.onchain.monero.wallet_types import (
    SubaddressIndex,
    TxCheck,
    WalletCode,
    WalletTransfer,
    WalletTransferKind,
)
from rpcsvc.settlement.onchain.unrecorded import (
    Adopted,
    NotAdopted,
    OpenTransfer,
    bare_txid,
    require_open,
)
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.recording import Recorder
from tests.sandbox import ManualClock
from tests.unit.evm_chain import NETWORK, TOKEN, USER
from tests.unit.evm_raw import HOT, STRANGER, signed

GWEI = 10**9
TXID = "ab" * 32
KEY = "cd" * 32


def transfer(name: str, network: str, address: str, units: int, **more: Any) -> OpenTransfer:
    asset = XMR if network == "monero" else USDC
    made = Transfer(f"{name}/payout/1", TransferKind.PAYOUT, network, asset, address, units, 1)
    return OpenTransfer(name, replace(made, **more))


@pytest.mark.parametrize("text", ["", "ab", "0x", "zz" * 32, "ab" * 33, "0x0x" + "ab" * 31])
def test_malformed_transaction_id_is_refused(text: str) -> None:
    with pytest.raises(NotAdopted, match="64 hex digits"):
        bare_txid(text, "0x")


def test_transaction_id_may_be_prefixed_and_in_any_case() -> None:
    assert bare_txid("0x" + TXID.upper(), "") == TXID
    assert bare_txid(TXID, "0x") == f"0x{TXID}"


@pytest.mark.parametrize(
    ("state", "kind", "why"),
    [
        (TransferState.SETTLED, TransferKind.PAYOUT, "there is nothing to adopt"),
        (TransferState.FAILED, TransferKind.PAYOUT, "its order is refunded.*do not resume"),
        (TransferState.CANCELLED, TransferKind.REFUND, "it is over"),
    ],
)
def test_what_has_come_to_its_end_is_not_adopted(
    state: TransferState, kind: TransferKind, why: str
) -> None:
    with pytest.raises(NotAdopted, match=why):
        require_open(transfer("ord_9", "arbitrum", USER, 50, state=state, kind=kind).transfer)


# --- XMR ---------------------------------------------------------------------------------------


@dataclass
class Xmr:
    """A wallet and a node with one transaction."""

    pays: dict[str, int]
    fee: int = 3
    kind: WalletTransferKind = WalletTransferKind.OUTGOING
    raw: str = "00ff"
    own_key: str | None = KEY
    images: tuple[str, ...] = ("image",)
    is_known: bool = True
    others: int = 0
    broken: str = ""
    asked: list[str] = field(default_factory=list)

    # the connection
    @property
    def wallet(self) -> Xmr:
        return self

    @property
    def node(self) -> Xmr:
        return self

    async def check_node(self) -> None:
        self.asked.append("node")

    async def check_wallet(self) -> None:
        self.asked.append("wallet")

    # the node
    async def transaction_bytes(self, txid: str) -> NodeBytes | None:
        return NodeBytes(txid, self.raw, self.images, 7) if self.is_known else None

    # the wallet
    async def refresh(self) -> None:
        self.asked.append("refresh")

    async def transfer(self, txid: str) -> list[WalletTransfer]:
        amount = sum(self.pays.values()) + self.others
        return [
            WalletTransfer(
                self.kind, txid, "4own", SubaddressIndex(0, 0), amount, self.fee, 7, 3, 1_700_000,
                0, False, False,
            )
        ]  # fmt: skip

    def _require_open(self, method: str) -> None:
        if method == self.broken:
            raise NodeError("wallet", method, WalletCode.NOT_OPEN, "No wallet file")

    async def tx_key(self, txid: str) -> str:
        self._require_open("get_tx_key")
        if self.own_key is None:
            raise NodeError("wallet", "get_tx_key", WalletCode.NO_TX_KEY, "no tx secret key")
        return self.own_key

    async def check_key(self, txid: str, key: str, address: str) -> TxCheck:
        self._require_open("check_tx_key")
        if key != KEY:
            raise NodeError("wallet", "check_tx_key", WalletCode.UNKNOWN, "wrong key")
        return TxCheck(True, self.pays.get(address, 0), 3, False)


async def adopt_xmr(
    at: Xmr,
    database: SqliteDatabase,
    wanted: OpenTransfer,
    *others: OpenTransfer,
    key: str | None = None,
) -> Adopted:
    ledger = MoneroLedger(database)
    adoption = MoneroAdoption(cast("MoneroConnection", at), ledger)
    return await adoption.adopt(wanted, others, TXID, key, Recorder())


WANTED = transfer("ord_1", "monero", "4user", 50)


async def test_proven_payment_is_recorded_as_published(
    database: SqliteDatabase,
) -> None:
    done = await adopt_xmr(Xmr({"4user": 50}), database, WANTED)
    known = await MoneroLedger(database).payment("ord_1/payout/1")
    assert known == MoneroPayment(
        "ord_1/payout/1", MoneroPurpose.TRANSFER, "4user", 50, 3, TXID, "00ff", "", KEY, ("image",),
        1_700_000_000, MoneroPaymentState.PUBLISHED, 1_700_000_000, 7,
    )  # fmt: skip
    assert (done.txid, done.transfers, done.other_units) == (TXID, (WANTED,), 0)


async def test_node_and_wallet_are_checked_before_anything_is_believed(
    database: SqliteDatabase,
) -> None:
    at = Xmr({"4user": 50})
    await adopt_xmr(at, database, WANTED)
    assert at.asked == ["node", "wallet", "refresh"]


@pytest.mark.parametrize("method", ["get_tx_key", "check_tx_key"])
async def test_silent_wallet_proves_nothing_about_the_payment(
    database: SqliteDatabase, method: str
) -> None:
    at = Xmr({"4user": 50}, broken=method)
    with pytest.raises(NodeError, match="No wallet file"):
        await adopt_xmr(at, database, WANTED)
    assert await MoneroLedger(database).payment("ord_1/payout/1") is None


@pytest.mark.parametrize(
    ("at", "why"),
    [
        (Xmr({"4user": 49}), "pays 49"),
        (Xmr({"4user": 51}), "pays 51"),
        (Xmr({"4other": 50}), "pays 0"),
        (Xmr({"4user": 50}, kind=WalletTransferKind.INCOMING), "its own"),
        (Xmr({"4user": 50}, kind=WalletTransferKind.FAILED), "its own"),
        (Xmr({"4user": 50}, is_known=False), "node has no"),
        (Xmr({"4user": 50}, raw=""), "pruned"),
        (Xmr({"4user": 50}, own_key=None), "--tx-key"),
        (Xmr({"4user": 50}, own_key="00" * 32), "not that of"),
    ],
)
async def test_what_is_not_proven_is_not_adopted(
    database: SqliteDatabase, at: Xmr, why: str
) -> None:
    with pytest.raises(NotAdopted, match=why):
        await adopt_xmr(at, database, WANTED)
    assert await MoneroLedger(database).payment("ord_1/payout/1") is None


async def test_a_key_that_is_given_goes_before_the_wallet_s(database: SqliteDatabase) -> None:
    await adopt_xmr(Xmr({"4user": 50}, own_key=None), database, WANTED, key=KEY)
    assert await MoneroLedger(database).payment("ord_1/payout/1") is not None


async def test_a_transaction_is_the_payment_of_one_transfer_only(database: SqliteDatabase) -> None:
    at = Xmr({"4user": 50})
    await adopt_xmr(at, database, WANTED)
    same = transfer("ord_2", "monero", "4user", 50)
    with pytest.raises(NotAdopted, match="spends"):
        await adopt_xmr(at, database, same)


async def test_a_transfer_that_is_signed_takes_no_second_payment(database: SqliteDatabase) -> None:
    await adopt_xmr(Xmr({"4user": 50}), database, WANTED)
    at, ledger = Xmr({"4user": 50}, images=("other",)), MoneroLedger(database)
    adoption = MoneroAdoption(cast("MoneroConnection", at), ledger)
    with pytest.raises(NotAdopted, match="already"):
        await adoption.adopt(WANTED, (), "ef" * 32, None, Recorder())


async def test_an_adoption_that_ended_half_way_is_gone_on_with(database: SqliteDatabase) -> None:
    first = await adopt_xmr(Xmr({"4user": 50}), database, WANTED)
    again = await adopt_xmr(Xmr({}), database, WANTED)
    assert (again.txid, again.transfers) == (first.txid, first.transfers)
    reported = transfer("ord_1", "monero", "4user", 50, state=TransferState.PUBLISHED, txid=TXID)
    with pytest.raises(NotAdopted, match="already"):
        await adopt_xmr(Xmr({}), database, reported)


@pytest.mark.parametrize("state", [s for s in TransferState if s.is_final])
async def test_a_transfer_that_is_over_is_not_paid_by_anything(
    database: SqliteDatabase, state: TransferState
) -> None:
    over = transfer("ord_1", "monero", "4user", 50, state=state)
    with pytest.raises(NotAdopted):
        await adopt_xmr(Xmr({"4user": 50}), database, over)


async def test_transaction_that_pays_several_is_adopted_for_all(
    database: SqliteDatabase,
) -> None:
    second = transfer("ord_2", "monero", "4second", 30)
    less = transfer("ord_3", "monero", "4third", 19)
    twin = transfer("ord_4", "monero", "4user", 50)
    at = Xmr({"4user": 50, "4second": 30, "4third": 20})
    done = await adopt_xmr(at, database, WANTED, less, twin, second)
    assert done.transfers == (WANTED, second)
    assert done.other_units == 20
    ledger = MoneroLedger(database)
    known = await ledger.payment("ord_2/payout/1")
    assert known == await ledger.payment("ord_1/payout/1")
    assert known is not None
    assert (known.units, known.payee("ord_2/payout/1").units) == (80, 30)
    assert await ledger.payment("ord_3/payout/1") is None
    assert await ledger.payment("ord_4/payout/1") is None


async def test_single_payment_is_adopted_for_one_transfer_only(
    database: SqliteDatabase,
) -> None:
    """The payment paid others, too: its amount would suffice for an equal second transfer."""
    at = Xmr({"4user": 50, "4second": 30}, others=1000)
    second, twin = (transfer(name, "monero", "4second", 30) for name in ("ord_2", "ord_3"))
    done = await adopt_xmr(at, database, WANTED, second, twin)
    assert done.transfers == (WANTED, second)
    assert done.other_units == 1000


async def test_transfer_signed_elsewhere_is_not_adopted_along(
    database: SqliteDatabase,
) -> None:
    second = transfer("ord_2", "monero", "4second", 30)
    third = transfer("ord_3", "monero", "4third", 20)
    ledger = MoneroLedger(database)
    own = MoneroAdoption(cast("MoneroConnection", Xmr({"4second": 30}, images=("other",))), ledger)
    await own.adopt(second, (), "ef" * 32, None, Recorder())
    at = Xmr({"4user": 50, "4second": 30, "4third": 20})
    done = await adopt_xmr(at, database, WANTED, second, third)
    assert done.transfers == (WANTED, third)
    known = await ledger.payment("ord_2/payout/1")
    assert known is not None
    assert known.txid == "ef" * 32


# --- EVM ---------------------------------------------------------------------------------------


class Evm(EvmConnection):
    """A checked node with one transaction and its receipt."""

    def __init__(self, reported: dict[str, Any] | None, *events: tuple[str, str, int]) -> None:
        self.reported = reported
        self.ok = True
        self.fork = False
        self.token = TOKEN
        self.events = events or ((HOT.address, USER, 50),)
        self.network = NETWORK

    @property
    def client(self) -> Any:
        return self

    @client.setter
    def client(self, _client: Any) -> None: ...

    @property
    def rpc(self) -> Evm:
        return self

    async def check(self) -> Block:
        return await self.block(9)

    async def read(self, _method: str, _params: list[str]) -> dict[str, Any] | None:
        return self.reported

    async def block(self, number: int) -> Block:
        return Block(number, "0xfork" if self.fork else "0xb", "0xa", 1_700_000, None)

    async def receipt(self, txid: str) -> Receipt | None:
        if self.reported is None:
            return None
        logs = tuple(
            Log(
                self.token, (usdc.TRANSFER_TOPIC, *map(usdc.address_word, (source, to))),
                usdc.uint_word(units), txid, 5, "0xb", index,
            )
            for index, (source, to, units) in enumerate(self.events)
        )  # fmt: skip
        return Receipt(txid, self.ok, 5, "0xb", 40_000, GWEI, logs)


PAYOUT = transfer("ord_9", "arbitrum", USER, 50)


async def adopt_usdc(at: Evm, database: SqliteDatabase, wanted: OpenTransfer = PAYOUT) -> Adopted:
    ledger = EvmPaymentLedger(database)
    adoption = EvmAdoption(at, ledger, HOT.address, ManualClock())
    return await adoption.adopt(wanted, (at.reported or signed())["hash"], Recorder())


async def test_mined_payment_is_recorded_with_its_bytes_and_nonce(
    database: SqliteDatabase,
) -> None:
    reported = signed()
    done = await adopt_usdc(Evm(reported), database)
    known = await EvmPaymentLedger(database).payment("ord_9/payout/1")
    assert known is not None
    assert (known.nonce, known.sender, known.state) == (4, HOT.address, EvmPaymentState.PUBLISHED)
    assert (known.order.recipient, known.order.units) == (USER, 50)
    assert known.order.purpose is EvmPurpose.TRANSFER
    assert known.attempts[0].txid == reported["hash"]
    mined_at = 1_700_000_000  # the daily cap counts it at the time of its block
    assert (known.prepared_at, known.published_at, known.attempts[0].made_at) == (mined_at,) * 3
    assert done.txid == reported["hash"]
    assert usdc.keccak256(bytes.fromhex(known.attempts[0].raw)).hex() == reported["hash"][2:]


def changed(**fields: Any) -> Evm:
    at = Evm(signed())
    for name, value in fields.items():
        setattr(at, name, value)
    return at


@pytest.mark.parametrize(
    ("at", "why"),
    [
        (Evm(None), "not mined"),
        (changed(ok=False), "failed"),
        (changed(fork=True), "being replaced"),
        (changed(token=STRANGER.address), "pays nothing"),
        (changed(events=((HOT.address, USER, 49),)), "pays 49"),
        (changed(events=((HOT.address, USER, 25), (HOT.address, USER, 25))), "pays 50 units"),
        (changed(events=((STRANGER.address, USER, 50),)), "pays nothing"),
        (changed(events=((HOT.address, STRANGER.address, 50),)), "pays nothing"),
        (Evm(signed(STRANGER)), "was sent by"),
        (Evm(signed(value=1)), "1 wei"),
        (Evm({**signed(), "nonce": "0x5"}), "can't be put together"),
    ],
)
async def test_what_the_chain_does_not_show_is_not_adopted(
    database: SqliteDatabase, at: Evm, why: str
) -> None:
    with pytest.raises(NotAdopted, match=why):
        await adopt_usdc(at, database)
    assert await EvmPaymentLedger(database).payment("ord_9/payout/1") is None


@pytest.mark.parametrize("state", [TransferState.SETTLED, TransferState.FAILED])
async def test_for_what_is_over_nothing_is_put_on_record(
    database: SqliteDatabase, state: TransferState
) -> None:
    over = transfer("ord_9", "arbitrum", USER, 50, state=state)
    with pytest.raises(NotAdopted, match="ord_9/payout/1 is"):
        await adopt_usdc(Evm(signed()), database, over)
    assert await EvmPaymentLedger(database).payment("ord_9/payout/1") is None


async def test_a_node_that_is_not_right_proves_nothing(
    database: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wrong(_self: Evm) -> Block:
        raise ChainUnusable("wrong network")

    monkeypatch.setattr(Evm, "check", wrong)
    with pytest.raises(ChainUnusable):
        await adopt_usdc(Evm(signed()), database)
    assert await EvmPaymentLedger(database).payment("ord_9/payout/1") is None


async def test_a_payment_that_has_failed_gets_no_more_attempts(database: SqliteDatabase) -> None:
    await adopt_usdc(Evm(signed(fee=5)), database)
    ledger = EvmPaymentLedger(database)
    known = await ledger.payment("ord_9/payout/1")
    assert known is not None
    await ledger.put_payment(replace(known, state=EvmPaymentState.FAILED))
    with pytest.raises(NotAdopted, match="final"):
        await adopt_usdc(Evm(signed(fee=9)), database)


async def test_a_transaction_pays_one_transfer_though_two_look_alike(
    database: SqliteDatabase,
) -> None:
    await adopt_usdc(Evm(signed()), database)
    twin = transfer("ord_8", "arbitrum", USER, 50)
    with pytest.raises(NotAdopted, match="ord_9/payout/1"):
        await adopt_usdc(Evm(signed()), database, twin)


async def test_raised_fee_unknown_to_the_copy_is_one_more_attempt(
    database: SqliteDatabase,
) -> None:
    first = await adopt_usdc(Evm(signed(fee=5)), database)
    raised = signed(fee=9)
    done = await adopt_usdc(Evm(raised), database)
    known = await EvmPaymentLedger(database).payment("ord_9/payout/1")
    assert known is not None
    assert [item.txid for item in known.attempts] == [first.txid, raised["hash"]]
    # The order keeps the transaction id that was adopted first.
    assert done.txid == first.txid
    with pytest.raises(NotAdopted, match="nonce"):
        await adopt_usdc(Evm(signed(nonce=5)), database)


async def test_payment_mined_below_the_present_offer_is_adopted(
    database: SqliteDatabase,
) -> None:
    """Mined at a fee below that of a replacement signed later, on the restored copy."""
    for fee in (5, 9):
        await adopt_usdc(Evm(signed(fee=fee)), database)
    mined = signed(fee=7)
    await adopt_usdc(Evm(mined), database)
    known = await EvmPaymentLedger(database).payment("ord_9/payout/1")
    assert known is not None
    assert (len(known.attempts), known.latest.txid) == (3, mined["hash"])
    # If it is reorged out, a replacement has to outbid these fees.
    assert known.latest.max_fee > known.attempts[1].max_fee
    assert known.latest.tip > known.attempts[1].tip


async def test_payments_to_others_are_listed(database: SqliteDatabase) -> None:
    at = changed(events=((HOT.address, USER, 50), (HOT.address, STRANGER.address, 7)))
    assert (await adopt_usdc(at, database)).other_units == 7


async def test_a_half_made_adoption_is_gone_on_with_here_too(database: SqliteDatabase) -> None:
    first = await adopt_usdc(Evm(signed()), database)
    again = await adopt_usdc(Evm(signed()), database)
    assert again.txid == first.txid
    reported = transfer("ord_9", "arbitrum", USER, 50, state=TransferState.PREPARED)
    with pytest.raises(NotAdopted, match="already"):
        await adopt_usdc(Evm(signed()), database, reported)


def test_an_adopted_payment_calls_what_was_called() -> None:
    """A replacement after a reorganisation must be the same call."""
    fields = signed_fields(signed())
    order = EvmPaymentOrder("x", EvmPurpose.TRANSFER, USER, 50, TOKEN, fields.data, fields.gas)
    assert order.data == usdc.transfer(USER, 50)
