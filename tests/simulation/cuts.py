"""Systematic faults: a scenario is struck at each lasting effect, one run for each.

The scenario runs once, and forks at each effect: the fork is struck there and goes on to its end.

The settling replica is killed there. Or a copy of the database is taken, and put in place with the
journal once all is over; or deposits are taken back; or the daemons are gone for a while.

Between two effects nothing lasts: to be killed there is to be killed at the second one. Effects are
commits, lines of the payment journal, and requests by which a daemon signs, publishes or makes an
address. The answer to the last effect never comes.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, NamedTuple
from unittest.mock import patch

from typing_extensions import override

from rpcsvc.settlement.onchain.journal.files import PlaceWriter
from tests.simulation.daemons import NO_FAULTS
from tests.simulation.database import nothing
from tests.simulation.evm import GWEI, Holding
from tests.simulation.evm_networks import BASE
from tests.simulation.monero import SPENDABLE_AGE, MonerodName, Paid
from tests.simulation.monero_wallet import address_of
from tests.simulation.onchain import DEAREST, POOR, PUBLISHING, RICH, OnchainUniverse, signer_at
from tests.simulation.runs import Outcome, forked, run_made, runs_made
from tests.simulation.signers import key_of
from tests.simulation.tiers import USDC, XMR, Tiers
from tests.simulation.universe import Faults, Order, Replica

SEED: Final = 1
_ACTING: Final = frozenset(
    {
        "eth_sendRawTransaction", "/send_raw_transaction", "relay_tx", "transfer", "sweep_single",
        "create_address",
    }
)  # fmt: skip
_ENDED: Final = ("completed", "terminal_failure")
_FINAL_ONLY: Final = Tiers()
# Of four orders that are paid at once, two count before their deposits are final: of USDC after one
# block, of XMR after four.
_EARLY: Final = Tiers(
    ((0, 1), (500 * USDC, 12)),
    ((0, 1), (XMR, 4), (5 * XMR, 12)),
    {"arbitrum": 200 * USDC, "monero": 200 * USDC, "all": 400 * USDC},
)
_HOSTS: Final = {"monero": ["monerod:80", "wallet:80"], "arbitrum": ["evm:80"]}
# Wei for the fees of two payouts, and not of three.
_ETHER: Final = 5 * 10**14
# Strikes after which payments go on at once, or in less than a minute.
_SHORT_STRIKES: Final = ("kill", "pause", "leave")
# Strikes after which calls of the hot wallet fail: payments to banned payees, or sweeps of deposits
# that are gone.
_FAILING: Final = ("ban", "resume")
_LATE: Final = (
    "SELECT order_seq FROM event_log WHERE event = 'DeadlinePassed' AND status = 'executing_swap'"
)
# What audits say of a payment's nonce that somebody else has spent.
_BY_HAND: Final = "unrecorded_transaction"
# What they say of a deposit that only a replaced branch has, where the wallet's node kept that.
_OF_A_BRANCH: Final = ("audit: deposit_not_credited of", "audit: deposit_missing of")
# What they say of a settled payout whose inputs a branch has taken.
_OF_A_PAYOUT: Final = "audit: not_on_chain of"
_REMOVED: Final = "SELECT order_seq FROM event_log WHERE event = 'DepositRemoved'"
_SHORT: Final = "is short of ether for gas"
# How long (s) the daemons are gone, or a replica is paused.
_GONE: Final = 40
# How long (s) after a pause began nothing is being signed any more.
_LONG_PAUSE: Final = 61
# How long (s) a node keeps a replaced branch: while replicas start, and some scans.
_KEPT: Final = 120
# Seconds of commits that a late standby lacks.
_LATE_SECONDS: Final = 5
# Blocks of Monero are slower: until a deposit on the branch looks final.
_KEPT_XMR: Final = 400
# How long (s) a replica is without the database until another one has its lease.
_TAKEN_OVER: Final = 12
# Blocks that a node lags by, and that are replaced without touching anything final.
_LAG, _SHALLOW = 60, 2
# How long (s) a node's index lacks what is in a block, at most.
_INDEXED: Final = 10
# Blocks of Monero that a node lacks which answers alone: an order's deposit, and its payout.
_LATE_BY: Final = 20
# How long (s) the nodes of one network hang; until when USDC that was paid on another one counts,
# and until when the orders of that one are over.
_HUNG, _COUNTED, _OVER = 600, 30, 150
# Piconero of each of many small outputs: a payout takes several.
_SMALL: Final = XMR // 5
# The states of an order whose deposit counts.
_COUNTING: Final = ("deposit_confirmed", "executing_swap")
_STATUS: Final = "SELECT status FROM orders WHERE order_id = ?"
# More blocks than a scan reads again, and those that the wallet lacks of as many.
_UNREAD, _WALLET_LAG = 8, 2
# Accounts of the wallet that a run derives, at least.
_ACCOUNTS: Final = 128
# Seconds from one payment to the next: they are not signed for together.
_APART: Final = 30


class Scenario(NamedTuple):
    """Orders by direction and the units that are paid to each, and how many replicas run.

    Units of None: by signing. ``hot``: what the hot wallet begins with. ``withdrawn``: units that
    the operator takes out, by network. ``strike``: what happens at an effect. ``nodes``: of each
    chain, behind one name. ``chains``: EVM chains that orders are on in turn. ``xmr``: outputs of
    the wallet in place of many large ones, those that last and those that a branch takes back.
    ``again``: each pays once more when all is over. ``apart``: seconds from one payment to the
    next. ``most``: effects at which it is struck.
    """

    orders: Sequence[tuple[str, int | None]] = ()
    replicas: int = 1
    hot: Holding = RICH
    withdrawn: Mapping[str, int] = MappingProxyType({})
    strike: Literal[
        "kill", "pause", "contest", "cut", "copy", "rob", "resume", "keep", "leave", "ban", "raise",
        "slow", "block", "lag", "reorganise", "forget", "hide", "branch", "reindex", "prune",
        "displace", "fail_over", "fall_behind", "hang", "take_inputs",
    ] = "kill"  # fmt: skip
    nodes: int = 1
    chains: int = 1
    xmr: tuple[int, int] | None = None
    tiers: Tiers = _FINAL_ONLY
    again: bool = False
    apart: int = 0
    most: int = 1_000


_USDC_IN, _XMR_IN = ("u2x", 150 * USDC), ("x2u", 8 * XMR // 10)
SCENARIOS: Final = {
    "payout-of-usdc": Scenario([_XMR_IN]),
    "payouts-of-usdc": Scenario([_XMR_IN] * 3),
    "payout-of-xmr": Scenario([_USDC_IN]),
    "refund-of-usdc": Scenario([("u2x", 60_000 * USDC)]),
    "refund-of-xmr": Scenario([("x2u", 400 * XMR)]),
    "batch": Scenario([_USDC_IN] * 3),
    "short": Scenario([("u2x", 60 * USDC)]),
    "below-minimum": Scenario([("u2x", 35 * USDC), ("x2u", XMR // 5)]),
    "paid-again": Scenario([_USDC_IN, _XMR_IN], again=True),
    "banned": Scenario([_XMR_IN], strike="ban"),
    "dear": Scenario([_XMR_IN] * 2, strike="raise"),
    "paused": Scenario([_USDC_IN, _XMR_IN], replicas=2, strike="pause"),
    "slow": Scenario([_USDC_IN, _XMR_IN], replicas=2, strike="slow"),
    "cut-off": Scenario([_USDC_IN, _XMR_IN], replicas=2, strike="cut"),
    "contested": Scenario([_USDC_IN, _XMR_IN], replicas=3, strike="contest"),
    "two-nodes": Scenario([_USDC_IN, _XMR_IN], nodes=2, strike="lag"),
    "reorganised": Scenario([_USDC_IN, _XMR_IN], strike="reorganise"),
    "forgetful": Scenario([_XMR_IN] * 2, strike="forget", apart=_APART),
    "unread": Scenario([_USDC_IN, _XMR_IN], nodes=2, strike="hide"),
    "branch": Scenario([_USDC_IN, _XMR_IN], strike="branch"),
    "late-index": Scenario([_USDC_IN], strike="reindex"),
    "pruned": Scenario([_XMR_IN], strike="prune"),
    "displaced": Scenario([_XMR_IN], strike="displace"),
    "unreached": Scenario([_XMR_IN] * 2, strike="leave", apart=_APART),
    "untaken": Scenario([_USDC_IN] * 2, strike="block", apart=_APART),
    "take-over": Scenario([_USDC_IN, _XMR_IN], replicas=2),
    "sweep": Scenario([("u2x", 60_000 * USDC)], hot=POOR),
    "x402": Scenario([("u2x", None)]),
    "withdrawal": Scenario(withdrawn={"arbitrum": 70 * USDC, "monero": 3 * XMR}),
    "restored-withdrawal": Scenario(
        withdrawn={"arbitrum": 70 * USDC, "monero": 3 * XMR}, strike="copy"
    ),
    "robbed-payout": Scenario([_USDC_IN, _XMR_IN], strike="rob"),
    "resumed": Scenario([_USDC_IN, _XMR_IN], strike="resume"),
    "kept-branch": Scenario([_USDC_IN, _XMR_IN], nodes=2, strike="keep"),
    "kept-branch-of-xmr": Scenario([_XMR_IN], nodes=2, strike="keep"),
    "late-node": Scenario([_USDC_IN, _XMR_IN], nodes=2, strike="fall_behind"),
    "robbed-refund": Scenario([("u2x", 60_000 * USDC), ("x2u", 400 * XMR)], strike="rob"),
    "unanswered": Scenario([_USDC_IN, _XMR_IN], strike="leave"),
    "restored-batch": Scenario([_XMR_IN] * 3, strike="copy"),
    "little-usdc": Scenario([("x2u", 12 * XMR)] * 3, hot=POOR),
    # Until the first one's deadline nothing happens.
    "overpaid": Scenario([("x2u", 30 * XMR), _XMR_IN], hot=POOR, apart=3 * _APART, most=150),
    "little-ether": Scenario([_XMR_IN] * 3, hot=Holding(_ETHER, RICH.units)),
    "early": Scenario([_USDC_IN, ("x2u", 12 * XMR // 10)] * 2, tiers=_EARLY),
    "fail-over": Scenario([_USDC_IN, _XMR_IN], strike="fail_over"),
    "fail-over-of-two": Scenario([_USDC_IN, _XMR_IN], replicas=2, strike="fail_over"),
    "hung-network": Scenario([_USDC_IN, _USDC_IN, _XMR_IN, _XMR_IN], chains=2, strike="hang"),
    "lost-inputs": Scenario([_USDC_IN], xmr=(0, 30), strike="take_inputs"),
    "lost-input": Scenario([_USDC_IN], xmr=(30, 30), strike="take_inputs"),
    "restore": Scenario([_USDC_IN, _XMR_IN, ("u2x", 60_000 * USDC)], strike="copy"),
}


class CutUniverse(OnchainUniverse):
    """A universe without faults but those at the effects with the numbers in ``cuts``.

    It forks at the effects in ``forks``, and each fork is struck there. The forks fork at all that
    follows, until they are struck ``size`` times.
    """

    def __init__(
        self,
        folder: Path,
        scenario: Scenario,
        cuts: Sequence[int] = (),
        forks: Container[int] = (),
        size: int = 1,
    ) -> None:
        self._scenario = scenario
        super().__init__(SEED, folder, Faults())
        self.replicas = [Replica(self, number) for number in range(scenario.replicas)]
        self.counts["effects"] = 0
        self._cuts, self._forks, self._size = cuts, forks, size
        self._copied: sqlite3.Connection | None = None
        self._pays_again = scenario.again
        if scenario.strike == "take_inputs":
            self.most_waits = 5  # nothing but the operator ends what has lost its inputs

    @override
    def _opening_holding(self, chance: random.Random) -> Holding:
        return self._scenario.hot

    @override
    def _wallet_node(self) -> MonerodName:
        return self.monerod  # it finds deposits of a branch there

    @override
    def _has_second_chain(self) -> bool:
        return self._scenario.chains > 1

    @override
    def chain_of(self, number: int, chance: random.Random) -> str:
        drawn = super().chain_of(number, chance)
        return drawn if len(self.chains) == 1 else self.chains[number % len(self.chains)]

    @override
    def _fund_monero(self) -> None:
        if self._scenario.xmr is None:
            super()._fund_monero()
            return
        lasting, doomed = self._scenario.xmr
        if lasting:
            self.monero.pay([Paid(address_of(0), _SMALL)] * lasting)
        self._funding = self.monero.pay([Paid(address_of(0), _SMALL)] * doomed)
        self.monero.mine(SPENDABLE_AGE + 1)

    @override
    def _node_count(self, chance: random.Random) -> int:
        return self._scenario.nodes

    @override
    def _tiers(self, chance: random.Random, *, is_early: bool) -> Tiers:
        return self._scenario.tiers

    @override
    def _settings(self, chance: random.Random) -> dict[str, object]:
        settings = super()._settings(chance)
        if self._scenario.strike == "fail_over":
            # The nonce of a sweep that a copy lacks stops all payouts, also those that it lacks.
            settings["onchain.sweep_usdc"] = "1000"
        return settings

    @override
    def _signs(self, number: int) -> bool:
        return self._scenario.orders[number][1] is None

    @override
    def run(self, orders: int) -> None:
        append = PlaceWriter.append

        def appended(writer: PlaceWriter, data: bytes) -> None:
            append(writer, data)
            self._effect()

        with patch.object(PlaceWriter, "append", appended):
            super().run(orders)

    @override
    async def story(self, orders: int) -> None:
        await self.begin()
        for replica in self.replicas:
            replica.start()
        placed = [
            await self.place(number, direction, random.Random(f"{number}"))
            for number, (direction, _) in enumerate(self._scenario.orders)
        ]
        self.server.effect = self._effect
        self.network.watch = self._acted
        await self._pay_all(placed)
        for network, units in self._scenario.withdrawn.items():
            await self.operator.take(network, units)
        await self.settled()
        if self._copied is not None:
            self.operator.has_restored = True
            self.restore(self._copied)
            await self.settled()
        if self._scenario.again:
            await self._pay_all(placed)
            await self.settled()
        has_ended = set((await self.states()).values()) <= set(_ENDED)
        if self._pays_again or not has_ended:
            await self.recover()
        self.server.effect = nothing
        self.calm()
        await self.check()

    async def _pay_all(self, placed: Sequence[Order]) -> None:
        for order, (_, units) in zip(placed, self._scenario.orders, strict=True):
            if units is None:
                key, chain = key_of(SEED, order.number), self.evms[order.chain].chain
                await self.signers.pay(order.order_id, chain, key, random.Random(SEED))
            else:
                await self.send(order, units)
            await asyncio.sleep(self._scenario.apart)

    def _pay_unseen(self) -> None:
        """Have everybody pay once more, which no daemon has told of before the next block."""
        self._pays_again = True
        for order, (_, units) in zip(self.orders.values(), self._scenario.orders, strict=True):
            self.pay_out_of_turn(order, units or order.due)

    def _acted(self, method: str, is_done: bool) -> None:
        if is_done and method == "eth_sendRawTransaction":
            self._compare_ether()
        if is_done and method in _ACTING:
            self._effect()

    def _effect(self) -> None:
        if self.server.effect is nothing:
            return
        robs = self._scenario.strike in ("rob", "keep")
        if robs and not self.planned_deposits(also_seen=True):
            return  # there is nothing to take back
        self.counts["effects"] += 1
        if self._is_struck(self.counts["effects"]):
            self.struck += (self.counts["effects"],)
            getattr(self, f"strike_{self._scenario.strike}")()

    def _is_struck(self, effect: int) -> bool:
        if effect in self._cuts:
            return True
        if len(self.struck) >= self._size:
            return False
        forks = effect <= self._scenario.most if self.struck else effect in self._forks
        return forks and forked(self)

    # --- strikes -------------------------------------------------------------------------------

    def strike_kill(self) -> None:
        for replica in self._settlers():
            self.kill(replica)

    def strike_pause(self) -> None:
        for replica in self._settlers():
            self.pause(replica, _GONE)

    def strike_cut(self) -> None:
        """Take the database from the settler until another replica has just taken over."""
        for replica in self._settlers():
            if (database := replica.database) is not None:
                database.is_cut = True
                self.later(_TAKEN_OVER, partial(setattr, database, "is_cut", False))

    def _settlers(self) -> Iterator[Replica]:
        holder = self.server.connection.execute("SELECT holder FROM leases").fetchone()[0]
        for replica in self.replicas:
            if replica.up is not None and replica.up.lease.holder == holder:
                yield replica

    def strike_copy(self) -> None:
        self._copied = self.server.copy()

    def strike_fail_over(self) -> None:
        """Have the database fail over to a standby that is late by some seconds."""
        self.later(_LATE_SECONDS, partial(self.fail_over, self.server.copy()))

    def strike_contest(self) -> None:
        """Kill the settler; those that want its lease ask at once, and their commits are late."""
        for replica in self.replicas:
            if (database := replica.database) is not None:
                database.is_late = True
                self.later(_GONE, partial(setattr, database, "is_late", False))
        self.strike_kill()

    def strike_rob(self) -> None:
        """Take deposits back; the network of the first can't be asked for a while."""
        deposits = self.planned_deposits(also_seen=True)
        if not deposits:
            return
        self.network.away += _HOSTS[deposits[0]["network"]]
        self.later(_GONE, self.network.away.clear)
        for deposit in deposits:
            self.rob(deposit)

    def strike_resume(self) -> None:
        """Have a pause of payouts end just after deposits were taken back in it."""
        pausing = partial(self.operator.pause, _LONG_PAUSE, self.strike_rob)
        self.later(0, lambda: asyncio.ensure_future(pausing()))

    def strike_keep(self) -> None:
        """Take deposits back; one of two nodes of each chain keeps the branch that has them."""
        self.operator.expects += _OF_A_BRANCH
        self.nodes[-1].keep(share=1.0)
        self.later(_KEPT, self.nodes[-1].follow)
        self.monerods[-1].keep(share=1.0, grows=1.0)
        self.later(_KEPT_XMR, self.monerods[-1].follow)
        for deposit in self.planned_deposits(also_seen=True):
            self.rob(deposit)

    def strike_fall_behind(self) -> None:
        """Have a node of Monero that lacks blocks answer alone for a while."""
        self.leave_late_node(self.monerods[-1], _LATE_BY)
        self.later(_GONE, self.bring_nodes_back)

    def strike_hang(self) -> None:
        """Have the nodes of one of two networks answer nothing; the orders of the other go on."""
        self.network.hung[f"{BASE.host}:80"] = True
        self.later(_HUNG, self.network.hung.clear)
        others = [each for each in self.orders.values() if each.chain != BASE.name]
        paid = [each for each in others if each.deposit_network == each.chain]
        self.later(_COUNTED, partial(self._require, paid, (*_ENDED, *_COUNTING)))
        self.later(_OVER, partial(self._require, others, _ENDED))

    def _require(self, orders: Sequence[Order], states: Collection[str]) -> None:
        """Require that the orders are in these states, while another network hangs."""
        for order in orders:
            row = self.server.connection.execute(_STATUS, (order.order_id,)).fetchone()
            if row["status"] not in states:
                self.violated(f"{order.order_id} on {order.chain} waits for {BASE.name}: {row[0]}")

    def strike_take_inputs(self) -> None:
        """Have a branch in which who funded the wallet has spent that money otherwise.

        What was signed with it can't be mined any more.
        """
        self.operator.expects += (_OF_A_PAYOUT,)
        txid, height = self._funding.txid, self.monero.heights[self._funding.txid]
        depth = len(self.monero.blocks) - height
        self._replace_xmr(txid, self._funding.images[0], depth)

    def strike_leave(self) -> None:
        """Have no daemon answer for a while, not even what it has done."""
        self.network.faults = NO_FAULTS._replace(unreached=1.0, lost=1.0)
        self.later(_GONE, lambda: setattr(self.network, "faults", NO_FAULTS))

    def strike_block(self) -> None:
        """Have daemons sign and look up for a while, and get nothing that is given out."""
        self.network.blocked = PUBLISHING
        self.later(_GONE, lambda: setattr(self.network, "blocked", frozenset()))

    def strike_slow(self) -> None:
        """Have half of the database's answers take up to 15 s for a while."""
        for replica in self.replicas:
            if (database := replica.database) is not None:
                database.slow = 0.5
                self.later(_GONE, partial(setattr, database, "slow", 0.0))

    def strike_lag(self) -> None:
        self.nodes[-1].lag = _LAG
        self.later(_GONE, lambda: setattr(self.nodes[-1], "lag", 0))

    def strike_reorganise(self) -> None:
        self.evm.reorganise(_SHALLOW)
        self.monero.pop(_SHALLOW)
        self.monero.mine(_SHALLOW + 1)

    def strike_forget(self) -> None:
        """Have the EVM node relay nothing, and lose all that it takes within a second."""
        node = self.nodes[0]
        node.relays = False
        for second in range(_GONE):
            self.later(second, node.restart)
        self.later(_GONE, node.announce)

    def strike_hide(self) -> None:
        """Have people pay in blocks that come at once; a node and the wallet lack these."""
        self._pay_unseen()
        for _ in range(_UNREAD):
            self.evm.mine()
        self.monero.mine(_WALLET_LAG)
        self.wallet.lag = _WALLET_LAG
        self.later(_GONE, lambda: setattr(self.wallet, "lag", 0))
        self.strike_lag()

    def strike_branch(self) -> None:
        """Have people pay in a branch, below the newest block that was scanned."""
        self._pay_unseen()
        self.strike_reorganise()

    def strike_reindex(self) -> None:
        """Replace blocks; nodes are late to have in their index the transactions that come back."""
        back = [each.made for block in self.evm.blocks[-_SHALLOW:] for each in block.mined]
        self.strike_reorganise()
        for node in self.nodes:
            node.unlisted |= {made.txid for made in back if not made.is_signed}
            self.later(_INDEXED, node.unlisted.clear)

    def strike_prune(self) -> None:
        """Have the EVM node tell nothing of what was mined, and of states before the newest."""
        self._keep_past(keeps=False)
        self.later(_GONE, partial(self._keep_past, keeps=True))

    def _keep_past(self, *, keeps: bool) -> None:
        for node in self.nodes:
            node.keeps_past = keeps

    def strike_displace(self) -> None:
        """Have the keys' owner spend the nonces of payments that wait, from elsewhere."""
        hot = self.hot.lower()
        self.operator.expects += (f"audit: {_BY_HAND}",)
        for made in [each for each in self.nodes[0].pool.values() if each.sender == hot]:
            txid = self.evm.replace_waiting(made, to=hot, data=b"")
            works = self.operator.annotate("arbitrum", txid, "sent by hand")
            self.later(_GONE, partial(asyncio.ensure_future, works))
        self.evm.mine()

    def strike_ban(self) -> None:
        """Have the token's issuer refuse payments to everybody who ordered."""
        for order in self.orders.values():
            self.evm.state.set(("blacklisted", order.to.lower()), 1, self.evm.top)

    def strike_raise(self) -> None:
        """Have gas cost more than payments that wait offer."""
        self.evm.base_fee = DEAREST * GWEI

    # --- checks --------------------------------------------------------------------------------

    def _compare_ether(self) -> None:
        """Note payments that wait to be mined whose fees together pass the hot wallet's ether."""
        hot = self.hot.lower()
        waiting = [each for each in self.nodes[0].pool.values() if each.sender == hot]
        if sum(each.gas * each.max_fee for each in waiting) > self.evm.state.get(("ether", hot)):
            self.violated(f"{len(waiting)} payments that wait count on the same ether")

    @override
    async def check(self) -> None:
        """Note payments of the hot wallet that failed, and that went on at a deadline only.

        Nothing else moves its money here, and nothing keeps a payment for minutes.
        """
        if self._scenario.strike in _SHORT_STRIKES and self._scenario.hot == RICH:
            for row in self.server.connection.execute(_LATE):
                self.violated(f"order {row['order_seq']} went on at its deadline only")
        for block in self.evm.blocks:
            for each in block.mined if self._scenario.strike not in _FAILING else ():
                if each.made.sender == self.hot.lower() and not each.ok:
                    self.violated(f"{each.made.txid} of the hot wallet failed in its block")
        for order in self.orders.values() if self._scenario.strike == "kill" else ():
            came, paid, refunds = self._flows(order)
            if came == [order.due] and paid != [order.expected]:
                self.violated(f"{order.order_id} was paid as quoted: {paid}, and back {refunds}")
        for row in self.server.connection.execute(_REMOVED) if self._keeps_deposits() else ():
            self.violated(f"a deposit of order {row['order_seq']} was removed, and is there")
        await super().check()

    def _keeps_deposits(self) -> bool:
        return self._scenario.strike in ("lag", "reorganise", "reindex")

    @override
    async def _sickness(self, replica: Replica) -> str:
        problem = await super()._sickness(replica)
        if problem and self._scenario.strike == "take_inputs":
            problem = await super()._sickness(replica)  # a lost split fails after 30 blocks
        is_short = self._scenario.hot.ether == _ETHER and problem.endswith(_SHORT)
        return "" if is_short else problem


def cut(name: str, cuts: Sequence[int]) -> Outcome:
    """Run a scenario once, struck at these effects."""
    scenario = SCENARIOS[name]
    return run_made(lambda folder: CutUniverse(folder, scenario, cuts), len(scenario.orders))


def cut_everywhere(name: str, size: int = 1, jobs: int = 1) -> Iterator[Outcome]:
    """Run a scenario for each set of up to ``size`` of its effects, ``jobs`` runs at once.

    The run that nothing strikes comes first.
    """
    for index in range(_ACCOUNTS):
        signer_at(index)  # each run inherits them
    scenario = SCENARIOS[name]
    yield cut(name, ())
    shares = [range(first, scenario.most + 1, jobs) for first in range(1, jobs + 1)]
    makes = [partial(CutUniverse, scenario=scenario, forks=each, size=size) for each in shares]
    yield from (each for each in runs_made(makes, len(scenario.orders)) if each.struck)
