"""The payment journals of replicas on one database: each transfer is paid at most once, and no
payment is lost, over kills, pauses and restores (docs/adr/0014-replicas.md).
"""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.journal.files import FOLDER, NO_LEASE, Mark
from rpcsvc.settlement.onchain.journal.writer import JournalOptions, PaymentJournal
from rpcsvc.settlement.onchain.journal_replay import (
    JournalReplay,
    JournalWatch,
    ReplayResult,
    open_journal,
)
from rpcsvc.settlement.onchain.monero import records as monero
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.pause import PauseRow, PauseSwitch, SharedPause
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, SqliteDatabase
from rpcsvc.store.database import Statement
from rpcsvc.store.leases import (
    SETTLER,
    DatabaseReplaced,
    Fenced,
    HeldLease,
    Lease,
    LeaseLost,
    Leases,
)
from tests.sandbox import ManualClock
from tests.unit.journaled import put_back
from tests.unit.orders import NOW

REPLICAS = "abc"


class Killed(Exception):
    """The process died before its commit."""


class Dying(Fenced):
    """A fenced database at whose next write the process may be killed."""

    dies = False

    async def write(self, statements: Sequence[Statement]) -> None:
        if self.dies:
            raise Killed
        await super().write(statements)


@dataclass
class Settler:
    """A replica that took the lease; ``adopted``: the payments adopted from its journal."""

    name: str
    lease: HeldLease
    journal: PaymentJournal
    database: Dying
    switch: PauseSwitch
    adopted: ReplayResult

    def pause(self) -> str | None:
        """Why it pays nothing."""
        return self.switch.reason()

    @property
    def ledger(self) -> MoneroLedger:
        return MoneroLedger(self.database, self.journal)


