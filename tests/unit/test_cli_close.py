"""``rpcsvc payouts close``: payouts without proof are closed by the operator's signed note."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from errno import ENOSPC
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from nacl.bindings import crypto_sign_open

from rpcsvc.audit.books import read_books
from rpcsvc.cli.recovery import transfers
from rpcsvc.clock import SystemClock
from rpcsvc.domain import events as ev
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.money import USDC, XMR
from rpcsvc.domain.order import Order, TransferState
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.withdrawals import Withdrawal, stepped
from rpcsvc.ids import system_random
from rpcsvc.orders.ports.wallets import PreparedTransfer, Record
from rpcsvc.settlement.onchain import wiring
from rpcsvc.settlement.onchain.engine import SignedPayments
from rpcsvc.settlement.onchain.evm.records import EvmPayment, EvmPaymentState
from rpcsvc.settlement.onchain.monero import records as monero
from rpcsvc.settlement.onchain.monero.presence import MoneroPayoutEnd
from rpcsvc.settlement.onchain.monero.unrecorded import MoneroAdoption
from rpcsvc.settlement.onchain.monero.wallet_types import (
    SubaddressIndex,
    WalletTransfer,
    WalletTransferKind,
)
from rpcsvc.settlement.onchain.unrecorded import Adopted, NotAdopted, OpenTransfer
from rpcsvc.signing import KEYS_DIR, KeyRing
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, SqliteDatabase, snapshot
from rpcsvc.store.backends.sqlite.maintenance import check_database
from rpcsvc.store.database import Statement
from rpcsvc.store.operator_books import BookedTransfer, OperatorBooks
from rpcsvc.store.withdrawals import WithdrawalStore
from rpcsvc.treasury.annotations import Annotations
from rpcsvc.verify import unb64url
from tests.operator_cli import Cli
from tests.unit.journaled import (
    WALLET,
    JournaledBooks,
    evm_payment,
    opened,
    put_back,
    xmr_payment,
)
from tests.unit.orders import NOW, key, terms

OK, FAILED, USAGE = 0, 1, 2
TXID = "ab" * 32
OLDER = "older.db"  # a copy from before the payout was signed


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, capsys, "onchain")


@pytest.fixture
def order(tmp_path: Path) -> Order:
    """An order whose payout of XMR is planned."""

    async def make() -> Order:
        async with opened(tmp_path) as books:
            return await books.funded(await books.ordered(Direction.USDC_TO_XMR))

    return asyncio.run(make())


def test_close_settles_the_transfer_and_keeps_the_signed_word(cli: Cli, order: Order) -> None:
    name = order.transfers[0].transfer_id
    assert cli("payouts", "close", name, TXID, "--note", "asked\n its owner") == OK
    assert cli("payouts", "close", name, TXID, "--note", "again") == FAILED
    shown = booked(cli, name)
    assert (shown.state, shown.txid, shown.order_status) == ("settled", TXID, "completed")
    assert check_database(cli.data_dir) == []
    assert read_books(cli.data_dir).closed == {name}
    with closing(sqlite3.connect(cli.data_dir / DATABASE_NAME)) as database:
        (row,) = database.execute("SELECT * FROM closed_by_hand")
    _, txid, note, at, kid, signature = row
    (key,) = [item for item in ring_of(cli)["keys"] if item["kid"] == kid]
    word = json.dumps(
        {"at": at, "note": note, "transfer": name, "txid": txid}, separators=(",", ":")
    )
    signed = bytes_of(signature) + b"rpcsvc operator's word\n" + word.encode()
    assert crypto_sign_open(signed, bytes_of(key["x"]))
    assert note == "asked its owner"


@pytest.mark.parametrize("network", ["arbitrum", "monero"])
def test_close_settles_a_planned_withdrawal(cli: Cli, network: str) -> None:
    asset, to = (XMR, "4cold") if network == "monero" else (USDC, "0x" + "0b" * 20)
    item = Withdrawal("wd_0001", network, asset, to, 7, 1, NOW, NOW)

    async def make() -> None:
        async with opened(cli.data_dir) as books:
            await WithdrawalStore(books.db).add(item, None)

    asyncio.run(make())
    assert cli("payouts", "close", "wd_0002", TXID, "--note", "by hand") == USAGE
    assert "rpcsvc treasury withdrawals" in cli.err
    assert cli("payouts", "close", "wd_0001", "--note", "by hand") == FAILED
    assert cli("payouts", "close", "wd_0001", TXID, "--note", "by hand") == OK, cli.err
    assert cli("payouts", "close", "wd_0001", TXID, "--note", "again") == FAILED
    paid = TXID if network == "monero" else f"0x{TXID}"
    with snapshot(cli.data_dir) as taken:
        (closed,) = asyncio.run(WithdrawalStore(taken).latest(2))
    assert (closed.state, closed.txid) == ("settled", paid)
    assert check_database(cli.data_dir) == []
    books = read_books(cli.data_dir)
    assert books.closed == {"wd_0001"}
    assert [each.transfer_id for each in books.withdrawals] == ["wd_0001"]


async def _adopted(
    _self: object,
    opened: OpenTransfer,
    others: object,
    txid: str,
    _key: object,
    record: Record,
) -> Adopted:
    """Stands in for a proof from the chain."""
    assert others == []
    name = opened.transfer.transfer_id
    await record([PreparedTransfer(txid, (name,))], None)
    return Adopted(txid, (opened,), 5)


def test_adopt_records_the_payment_of_a_planned_withdrawal(
    cli: Cli, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MoneroAdoption, "adopt", _adopted)
    item = Withdrawal("wd_0001", "monero", XMR, "4cold", 7, 1, NOW, NOW)

    async def make() -> None:
        async with opened(cli.data_dir) as books:
            await WithdrawalStore(books.db).add(item, None)

    asyncio.run(make())
    assert cli("payouts", "adopt", "wd_0001", TXID) == OK, cli.err
    assert "wd_0001" in cli.out
    with snapshot(cli.data_dir) as taken:
        found = asyncio.run(WithdrawalStore(taken).find("wd_0001"))
    assert found is not None
    assert (found.state, found.txid, found.raw) == ("prepared", TXID, "")
    assert booked(cli, order.transfers[0].transfer_id).state == "planned"
    assert check_database(cli.data_dir) == []


def test_adopt_refuses_a_withdrawal_that_is_over(cli: Cli) -> None:
    item = Withdrawal("wd_0001", "monero", XMR, "4cold", 7, 1, NOW, NOW)

    async def make() -> None:
        async with opened(cli.data_dir) as books:
            store = WithdrawalStore(books.db)
            await store.add(item, None)
            await store.cancel(item, stepped(item, TransferState.CANCELLED, NOW))

    asyncio.run(make())
    assert cli("payouts", "adopt", "wd_0001", TXID) == FAILED
    assert f"rpcsvc treasury explain monero {TXID} --note TEXT" in cli.err


def booked(cli: Cli, transfer_id: str) -> BookedTransfer:
    """The recorded transfer."""
    with snapshot(cli.data_dir) as taken:
        found = asyncio.run(OperatorBooks(taken).transfer(transfer_id))
    assert found is not None
    return found


def bytes_of(text: str) -> bytes:
    found = unb64url(text)
    assert found is not None
    return found


def ring_of(cli: Cli) -> Any:
    """The public keys of the data directory."""
    return KeyRing.load(cli.data_dir / KEYS_DIR, SystemClock(), system_random).jwks()


@pytest.fixture
def settled(order: Order, tmp_path: Path) -> str:
    """Sign and settle the order's payout; the transfer's id."""
    return signed(order, tmp_path, monero.MoneroPaymentState.SETTLED)


@pytest.fixture
def published(order: Order, tmp_path: Path) -> str:
    """Sign and publish the order's payout, unmined; the transfer's id."""
    return signed(order, tmp_path, monero.MoneroPaymentState.PUBLISHED)


def signed(order: Order, tmp_path: Path, state: monero.MoneroPaymentState) -> str:
    (transfer,) = order.transfers

    async def pay() -> None:
        async with opened(tmp_path) as books:
            await books.monero.adopt_wallet(WALLET)
            books.copy(tmp_path / OLDER)
            payment = xmr_payment(order, TXID)
            await books.monero.add_payment(payment)
            name = transfer.transfer_id
            events: list[ev.Event] = [
                ev.TransferPrepared(name, TXID, payment.raw),
                ev.TransferPublished(name),
            ]
            if state is monero.MoneroPaymentState.SETTLED:
                events.append(ev.TransferSettled(name, None))
            for event in events:
                await books.processor.apply(order.order_id, event)
            await books.monero.put_payment(replace(payment, state=state, height=None))

    asyncio.run(pay())
    return transfer.transfer_id


class Client:
    """A daemon's client that is asked nothing."""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None: ...


