"""The operator of a universe of the engine onchain: pauses, resumes, withdraws and closes payouts.

What a pause and a withdrawal must not do is checked from outside, on the rows that replicas write
and on the chains.
"""

from __future__ import annotations

import asyncio
import random
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest.mock import patch

from rpcsvc.audit.records import ChainMoved, Difference
from rpcsvc.cli.recovery import transfers
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.settlement.onchain.pause import PauseRow, PauseSwitch
from rpcsvc.settlement.onchain.unrecorded import NotAdopted
from tests.simulation.database import LEASE_MS, SimulatedDatabase

if TYPE_CHECKING:
    from tests.simulation.onchain import OnchainUniverse

_OF_A_REORGANISATION: Final = "audit: deposit_unmined"
_OF_AN_AUDIT: Final = "audit: "
_OF_A_LOSS: Final = "audit: deposit_lost of"
_OF_TRANSACTIONS: Final = "transactions of "
# A journal that could not be read at the start adopts nothing before the next one.
_OF_A_COPY: Final = ("the database is a restored copy", _OF_TRANSACTIONS)
# Before the replica has noticed, its own looks at what the database lacks may pause it.
_OF_A_FAIL_OVER: Final = (_OF_AN_AUDIT, _OF_TRANSACTIONS)
_OWN: Final = "the operator looks into something"
_LOOK_SECONDS: Final = 60
_NONCE: Final = re.compile(r"nonce (\d+) of the hot wallet on (\w+)")
_PAUSES: Final = (5, 60, 300)
# Seconds from the start of one replica to that of the next when all were stopped.
_APART_SECONDS: Final = 10
# How old (s) copies are that are restored, and what a late standby has.
_AGES: Final = (1, 10, 60)
_LAGS: Final = (1, 3, 6)
# Units of withdrawals: what comes first is seldom drawn, and large.
_AMOUNTS: Final = {
    "arbitrum": (300_000_000_000, 5_000_000_000, 70_000_000, 1_000_000),
    "monero": (900_000_000_000_000, 20_000_000_000_000, 3_000_000_000_000, 100_000_000_000),
    "base": (300_000_000_000, 5_000_000_000, 70_000_000, 1_000_000),
}
_ROW: Final = "SELECT network, address, units, state, txid FROM withdrawals WHERE withdrawal_id = ?"
_LOST: Final = (
    "SELECT DISTINCT d.network, d.txid, EXISTS (SELECT 1 FROM unfinal_deposits u"
    " WHERE u.network = d.network AND u.txid = d.txid) AS is_early FROM deposits d"
    " WHERE d.state = 'removed' AND d.transfer_id IS NOT NULL"
)
_IMAGES: Final = (
    "SELECT key_image FROM monero_key_images WHERE payment_id = :name OR payment_id IN"
    " (SELECT payment_id FROM monero_payees WHERE transfer_id = :name)"
)
_IS_CLOSED: Final = "SELECT 1 FROM closed_by_hand WHERE transfer_id = ?"
# What health asks for, with the transfer that it names.
_CLOSE: Final = re.compile(r"rpcsvc payouts close (\S+) --note TEXT")
# What the command says when it has the wallet spend the inputs of a payout itself.
_HAS_RIVAL: Final = "is not closed yet"
_OF_NO_ORDER: Final = "are of no order"
_TXID: Final = re.compile("0x[0-9a-f]{64}")
_TRANSFERS: Final = "SELECT transfer_id FROM transfers"
_ENDS: Final = ("settled", "failed", "cancelled")


def units_of(text: str) -> int:
    """The units of an amount of USDC, such as 12.5 USDC."""
    return int(Decimal(text.removesuffix(" USDC")).scaleb(6))


class Wanted(NamedTuple):
    """A withdrawal that the operator asked for. ``units`` are those of no other one."""

    withdrawal_id: str
    network: str
    units: int

    def params(self, to: str, units: int | None = None) -> dict[str, Any]:
        """The call's params; ``units``: other ones than are wanted."""
        digits = 12 if self.network == "monero" else 6
        whole, part = divmod(self.units if units is None else units, 10**digits)
        return {
            "withdrawalId": self.withdrawal_id, "network": self.network,
            "amount": f"{whole}.{part:0{digits}}", "to": to,
        }  # fmt: skip