@dataclass
class World:
    """A database, a folder for each replica, and a chain: what was published, by transfer."""

    folder: Path
    database: SqliteDatabase
    random: random.Random
    chain: dict[str, set[str]] = field(default_factory=dict)
    settler: Settler | None = None
    zombie: Settler | None = None
    signed: int = 0

    def switch(self, name: str) -> PauseSwitch:
        """The pause in a replica's folder."""
        (self.folder / name).mkdir(exist_ok=True)
        return PauseSwitch(self.folder / name)

    async def resume(self) -> None:
        """Resume payouts at all replicas, as the operator does."""
        for name in REPLICAS:
            self.switch(name).resume()
        await PauseRow(self.database).resume()

    async def take_over(
        self, name: str, *, watched: Sequence[Mark] | None, is_alone: bool = False
    ) -> Settler:
        """The replica takes the lease, opens its journal, and publishes recorded payments."""
        holder = f"{name}-{self.random.getrandbits(32):x}"
        token = await Leases(self.database).take(SETTLER, holder, None)
        assert token is not None
        lease = Lease(SETTLER, token, holder=holder)
        database = Dying(self.database, lease)
        journal, switch = self.journal(name, lease.on_record), self.switch(name)
        shared = SharedPause(PauseRow(database), switch, ManualClock())
        await shared.look()
        adopted = await open_journal(
            journal, database, ManualClock(), switch, watched, shared=None if is_alone else shared
        )
        self.settler = Settler(name, lease.on_record, journal, database, switch, adopted)
        await self.publish()
        return self.settler

    def journal(self, name: str, lease: HeldLease = NO_LEASE) -> PaymentJournal:
        """The journal in a replica's folder, not opened."""
        place = self.folder / name
        place.mkdir(exist_ok=True)
        options = JournalOptions(place / FOLDER)
        return PaymentJournal(options, ManualClock(), self.random.randbytes, lease=lease)

    def watch(self, name: str = "watching") -> JournalWatch:
        """A standby's watch."""
        return JournalWatch(self.database, self.journal(name))

    async def watched(self) -> list[Mark] | None:
        """The journal marks that a standby read last."""
        watch = self.watch()
        await watch()
        return watch.marks

    def pause(self) -> str | None:
        """Why the settler pays nothing."""
        return None if self.settler is None else self.settler.pause()

    def may_pay(self) -> bool:
        return self._is_usable() and self.pause() is None

    def _is_usable(self) -> bool:
        return self.settler is not None and self.settler.journal.is_usable

    async def publish(self) -> None:
        """Publish all recorded payments that are not on the chain."""
        if self.settler is None or self.pause() is not None:
            return
        states = (monero.MoneroPaymentState.PREPARED, monero.MoneroPaymentState.PUBLISHED)
        for item in await self.settler.ledger.payments_in(*states):
            self.chain.setdefault(item.payment_id, set()).add(item.txid)
            if item.state is monero.MoneroPaymentState.PREPARED:
                await self.settler.ledger.put_payment(_published(item))

    async def sign(self, at: Settler, transfer: str, *, dies: bool = False) -> None:
        """Journal and commit a payment. Raises Killed, LeaseLost and Unavailable."""
        self.signed += 1
        txid = f"{self.signed:064x}"
        at.database.dies = dies
        await at.ledger.add_payment(
            monero.MoneroPayment(
                transfer, monero.MoneroPurpose.TRANSFER, "address", 10, 1, txid, "02ff", "metadata",
                "key", (f"image-{txid}",), NOW,
            )
        )  # fmt: skip

    async def unpaid(self) -> str:
        """The first transfer that the database has no payment for."""
        ledger = MoneroLedger(self.database, _none)
        number = 0
        while await ledger.payment(f"ord_{number}/payout/1") is not None:
            number += 1
        return f"ord_{number}/payout/1"

    async def recorded(self) -> set[str]:
        rows = await self.database.fetch("SELECT txid FROM monero_payments")
        return {row["txid"] for row in rows}

    def backup(self, name: str = "copy") -> Path:
        with (
            closing(sqlite3.connect(self.folder / DATABASE_NAME)) as source,
            closing(sqlite3.connect(self.folder / name)) as target,
        ):
            source.backup(target)
        return self.folder / name

    async def restore(self, copy: Path) -> None:
        """Follow docs/operate/cluster.md: stop replicas, pause payouts, put the copy back."""
        self.settler = self.zombie = None
        for name in REPLICAS:
            self.switch(name).pause("restoring")
        await self.database.close()
        kept = copy.with_name("kept")
        shutil.copyfile(copy, kept)
        put_back(self.folder, kept)
        self.database = await SqliteDatabase.open(self.folder)

    async def fail_over(self, copy: Path) -> None:
        """Put a copy in place while the replicas run."""
        with (
            closing(sqlite3.connect(copy)) as source,
            closing(sqlite3.connect(self.folder / DATABASE_NAME)) as target,
        ):
            source.backup(target)
        # What was read before the copy is not read again.
        self.database._release_snapshot()

    async def adopt_all(self, names: Sequence[str]) -> list[str]:
        """Each replica takes over in turn, if its journal can be opened; the refusals of journals.

        The first one has seen no other settler.
        """
        watched, waiting, refused = None, list(names), list[str]()
        for _ in names:
            for name in waiting[:]:
                at = await self.take_over(name, watched=watched)
                watched = await self.watched()
                refused += at.adopted.refused
                if at.journal.is_usable:
                    waiting.remove(name)
        assert waiting == [] or refused
        return refused

    def check(self) -> None:
        assert all(len(txids) == 1 for txids in self.chain.values()), self.chain


_none = PaymentJournal(JournalOptions(Path("none")), ManualClock(), lambda n: b"\x00" * n)


def _published(item: monero.MoneroPayment) -> monero.MoneroPayment:
    return replace(item, state=monero.MoneroPaymentState.PUBLISHED, relayed_at=NOW)


@asynccontextmanager
async def world(folder: Path, seed: int = 0) -> AsyncIterator[World]:
    made = World(folder, await SqliteDatabase.open(folder), random.Random(seed))
    try:
        yield made
    finally:
        await made.database.close()


async def killed_before_it_adopts(up: World, name: str, patch: pytest.MonkeyPatch) -> None:
    """A replica takes the lease, and dies before a line of its journal is in the database."""

    async def killed(*_: object) -> ReplayResult:
        raise Killed

    with patch.context() as patched:
        patched.setattr(JournalReplay, "run", killed)
        with pytest.raises(Killed):
            await up.take_over(name, watched=None)


