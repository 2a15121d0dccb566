"""Payments since an older copy of the database are adopted from the payment journal."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from rpcsvc.domain.money import XMR
from rpcsvc.domain.order import TransferState
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.withdrawals import Withdrawal, stepped
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.engine import SignedPayments
from rpcsvc.settlement.onchain.evm import records as evm
from rpcsvc.settlement.onchain.evm.records import EvmAddress
from rpcsvc.settlement.onchain.journal.files import FOLDER, read_place
from rpcsvc.settlement.onchain.journal_check import check_journal
from rpcsvc.settlement.onchain.journal_entries import entries_of, is_restored, last_signed
from rpcsvc.settlement.onchain.journal_replay import ReplayResult
from rpcsvc.settlement.onchain.monero import records as monero
from rpcsvc.settlement.onchain.monero.ledger import MoneroEntry
from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from rpcsvc.store.database import StaleWrite, StoreConflict
from rpcsvc.store.withdrawals import WithdrawalStore
from tests.rows import statement
from tests.unit.journaled import (
    HOT,
    WALLET,
    JournaledBooks,
    evm_payment,
    opened,
    put_back,
    xmr_payment,
)
from tests.unit.orders import NOW


async def test_planned_payout_gets_its_payment(tmp_path: Path) -> None:
    async with opened(tmp_path) as books:
        await books.monero.adopt_wallet(WALLET)
        order = await books.funded(await books.ordered(Direction.USDC_TO_XMR))
        copy = books.copy(tmp_path / "copy.db")
        lost = monero.Payee("ord_lost/payout/1", "4lost", 7)
        await books.monero.add_payment(xmr_payment(order, "aa", lost))
    for _ in range(2):
        put_back(tmp_path, copy)
        async with opened(tmp_path) as books:
            name = order.transfers[0].transfer_id
            assert books.adopted.payments == ["batch_aa"]
            assert (books.adopted.orders, books.adopted.lost) == ([name], [lost.transfer_id])
            replayed = await books.store.order(order.order_id)
            assert replayed is not None
            transfer = replayed.transfer(name)
            assert transfer is not None
            assert (transfer.state, transfer.txid) == (TransferState.PREPARED, "aa")
            paid = await books.monero.payment(lost.transfer_id)
            assert paid is not None
            assert (paid.state, paid.raw) == (monero.MoneroPaymentState.PUBLISHED, "02ff")
    async with opened(tmp_path) as books:
        assert books.adopted == ReplayResult()


async def test_order_that_plans_its_payout_later_finds_the_payment(tmp_path: Path) -> None:
    async with opened(tmp_path) as books:
        await books.monero.adopt_wallet(WALLET)
        order = await books.ordered(Direction.USDC_TO_XMR)
        copy = books.copy(tmp_path / "copy.db")
        order = await books.funded(order)
        await books.monero.add_payment(xmr_payment(order, "aa"))
    put_back(tmp_path, copy)
    async with opened(tmp_path) as books:
        assert books.adopted.orders == books.adopted.lost == []
        planned = (await books.funded(order)).transfers[0]
        signed = SignedPayments(books.db)
        assert await signed.unmatched(planned) is None
        other = replace(planned, units=planned.units - 1)
        assert "aa paid" in str(await signed.unmatched(other))
        refund = replace(planned, transfer_id=f"{order.order_id}/refund/1")
        assert "aa paid" in str(await signed.unmatched(refund)), (
            "the copy's order does not know of it"
        )


async def test_withdrawal_in_a_copy_keeps_its_payment(tmp_path: Path) -> None:
    """A planned one is matched and not cancelled; a payment of a missing one is reported."""
    planned, later = (
        Withdrawal(name, "monero", XMR, "4cold", 7, 1, NOW, NOW) for name in ("wd_0001", "wd_0002")
    )
    async with opened(tmp_path) as books:
        await books.monero.adopt_wallet(WALLET)
        await WithdrawalStore(books.db).add(planned, None)
        copy = books.copy(tmp_path / "copy.db")
        for item, txid in ((planned, "aa"), (later, "bb")):
            await books.monero.add_payment(
                monero.MoneroPayment(
                    item.withdrawal_id, monero.MoneroPurpose.TRANSFER, item.address, item.units, 5,
                    txid, "02ff", "metadata", "key", (f"image-{txid}",), NOW,
                )
            )  # fmt: skip
            made = await books.monero.payment(item.withdrawal_id)
            assert made is not None
            await books.monero.put_payment(
                replace(made, state=monero.MoneroPaymentState.PUBLISHED, relayed_at=NOW)
            )
    put_back(tmp_path, copy)
    async with opened(tmp_path) as books:
        assert books.adopted.payments == ["wd_0001", "wd_0002"]
        assert (books.adopted.orders, books.adopted.lost) == ([], ["wd_0002"])
        store = WithdrawalStore(books.db)
        cancelled = stepped(planned, TransferState.CANCELLED, NOW + 1)
        assert not await store.cancel(planned, cancelled)
        assert await store.signed_terms("wd_0002") == later.terms
        assert [each.payment_id for each in await books.monero.without_order()] == ["wd_0002"]


async def test_killed_between_line_and_commit_the_payment_is_adopted(tmp_path: Path) -> None:
    async with opened(tmp_path) as books:
        await books.monero.adopt_wallet(WALLET)
        order = await books.funded(await books.ordered(Direction.USDC_TO_XMR))
        before = books.copy(tmp_path / "copy.db")
        await books.monero.add_payment(xmr_payment(order, "aa"))
    put_back(tmp_path, before)  # as if the commit had not come
    async with opened(tmp_path) as books:
        paid = await books.monero.payment(order.transfers[0].transfer_id)
        assert paid is not None
        assert paid.state is monero.MoneroPaymentState.PUBLISHED, "it is looked for, and published"


async def test_uncommitted_payment_is_not_brought_back(tmp_path: Path) -> None:
    """Its commit was refused, as by a cancellation, and the transfer signed again."""
    async with opened(tmp_path) as books:
        await books.monero.adopt_wallet(WALLET)
        order = await books.funded(await books.ordered(Direction.USDC_TO_XMR))
        before = books.copy(tmp_path / "before.db")
        first = xmr_payment(order, "aa", monero.Payee("ord_x/payout/1", "4x", 7))
        impossible = statement("INSERT INTO monero_wallet (id) VALUES (7)", ())
        with pytest.raises(StoreConflict):
            await books.monero.add_payment(first, [impossible])
        await books.monero.add_payment(xmr_payment(order, "bb"))
    put_back(tmp_path, before)
    async with opened(tmp_path) as books:
        paid = await books.monero.payment(order.transfers[0].transfer_id)
        assert paid is not None
        assert paid.txid == "bb"
        assert books.adopted.payments == [paid.payment_id]


async def test_failed_payment_fails_on_an_older_copy(tmp_path: Path) -> None:
    async with opened(tmp_path) as books:
        await books.monero.adopt_wallet(WALLET)
        order = await books.funded(await books.ordered(Direction.USDC_TO_XMR))
        made = xmr_payment(order, "aa")
        await books.monero.add_payment(made)
        prepared = books.copy(tmp_path / "prepared.db")
        await books.monero.put_payment(replace(made, state=monero.MoneroPaymentState.FAILED))
    put_back(tmp_path, prepared)
    async with opened(tmp_path) as books:
        paid = await books.monero.payment(made.payment_id)
        assert paid is not None
        assert paid.state is monero.MoneroPaymentState.FAILED


async def test_evm_payment_comes_back_with_its_attempts(tmp_path: Path) -> None:
    async with opened(tmp_path) as books:
        order = await books.funded(await books.ordered(Direction.XMR_TO_USDC))
        planned = order.transfers[0]
        before = books.copy(tmp_path / "before.db")
        payment = evm_payment(planned.transfer_id, planned.units, planned.address, 4)
        await books.evm.add_payment(payment)
        signed = books.copy(tmp_path / "signed.db")
        await books.evm.add_attempt(payment, evm.Attempt("0xraised", "03", 200, 2, NOW))
    for copy in (before, signed):
        put_back(tmp_path, copy)
        async with opened(tmp_path) as books:
            found = await books.evm.payment(planned.transfer_id)
            assert found is not None
            assert [item.txid for item in found.attempts][1:] == ["0xraised"]
            assert found.state is evm.EvmPaymentState.PUBLISHED
            assert await books.evm.next_nonce("arbitrum", HOT) == 5


async def test_attempt_that_another_replica_outbid_is_left_out(tmp_path: Path) -> None:
    async with opened(tmp_path) as books:
        order = await books.funded(await books.ordered(Direction.XMR_TO_USDC))
        planned = order.transfers[0]
        payment = evm_payment(planned.transfer_id, planned.units, planned.address, 4)
        await books.evm.add_payment(payment)
        signed = books.copy(tmp_path / "signed.db")
        await books.evm.add_attempt(payment, evm.Attempt("0xraised", "03", 200, 2, NOW))
    with closing(sqlite3.connect(signed)) as other:
        sql = "INSERT INTO evm_attempts VALUES (?, 2, '0xdearer', x'04', 300, 3, ?)"
        other.execute(sql, (payment.payment_id, NOW))
        other.commit()
    put_back(tmp_path, signed)
    async with opened(tmp_path) as books:
        assert books.adopted.refused == []
        found = await books.evm.payment(planned.transfer_id)
        assert found is not None
        assert [item.txid for item in found.attempts][1:] == ["0xdearer"]


async def together(books: JournaledBooks) -> tuple[list[str], list[evm.EvmPayment]]:
    """Payouts of two networks' orders that are signed together; one order is on record."""
    order = await books.funded(await books.ordered(Direction.XMR_TO_USDC))
    planned = order.transfers[0]
    paid = [
        evm_payment(planned.transfer_id, planned.units, planned.address, 4),
        evm_payment("ord_lost/payout/1", 7, "0x07", 5),
    ]
    return [each.payment_id for each in paid], paid