class Operator:
    """Looks at the service once a minute, and does more by the universe's faults."""

    def __init__(self, universe: OnchainUniverse, chance: random.Random, *, is_busy: bool) -> None:
        self._universe = universe
        self._chance = chance
        self._is_busy = is_busy
        self._database = SimulatedDatabase(universe.server, chance, 0.0)
        self._row = PauseRow(self._database)
        self._switches = [
            PauseSwitch(universe.folder / f"replica-{each.number}") for each in universe.replicas
        ]
        self._is_drill = False
        # Which replica was the first to start again.
        self._first = 0
        # Whether an older copy of the database was put in place.
        self.has_restored = False
        # Whether it does so at random times.
        self.restores = False
        # Whether copies are put in place below replicas that run, as by a server that fails over.
        self.fails_over = False
        # How the reasons of pauses begin that the operator has an explanation for.
        self.expects: tuple[str, ...] = (_OF_A_REORGANISATION,)
        self._is_copied = self._is_withdrawing = False
        # Transactions on the wrong network whose sender was paid back.
        self._paid_back: set[str] = set()
        # What the service said of each: whether it was made.
        self.wanted: dict[Wanted, bool] = {}

    def address(self, network: str) -> str:
        """The operator's own address, the only one that withdrawals may pay."""
        return self._universe.operator_addresses[network]

    async def look(self) -> None:
        """Resume what an audit has paused because a deposit's block is gone.

        Once it is mined again, if no pool has it: the service gives out again what it sent itself.
        """
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self._look()
            except (Unavailable, RpcFailure, ChainMoved):
                continue  # looked at again in a minute

    async def _look(self) -> None:
        universe = self._universe
        if len(universe.evms) > 1:
            await self.pay_back()
        reasons = [switch.reason() for switch in self._switches] + [await self._row.reason()]
        for reason in filter(None, reasons):
            of_others = reason.replace(_OWN, "").strip("; ")
            is_of_a_copy = self.has_restored and of_others.startswith(_OF_A_COPY)
            if universe.counts["failovers"]:
                is_of_a_copy |= of_others.startswith(_OF_A_FAIL_OVER)
            if is_of_a_copy:
                if found := await universe.audit():
                    if self._first >= len(universe.replicas):
                        await self._explain(found)
                    self._start_in_turn()
                    return  # it is still adopting what the journals have
            elif of_others.startswith(_OF_A_LOSS):
                if any(not row["is_early"] for row in self._lost()):
                    return
            elif of_others and not of_others.startswith(self.expects):
                universe.violated(f"payouts are paused: {reason}")
        if any(reasons) and not self._is_drill:
            universe.counts["resumed"] += 1
            for switch in self._switches:
                switch.resume()
            await self._row.resume()

    async def _explain(self, found: Sequence[Difference]) -> None:
        """Explain the sweeps that no journal has adopted, as the audit's hints ask, and what moved
        nothing of the hot wallet's at a nonce that it names: a signed payment of a person.

        The line of one is void where another replica has settled since: a commit that a fail-over
        dropped looks like one that was refused.
        """
        swept = {each.subject for each in found if each.kind == "unrecorded_payment"}
        spent = {txid for each in found for txid in _TXID.findall(each.hint)}
        sweeps = self._universe.sweeps()
        lost = (swept | spent) & sweeps.keys()
        for txid in sorted(lost):
            await self.annotate(sweeps[txid], txid, "a sweep that the database has lost")
        for each in found:
            if (named := _NONCE.fullmatch(each.subject)) is not None:
                network = self._universe.evms[named[2]]
                txid = network.harmless_at(self._universe.hot, int(named[1]))
                if txid is not None and txid not in lost:
                    await self.annotate(network.name, txid, "moved nothing of ours")

    def _start_in_turn(self) -> None:
        """Stop all of several replicas, and start another one first than before.

        Only the one that takes the lease adopts what its journal has.
        """
        replicas = self._universe.replicas
        self._first += 1
        for place in range(len(replicas)) if len(replicas) > 1 else ():
            replica = replicas[(self._first + place) % len(replicas)]
            self._universe.restart(replica, LEASE_MS / 1000 + _APART_SECONDS * place)

    async def drill(self) -> None:
        """Pause payouts at random times; resume them at the next look."""
        while True:
            await asyncio.sleep(10 + 100 * self._chance.random())
            if not self._universe.is_striking or not self._is_busy:
                continue
            try:
                await self._row.pause(_OWN, self._universe.now_ms())
            except Unavailable:
                continue
            self._universe.counts["drills"] += 1
            self._is_drill = True
            await asyncio.sleep(self._chance.choice(_PAUSES))
            self._is_drill = False

    async def pause(self, seconds: float, then: Callable[[], None]) -> None:
        """Pause payouts for ``seconds``, and resume them at once after ``then``."""
        self._is_drill = True
        await self._row.pause(_OWN, self._universe.now_ms())
        await asyncio.sleep(seconds)
        then()
        await self._row.resume()
        self._is_drill = False

    async def restore(self) -> None:
        """Put older copies of the database in place, with the journal as it is.

        Once everybody has ordered, and while nothing is withdrawn: orders and withdrawals since a
        copy would be lost with it.
        """
        while self.restores:
            await asyncio.sleep(5 + 20 * self._chance.random())
            is_time = self._universe.is_striking and self._universe.has_all_orders
            if not is_time or self._is_withdrawing:
                continue
            self._is_copied = True
            copied = self._universe.server.copy()
            await asyncio.sleep(self._chance.choice(_LAGS if self.fails_over else _AGES))
            if self._universe.is_striking and not self._lacks_a_transfer(copied):
                self._put_in_place(copied)
            self._is_copied = False

    def _put_in_place(self, copied: sqlite3.Connection) -> None:
        if not self.fails_over:
            self._universe.counts["restores"] += 1
            self.has_restored = True
            self._universe.restore(copied)
        elif self._lease_of(copied) == self._lease_of(self._universe.server.connection):
            # Otherwise no journal shows what the last settler has paid: the operator has to pause.
            self._universe.fail_over(copied)

    @staticmethod
    def _lease_of(database: sqlite3.Connection) -> list[int]:
        return [row[0] for row in database.execute("SELECT token FROM leases")]

    def _lacks_a_transfer(self, copied: sqlite3.Connection) -> bool:
        """Return whether a transfer was signed that a copy has not planned.

        The copy may plan it for other deposits of the order, which stops then, until somebody pays
        it by hand. The scenario ``restore`` has the copies that plan it as it was.
        """
        known = {row[0] for row in copied.execute(_TRANSFERS)}
        signed = self._universe.server.connection.execute(f"{_TRANSFERS} WHERE state <> 'planned'")
        return any(row[0] not in known for row in signed)

    async def rotate_keys(self) -> None:
        """Replace the signing key at random times."""
        while (rings := self._universe.key_rings) is not None:
            await asyncio.sleep(5 + 60 * self._chance.random())
            if self._universe.is_striking:
                self._universe.counts["rotations"] += 1
                rings.rotate()

    async def withdraw(self) -> None:
        """Take money out at random times: ask until there is an answer, perhaps twice at once."""
        networks = self._universe.operator_addresses
        left = {name: list(amounts) for name, amounts in _AMOUNTS.items() if name in networks}
        while True:
            await asyncio.sleep(5 + 40 * self._chance.random())
            network = self._chance.choice(list(left))
            if not self._universe.is_striking or not self._is_busy or not left[network]:
                continue
            if self._is_copied:
                continue
            self._is_withdrawing = True
            units = left[network].pop(self._chance.randrange(len(left[network])))
            await self.take(network, units, self._chance.choice([1, 1, 2]))
            self._is_withdrawing = False

    async def take(self, network: str, units: int, copies: int = 1) -> None:
        """Take ``units`` out, or little more; ``copies``: how often that is asked for at once."""
        number = len(self.wanted) + 1
        wanted = Wanted(f"wd_{self._universe.seed:012}-{number}", network, units + number)
        self.wanted[wanted] = False
        await asyncio.gather(*(self._make(wanted) for _ in range(copies)))

    async def _make(self, wanted: Wanted) -> None:
        """Make it, or learn that it is refused."""
        answer = await self._ask(wanted.params(self.address(wanted.network)))
        self.wanted[wanted] |= answer.get("isMade", False)
        if "error" in answer:
            self._universe.violated(f"{wanted} was refused: {answer}")

    async def _ask(self, params: dict[str, Any]) -> dict[str, Any]:
        name = "admin.withdrawals.make"
        return await self._universe.administer(name, self._chance, params)

    async def close(self, late: set[str]) -> bool:
        """Close those transfers that health names; return whether anything was done for one.

        The replicas are stopped meanwhile, and the lease of the last one has ended.
        """
        universe = self._universe
        named = late & set(_CLOSE.findall(await self._health()))
        if not named:
            return False
        for replica in universe.replicas:
            replica.kill()
        await asyncio.sleep(LEASE_MS / 1000)
        has_done = [await self._close(name) for name in sorted(named)]
        for replica in universe.replicas:
            replica.start()
        return any(has_done)

    async def _close(self, name: str) -> bool:
        """Run the command, as it is given; return False when it refuses."""
        universe, settings = self._universe, self._universe.operator_settings()
        closing = transfers._Closing(settings, self._database, "health has asked for it")
        universe.loop.note(f"close {name}")
        with patch.object(transfers, "system_random", self._chance.randbytes):
            try:
                try:
                    said = await closing.run(name, None)
                except NotAdopted as refused:
                    if "--unproven" not in str(refused) or self._is_on_chain(name):
                        raise
                    closing.is_unproven = True
                    said = await closing.run(name, None)
            except NotAdopted as refused:
                universe.loop.note(f"not closed: {refused}")
                return False
        universe.loop.note(said)
        has_rival = _HAS_RIVAL in said
        universe.counts["unproven"] += closing.is_unproven
        universe.counts["rivals" if has_rival else "closed"] += 1
        return True

    def _is_on_chain(self, name: str) -> bool:
        """Return whether the network has what a payment of XMR spends: what other nodes say."""
        images = self._universe.server.connection.execute(_IMAGES, {"name": name}).fetchall()
        return any(row["key_image"] in self._universe.monero.spent for row in images)

    async def _health(self) -> str:
        """The words of all replicas that run."""
        checks = [
            check
            for replica in self._universe.replicas
            if replica.up is not None
            for check in (await replica.up.service.venue.health()).values()
        ]
        return "; ".join(check.detail or "" for check in checks)

    async def annotate(self, network: str, txid: str, note: str) -> None:
        """Say what a transaction was, which the books do not have."""
        if not await self._annotate(network, txid, note):
            self._universe.violated(f"{txid} on {network} was not explained")

    async def _annotate(self, network: str, txid: str, note: str) -> bool:
        """Return whether it is explained now; a node may lack it just now."""
        name, params = "admin.treasury.annotate", {"network": network, "txid": txid, "note": note}
        answer = await self._universe.administer(name, self._chance, params)
        return bool(answer.get("moved"))

    async def treasury(self) -> dict[str, Any]:
        """Return the view that `rpcsvc treasury` shows."""
        return await self._universe.administer("admin.treasury.show", self._chance, {})

    async def pay_back(self) -> None:
        """Pay back by hand what came on the wrong network, as health asks, and annotate it.

        Each once: a copy of the database that is put in place may list it again.
        """
        if _OF_NO_ORDER not in await self._health():
            return
        for item in (await self.treasury()).get("ofNoOrder", []):
            network, txid, units = item["network"], item["txid"], units_of(item["amount"])
            if txid not in self._paid_back:
                if not self._universe.pay_back(network, txid, item["address"], units):
                    continue  # a branch has taken it just now
                self._paid_back.add(txid)
            await self._annotate(network, txid, "paid back to its sender")

    async def write_off(self) -> None:
        """Write off each deposit that vanished after its payout, as health asks.

        One that was final may have been gone for a while, and has to be back.
        """
        for row in self._lost():
            network, txid = row["network"], row["txid"]
            if not row["is_early"]:
                self._universe.violated(f"{txid} was final, was paid out for and is lost")
            await self.annotate(network, txid, "taken back by its payer")

    def _lost(self) -> list[sqlite3.Row]:
        rows: list[sqlite3.Row] = self._universe.server.connection.execute(_LOST).fetchall()
        return rows

    async def check(self) -> None:
        """Each withdrawal was paid once, if it was made and settled, and otherwise not at all."""
        universe = self._universe
        if self.has_restored:
            # When payouts go on, those that a copy lacks are asked for again, under the same ids.
            await asyncio.sleep(2 * _LOOK_SECONDS)
            for wanted in self.wanted:
                await self._make(wanted)
            await universe.settled()
        for wanted, is_made in self.wanted.items():
            row = universe.server.connection.execute(_ROW, (wanted.withdrawal_id,)).fetchone()
            if (row is not None) != is_made:
                universe.violated(f"{wanted} is {row and tuple(row)}, the answer was {is_made}")
            if row is not None and row["state"] not in _ENDS:
                universe.violated(f"{wanted} has not ended: {row['state']}")
            to = self.address(wanted.network)
            paid = universe.received(to, wanted.network).count(wanted.units)
            is_owed = self._is_closed(wanted.withdrawal_id)
            if paid != (row is not None and row["state"] == "settled" and not is_owed):
                universe.violated(f"{wanted} was paid {paid} times: {row and tuple(row)}")
            if not is_made:
                continue
            again = await self._ask(wanted.params(to))
            if not again.get("isMade") or again["withdrawal"]["state"] != row["state"]:
                universe.violated(f"{wanted} is {row['state']}, and was answered {again}")
            if "error" not in await self._ask(wanted.params(to, wanted.units + 1)):
                universe.violated(f"{wanted} was made again with other terms")

    def _is_closed(self, name: str) -> bool:
        """Return whether it was closed: it is owed, and not paid by the service."""
        rows = self._universe.server.connection.execute(_IS_CLOSED, (name,))
        return rows.fetchone() is not None

    def strange(self) -> Iterator[str]:
        """Payments to the operator that were not asked for."""
        for network, to in self._universe.operator_addresses.items():
            known = {each.units for each in self.wanted if each.network == network}
            for units in self._universe.received(to, network):
                if units not in known:
                    yield f"{units} units were withdrawn on {network}, which nobody asked for"