async def paid(up: World, at: Settler) -> str:
    transfer = await up.unpaid()
    await up.sign(at, transfer)
    await up.publish()
    return transfer


async def test_standby_that_watched_goes_on_with_a_journal_of_its_own(tmp_path: Path) -> None:
    async with world(tmp_path) as up:
        await paid(up, await up.take_over("a", watched=None))
        second = await up.take_over("b", watched=await up.watched())
        assert second.journal.is_usable
        await paid(up, second)
        first = await up.take_over("a", watched=None)
        assert not first.journal.is_usable, "it has not seen what the other one did"
        assert await up.watched() is None, "who can't pay vouches for nothing"
        await up.take_over("b", watched=None)
        first = await up.take_over("a", watched=await up.watched())
        assert first.journal.is_usable
        assert first.adopted.payments == []
        assert len(up.chain) == 2


async def looks(watch: JournalWatch, count: int) -> list[HeldLease]:
    """The leases to take over that some looks name."""
    found = [await watch() for _ in range(count)]
    return [lease for lease in found if lease is not None]


async def test_last_settler_takes_over_from_one_that_cannot_pay(tmp_path: Path) -> None:
    async with world(tmp_path) as up:
        await paid(up, await up.take_over("a", watched=None))
        stranger = await up.take_over("b", watched=None)
        assert not stranger.journal.is_usable
        last, third = up.watch("a"), up.watch("c")
        assert await looks(last, 30) == [], "a holder that starts opens its journal meanwhile"
        assert await looks(last, 1) == [stranger.lease]
        assert await looks(third, 40) == [], "it has not seen the last settler either"


async def test_standby_that_saw_the_last_settler_takes_over(tmp_path: Path) -> None:
    async with world(tmp_path) as up:
        await paid(up, await up.take_over("a", watched=None))
        third = up.watch("c")
        await third()
        stranger = await up.take_over("b", watched=None)
        assert await looks(third, 31) == [stranger.lease]
        again = await up.take_over("c", watched=third.marks)
        await paid(up, again)
        up.check()
        assert await looks(up.watch("a"), 40) == [], "the holder pays"


async def test_standby_with_a_damaged_journal_does_not_take_over(tmp_path: Path) -> None:
    async with world(tmp_path) as up:
        await paid(up, await up.take_over("a", watched=None))
        await up.take_over("b", watched=None)
        (file,) = (tmp_path / "a" / FOLDER).glob("*.journal")
        lines = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join(lines[:-1]))
        assert await looks(up.watch("a"), 40) == []
        file.write_bytes(b"".join(lines))
        assert len(await looks(up.watch("a"), 31)) == 1


async def test_standby_does_not_go_on_with_a_copy_that_has_less(tmp_path: Path) -> None:
    """As after a fail-over of PostgreSQL that lost commits, within the time of the lease."""
    async with world(tmp_path) as up:
        first = await up.take_over("a", watched=None)
        await paid(up, first)
        before = up.backup()
        await paid(up, first)
        watch = up.watch()
        await watch()
        await up.database.close()
        put_back(tmp_path, before)
        up.database = await SqliteDatabase.open(tmp_path)
        again = up.watch()
        again.marks = watch.marks
        await again()
        second = await up.take_over("b", watched=again.marks)
        assert not second.journal.is_usable


@pytest.mark.parametrize("dies", [False, True])
async def test_copy_below_a_settler_gets_no_second_payment(tmp_path: Path, dies: bool) -> None:
    """As after a fail-over of PostgreSQL that lost commits, and nothing but these."""
    async with world(tmp_path) as up:
        first = await up.take_over("a", watched=None)
        await paid(up, first)
        before = up.backup()
        lost = await paid(up, first)
        await up.fail_over(before)
        assert await up.unpaid() == lost
        # It looks once more by a write, at which it may be killed: before there is a line.
        with pytest.raises(Killed if dies else DatabaseReplaced):
            await up.sign(first, lost, dies=dies)
        assert dies or not up.may_pay()
        again = await up.take_over("a", watched=None, is_alone=True)
        assert again.adopted.payments == [lost]
        await paid(up, again)
        up.check()
        assert len(up.chain) == 3