async def test_payouts_signed_together_are_adopted_together(tmp_path: Path) -> None:
    async with opened(tmp_path) as books:
        names, payments = await together(books)
        before = books.copy(tmp_path / "before.db")
        await books.evm.add_payouts(payments, [])
        assert len(read_place(tmp_path / FOLDER).lines) == 2, "a header, and one line for both"
    put_back(tmp_path, before)  # as if the commit had not come
    async with opened(tmp_path) as books:
        assert books.adopted.payments == names
        assert (books.adopted.orders, books.adopted.lost) == (names[:1], names[1:])
        live = await books.evm.payments_in("arbitrum", evm.EvmPaymentState.PUBLISHED)
        assert [each.nonce for each in live] == [4, 5]
    problems, state = check_journal(tmp_path, tmp_path / FOLDER, [])
    assert problems == []
    assert "the last payment at" in state


async def test_payouts_refused_together_are_void_together(tmp_path: Path) -> None:
    """Their commit is rolled back; signed once more with the same bytes, they are not void."""
    async with opened(tmp_path) as books:
        names, payments = await together(books)
        before = books.copy(tmp_path / "before.db")
        impossible = statement("INSERT INTO monero_wallet (id) VALUES (7)", ())
        with pytest.raises(StoreConflict):
            await books.evm.add_payouts(payments, [impossible])
        await books.evm.add_payouts(payments[:1], [])
    put_back(tmp_path, before)
    async with opened(tmp_path) as books:
        assert books.adopted.payments == names[:1]
        assert await books.evm.payment(names[1]) is None
        assert await books.evm.next_nonce("arbitrum", HOT) == 5


