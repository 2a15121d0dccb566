"""The universe of the engine onchain: the product's own daemon clients on models of the chains.

Money is counted on the models: what came to each order's address, and what each of its addresses
got. The product's auditor, which shares no code with what it audits, compares the books as well.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from unittest.mock import patch

from typing_extensions import override

from rpcsvc import verify
from rpcsvc.audit.auditor import open_auditor
from rpcsvc.audit.books import read_books_of
from rpcsvc.audit.records import Difference
from rpcsvc.domain import usdc
from rpcsvc.orders.scheduler import worker
from rpcsvc.settings import Settings, load_settings
from rpcsvc.settings_onchain import read_chains
from rpcsvc.settlement.onchain.evm.keys import HOT_WALLET_INDEX, EvmSigner, HdKeys
from rpcsvc.settlement.onchain.journal import files
from tests.simulation.daemons import NO_FAULTS, Network, NetworkFaults
from tests.simulation.database import SimulatedDatabase
from tests.simulation.evm import GWEI, Block, EvmChain, Holding
from tests.simulation.evm_networks import ARBITRUM, BASE, EvmNetwork, moves
from tests.simulation.evm_node import EvmNode
from tests.simulation.keyrings import KeyRings
from tests.simulation.monero import MoneroChain, MonerodModel, MonerodName, Paid, XmrBlock
from tests.simulation.monero_wallet import WalletModel, address_of
from tests.simulation.operator import Operator, units_of
from tests.simulation.signers import Signers, key_of
from tests.simulation.tiers import CONFIRMATIONS, USDC, XMR, Tiers
from tests.simulation.universe import (
    Faults,
    Order,
    Universe,
    evm_address,
    faults_without,
    monero_address,
)

PRICE: Final = 165
MNEMONIC: Final = "legal winner thank year wave sausage worth useful legal winner thank yellow"
_KEYS: Final = HdKeys(MNEMONIC)
_derive = HdKeys.signer
_SITE: Final = "http://127.0.0.1:8080"
# What signs, or gives to the network: around these a crash matters most.
_CRITICAL: Final = frozenset(
    {"eth_sendRawTransaction", "/send_raw_transaction", "relay_tx", "transfer"}
)
# A wallet's ``transfer`` only signs: what it gives is committed under the lease, then published.
PUBLISHING: Final = _CRITICAL - {"transfer"}
# Requests that are together as likely aimed at as each that signs or publishes.
_REQUESTS: Final = 50
_OPENING_OUTPUTS: Final = 60
# More than the service looks back at its first start.
_OPENING_BLOCKS: Final = 2_100
# Seconds after which health names what is published and not mined.
_NAMED_AFTER: Final = 3_600
# How long (s) a node keeps a replaced branch, and how often it answers, for each time that another
# one does.
_KEPT_SECONDS: Final = (30, 90, 300)
_KEPT_SHARES: Final = (0.2, 1.0, 4.0)
# Blocks that a Monero node lacks which answers alone, and for how long (s) it does.
_LATE_BLOCKS: Final = (1, 2, 5, 15)
_LATE_SECONDS: Final = (5, 30, 90)
# Of people in universes with faults, those who pay USDC by signing; and of these, those who send
# nothing in addition.
_SIGN: Final = 0.3
_SIGN_ALONE: Final = 0.8
# Where branches are deeper than finality, a signature outlives the faults: one that has run out is
# not mined again, and no service can prevent that loss. The service takes an hour at most.
_LASTING_SECONDS: Final = 3_000
RICH: Final = Holding(ether=1_000 * 10**18, units=1_000_000 * USDC)
# With little, refunds wait for sweeps, and payouts for each other.
POOR: Final = Holding(RICH.ether, units=5_000 * USDC)
# Of universes with faults, those whose hot wallet begins with little.
_SHARE_OF_POOR: Final = 0.4
# Of universes with faults, those that count deposits before they are final.
_EARLY: Final = 0.5
# Of universes with one replica and a busy operator, those in which older copies are restored.
_RESTORED: Final = 0.9
# Of universes with a busy operator, those whose database fails over to a late standby.
_FAILS_OVER: Final = 0.4
# Of payers where deposits count early, those who take theirs back, at least.
_CHEATS: Final = 0.15
# Of universes with faults, those whose answers are signed.
_SIGNING: Final = 0.3
_TRIES: Final = 10
# How long (s) a payer waits for a depth at which to take a payment back.
_PATIENCE: Final = 300
# Of payers, those who pay in two pieces.
_PIECES: Final = 0.1
# Of universes with faults, those whose operator pauses and withdraws.
_BUSY: Final = 0.7
# Of universes with faults, those with a second EVM chain.
_TWO_CHAINS: Final = 0.5
# How long (s) the nodes of one network hang, or lag, while those of the others do not.
_HANG_SECONDS: Final = (10, 60, 300)
# Of people who pay USDC where there are two chains, those who pay on the wrong one; and of these,
# those who do not pay in addition as they should.
_MISDIRECTED: Final = 0.25
_MISDIRECTED_ALONE: Final = 0.5
_UNDER_WAY: Final = (
    "SELECT EXISTS (SELECT 1 FROM deposits WHERE state = 'seen'), EXISTS (SELECT 1 FROM transfers"
    " WHERE state NOT IN ('settled', 'failed', 'cancelled')), EXISTS (SELECT 1 FROM withdrawals"
    " WHERE state NOT IN ('settled', 'failed', 'cancelled'))"
)
_SETTLED_XMR: Final = (
    "SELECT transfer_id, state, txid FROM (SELECT transfer_id, network, state, txid FROM transfers"
    " UNION ALL SELECT withdrawal_id, network, state, txid FROM withdrawals)"
    " WHERE network = 'monero' AND state = 'settled'"
    " AND transfer_id NOT IN (SELECT transfer_id FROM closed_by_hand)"
)
_SETTLED: Final = "SELECT address FROM transfers WHERE state = 'settled'"
# A transfer that began before all faults had ended, and is under way still.
_LATE: Final = (
    "SELECT transfer_id, state FROM transfers WHERE state NOT IN ('settled', 'failed', 'cancelled')"
    " AND EXISTS (SELECT 1 FROM orders WHERE orders.order_id = transfers.order_id"
    " AND orders.status_at < ?)"
)
# The deposits of orders for which nothing was signed yet, and something is planned.
_PLANNED: Final = (
    "SELECT d.order_id, d.txid, d.network FROM transfers t"
    " JOIN deposits d ON d.order_id = t.order_id"
    " WHERE t.state = 'planned' AND d.state = 'confirmed' AND NOT EXISTS (SELECT 1 FROM transfers s"
    " WHERE s.order_id = t.order_id AND s.state <> 'planned')"
)
_SEEN: Final = "SELECT order_id, txid, network FROM deposits WHERE state = 'seen'"
_USDC_ON_RECORD: Final = (
    "SELECT state FROM evm_payments JOIN evm_attempts USING (payment_id) WHERE txid = ?"
)
# The rival of a payout that is closed is annotated.
_XMR_ON_RECORD: Final = (
    "SELECT state FROM monero_payments WHERE txid = ?1 UNION ALL SELECT 'annotated' AS state"
    " FROM annotated_transactions WHERE network = 'monero' AND txid = ?1"
)
# Payments that may be on no network yet; the service's own of USDC hold up no others.
_UNPUBLISHED: Final = (
    "SELECT payment_id, txid FROM evm_payments JOIN evm_attempts USING (payment_id)"
    " WHERE network = :network AND state = 'prepared' AND purpose = 'transfer'"
    " UNION ALL SELECT payment_id, txid FROM monero_payments"
    " WHERE :network = 'monero' AND state IN ('prepared', 'relaying')"
)
_NONCE: Final = "SELECT network, sender, nonce FROM evm_payments WHERE payment_id = ?"
_IMAGES: Final = "SELECT key_image FROM monero_key_images WHERE payment_id = ?"
# Seconds after a reorganisation by which all replicas that run know of it.
_KNOWN_SECONDS: Final = 120
_LONG_PAUSED: Final = "SELECT 1 FROM payout_pause WHERE paused_at < ? - 60000"
# A branch is no longer, in blocks.
_MOST_DEPTH: Final = 25
_MOST_DEPOSIT: Final = "SELECT max_deposit FROM orders WHERE order_id = ?"
# What a payer sends, by direction: short, below the minimum, over, far over, over the most.
_WRONG: Final = {
    "x2u": [3 * XMR // 10, XMR // 5, XMR, 20 * XMR, 400 * XMR],
    "u2x": [60 * USDC, 35 * USDC, 200 * USDC, 3_000 * USDC, 60_000 * USDC],
}
# Of this many payments each of these is one; the others are right.
_PAYMENTS: Final = 8
_CLOSED: Final = (
    "SELECT kind, units FROM transfers WHERE order_id = ?"
    " AND transfer_id IN (SELECT transfer_id FROM closed_by_hand)"
)
_RESERVED: Final = "SELECT sum(units) FROM reservations WHERE network = ?"
_COUNTED: Final = "SELECT d.network, d.txid, d.units FROM deposits d WHERE d.state = 'confirmed'"
_DEPOSIT: Final = (
    "SELECT d.units, o.deposit_address FROM deposits d JOIN orders o USING (order_id)"
    " WHERE d.network = ? AND d.txid = ?"
)
# After such a reorganisation, deposits are as deep again as they were.
_DEEP_AGAIN_SECONDS: Final = 900
_LOST: Final = "A deposit vanished from its network after it was paid out."
# Less than this is dust, or too little to be sent back, in USDC units.
_LITTLE: Final = 2 * USDC
# The dearest gas, in gwei; and what network fees may take of a payment then, in USDC units.
DEAREST: Final = 20
_FEES: Final = 18 * USDC


class ChainFaults(NamedTuple):
    """How likely each fault is: of reorganisations and gas per block, of daemons per second (and
    that an EVM node loses its pool, per block).

    ``forgotten``: the share of payments of the service that no pool gets back from replaced blocks.
    ``cheat``: the share of payers who take their payment back while it is shallow.
    ``aimed``: the share of requests that sign or publish at which a replica is killed; fewer of all
    requests pause their sender, or cut it off from the database. ``torn``: the share of journal
    lines that are written in part, because the disk is full or the process is killed. ``banned``:
    how often, per block, the token's issuer bans somebody who is to be paid. ``kept``: the share of
    reorganisations in which one of several nodes keeps what is replaced.
    """

    network: NetworkFaults = NO_FAULTS
    reorg: float = 0.0
    gas: float = 0.0
    daemon: float = 0.0
    left_out: float = 0.0
    forgotten: float = 0.0
    cheat: float = 0.0
    aimed: float = 0.0
    torn: float = 0.0
    banned: float = 0.0
    kept: float = 0.0

    @classmethod
    def drawn(cls, chance: random.Random) -> ChainFaults:
        """A mix of its own for each seed; some seeds have none of a kind."""

        def rate(most: float) -> float:
            return chance.choice([0.0, most / 10, most])

        network = NetworkFaults(
            unreached=rate(0.01), unread=rate(0.01), lost=rate(0.02), slow=rate(0.005),
            busy=rate(0.01), cut=rate(0.005), delay_ms=chance.choice([1.0, 10.0, 100.0]),
        )  # fmt: skip
        return cls(
            network, reorg=rate(0.1), gas=rate(0.05), daemon=rate(0.1), left_out=rate(0.7),
            forgotten=rate(0.5), cheat=rate(0.2), aimed=rate(0.1), torn=rate(0.1),
            banned=rate(0.1), kept=rate(1.0),
        )  # fmt: skip


_Block = TypeVar("_Block", Block, XmrBlock)


class OnchainUniverse(Universe):
    """One EVM chain or two, Monero, and the operator's wallets on them.

    ``operator_addresses``: where the operator takes money out to, by network. ``most_waits``: of 40
    s each, after which what is under way goes on no more by itself.
    """

    operator: Operator
    most_waits = 30

    def __init__(
        self,
        seed: int,
        folder: Path,
        faults: Faults | None = None,
        left_out: Collection[str] = (),
    ) -> None:
        super().__init__(seed, folder, faults, left_out)
        chance = self.chance
        drawn = ChainFaults() if faults == Faults() else ChainFaults.drawn(chance)
        self.chain_faults = faults_without(drawn, self.left_out)
        self.network = Network(self.loop, self._fork())
        # How many of the blocks from before the service began are still to come.
        self._opening = _OPENING_BLOCKS
        self.hot = _KEYS.address(HOT_WALLET_INDEX)
        holdings = {self.hot: self._opening_holding(chance)}
        first = EvmNetwork(ARBITRUM, self._evm_now, holdings, self._node_count, chance)
        self.evms = {first.name: first}
        if self._has_second_chain():
            second = random.Random(f"{seed} second chain")
            more = EvmNetwork(BASE, self._evm_now, holdings, self._node_count, second)
            self.evms[more.name] = more
        self.chains = tuple(self.evms)
        # Those of the first one, which most faults strike.
        self.evm, self.nodes = first.chain, first.nodes
        self.monero = MoneroChain(self._now, self._fork())
        self.monerods = [
            MonerodModel(self.monero, "stagenet", self._fork())
            for _ in range(self._node_count(chance))
        ]
        self.monerod = MonerodName(self.monerods, self._fork())
        self.wallet = WalletModel(self._wallet_node(), self._fork())
        self.monero.replacing = lambda: self._keep_branch(self.monerods, self._outside)
        self.server.reserved = self.compare_reservations
        self.server.signed = self._signed_payment
        self.server.nonce_taken = lambda nonce: self.violated(f"nonce {nonce} was signed for again")
        self.server.ended = self._ended_payment
        self.monero.submitting = partial(self._submitted, _XMR_ON_RECORD)
        # Transactions that have reached a node, and payments by the commit that has recorded them.
        self._reached: set[str] = set()
        self._recorded: dict[str, int] = {}
        self._restored_at = -_KNOWN_SECONDS
        self._outside = first.outside = self._fork()
        for each in self.evms.values():
            each.chain.replacing = partial(self._keep_branch, each.nodes, each.outside)
            each.chain.submitting = partial(self._submitted, _USDC_ON_RECORD)
        self._block_seconds = chance.choice([10, 20])
        self.counts |= dict.fromkeys(
            ["reorganisations", "daemons", "cheats", "resumed", "torn", "drills", "withdrawals",
             "signed", "robberies", "bans", "losses", "verified", "rotations", "restores", "kept",
             "failovers", "late", "closed", "hangs", "misdirected", "unproven", "rivals"], 0
        )  # fmt: skip
        self.comes, self.lingers = chance.choice([20, 60, 300]), chance.choice([0, 60, 300])
        own = dict.fromkeys(self.evms, evm_address(seed, "operator"))
        self.operator_addresses = own | {"monero": monero_address(seed, "operator")}
        self._is_busy = self.chain_faults != ChainFaults() and chance.random() < _BUSY
        self._refunds: dict[str, list[str]] = {}
        is_early = self.chain_faults != ChainFaults() and chance.random() < _EARLY
        # One who restores loses what followers and receivers were told since the copy, and the sum
        # of the deposits that count early.
        self._is_restored = (
            self._is_busy and len(self.replicas) == 1 and chance.random() < _RESTORED
        )
        self._fails_over = (
            self._is_busy and random.Random(f"{seed} fails over").random() < _FAILS_OVER
        )
        if self._is_restored or self._fails_over:
            self._audience, is_early = 0.0, False
        self.tiers = self._tiers(chance, is_early=is_early)
        if is_early:
            most = max(self.chain_faults.cheat, _CHEATS)
            self.chain_faults = self.chain_faults._replace(cheat=most)
        has_branches = self.chain_faults.reorg > 0 or self.chain_faults.cheat > 0
        lasting = _LASTING_SECONDS if has_branches else 0
        self.signers = Signers(self._fund, self._now, lasting)
        self.server.counted = self._counted_deposit
        self.settings |= self._settings(chance)
        is_signing = self.chain_faults != ChainFaults() and chance.random() < _SIGNING
        folders = [folder / f"replica-{each.number}" for each in self.replicas]
        self.key_rings = KeyRings(folders, self, self._fork().randbytes) if is_signing else None
        self.settings["signing.enabled"] = is_signing

    def _has_second_chain(self) -> bool:
        """Return whether there are two EVM chains; no draw of it changes another one."""
        has_faults = self.chain_faults != ChainFaults()
        return (
            has_faults and random.Random(f"{self.seed} has several chains").random() < _TWO_CHAINS
        )

    def _opening_holding(self, chance: random.Random) -> Holding:
        is_poor = self.chain_faults != ChainFaults() and chance.random() < _SHARE_OF_POOR
        return POOR if is_poor else RICH

    def _wallet_node(self) -> MonerodName:
        """The node of the wallet: its own, as operators are told, and on the chain.

        What it signs on a branch the network may never take, and only the operator can end it.
        """
        return MonerodName(self.monerods, self._fork(), is_on_chain=True)

    def _node_count(self, chance: random.Random) -> int:
        return chance.choice([1, 2])

    def _tiers(self, chance: random.Random, *, is_early: bool) -> Tiers:
        return Tiers.drawn(chance, self.chains) if is_early else Tiers()

    def _fork(self) -> random.Random:
        return random.Random(self.chance.getrandbits(64))

    def _now(self) -> int:
        return self.now_ms() // 1000

    def _evm_now(self, block_seconds: int) -> int:
        return self._now() - self._opening * block_seconds

    def _settings(self, chance: random.Random) -> dict[str, object]:
        tables = "".join(each.terms.table() for each in self.evms.values())
        (self.folder / "chains.toml").write_text(tables)
        key_file = self.folder / "evm-mnemonic"
        key_file.write_text(MNEMONIC)
        key_file.chmod(0o600)
        nodes = ",".join(
            f"{each.name}={self.network.serve(each.terms.host, each.answering())}"
            for each in self.evms.values()
        )
        return {
            "engine": "onchain",
            "chains_file": str(self.folder / "chains.toml"),
            # Where the auditor reads; it is reached as a server's is, through the port.
            "database_url": "postgresql://simulated/rpcsvc",
            "rates.fixed_usdc_per_xmr": str(PRICE),
            "orders.unfunded_share": 100,
            "orders.unfunded_token_share": 100,
            "orders.unfunded_token_orders": 100_000,
            "onchain.monero_network": "stagenet",
            "onchain.monerod_url": self.network.serve("monerod", self.monerod),
            "onchain.wallet_url": self.network.serve("wallet", self.wallet),
            "onchain.wallet_file": WalletModel.FILE,
            "onchain.nodes": nodes,
            "onchain.key_file": str(key_file),
            **self.tiers.settings(self.chains),
            "onchain.xmr_settled_after": CONFIRMATIONS,
            "onchain.xmr_outputs": chance.choice([0, 0, 16]),
            "onchain.xmr_addresses": 64,
            "onchain.usdc_addresses": 64,
            "onchain.poll_ms": chance.choice([2000, 5000, 10_000]),
            "onchain.audit_seconds": 120,
            "inventory.withdraw_to": [f"{n}={at}" for n, at in self.operator_addresses.items()],
            **dict.fromkeys(("onchain.xmr_per_transfer", "onchain.xmr_per_day"), "100000"),
            **dict.fromkeys(("onchain.usdc_per_transfer", "onchain.usdc_per_day"), "10000000"),
        }

    # --- what happens by itself ----------------------------------------------------------------

    def run(self, orders: int) -> None:
        """As of every universe, with the daemons at the end of the product's connections."""
        for each in self.evms.values():
            for number in range(orders):
                each.chain.give(self.payer(number), Holding(10**24, 10**6 * USDC))
            # To pay back what came on the wrong network.
            each.chain.give(self.operator_addresses[each.name], Holding(10**24, 10**6 * USDC))
        # More often there is nothing new on the chains to look at.
        tick = patch.object(worker, "TICK_MS", self.chance.choice([1000, 2000, 5000]))
        disk = patch.object(files, "_write_all", partial(self._write, files._write_all))
        keys = patch.object(HdKeys, "signer", lambda _keys, index: signer_at(index))
        with self.network.carrying(), tick, disk, keys:
            super().run(orders)

    def payer(self, number: int) -> str:
        """The account that a person pays USDC from, where a refund may go, too."""
        if self._signs(number):
            return str(key_of(self.seed, number).public_key.to_checksum_address())
        return evm_address(self.seed, number, "payer")

    def _signs(self, number: int) -> bool:
        """Whether a person pays by signing, at first."""
        is_simple = self.chain_faults == ChainFaults()
        return not is_simple and random.Random(f"{self.seed} {number} signs").random() < _SIGN

    async def _fund(self, chance: random.Random, **params: Any) -> dict[str, Any]:
        return await self.call("swap.fund", chance, once=True, **params)

    def most_steps(self, orders: int) -> int:
        """Daemons take many."""
        return 20_000_000 + 100_000 * orders

    async def begin(self) -> None:
        """Fund the wallets, and let blocks come."""
        self._fund_monero()
        for left in reversed(range(_OPENING_BLOCKS)):
            self._opening = left
            for each in self.evms.values():
                each.chain.mine()
        self.operator = Operator(self, self._fork(), is_busy=self._is_busy)
        self.operator.restores = self._is_restored or self._fails_over
        self.operator.fails_over = self._fails_over
        first, *more = self.evms.values()
        works = [
            self._mine_evm(first), self._mine_monero(), self._trouble_daemons(),
            self._fall_behind(), self._rob(), self.operator.look(), self.operator.drill(),
            self.operator.withdraw(), self.operator.rotate_keys(), self.operator.restore(),
        ]  # fmt: skip
        for network in more:
            works += [self._mine_evm(network), self._trouble_one_network(network.outside)]
        self._works = [asyncio.ensure_future(each) for each in works]
        for work in self._works:
            work.add_done_callback(self._stopped)
        self.network.faults = self.chain_faults.network
        self.network.watch = self._aim
        self.network.sent = self._sent
        for chain in self._all_chains():
            chain.left_out = self.chain_faults.left_out
            chain.forgotten = self.chain_faults.forgotten

    def _all_chains(self) -> list[EvmChain | MoneroChain]:
        return [*(each.chain for each in self.evms.values()), self.monero]

    def _fund_monero(self) -> None:
        """Let the wallet have outputs that can be spent."""
        self.monero.pay([Paid(address_of(0), 50 * XMR)] * _OPENING_OUTPUTS)
        self.monero.mine(20)

    def _stopped(self, work: asyncio.Task[None]) -> None:
        """End the universe: a task of its own has failed."""
        self.broken = work.exception()

    def calm(self) -> None:
        """Let no more faults strike, of chains and daemons either."""
        super().calm()
        self.network.faults = NO_FAULTS
        self.network.away.clear()
        self.network.hung.clear()
        self.bring_nodes_back()
        for each in self.monerods:
            each.is_away = each.is_syncing = False
            each.relays = True
        self.monero.left_out = self.monero.forgotten = 0.0
        for network in self.evms.values():
            network.calm()

    def _strikes(self, rate: float, outside: random.Random | None = None) -> bool:
        chance = self._outside if outside is None else outside
        return self.is_striking and rate > 0 and chance.random() < rate

    def _aim(self, method: str, _is_done: bool) -> None:
        """Perhaps kill a replica just before a daemon acts on what may be its request, or after."""
        if method in _CRITICAL and self._strikes(self.chain_faults.aimed):
            self.kill(self._outside.choice(self.replicas))

    def _sent(self, method: str) -> bool:
        """Compare what is published with the lease; perhaps pause the sender, or cut it off from
        the database while it waits for a late answer.
        """
        if method in PUBLISHING:
            self.published()
        sender = self.sender()
        if sender is None or not self._strikes(self.chain_faults.aimed / _REQUESTS):
            return False
        if self._outside.random() < 0.5:
            self.pause(sender)
            return False
        self.cut(sender)
        return True

    def _write(self, write: Callable[[int, bytes], None], fd: int, data: bytes) -> None:
        """Write to a journal; perhaps in part, on a full disk or by a process that is killed."""
        if not self._strikes(self.chain_faults.torn):
            write(fd, data)
            return
        self.counts["torn"] += 1
        write(fd, data[: self._outside.randrange(len(data))])
        sender = self.sender()
        if sender is not None and self._outside.random() < 0.5:
            self.kill(sender)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _ended_payment(self, table: str, payment_id: str) -> None:
        """Compare with the chain: a payment is called settled or failed now.

        It is in a block that is as deep as finality, or so is what took its place. A replica that
        asked before a reorganisation may not know of it yet.
        """
        chain: EvmChain | MoneroChain = self.monero
        if table == "monero_payments":
            images = self.server.connection.execute(_IMAGES, (payment_id,)).fetchall()
            depth = self.monero.depth_of({each["key_image"] for each in images}, CONFIRMATIONS)
        else:
            row = self.server.connection.execute(_NONCE, (payment_id,)).fetchone()
            chain = evm = self.evms[row["network"]].chain
            depth = evm.depth_of(row["sender"].lower(), row["nonce"], CONFIRMATIONS)
        if self._now() - chain.replaced_at < _KNOWN_SECONDS:
            return
        if depth is not None and depth < CONFIRMATIONS:
            self.violated(f"{payment_id} is final for the service, {depth} blocks deep")

    def compare_reservations(self, network: str) -> None:
        """Compare with the chain: an order has reserved its payout, which the wallet must hold.

        A replica may have looked a while ago: the most counts that the wallet has held since.
        """
        chain: EvmChain | MoneroChain = self.monero
        if network != "monero":
            chain = self.evms[network].chain
        if self._now() - chain.replaced_at < _KNOWN_SECONDS:
            return
        (reserved,) = self.server.connection.execute(_RESERVED, (network,)).fetchone()
        if reserved > (held := self._held_lately(network)):
            self.violated(f"orders reserve {reserved} units on {network}, where {held} are held")

    def _held_lately(self, network: str) -> int:
        """The units that the wallet holds, and that it has paid in the last minutes."""
        if network != "monero":
            evm, hot = self.evms[network], self.hot.lower()
            paid = [move for move in moves(_recent(evm.chain.blocks)) if move.source == hot]
            return evm.held(hot) + sum(move.units for move in paid)
        chain = self.monero
        own = {
            image: output.paid.amount
            for image, output in chain.outputs.items()
            if self.wallet.owns(output.paid.address)
        }
        held = sum(units for image, units in own.items() if image not in chain.spent)
        for made in (made for block in _recent(chain.blocks) for made in block.mined):
            images = [made.image_of(place) for place in range(len(made.outputs))]
            came, went = (sum(own.get(each, 0) for each in some) for some in (images, made.images))
            held += max(0, went - came)
        return held

    def _signed_payment(self, network: str, payment_id: str) -> None:
        """Compare with the nodes: nothing is signed while an earlier payment on the same network
        has reached none.

        Payments that are signed together are recorded in one commit.
        """
        now = self._recorded[payment_id] = self.server.commits
        for row in self.server.connection.execute(_UNPUBLISHED, {"network": network}):
            other = row["payment_id"]
            if self._recorded.get(other, now) < now and row["txid"] not in self._reached:
                self.violated(f"{payment_id} was signed behind {other}, which has reached no node")

    def _submitted(self, on_record: str, txid: str) -> None:
        """Compare with the record: a payment reaches a node now, and has to be there as given out.

        A copy that was put in place a moment ago may lack what is on its way.
        """
        self._reached.add(txid)
        if self._now() - self._restored_at < _KNOWN_SECONDS:
            return
        row = self.server.connection.execute(on_record, (txid,)).fetchone()
        if row is None or row["state"] == "prepared":
            self.violated(f"{txid} reaches a node, and is {row and row['state']} on record")

    @override
    def restore(self, copied: sqlite3.Connection) -> None:
        self._restored_at = self._now()
        super().restore(copied)

    @override
    def fail_over(self, copied: sqlite3.Connection) -> None:
        self._restored_at = self._now()
        self.counts["failovers"] += 1
        self.operator.has_restored = True
        super().fail_over(copied)

    def _counted_deposit(self, network: str, txid: str, order_id: str) -> None:
        """Compare with the chain: a deposit counts from now on.

        It is as deep as the deposits to its address until then ask, or as itself asks if it was in
        a replaced block. Those that count before they are final keep their bounds together.
        """
        chain: EvmChain | MoneroChain = self.monero
        if network != "monero":
            chain = self.evms[network].chain
        if self._now() - chain.replaced_at < _KNOWN_SECONDS:
            return
        row = self.server.connection.execute(_DEPOSIT, (network, txid)).fetchone()
        depth, units = self._depth(network, txid), int(row["units"])
        if not chain.replaced_at:
            units = max(units, sum(self.received(row["deposit_address"], network, depth)))
        if depth < (wanted := self.tiers.depth(network, units)):
            self.violated(f"{txid} of {order_id} counts at {depth} of {wanted} blocks")
        if not self.tiers.bounds or any(
            self._now() - each.replaced_at < _DEEP_AGAIN_SECONDS for each in self._all_chains()
        ):
            return
        sums: dict[str, int] = {}
        for each in self.server.connection.execute(_COUNTED):
            if self._depth(each["network"], each["txid"]) < self.tiers.final(each["network"]):
                worth = _value(each["units"], is_xmr=each["network"] == "monero")
                sums[each["network"]] = sums.get(each["network"], 0) + worth
        for text in self.tiers.exceeded(sums):
            self.violated(f"deposits that are not final: {text}")

    def _depth(self, network: str, txid: str) -> int:
        """Blocks of the chain from the one with a transaction on; 0: there is none."""
        if network == "monero":
            height = self.monero.heights.get(txid)
            return 0 if height is None else len(self.monero.blocks) - height
        return self.evms[network].depth(txid)

    async def _mine_evm(self, network: EvmNetwork) -> None:
        chain, outside, faults = network.chain, network.outside, self.chain_faults
        while True:
            await asyncio.sleep(network.terms.seconds * (0.5 + outside.random()))
            if self._strikes(faults.daemon, outside):
                outside.choice(network.nodes).restart()
            if self._strikes(faults.gas, outside):
                chain.base_fee = GWEI * outside.choice([1, 1, 3, DEAREST])
            if self._strikes(faults.reorg, outside):
                self.counts["reorganisations"] += 1
                chain.reorganise(outside.choice([1, 2, 3, 5, 12, 40]))
            chain.mine()
            if self._strikes(faults.banned, outside):
                self._ban(network)

    def _keep_branch(self, nodes: Sequence[EvmNode | MonerodModel], outside: random.Random) -> None:
        """Perhaps have one of several nodes behind one name keep blocks that are replaced now."""
        if len(nodes) == 1 or any(each.view is not each.chain for each in nodes):
            return
        if self._strikes(self.chain_faults.kept, outside):
            self.counts["kept"] += 1
            node = outside.choice(nodes)
            node.keep(outside.choice(_KEPT_SHARES))
            self.later(outside.choice(_KEPT_SECONDS), node.follow)

    def _ban(self, network: EvmNetwork) -> None:
        """Have the token's issuer refuse payments to somebody, from this block on.

        Nobody whose payout is settled: a branch deeper than finality would fail it.
        """
        settled = {row["address"] for row in self.server.connection.execute(_SETTLED)}
        orders = (each for each in self.orders.values() if each.payout_network == network.name)
        payees = [each.to for each in orders if each.to not in settled]
        if payees:
            self.counts["bans"] += 1
            account = network.outside.choice(payees).lower()
            network.chain.state.set(("blacklisted", account), 1, network.chain.top)

    async def _mine_monero(self) -> None:
        while True:
            await asyncio.sleep(self._block_seconds * (0.2 + 1.6 * self._outside.random()))
            if self._strikes(self.chain_faults.reorg):
                await self._reorganise_monero(self._outside.choice([1, 2, 3, 5, 12, 25]))
            self.monero.mine()

    async def _reorganise_monero(self, depth: int) -> None:
        """Blocks go first, and others come a while after, or at once."""
        self.counts["reorganisations"] += 1
        self.monero.pop(depth)
        if self._outside.random() < 0.3:
            await asyncio.sleep(self._outside.random() * 10)
        self.monero.mine(depth + 1)

    async def _trouble_daemons(self) -> None:
        """Restart a daemon, take it away, let it lag or keep to itself what it takes."""
        while True:
            await asyncio.sleep(1)
            if self._strikes(self.chain_faults.daemon):
                self.counts["daemons"] += 1
                await self._trouble(self._outside.choice(["evm", "monerod", "wallet"]))

    async def _trouble(self, name: str) -> None:
        chance, node = self._outside, self._outside.choice(self.nodes)
        if name == "evm":
            self.evms[ARBITRUM.name].disturb(node)
        elif name == "monerod":
            for each in self.monerods:
                each.restart()
                each.relays = chance.random() < 0.7
                each.is_away = each.is_syncing = True
        else:
            self.wallet.restart()
        host = f"{name}:80"
        if name != "evm" or chance.random() < 0.3:
            self.network.away.append(host)
            await asyncio.sleep(chance.random() * 20)
        for each in self.monerods:
            each.is_away = False
        self.network.away.clear()
        await asyncio.sleep(chance.random() * 10)
        for each in self.monerods:
            each.is_syncing = False
        if chance.random() < 0.5:
            node.lag, node.relays = 0, True
            for each in self.monerods:
                each.relays = True

    async def _trouble_one_network(self, chance: random.Random) -> None:
        """Have one of several EVM networks answer nothing for a while, or a node of it lag.

        Requests that are sent to nodes that hang are carried out, or not.
        """
        while True:
            await asyncio.sleep(1)
            if not self._strikes(self.chain_faults.daemon, chance):
                continue
            network = chance.choice(list(self.evms.values()))
            node = chance.choice(network.nodes)
            network.disturb(node)
            if chance.random() < 0.5:
                self.counts["hangs"] += 1
                self.network.hung[f"{network.terms.host}:80"] = chance.random() < 0.5
            await asyncio.sleep(chance.choice(_HANG_SECONDS))
            self.network.hung.clear()
            if chance.random() < 0.5:
                node.lag, node.relays = 0, True

    async def _fall_behind(self) -> None:
        """Have one of several Monero nodes lack blocks, and answer alone for a while."""
        chance = random.Random(f"{self.seed} falls behind")
        while len(self.monerods) > 1:
            await asyncio.sleep(5 + 60 * chance.random())
            if not self.is_striking or chance.random() > 20 * self.chain_faults.daemon:
                continue
            if any(each.view is not each.chain for each in self.monerods):
                continue
            self.counts["late"] += 1
            self.leave_late_node(chance.choice(self.monerods), chance.choice(_LATE_BLOCKS))
            await asyncio.sleep(chance.choice(_LATE_SECONDS))
            self.bring_nodes_back()

    def leave_late_node(self, node: MonerodModel, blocks: int) -> None:
        """Have one of several Monero nodes lack ``blocks``, and the others gone."""
        node.fall_behind(blocks)
        self.monerod.alone = node

    def bring_nodes_back(self) -> None:
        """Have all Monero nodes answer, with the whole chain."""
        self.monerod.alone = None
        for each in self.monerods:
            each.follow()

    # --- people --------------------------------------------------------------------------------

    def destination(self, direction: str, number: int) -> str:
        """An address that no other order has."""
        own = self.seed, number
        return evm_address(*own) if direction == "x2u" else monero_address(*own)

    def refund_address(self, order: Order, attempt: int) -> str:
        """An address of this order alone."""
        own = self.seed, order.number, "refund", attempt
        address = monero_address(*own) if order.direction == "x2u" else evm_address(*own)
        known = self._refunds.setdefault(order.order_id, [])
        if address not in known:
            known.append(address)
        return address

    async def verify(self, order: Order, attestation: str, params: dict[str, Any]) -> None:
        """Have an orderer verify what was attested, by the keys that some replica publishes."""
        if self.key_rings is None:
            return
        expected = verify.Expected(
            direction=order.direction, chain_id=self.evms[order.chain].terms.chain_id,
            amount=params.get("amount"),
            receive_amount=params.get("receiveAmount"), to=order.to, session=order.session_id,
            deposit_address=order.deposit_address, issuer=_SITE,
        )  # fmt: skip
        problem: str | None = "no replica runs"
        for _ in range(_TRIES):
            ups = [each.up for each in self.replicas if each.up is not None]
            signer = self._outside.choice(ups).signer if ups else None
            if signer is not None:
                problem = self.key_rings.problem(attestation, expected, signer.jwks())
                if problem is None:
                    self.counts["verified"] += 1
                    return
                if self.counts["steps"] and problem.startswith(verify.RetiredKey.__name__):
                    return  # by a clock that is ahead it was made after the next rotation
            await asyncio.sleep(3)
        self.violated(f"{order.order_id} is not what was ordered: {problem}")

    async def pay(self, order: Order, chance: random.Random) -> None:
        """Pay from outside, and sometimes take it back; or sign, and perhaps pay once more.

        Where there are two EVM chains, some pay on the wrong one, alone or in addition.
        """
        astray = random.Random(f"{self.seed} {order.number} astray")
        if self._other_chain(order) is not None and astray.random() < _MISDIRECTED:
            self._misdirect(order, astray)
            if astray.random() < _MISDIRECTED_ALONE:
                return
        if order.direction == "u2x" and self._signs(order.number):
            key, chain = key_of(self.seed, order.number), self.evms[order.chain].chain
            await self.signers.pay(order.order_id, chain, key, chance)
            if chance.random() < _SIGN_ALONE:
                return
        place = chance.randrange(_PAYMENTS) - _PAYMENTS + len(_WRONG[order.direction])
        units = order.due if place < 0 else _WRONG[order.direction][place]
        cheats = chance.random() < self.chain_faults.cheat
        if place < 0 and chance.random() < _PIECES:
            await self.send(order, units - units // 3)
            await asyncio.sleep(chance.random() * 60)
            units //= 3
        await self.send(order, units, cheats=cheats)

    async def send(self, order: Order, units: int, *, cheats: bool = False) -> None:
        """Pay ``units``; ``cheats``: take them back if they are not final at some moment."""
        txid = self.pay_out_of_turn(order, units)
        if cheats and order.direction == "x2u":
            await self._take_xmr_back(txid)
        elif cheats:
            await self._take_usdc_back(txid, self.evms[order.chain])

    def pay_out_of_turn(self, order: Order, units: int) -> str:
        """Pay ``units`` now; return the transaction's id."""
        if order.direction == "x2u":
            return self.monero.pay([Paid(order.deposit_address, units)]).txid
        return self._pay_usdc(order, order.chain, units)

    def _pay_usdc(self, order: Order, network: str, units: int) -> str:
        """Have a payer send USDC to the address of an order, on whichever network."""
        payer, call = self.payer(order.number), usdc.transfer(order.deposit_address, units)
        return self.evms[network].chain.send(payer, call)

    def _other_chain(self, order: Order) -> str | None:
        """Return an EVM chain that an order of USDC is not of; None: there is none."""
        others = [name for name in self.evms if name != order.deposit_network]
        return others[0] if others and order.direction == "u2x" else None

    def _misdirect(self, order: Order, chance: random.Random) -> None:
        """Have a person pay on the wrong network, where the order's address is the service's, too.

        It may be too little to be swept.
        """
        self.counts["misdirected"] += 1
        units = chance.choice([order.due, order.due, *_WRONG["u2x"], 1])
        if (other := self._other_chain(order)) is not None:
            self._pay_usdc(order, other, units)

    def pay_back(self, network: str, txid: str, address: str, units: int) -> bool:
        """Have the operator pay ``units`` back to their sender; False: nobody sent any."""
        chain = self.evms[network].chain
        for move in moves(chain.blocks):
            if (move.txid, move.to) == (txid, address.lower()):
                chain.send(self.operator_addresses[network], usdc.transfer(move.source, units))
                return True
        return False

    async def _take_xmr_back(self, txid: str) -> None:
        """Have a longer branch without the payment, while that is not final."""
        is_shallow = await self._is_shallow("monero", txid)
        if is_shallow and (made := self.monero.transaction(txid)) is not None:
            self.counts["cheats"] += 1
            self._replace_xmr(txid, made.images[0], self._depth("monero", txid))

    async def _take_usdc_back(self, txid: str, network: EvmNetwork) -> None:
        is_shallow = await self._is_shallow(network.name, txid)
        if is_shallow and (made := network.chain.find(txid)) is not None:
            self.counts["cheats"] += 1
            network.chain.displace(made, network.depth(txid))

    async def _rob(self) -> None:
        """Take a confirmed deposit back in a deep branch, when nothing can be signed for it.

        All replicas are down, or payouts have been paused for a while: what is planned now must not
        be signed once the replicas have looked.
        """
        while True:
            await asyncio.sleep(1)
            if not self._strikes(self.chain_faults.cheat / 2):
                continue
            if deposits := self.planned_deposits():
                self.rob(self._outside.choice(deposits))

    def planned_deposits(self, *, also_seen: bool = False) -> list[sqlite3.Row]:
        """Return the deposits of orders for which something is planned, and nothing signed.

        ``also_seen``: and those that do not count yet.
        """
        sql = f"{_PLANNED} UNION {_SEEN}" if also_seen else _PLANNED
        rows: list[sqlite3.Row] = self.server.connection.execute(sql).fetchall()
        return rows

    def rob(self, deposit: sqlite3.Row) -> None:
        """Take a deposit back in a deep branch, if it can be and its order has no signed payment.

        All replicas are killed, unless payouts have been paused for a while.
        """
        if deposit["network"] == "monero" and self.monerod.alone is not None:
            return  # of a branch that only the service's node lacks, nobody can tell it
        branch = self._branch_without(deposit["txid"], deposit["network"])
        if branch is None or self._is_in_a_journal(deposit["order_id"]):
            return
        if not self.server.connection.execute(_LONG_PAUSED, (self.now_ms(),)).fetchall():
            for replica in self.replicas:
                self.kill(replica)
        self.counts["robberies"] += 1
        branch()

    def _is_in_a_journal(self, order_id: str) -> bool:
        """Whether a payment of an order was signed, and its commit may be under way."""
        parts = self.folder.glob(f"replica-*/{files.FOLDER}/*")
        return any(order_id.encode() in part.read_bytes() for part in parts)

    def _branch_without(self, txid: str, network: str) -> Callable[[], None] | None:
        """Makes a branch in which a payer has spent a deposit otherwise; None: it is too deep, or
        the service itself has sent it, for somebody who signed.
        """
        if network == "monero":
            height = self.monero.heights.get(txid)
            if height is None or (depth := len(self.monero.blocks) - height) > _MOST_DEPTH:
                return None
            block = self.monero.blocks[height]
            image = next(each.images[0] for each in block.mined if each.txid == txid)
            return partial(self._replace_xmr, txid, image, depth)
        evm = self.evms[network].chain
        place = evm.place_of(txid)
        if place is None or (depth := evm.top.number - place[0].number + 1) > _MOST_DEPTH:
            return None
        made = place[0].mined[place[1]].made
        return None if made.is_signed else partial(evm.displace, made, depth)

    def _replace_xmr(self, txid: str, image: str, depth: int) -> None:
        """Have a branch in which the payer has spent an input otherwise."""
        chain = self.monero
        chain.doomed[txid] = None
        chain.pop(depth)
        chain.pay([Paid(monero_address("cheat", txid), XMR)], image)
        chain.mine(depth + 1)

    async def _is_shallow(self, network: str, txid: str) -> bool:
        """Wait for a depth, and some of the next block: whether it was never final until then."""
        final, deepest = self.tiers.final(network), 0
        wanted = self._outside.randrange(final)
        more = self._outside.random() * ARBITRUM.seconds
        ends, gives_up = None, self.loop.time() + _PATIENCE
        while self.is_striking and self.loop.time() < (ends or gives_up):
            await asyncio.sleep(0.2)  # in virtual time
            deepest = max(deepest, self._depth(network, txid))
            if ends is None and deepest >= wanted:
                ends = self.loop.time() + more
        return self.is_striking and ends is not None and deepest < final

    # --- the end -------------------------------------------------------------------------------

    async def settled(self) -> None:
        """Wait until no deposit is to be confirmed and no transfer is under way.

        What goes on no more the operator closes, where health names the command: for a payment that
        was published, it does so after an hour.
        """
        has_waited = False
        while True:
            for _ in range(self.most_waits):
                await asyncio.sleep(40)
                is_under_way = any(self.server.connection.execute(_UNDER_WAY).fetchone())
                if not is_under_way and not self._taken_payments():
                    return
            since = self.now_ms() - self.most_waits * 40_000
            late = self.server.connection.execute(_LATE, (since,)).fetchall()
            late += self._taken_payments()
            if await self.operator.close({row["transfer_id"] for row in late}):
                continue
            if late and not has_waited:
                has_waited = True
                self.loop.skip(_NAMED_AFTER)
                continue
            for row in late:
                self.violated(f"{row['transfer_id']} is {row['state']} and goes on no more")
            return

    def _taken_payments(self) -> list[sqlite3.Row]:
        """Return the settled payments of XMR that a branch has taken, and that are not closed."""
        rows = self.server.connection.execute(_SETTLED_XMR)
        return [row for row in rows if not self.monero.heights.get(row["txid"])]

    async def differences(self) -> list[str]:
        """Faults of each order by the models, strange payments, and the auditor's findings."""
        found = [text for order in self.orders.values() for text in self.order_differences(order)]
        found += await self._losses()
        found += [
            f"nonce {nonce} of {sender} was signed for {len(calls)} calls"
            for each in self.evms.values()
            for (sender, nonce), calls in each.chain.submitted.items()
            if len(calls) > 1
        ]
        await self.operator.check()
        await self.operator.write_off()
        found += await self._differences_by_network()
        self.counts["withdrawals"] = sum(self.operator.wanted.values())
        found += [*self.strange_payments(), *self.operator.strange()]
        found += await self.signers.differences(has_restored=self.operator.has_restored)
        self.counts["signed"] = sum(each.is_used for each in self.signers.sent)
        return [*found, *await self.audited()]

    async def _differences_by_network(self) -> list[str]:
        """Compare USDC on each of two networks with the treasury and with what was paid back."""
        if len(self.evms) == 1:
            return []
        await self.operator.pay_back()
        await asyncio.sleep(60)
        view = await self.operator.treasury()
        found = [f"{item} is of no order still" for item in view["ofNoOrder"]]
        found += [text for said in view["usdc"] for text in self.holding_differences(said)]
        return [*found, *self.misdirected_payments()]

    def holding_differences(self, said: dict[str, Any]) -> Iterator[str]:
        """Compare what the treasury says of a network's USDC with the chain, to the unit."""
        network = self.evms[said["network"]]
        addresses = {each.deposit_address for each in self.orders.values()}
        on_addresses = sum(network.held(address) for address in addresses)
        for name, units in (("hotWallet", network.held(self.hot)), ("unswept", on_addresses)):
            if units != units_of(said[name]):
                yield f"{name} of {network.name} is {units} units, and not {said[name]} USDC"

    def misdirected_payments(self) -> Iterator[str]:
        """USDC on networks that its orders are not of, and that was not paid back once."""
        for order in self.orders.values():
            for network in self.evms.values():
                if order.direction != "u2x" or order.chain == network.name:
                    continue
                came = sorted(network.received(order.deposit_address))
                own = {self.operator_addresses[network.name].lower(), self.hot.lower()}
                back = sorted(
                    move.units
                    for move in moves(network.chain.blocks)
                    if move.to == self.payer(order.number).lower() and move.source in own
                )
                if came != back:
                    yield f"{order.order_id} got {came} on {network.name}, and gave back {back}"

    def _flows(self, order: Order) -> tuple[list[int], list[int], list[int]]:
        """The units that came for an order, that were paid, and that were refunded.

        What the operator has closed is owed: it counts as paid, and twice if it is on the chain.
        """
        network = order.deposit_network
        refunds = [units for at in self._refunded_to(order) for units in self.received(at, network)]
        paid = self.received(order.to, order.payout_network)
        for row in self.server.connection.execute(_CLOSED, (order.order_id,)):
            (paid if row["kind"] == "payout" else refunds).append(int(row["units"]))
        return self.received(order.deposit_address, network), paid, refunds

    def _loss(self, order: Order) -> int:
        """USDC units that went out for an order in excess of what came; below 0: that remained."""
        came, paid, refunds = self._flows(order)
        is_x2u = order.direction == "x2u"
        value_in = sum(_value(units, is_xmr=is_x2u) for units in came)
        value_out = sum(_value(units, is_xmr=not is_x2u) for units in paid)
        return value_out + sum(_value(units, is_xmr=is_x2u) for units in refunds) - value_in

    async def _losses(self) -> list[str]:
        """Losses that pass the bounds of deposits that count early, or that an order hides."""
        found, sums, chance = [], dict[str, int](), random.Random(self.seed)
        for order in self.orders.values():
            if (loss := self._loss(order)) <= 0 or not self.tiers.bounds:
                continue
            network = order.deposit_network
            sums[network] = sums.get(network, 0) + loss
            self.counts["losses"] += 1
            answer = await self.call("swap.status", chance, orderId=order.order_id)
            # What an order that has ended says in addition stands before it.
            if not (answer["data"]["order"]["errorMessage"] or "").endswith(_LOST):
                found.append(f"{order.order_id} hides a loss of {loss} USDC units: {answer}")
        return found + [f"losses: {text}" for text in self.tiers.exceeded(sums)]

    def order_differences(self, order: Order) -> Iterator[str]:
        """Whether an order got for its deposits what it should, once."""
        came, paid, refunds = self._flows(order)
        is_x2u = order.direction == "x2u"
        is_lost = self._loss(order) > 0 and bool(self.tiers.bounds)
        said = f"{order.order_id} ({order.direction}) got {paid} and back {refunds} for {came}"
        if len(paid) > 1:
            yield f"paid twice: {said}"
        is_short = len(came) == 1 and came[0] <= order.due
        if paid and paid[0] > order.expected and is_short and not is_lost:
            yield f"paid more than was quoted: {said}"
        if paid and _value(paid[0], is_xmr=not is_x2u) > _value(
            self._most_deposit(order), is_xmr=is_x2u
        ):
            yield f"more than the largest deposit was swapped: {said}"
        if self._loss(order) > 0 and not is_lost:
            yield f"more went out than came: {said}"
        counted = [u for u in came if _value(u, is_xmr=is_x2u) > _LITTLE]
        due = sum(_value(units, is_xmr=is_x2u) for units in counted)
        value_in = sum(_value(units, is_xmr=is_x2u) for units in came)
        if value_in + self._loss(order) < due * 95 // 100 - _FEES * len(counted):
            yield f"less went out than came: {said}"
        if sum(came) == order.due and not refunds and paid != [order.expected] and not is_lost:
            yield f"not paid what was quoted, {order.expected}: {said}"

    def _most_deposit(self, order: Order) -> int:
        """Units above which a deposit is refunded, of the order's terms."""
        row = self.server.connection.execute(_MOST_DEPOSIT, (order.order_id,)).fetchone()
        return 10**30 if row is None else int(row[0])

    def _refunded_to(self, order: Order) -> list[str]:
        """Where its refunds may go: what was named, and the sender of USDC."""
        sender = [self.payer(order.number)] if order.direction == "u2x" else []
        return [*self._refunds.get(order.order_id, []), *sender]

    def received(self, address: str, network: str, least: int = 1) -> list[int]:
        """Units that an address got in blocks that are ``least`` deep, by payment."""
        if network != "monero":
            return self.evms[network].received(address, least)
        sums: dict[str, int] = {}
        for output in self.monero.outputs.values():
            if output.paid.address == address and (
                len(self.monero.blocks) - output.height >= least
            ):
                txid = output.made.txid
                sums[txid] = sums.get(txid, 0) + output.paid.amount
        return list(sums.values())

    def strange_payments(self) -> Iterator[str]:
        """Payments of the wallets to nobody that an order knows."""
        for network in self.evms.values():
            known = {address.lower() for address in self._known_payees(network.name)}
            for move in moves(network.chain.blocks):
                if move.source == self.hot.lower() and move.to not in known:
                    yield (
                        f"{move.units} USDC units went from the hot wallet to {move.to} on"
                        f" {network.name}"
                    )
        known = self._known_payees("monero")
        own = {output.made.image_of(output.place) for output in self.monero.outputs.values()
               if self.wallet.owns(output.paid.address)}  # fmt: skip
        for block in self.monero.blocks:
            for made in block.mined:
                if own.isdisjoint(made.images):
                    continue
                for paid in made.outputs:
                    if paid.address not in known and not self.wallet.owns(paid.address):
                        yield f"{paid.amount} piconero went from the wallet to {paid.address}"

    def _known_payees(self, network: str) -> set[str]:
        """Return whom the wallets may pay on a network."""
        known = {self.operator_addresses[network]}
        for order in self.orders.values():
            if order.payout_network == network:
                known.add(order.to)
            if order.deposit_network == network:
                known.update(self._refunded_to(order))
        return known

    def operator_settings(self) -> Settings:
        """The settings of a command that the operator runs."""
        flags = {"data_dir": str(self.folder), **self.settings}
        return load_settings(config_file=None, environ={}, flags=flags).settings

    def sweeps(self) -> dict[str, str]:
        """The transactions that only bring USDC to the hot wallet, with their networks."""
        return {txid: each.name for each in self.evms.values() for txid in each.sweeps(self.hot)}

    async def audited(self) -> list[str]:
        """The differences that the product's auditor finds, in words."""
        return [f"the auditor finds {item}" for item in await self.audit()]

    async def audit(self) -> tuple[Difference, ...]:
        """The differences that the product's auditor finds."""
        settings = self.operator_settings()
        chains = read_chains(settings.chains_file)
        database = SimulatedDatabase(self.server, self._outside, 0.0)
        try:
            async with open_auditor(
                settings.onchain, chains, partial(read_books_of, database)
            ) as auditor:
                report = await auditor.audit()
        finally:
            await database.close()
        return report.differences


@lru_cache(maxsize=1024)
def signer_at(index: int) -> EvmSigner:
    """An account of the wallet. Each life of a replica derives all that it has given out."""
    return _derive(_KEYS, index)


def _recent(blocks: Sequence[_Block]) -> list[_Block]:
    """The blocks of the last minutes."""
    since = blocks[-1].timestamp - _KNOWN_SECONDS
    return [each for each in blocks if each.timestamp >= since]


def _value(units: int, *, is_xmr: bool) -> int:
    """Units of an asset in USDC units, at the price of the run."""
    return units * PRICE * USDC // XMR if is_xmr else units
