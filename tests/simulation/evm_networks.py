"""The EVM networks of a universe: each is a chain, its nodes behind one name, and their faults.

All wallets have the same addresses on each, so that everything is asked of one network.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from rpcsvc.domain import usdc
from tests.simulation.evm import Block, EvmChain, Holding, Mined
from tests.simulation.evm_node import EvmName, EvmNode
from tests.simulation.tiers import CONFIRMATIONS
from tests.simulation.universe import evm_address

# Blocks that a single node lacks, or one of several behind one name: then one may lack minutes.
_LAGS: Final = (0, 1, 2, 4)
_FAR_LAGS: Final = (12, 60, 60)


class Terms(NamedTuple):
    """How a network is named in orders, and its test network, which is the one that runs.

    ``chain_id``: in orders. ``seconds``: from one block to the next.
    """

    name: str
    chain_id: int
    test_chain_id: int
    token: str
    seconds: int

    @property
    def host(self) -> str:
        """The name of its nodes in the network of daemons."""
        return "evm" if self is ARBITRUM else f"evm-{self.name}"

    def table(self) -> str:
        """The network's table in the service's file of chains."""
        return f"""
[chains.{self.name}]
display_name = "{self.name.title()}"
chain_id = {self.chain_id}
aliases = []
native_token = "ETH"
usdc_contract = "{evm_address(self.token, "main")}"
min_swap_usd = 40
confirmations = {CONFIRMATIONS}
block_time_ms = {self.seconds * 1000}
test_network = "{self.name}-sepolia"
test_chain_id = {self.test_chain_id}
test_usdc_contract = "{self.token}"
"""


ARBITRUM: Final = Terms("arbitrum", 42161, 421614, evm_address("token"), 6)
BASE: Final = Terms("base", 8453, 84532, evm_address("token", "base"), 3)


class Move(NamedTuple):
    """A transfer of the token, by addresses in lower case."""

    txid: str
    source: str
    to: str
    units: int


class EvmNetwork:
    """A chain and its nodes. ``chance`` draws what they are, ``outside`` what happens to them.

    ``now`` tells Unix seconds, by the seconds from one block to the next.
    """

    def __init__(
        self,
        terms: Terms,
        now: Callable[[int], int],
        holdings: Mapping[str, Holding],
        node_count: Callable[[random.Random], int],
        chance: random.Random,
    ) -> None:
        self.terms = terms
        self.name = terms.name
        self._chance = self.outside = chance
        self.chain = EvmChain(
            terms.test_chain_id, terms.token, lambda: now(terms.seconds), self._fork(), holdings
        )
        self.nodes = [EvmNode(self.chain, self._fork()) for _ in range(node_count(chance))]

    def _fork(self) -> random.Random:
        return random.Random(self._chance.getrandbits(64))

    def answering(self) -> EvmNode | EvmName:
        """Return the daemon that answers at the name of its nodes."""
        return self.nodes[0] if len(self.nodes) == 1 else EvmName(self.nodes, self._fork())

    def depth(self, txid: str) -> int:
        """The blocks from the one with a transaction on; 0: there is none."""
        place = self.chain.place_of(txid)
        return 0 if place is None else self.chain.top.number - place[0].number + 1

    def disturb(self, node: EvmNode) -> None:
        """Have a node perhaps lose its pool, lag, or keep to itself what it takes."""
        chance = self.outside
        if chance.random() < 0.5:
            node.restart()
        far = _FAR_LAGS if len(self.nodes) > 1 else ()
        node.lag = chance.choice([*_LAGS, *far])
        for other in self.nodes:
            if other is not node and node.lag in far:
                other.lag = min(other.lag, max(_LAGS))
        node.relays = chance.random() < 0.7

    def calm(self) -> None:
        """Have all nodes on the chain, and everything mined and relayed."""
        self.chain.left_out = self.chain.forgotten = 0.0
        for node in self.nodes:
            node.lag = 0
            node.follow()
            node.announce()

    def held(self, account: str) -> int:
        """USDC units of an account."""
        return self.chain.state.get(("usdc", account.lower()))

    def received(self, address: str, least: int = 1) -> list[int]:
        """Units that an address got in blocks that are ``least`` deep, by payment."""
        blocks = self.chain.blocks[: len(self.chain.blocks) + 1 - least]
        return [move.units for move in moves(blocks) if move.to == address.lower()]

    def sweeps(self, hot: str) -> set[str]:
        """The transactions that bring USDC to the hot wallet, and nothing to anybody else."""
        return {
            mined.made.txid
            for block in self.chain.blocks
            for mined in block.mined
            if {move.to for move in _moved(mined)} == {hot.lower()}
        }

    def harmless_at(self, account: str, nonce: int) -> str | None:
        """The transaction at a nonce of an account, if a block explorer shows that it moved nothing
        of the account's.
        """
        for block in self.chain.blocks:
            for mined in block.mined:
                if (mined.made.sender, mined.made.nonce) == (account.lower(), nonce):
                    took = any(move.source == account.lower() for move in _moved(mined))
                    return None if took else mined.made.txid
        return None


def moves(blocks: Sequence[Block]) -> Iterator[Move]:
    """Each transfer of the token in blocks."""
    for block in blocks:
        for mined in block.mined:
            yield from _moved(mined)


def _moved(mined: Mined) -> Iterator[Move]:
    """Each transfer of the token in one transaction."""
    for event in mined.events:
        if (move := usdc.transfer_in(event.topics, event.data)) is not None:
            yield Move(mined.made.txid, move.sender.lower(), move.to.lower(), move.units)