async def test_line_of_several_payments_is_no_sign_of_a_restore(tmp_path: Path) -> None:
    async with opened(tmp_path) as books:
        own = books.journal.mark
        _, payments = await together(books)
        await books.evm.add_payouts(payments, [])
        first = read_place(tmp_path / FOLDER).lines
        await books.evm.add_payment(evm_payment("ord_2/payout/1", 7, "0x07", 6))
        both = read_place(tmp_path / FOLDER).lines
    assert not is_restored(first, own)
    assert is_restored(both, own)
    assert last_signed(first) == first[-1]
    assert len(entries_of(first[-1])) == 2


async def test_payments_recorded_again_after_a_refusal_show_a_restore(tmp_path: Path) -> None:
    """An order had changed at the first commit. The next one had the same bytes, and more came."""
    async with opened(tmp_path) as books:
        own = books.journal.mark
        _, payments = await together(books)
        nothing = replace(statement("DELETE FROM monero_wallet WHERE id = 7"), finds=True)
        with pytest.raises(StaleWrite):
            await books.evm.add_payouts(payments, [nothing])
        refused = read_place(tmp_path / FOLDER).lines
        await books.evm.add_payouts(payments, [])
        again = read_place(tmp_path / FOLDER).lines
        await books.evm.add_payment(evm_payment("ord_2/payout/1", 7, "0x07", 6))
        later = read_place(tmp_path / FOLDER).lines
    assert not is_restored(refused, own)
    assert not is_restored(again, own)
    assert is_restored(later, own)