async def test_alone_the_journal_of_another_database_is_not_adopted(tmp_path: Path) -> None:
    """Even if its lines have a later fencing token."""
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    async with world(tmp_path / "own") as up, world(tmp_path / "other", seed=1) as other:
        await paid(up, await up.take_over("a", watched=None, is_alone=True))
        for _ in range(3):
            await paid(other, await other.take_over("a", watched=None, is_alone=True))
        shutil.rmtree(tmp_path / "own" / "a")
        shutil.copytree(tmp_path / "other" / "a", tmp_path / "own" / "a")
        found = await up.take_over("a", watched=None, is_alone=True)
        assert not found.journal.is_usable
        assert (len(await up.recorded()), found.adopted) == (1, ReplayResult())


async def test_uncommitted_line_is_void_once_another_settled(tmp_path: Path) -> None:
    async with world(tmp_path) as up:
        first = await up.take_over("a", watched=None)
        transfer = await paid(up, first)
        due = await up.unpaid()
        with pytest.raises(Killed):
            await up.sign(first, due, dies=True)
        second = await up.take_over("b", watched=await up.watched())
        assert await paid(up, second) == due
        copy = up.backup()
        first = await up.take_over("a", watched=await up.watched())
        assert first.adopted == ReplayResult(), "nothing is adopted, and nothing refused"
        assert up.pause() is None
        await up.restore(copy)  # also not on an older copy
        assert await up.adopt_all("ab") == []
        assert (await up.recorded()) == {txid for txids in up.chain.values() for txid in txids}
        up.check()
        assert set(up.chain) == {transfer, due}