def ends(monkeypatch: pytest.MonkeyPatch, with_what: str | Exception | None) -> None:
    """Script the result of the check on the payment."""

    async def end(_self: MoneroPayoutEnd, _payment: monero.MoneroPayment) -> str | None:
        if isinstance(with_what, Exception):
            raise with_what
        return with_what

    monkeypatch.setattr(MoneroPayoutEnd, "end", end)
    monkeypatch.setattr(wiring, "monero_clients", lambda _s: (Client(), Client()))


def test_close_without_a_txid_ends_a_settled_payout_that_is_gone(
    cli: Cli, settled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends(monkeypatch, None)
    assert cli("payouts", "close", settled, "--note", "I pay it from the cold wallet") == OK
    assert "it is yours to pay" in cli.out
    books = read_books(cli.data_dir)
    assert books.closed == {settled}
    (payment,) = books.payments
    assert payment.state == "failed", "it is not published again"
    assert booked(cli, settled).state == "settled"
    assert check_database(cli.data_dir) == []
    assert cli("payouts", "close", settled, "--note", "once more") == FAILED
    assert "closed already" in cli.err


def test_close_without_proof_says_that_it_is_the_operators_word(
    cli: Cli, settled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends(monkeypatch, None)

    async def end(asked: MoneroPayoutEnd, _payment: monero.MoneroPayment) -> None:
        asked.took_word = True

    monkeypatch.setattr(MoneroPayoutEnd, "end", end)
    unproven = ("--note", "no node of three has it", "--unproven")
    assert cli("payouts", "close", settled, TXID, *unproven) == USAGE
    assert cli("payouts", "close", settled, *unproven) == OK
    assert f"{TXID} is not mined, as you say" in cli.out


def test_close_of_a_proven_end_does_not_cite_the_operator(
    cli: Cli, settled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends(monkeypatch, None)
    assert cli("payouts", "close", settled, "--note", "no node has it", "--unproven") == OK
    assert f"{TXID} can't be mined any more" in cli.out
    assert "as you say" not in cli.out


def test_close_takes_absence_by_the_operators_word_alone(
    cli: Cli, settled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends(monkeypatch, None)

    async def end(asked: MoneroPayoutEnd, _payment: monero.MoneroPayment) -> str | None:
        if not asked._is_by_word:
            raise NotAdopted("nobody has said so")
        return None

    monkeypatch.setattr(MoneroPayoutEnd, "end", end)
    note = ("--note", "no node of three has it")
    assert cli("payouts", "close", settled, *note) == FAILED
    assert read_books(cli.data_dir).closed == set()
    assert cli("payouts", "close", settled, *note, "--unproven") == OK


def test_close_ends_a_payout_that_never_got_into_a_block(
    cli: Cli, published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends(monkeypatch, None)
    assert cli("payouts", "close", published, "--note", "its owner has the money") == OK
    shown = booked(cli, published)
    assert (shown.state, shown.order_status) == ("settled", "completed")
    assert next(iter(read_books(cli.data_dir).payments)).state == "failed"
    assert check_database(cli.data_dir) == []


def test_killed_close_leaves_no_failed_payout_without_its_word(
    cli: Cli, published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A payment that has failed is paid back, unless its close is on record."""
    ends(monkeypatch, None)

    async def killed(*_: object) -> None:
        raise OSError(ENOSPC, "no space left")

    monkeypatch.setattr(transfers._Closing, "_settle", killed)
    assert cli("payouts", "close", published, "--note", "its owner has the money") != OK
    books = read_books(cli.data_dir)
    assert (next(iter(books.payments)).state, set(books.closed)) == ("failed", {published})


class Killed(Exception):
    """The command dies at one of its commits."""


def killed_at(number: int, cli: Cli, *command: str) -> bool:
    """Run the command, which dies before its commit of that number; return whether it did."""
    write, commits = SqliteDatabase.write, count(1)

    async def written(database: SqliteDatabase, statements: Sequence[Statement]) -> None:
        if any("leases" not in each.sql for each in statements) and next(commits) == number:
            raise Killed
        await write(database, statements)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SqliteDatabase, "write", written)
        try:
            assert cli(*command) == OK, cli.err
        except Killed:
            return True
    return False


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_close_that_was_killed_is_finished_by_the_same_command(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The payment is of a published transfer and of a planned one."""
    ends(monkeypatch, None)
    names = asyncio.run(paid_beside_a_planned_one(tmp_path))
    command = ("payouts", "close", names[0], "--note")
    assert killed_at(number, cli, *command, "gone")
    assert cli(*command, "once more") == OK, cli.err
    assert [name in cli.out for name in names] == [True, True]
    assert f"{TXID} can't be mined any more" in cli.out
    books = read_books(cli.data_dir)
    assert (next(iter(books.payments)).state, set(books.closed)) == ("failed", set(names))
    assert {booked(cli, name).state for name in names} == {"settled"}
    assert check_database(cli.data_dir) == []
    assert cli(*command, "a third time") == FAILED
    assert "closed already" in cli.err


@pytest.mark.parametrize("named", [(), (TXID,)])
def test_killed_close_looks_again_whether_the_payout_is_mined(
    cli: Cli, published: str, monkeypatch: pytest.MonkeyPatch, named: tuple[str, ...]
) -> None:
    ends(monkeypatch, None)
    command = ("payouts", "close", published)
    assert killed_at(2, cli, *command, "--note", "gone")
    ends(monkeypatch, NotAdopted("its payment is in block 5"))
    assert cli(*command, *named, "--note", "gone") == FAILED
    assert "in block 5" in cli.err
    ends(monkeypatch, None)
    assert cli(*command, *named, "--note", "gone") == OK, cli.err
    assert "it is yours to pay" in cli.out


def test_killed_close_says_that_the_payout_has_failed_since(
    cli: Cli, published: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service was started in between: its order is refunded, and not the operator's to pay."""
    ends(monkeypatch, None)
    command = ("payouts", "close", published, "--note", "gone")
    assert killed_at(2, cli, *command)

    async def fail() -> None:
        async with opened(tmp_path) as books:
            failed = ev.TransferFailed(published, "displaced")
            await books.processor.apply(ev.order_of(published), failed)

    asyncio.run(fail())
    assert cli(*command) == FAILED
    assert "is failed, which is final" in cli.err


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("again", [(TXID,), ()])
def test_killed_close_of_a_planned_payout_lets_nothing_be_paid(
    cli: Cli, order: Order, number: int, again: tuple[str, ...]
) -> None:
    name = order.transfers[0].transfer_id
    command = ("payouts", "close", name)
    assert killed_at(number, cli, *command, TXID, "--note", "asked its owner")
    is_said = name in read_books(cli.data_dir).closed
    assert (booked(cli, name).state == "planned") is not is_said, "it would be signed"
    if is_said:
        assert cli(*command, "cd" * 32, "--note", "by another one") == FAILED
        assert f"closed already, by {TXID}" in cli.err
    done = cli(*command, *(again if is_said else (TXID,)), "--note", "asked its owner")
    assert done == OK, cli.err
    assert "paid as you say: asked its owner" in cli.out
    assert (booked(cli, name).state, booked(cli, name).txid) == ("settled", TXID)
    assert check_database(cli.data_dir) == []


def test_killed_close_by_another_txid_is_finished_without_a_look(
    cli: Cli, order: Order, tmp_path: Path
) -> None:
    """The wallet has a payment of the planned payout, which the payment journal brought back."""

    async def restore() -> None:
        async with opened(tmp_path) as books:
            await books.monero.adopt_wallet(WALLET)
            await books.monero.add_payment(xmr_payment(order, TXID))

    asyncio.run(restore())
    name = order.transfers[0].transfer_id
    command = ("payouts", "close", name, "cd" * 32, "--note", "from the cold wallet")
    assert killed_at(2, cli, *command)
    assert cli(*command) == OK, cli.err
    assert "paid as you say" in cli.out
    assert (booked(cli, name).state, booked(cli, name).txid) == ("settled", "cd" * 32)


def unknown_usdc_payout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: EvmPaymentState
) -> tuple[str, list[Exception]]:
    """Publish a payout whose payment has a state; its id, and what the looks at it raise."""
    raised: list[Exception] = []

    async def pay() -> str:
        async with opened(tmp_path) as books:
            order = await books.funded(await books.ordered(Direction.XMR_TO_USDC))
            (transfer,) = order.transfers
            name = transfer.transfer_id
            payment = evm_payment(name, transfer.units, transfer.address, 0)
            await books.evm.add_payment(payment)
            for event in (
                ev.TransferPrepared(name, payment.latest.txid, "02"),
                ev.TransferPublished(name),
                ev.TransferUnknown(name, "the token refused it"),
            ):
                await books.processor.apply(order.order_id, event)
            await books.evm.put_payment(replace(payment, state=state))
            return name

    async def require_unminable(_connection: object, payment: EvmPayment) -> None:
        assert payment.payment_id == name
        if raised:
            raise raised.pop()

    class Node:
        client, network = Client(), SimpleNamespace(name="arbitrum")

    name = asyncio.run(pay())
    monkeypatch.setattr(transfers, "EvmConnection", lambda *_: None)
    monkeypatch.setattr(transfers, "require_unminable", require_unminable)
    monkeypatch.setattr(wiring, "served_chains", lambda *_: ())
    monkeypatch.setattr(wiring, "evm_nodes", lambda *_: [Node()])
    return name, raised


@pytest.mark.parametrize("state", [EvmPaymentState.PUBLISHED, EvmPaymentState.SETTLED])
def test_close_ends_a_usdc_payout_that_its_record_calls_settled(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: EvmPaymentState
) -> None:
    """The order was not told before a reorganisation took it, and it fails no more by itself."""
    name, _ = unknown_usdc_payout(tmp_path, monkeypatch, state)
    is_settled = state is EvmPaymentState.SETTLED
    said = cli("payouts", "close", name, "--note", "I pay it from the cold wallet")
    assert said == (OK if is_settled else FAILED), cli.err
    assert booked(cli, name).state == ("settled" if is_settled else "unknown")
    assert ("it fails by itself" in cli.err) is not is_settled


def test_killed_close_looks_again_for_a_usdc_payout_by_its_txid(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, raised = unknown_usdc_payout(tmp_path, monkeypatch, EvmPaymentState.SETTLED)
    command = ("payouts", "close", name)
    assert killed_at(2, cli, *command, "--note", "gone")
    txid = booked(cli, name).txid
    assert txid is not None
    raised.append(NotAdopted("its payment is on the chain"))
    assert cli(*command, txid, "--note", "it came back") == FAILED
    assert "on the chain" in cli.err
    assert cli(*command, txid, "--note", "gone") == OK, cli.err
    assert "can't be mined any more" in cli.out


def test_close_of_a_lost_usdc_payout_holds_its_order(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with XMR: a restored copy has the order, and not its payout yet."""

    async def require_unminable(*_: object) -> None: ...

    async def restore() -> Order:
        async with opened(tmp_path) as books:
            order = await books.ordered(Direction.XMR_TO_USDC)
            payment = evm_payment(f"{order.order_id}/payout/1", 7, order.terms.to_address, 0)
            await books.evm.add_payment(payment)
            published = replace(payment, state=EvmPaymentState.PUBLISHED)
            await books.evm.put_payment(published)
            await books.evm.put_payment(replace(published, state=EvmPaymentState.SETTLED))
            return order

    async def later() -> str | None:
        async with opened(tmp_path) as books:
            await books.funded(order)
            failed = ev.TransferFailed(name, "rejected")
            refunded = await books.processor.apply(order.order_id, failed)
            return await SignedPayments(books.db).unmatched(refunded.transfers[-1])

    order = asyncio.run(restore())
    name = f"{order.order_id}/payout/1"
    monkeypatch.setattr(transfers, "EvmConnection", lambda *_: None)
    monkeypatch.setattr(transfers, "require_unminable", require_unminable)
    monkeypatch.setattr(wiring, "served_chains", lambda *_: ())
    node = SimpleNamespace(client=Client(), network=SimpleNamespace(name="arbitrum"))
    monkeypatch.setattr(wiring, "evm_nodes", lambda *_: [node])
    assert cli("payouts", "close", name, "--note", "I pay it") == OK, cli.err
    assert f"paid 7 units for {name}" in str(asyncio.run(later()))


async def another(books: JournaledBooks) -> Order:
    """A second order whose payout of XMR is planned."""
    return await deposited(books, await another_open(books))


async def another_open(books: JournaledBooks) -> Order:
    """A second order, whose deposit was not seen yet."""
    agreed = replace(
        terms(Direction.USDC_TO_XMR),
        order_id="ord_2",
        session_id="s2",
        deposit_address="there",
        to_address="other",
    )
    order = open_order(agreed)
    await books.processor.open(order, None, None)
    return order


async def deposited(books: JournaledBooks, order: Order) -> Order:
    """The second order, once its payout is planned."""
    seen = ev.DepositSeen(key(2), order.terms.deposit_amount, "sender", NOW)
    await books.processor.apply(order.order_id, seen)
    return await books.processor.apply(order.order_id, ev.DepositConfirmed(key(2)))


def test_close_ends_all_that_the_transaction_was_to_pay(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restored copy lacks the order of one of the transfers."""
    ends(monkeypatch, None)

    async def pay() -> list[str]:
        async with opened(tmp_path) as books:
            await books.monero.adopt_wallet(WALLET)
            orders = [
                await books.funded(await books.ordered(Direction.USDC_TO_XMR)),
                await another(books),
            ]
            first, second = (order.transfers[0] for order in orders)
            others = [
                monero.Payee(second.transfer_id, second.address, second.units),
                monero.Payee("ord_lost/payout/1", "4lost", 7),
            ]
            payment = xmr_payment(orders[0], TXID, *others)
            await books.monero.add_payment(payment)
            for order in orders:
                name = order.transfers[0].transfer_id
                for event in (ev.TransferPrepared(name, TXID, "02"), ev.TransferPublished(name)):
                    await books.processor.apply(order.order_id, event)
            return [first.transfer_id, second.transfer_id]

    names = asyncio.run(pay())
    assert cli("payouts", "close", names[1], "--note", "gone") == OK
    assert [name in cli.out for name in names] == [True, True]
    assert read_books(cli.data_dir).closed == set(names)
    assert {booked(cli, name).state for name in names} == {"settled"}


@pytest.mark.parametrize("name", ["ord_lost/payout/1", "wd_lost"])
def test_close_ends_a_payout_whose_order_is_lost(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The payment journal brought its payment back, and health names it."""
    ends(monkeypatch, None)

    async def restore() -> None:
        async with opened(tmp_path) as books:
            await books.monero.adopt_wallet(WALLET)
            order = await books.funded(await books.ordered(Direction.USDC_TO_XMR))
            lost = (
                monero.Payee(name, "4lost", 7 * 10**12),
                monero.Payee("ord_gone/payout/1", "4gone", 5),
            )
            payment = replace(xmr_payment(order, TXID), batch=lost, payment_id="batch_lost")
            await books.monero.add_payment(payment)
            published = replace(payment, state=monero.MoneroPaymentState.PUBLISHED)
            await books.monero.put_payment(published)

    asyncio.run(restore())
    assert cli("payouts", "close", name, TXID, "--note", "paid") == FAILED
    assert "the same without TXID" in cli.err
    assert cli("payouts", "close", name, "--note", "no order has it") == OK, cli.err
    assert f"{name}: 7 XMR to 4lost" in cli.out
    books = read_books(cli.data_dir)
    assert (next(iter(books.payments)).state, set(books.closed)) == ("failed", {name})
    assert check_database(cli.data_dir) == []
    assert cli("payouts", "close", name, "--note", "once more") == FAILED
    assert cli("payouts", "close", "ord_lost/payout/3", "--note", "x") == USAGE


@pytest.mark.parametrize("conflict", [None, monero.Cursor(9, "rival's block")])
def test_close_of_a_lost_payout_holds_its_order(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conflict: monero.Cursor | None
) -> None:
    """A restored copy has the order, and not its payout yet: that is the operator's to pay."""
    ends(monkeypatch, None)
    name = "ord_2/payout/1"

    async def restore() -> Order:
        async with opened(tmp_path) as books:
            await books.monero.adopt_wallet(WALLET)
            order = await books.funded(await books.ordered(Direction.USDC_TO_XMR))
            payment = replace(xmr_payment(order, TXID), payment_id=name, units=7)
            await books.monero.add_payment(payment)
            published = monero.MoneroPaymentState.PUBLISHED
            await books.monero.put_payment(replace(payment, state=published, conflict=conflict))
            return await another_open(books)

    async def later() -> str | None:
        async with opened(tmp_path) as books:
            await deposited(books, second)
            refunded = await books.processor.apply("ord_2", ev.TransferFailed(name, "rejected"))
            return await SignedPayments(books.db).unmatched(refunded.transfers[-1])

    second = asyncio.run(restore())
    assert cli("payouts", "close", name, "--note", "gone") == OK
    assert "it is yours to pay" in cli.out
    assert f"{TXID} paid 7 units for {name}" in str(asyncio.run(later()))


async def paid_together(books: JournaledBooks, second: monero.Payee) -> str:
    """Publish a payment of a new order and of ``second``; the id of the order's transfer."""
    await books.monero.adopt_wallet(WALLET)
    order = await books.funded(await books.ordered(Direction.USDC_TO_XMR))
    (transfer,) = order.transfers
    await books.monero.add_payment(xmr_payment(order, TXID, second))
    for event in (
        ev.TransferPrepared(transfer.transfer_id, TXID, "02"),
        ev.TransferPublished(transfer.transfer_id),
    ):
        await books.processor.apply(order.order_id, event)
    return transfer.transfer_id


async def paid_beside_a_planned_one(data_dir: Path) -> list[str]:
    """The ids of the two transfers of a batch: a published one, and one that is planned."""
    async with opened(data_dir) as books:
        (second,) = (await another(books)).transfers
        payee = monero.Payee(second.transfer_id, second.address, second.units)
        return [await paid_together(books, payee), second.transfer_id]


def test_close_ends_transfers_of_the_batch_that_are_planned(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The books of a restored copy do not have them as signed yet: they would be refunded."""
    ends(monkeypatch, None)
    names = asyncio.run(paid_beside_a_planned_one(tmp_path))
    assert booked(cli, names[1]).state == "planned"
    assert cli("payouts", "close", names[0], "--note", "gone") == OK
    assert read_books(cli.data_dir).closed == set(names)
    assert {booked(cli, name).state for name in names} == {"settled"}
    assert check_database(cli.data_dir) == []


def test_close_holds_orders_that_the_batch_was_to_pay(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator may be wrong: nothing is paid for an order that the payment was to pay."""
    ends(monkeypatch, None)
    name = "ord_2/payout/1"

    async def pay() -> tuple[Order, str]:
        async with opened(tmp_path) as books:
            order = await another_open(books)
            payee = monero.Payee(name, order.terms.to_address, 7)
            return order, await paid_together(books, payee)

    async def later() -> list[str | None]:
        async with opened(tmp_path) as books:
            await deposited(books, second)
            refunded = await books.processor.apply("ord_2", ev.TransferFailed(name, "rejected"))
            payments = SignedPayments(books.db)
            return [await payments.unmatched(each) for each in refunded.transfers]

    second, closed = asyncio.run(pay())
    assert cli("payouts", "close", closed, "--note", "gone") == OK
    problems = asyncio.run(later())
    assert [f"{TXID} paid 7 units for {name}" in str(each) for each in problems] == [True, True]


def test_close_with_a_proof_holds_no_refund_of_a_companion(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The payment failed by a deep rival, and so did one of its transfers before the stop."""
    ends(monkeypatch, None)
    name = "ord_2/payout/1"

    async def pay() -> str:
        async with opened(tmp_path) as books:
            (second,) = (await another(books)).transfers
            payee = monero.Payee(name, second.address, second.units)
            first = await paid_together(books, payee)
            await books.processor.apply("ord_2", ev.TransferPrepared(name, TXID, "02"))
            payment = await books.monero.payment(name)
            assert payment is not None
            rival = monero.Cursor(9, "rival's block")
            failed = replace(payment, state=monero.MoneroPaymentState.FAILED, conflict=rival)
            await books.monero.put_payment(failed)
            await books.processor.apply("ord_2", ev.TransferFailed(name, "displaced"))
            return first

    async def later() -> list[str | None]:
        async with opened(tmp_path) as books:
            payments = SignedPayments(books.db)
            order = await books.store.order("ord_2")
            assert order is not None
            return [await payments.unmatched(each) for each in order.transfers[1:]]

    assert cli("payouts", "close", asyncio.run(pay()), "--note", "gone") == OK
    assert asyncio.run(later()) == [None]


def test_closed_payout_is_not_free_in_an_older_copy(
    cli: Cli, settled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the journal it is signed and not void."""
    ends(monkeypatch, None)
    assert cli("payouts", "close", settled, "--note", "I pay it from the cold wallet") == OK
    put_back(cli.data_dir, cli.data_dir / OLDER)

    async def restored() -> None:
        async with opened(cli.data_dir) as books:
            assert books.adopted.orders == [settled]

    asyncio.run(restored())
    assert booked(cli, settled).state == "prepared"


@pytest.mark.parametrize("found", [NotAdopted("it may be mined yet"), "cd" * 32])
def test_close_refuses_a_payout_that_may_still_be_mined(
    cli: Cli, settled: str, monkeypatch: pytest.MonkeyPatch, found: str | Exception
) -> None:
    ends(monkeypatch, found)
    status = cli("payouts", "close", settled, "--note", "it is away")
    is_spent = isinstance(found, str)
    assert status == (OK if is_spent else FAILED)
    assert ("is not closed yet" in cli.out) is is_spent
    books = read_books(cli.data_dir)
    assert (books.closed, next(iter(books.payments)).state) == (frozenset(), "settled")


def test_close_of_a_signed_payout_takes_no_other_txid(cli: Cli, settled: str) -> None:
    assert cli("payouts", "close", settled, "cd" * 32, "--note", "paid") == FAILED
    assert "the same without TXID" in cli.err


def test_close_of_a_planned_payout_needs_a_txid(cli: Cli, order: Order) -> None:
    assert cli("payouts", "close", order.transfers[0].transfer_id, "--note", "paid") == FAILED
    assert "Name the TXID" in cli.err


@pytest.mark.parametrize("word", [("--note", " "), ("--note=x", "more")])
def test_close_wants_a_note(cli: Cli, order: Order, word: tuple[str, ...]) -> None:
    assert cli("payouts", "close", order.transfers[0].transfer_id, TXID, *word) == USAGE


def test_possible_payment_of_an_open_transfer_is_not_annotated(
    cli: Cli, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    (transfer,) = order.transfers

    class Wallet:
        async def __aenter__(self) -> Wallet:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def refresh(self) -> None: ...

        async def transfer(self, txid: str) -> list[WalletTransfer]:
            sent = WalletTransfer(
                WalletTransferKind.OUTGOING, txid, "4a", SubaddressIndex(0, 0), transfer.units, 5,
                100, 9, 1, 0, locked=False, double_spend_seen=False,
            )  # fmt: skip
            return [sent]

    monkeypatch.setattr(wiring, "monero_clients", lambda _s: (None, Wallet()))

    async def moved(*_: object) -> str:
        return "sent it"

    monkeypatch.setattr(Annotations, "poll", moved)
    explain = ("treasury", "explain", "monero", TXID, "--note", "to the cold wallet")
    assert cli(*explain) == FAILED
    assert f"may have paid {transfer.transfer_id}" in cli.err
    assert cli("payouts", "close", transfer.transfer_id, TXID, "--note", "it did") == OK
    assert cli(*explain) == OK