async def test_sweeps_come_back_as_they_ended(tmp_path: Path) -> None:
    async with opened(tmp_path) as books:
        await books.addresses.adopt_wallet(HOT)
        before = books.copy(tmp_path / "before.db")
        await books.addresses.add_addresses([EvmAddress(1, "0x01"), EvmAddress(2, "0x02")])
        for serial in (1, 2):
            name = f"sweep-arbitrum-2-{serial}"
            payment = evm_payment(name, 9, HOT, serial, purpose=evm.EvmPurpose.SWEEP)
            sweep = evm.Sweep("arbitrum", 2, serial, "0x02", evm.SweepMethod.RECEIVE, 9, "aa", name)
            await books.evm.add_payment(payment, sweep)
            if serial == 1:
                done = replace(sweep, state=evm.SweepState.DONE, taken=9)
                await books.evm.put_sweep(done)
    put_back(tmp_path, before)
    async with opened(tmp_path) as books:
        assert books.adopted.refused == []
        assert [item.serial for item in await books.evm.sweeps_under_way("arbitrum")] == [2]
        assert await books.addresses.unknown_addresses(2) == [1]
        wallet = await books.addresses.wallet()
        assert wallet is not None
        assert wallet.reserved_to == 2


async def test_sweep_whose_payment_failed_later_is_not_done_again(tmp_path: Path) -> None:
    """Done, then voided by a deep reorg, then made again: the deposit is swept once."""
    async with opened(tmp_path) as books:
        await books.addresses.adopt_wallet(HOT)
        await books.addresses.add_addresses([EvmAddress(1, "0x01")])
        before = books.copy(tmp_path / "before.db")
        for serial in (1, 2):
            payment = await sweep_from(books, serial)
            settled = replace(payment, state=evm.EvmPaymentState.SETTLED)
            await books.evm.put_payment(settled)
            if serial == 1:
                await books.evm.put_payment(replace(settled, state=evm.EvmPaymentState.FAILED))
        assert await books.evm.unswept_of("arbitrum", 1) == -9
    put_back(tmp_path, before)
    async with opened(tmp_path) as books:
        first = await books.evm.payment("sweep-arbitrum-1-1")
        assert first is not None
        assert first.state is evm.EvmPaymentState.PUBLISHED
        await books.evm.put_payment(replace(first, state=evm.EvmPaymentState.FAILED))
        assert await books.evm.unswept_of("arbitrum", 1) == -9
        (void,) = await books.evm.void_sweeps("arbitrum", 1)
        assert void.serial == 1