async def test_uncommitted_line_is_adopted_where_nobody_settled(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as up:
        first = await up.take_over("a", watched=None)
        due = await up.unpaid()
        with pytest.raises(Killed):
            await up.sign(first, due, dies=True)
        again = await up.take_over("a", watched=None)
        assert again.adopted.payments == [due]
        assert up.pause() is None
        up.check()


async def test_uncommitted_line_written_twice_is_no_sign_of_a_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settler was killed after it wrote the line again and before it adopted it."""
    async with world(tmp_path) as up:
        first = await up.take_over("a", watched=None)
        await paid(up, first)
        due = await up.unpaid()
        with pytest.raises(Killed):
            await up.sign(first, due, dies=True)
        await killed_before_it_adopts(up, "a", monkeypatch)
        again = await up.take_over("a", watched=None)
        assert again.adopted.payments == [due]
        assert up.pause() is None
        up.check()


async def test_zombie_writes_one_line_and_voids_it(tmp_path: Path) -> None:
    async with world(tmp_path) as up:
        first = await up.take_over("a", watched=None)
        due = await up.unpaid()
        second = await up.take_over("b", watched=await up.watched())
        line = first.journal.mark.at.line
        for _ in range(2):
            with pytest.raises(LeaseLost):
                await up.sign(first, due)
        assert first.journal.mark.at.line == line + 2, "a line and its void, and no other"
        assert await paid(up, second) == due
        first = await up.take_over("a", watched=await up.watched())
        assert first.adopted == ReplayResult()
        up.check()
        assert await up.unpaid() != due


async def test_copy_from_before_a_fail_over_gets_the_lines_of_both(tmp_path: Path) -> None:
    async with world(tmp_path) as up:
        first = await up.take_over("a", watched=None)
        await paid(up, first)
        copy = up.backup()
        await paid(up, first)
        await paid(up, await up.take_over("b", watched=await up.watched()))
        before = await up.recorded()
        await up.restore(copy)
        assert await up.adopt_all("ab") == []
        assert await up.recorded() == before
        up.check()


async def test_restored_copy_pauses_payouts_by_itself(tmp_path: Path) -> None:
    """Also if the operator did not pause them: other journals may have more payments."""
    async with world(tmp_path) as up:
        first = await up.take_over("a", watched=None)
        await paid(up, first)
        copy = up.backup()
        await paid(up, first)
        second = await up.take_over("b", watched=await up.watched())
        await paid(up, second)
        await paid(up, second)
        await up.restore(copy)
        await up.resume()
        assert len((await up.take_over("b", watched=None)).adopted.payments) == 2
        assert "a restored copy" in str(await PauseRow(up.database).reason()), "at all replicas"


async def test_copy_is_paused_at_all_replicas_before_it_is_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long adoption looks like a journal that can't be opened: another replica takes over."""
    async with world(tmp_path) as up:
        first = await up.take_over("a", watched=None)
        await paid(up, first)
        second = await up.take_over("b", watched=await up.watched())
        await paid(up, second)
        copy = up.backup()
        first = await up.take_over("a", watched=await up.watched())
        await paid(up, first)
        await paid(up, first)
        await up.restore(copy)
        await up.resume()
        await killed_before_it_adopts(up, "a", monkeypatch)
        second = await up.take_over("b", watched=None)
        assert "a restored copy" in str(second.pause())


class Walk:
    """A seeded sequence of payments, kills, take-overs, zombies, backups and restores.

    Standbys look regularly; who takes over has looked since it started, or has just started.
    """

    def __init__(self, up: World) -> None:
        self.up = up
        self.copies: list[Path] = []
        self.watches: dict[str, JournalWatch] = {}
        self.is_over = False

    async def step(self) -> None:
        up, chance = self.up, self.up.random
        for name in REPLICAS:
            if up.settler is not None and up.settler.name != name and chance.random() < 0.7:
                await self.watches.setdefault(name, up.watch(name))()
        acts = (self.pay, self.pay, self.die, self.leave, self.take, self.zombie, self.back_up)
        await chance.choice((*acts, self.restore))()
        if up.settler is None:
            await self.take()

    async def pay(self) -> None:
        if self.up.may_pay() and self.up.settler is not None:
            await paid(self.up, self.up.settler)

    async def die(self) -> None:
        """Kill the settler between journal line and commit."""
        if self.up.may_pay() and self.up.settler is not None:
            with pytest.raises(Killed):
                await self.up.sign(self.up.settler, await self.up.unpaid(), dies=True)
            self.up.settler = None

    async def leave(self) -> None:
        """Kill the settler between commit and publication."""
        if self.up.may_pay() and self.up.settler is not None:
            await self.up.sign(self.up.settler, await self.up.unpaid())
            self.up.settler = None

    async def take(self) -> None:
        up, name = self.up, self.up.random.choice(REPLICAS)
        if up.settler is not None and up.settler.name != name:
            up.zombie = up.settler
        elif up.zombie is not None and up.zombie.name == name:
            up.zombie = None  # a data directory has one process
        watch = self.watches.pop(name, None)
        await up.take_over(name, watched=None if watch is None else watch.marks)

    async def zombie(self) -> None:
        if self.up.zombie is not None:
            dies = self.up.random.random() < 0.5
            with pytest.raises((Killed, LeaseLost, Unavailable)):
                await self.up.sign(self.up.zombie, await self.up.unpaid(), dies=dies)
            self.up.zombie = None

    async def back_up(self) -> None:
        self.copies.append(self.up.backup(f"copy{len(self.copies)}"))

    async def restore(self) -> None:
        if not self.copies:
            return
        up = self.up
        self.watches.clear()
        await up.restore(up.random.choice(self.copies))
        if await up.adopt_all(up.random.sample(REPLICAS, len(REPLICAS))):
            self.is_over = True  # payouts stay paused until the operator resolves it
            return
        published = {txid for txids in up.chain.values() for txid in txids}
        assert published <= await up.recorded()
        await up.resume()
        await up.publish()


@pytest.mark.parametrize("seed", range(40))
async def test_random_deaths_and_restores_pay_once_and_lose_nothing(
    tmp_path: Path, seed: int
) -> None:
    async with world(tmp_path, seed) as up:
        await up.take_over("a", watched=None)
        walk = Walk(up)
        for _ in range(40):
            await walk.step()
            up.check()
            if walk.is_over:
                break
        assert up.chain