@pytest.mark.parametrize("later", [None, evm.SweepState.VOID])
async def test_sweep_whose_end_was_not_committed_has_ended(
    tmp_path: Path, later: evm.SweepState | None
) -> None:
    """The process dies between line and commit; or judges once more, and a copy is put back."""
    async with opened(tmp_path) as books:
        await books.addresses.adopt_wallet(HOT)
        await books.addresses.add_addresses([EvmAddress(1, "0x01")])
        name = "sweep-arbitrum-1-1"
        payment = evm_payment(name, 9, HOT, 1, purpose=evm.EvmPurpose.SWEEP)
        sweep = evm.Sweep("arbitrum", 1, 1, "0x01", evm.SweepMethod.RECEIVE, 9, "aa", name)
        await books.evm.add_payment(payment, sweep)
        before = books.copy(tmp_path / "before.db")
        fails = patch.object(books.db, "write", side_effect=Unavailable("gone"))
        with fails, pytest.raises(Unavailable):
            await books.evm.put_sweep(replace(sweep, state=evm.SweepState.DONE, taken=9))
        assert await books.evm.sweeps_under_way("arbitrum") == [sweep]
        if later is not None:
            await books.evm.put_sweep(replace(sweep, state=later))
    put_back(tmp_path, before)
    async with opened(tmp_path) as books:
        assert await books.evm.sweeps_under_way("arbitrum") == []
        assert await books.evm.unswept_of("arbitrum", 1) == (-9 if later is None else 0)


@pytest.mark.parametrize("at", ["before", "signed"])
async def test_void_sweep_that_was_mined_ends_before_the_next(tmp_path: Path, at: str) -> None:
    """Both failed, and a reorganisation had the first one mined after all."""
    copies, void = dict[str, Path](), list[evm.Sweep]()
    async with opened(tmp_path) as books:
        await books.addresses.adopt_wallet(HOT)
        await books.addresses.add_addresses([EvmAddress(1, "0x01")])
        copies["before"] = books.copy(tmp_path / "before.db")
        for serial in (1, 2):
            name = f"sweep-arbitrum-1-{serial}"
            payment = evm_payment(name, 9, HOT, serial, purpose=evm.EvmPurpose.SWEEP)
            sweep = evm.Sweep(
                "arbitrum", 1, serial, "0x01", evm.SweepMethod.RECEIVE, 9, f"a{serial}", name
            )
            await books.evm.add_payment(payment, sweep)
            if serial == 1:
                copies["signed"] = books.copy(tmp_path / "signed.db")
            await books.evm.put_payment(replace(payment, state=evm.EvmPaymentState.FAILED))
            void.append(replace(sweep, state=evm.SweepState.VOID))
            await books.evm.put_sweep(void[-1])
        await books.evm.put_sweep(replace(void[0], state=evm.SweepState.DONE, taken=9))
    put_back(tmp_path, copies[at])
    async with opened(tmp_path) as books:
        assert books.adopted.refused == []
        assert await books.evm.unswept_of("arbitrum", 1) == -9
        assert PauseSwitch(tmp_path).reason() is None


async def sweep_from(books: JournaledBooks, serial: int) -> evm.EvmPayment:
    """Record a done sweep of 9 units from the first address."""
    name = f"sweep-arbitrum-1-{serial}"
    payment = evm_payment(name, 9, HOT, serial, purpose=evm.EvmPurpose.SWEEP)
    sweep = evm.Sweep("arbitrum", 1, serial, "0x01", evm.SweepMethod.RECEIVE, 9, "aa", name)
    await books.evm.add_payment(payment, sweep)
    await books.evm.put_sweep(replace(sweep, state=evm.SweepState.DONE, taken=9))
    return payment


async def test_addresses_handed_out_since_are_left_out(tmp_path: Path) -> None:
    async with opened(tmp_path) as books:
        await books.monero.adopt_wallet(WALLET)
        await books.addresses.adopt_wallet(HOT)
        copy = books.copy(tmp_path / "copy.db")
        await books.monero.reserve_addresses(300)
        await books.addresses.add_addresses([EvmAddress(i, f"0x{i}") for i in range(1, 65)])
        await books.addresses.reserve_addresses(40)
    put_back(tmp_path, copy)
    async with opened(tmp_path) as books:
        xmr, usdc = await books.monero.wallet(), await books.addresses.wallet()
        assert xmr is not None
        assert usdc is not None
        assert (xmr.reserved_to, usdc.reserved_to) == (300, 64)


@pytest.mark.parametrize("earlier", [None, "by the operator"])
async def test_what_the_books_refuse_pauses_payouts(tmp_path: Path, earlier: str | None) -> None:
    async with opened(tmp_path) as books:
        copy = books.copy(tmp_path / "copy.db")
        await books.evm.add_payment(evm_payment("ord_1/payout/1", 7, HOT, 4))
    put_back(tmp_path, copy)
    with closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as other:
        other.execute(
            "INSERT INTO evm_payments (payment_id, network, sender, nonce, purpose, recipient,"
            " units, contract, data, gas, prepared_at, state) VALUES"
            " ('ord_2/payout/1', 'arbitrum', ?, 4, 'transfer', ?, 7, ?, x'', 1, 1, 'prepared')",
            (HOT, HOT, HOT),
        )
        other.commit()
    if earlier is not None:
        PauseSwitch(tmp_path).pause(earlier)
    named = set()
    for _ in range(2):
        async with opened(tmp_path) as books:
            assert len(books.adopted.refused) == 1
        named.add(str(PauseSwitch(tmp_path).reason()))
    (reason,) = named
    assert "the payment journal can't be adopted" in reason
    assert reason.endswith("(1 in all)" if earlier is None else f"before that: {earlier}")


# --- rpcsvc db check -------------------------------------------------------------------------


async def test_check_names_what_the_journal_lacks(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    async with opened(tmp_path) as books:
        before = books.copy(tmp_path / "before.db")
        await books.evm.add_payment(evm_payment("ord_1/payout/1", 7, HOT, 4))
    problems, state = check_journal(tmp_path, folder, [])
    assert (problems, "0 lines behind" in state) == ([], True), state
    after = (tmp_path / DATABASE_NAME).read_bytes()
    put_back(tmp_path, before)
    problems, state = check_journal(tmp_path, folder, [tmp_path / "none"])
    assert "1 lines behind" in state
    assert problems == [f"{tmp_path / 'none'} does not hold the journal: another one"]
    with closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as database:
        database.execute("UPDATE payment_journal SET line = 2")
        database.commit()
    found = " ".join(check_journal(tmp_path, folder, [])[0])
    assert "line 2 of the payment journal is not in the database" in found
    (tmp_path / DATABASE_NAME).write_bytes(after)
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])
    assert "ends at line 1" in " ".join(check_journal(tmp_path, folder, [])[0])


async def test_check_does_not_name_what_a_replay_left_out(tmp_path: Path) -> None:
    """A payment that a later one has replaced."""
    async with opened(tmp_path) as books:
        await books.monero.adopt_wallet(WALLET)
        order = await books.funded(await books.ordered(Direction.USDC_TO_XMR))
        before = books.copy(tmp_path / "before.db")
        first = xmr_payment(order, "aa", monero.Payee("ord_x/payout/1", "4x", 7))
        # As if killed after the journal line, before the commit and before a void line.
        await books.journal.write(MoneroEntry(WALLET.primary_address, first))
        await books.monero.add_payment(xmr_payment(order, "bb"))
    put_back(tmp_path, before)
    async with opened(tmp_path) as books:
        assert books.adopted.refused == []
        assert not await books.monero.has_transaction("aa")
    assert check_journal(tmp_path, tmp_path / FOLDER, [])[0] == []
