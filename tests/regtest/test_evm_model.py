"""The simulation's model of an EVM node answers what Anvil answers: one script is played on both.

An answer that differs is a fault of the model. Left out are gas and fees, which the model keeps
flat, and events of blocks that do not exist yet: Anvil refuses the question, the model lists none
as other nodes do.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Any, Final

import pytest
from msgspec.structs import replace

from rpcsvc.domain import usdc
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint, NodeError
from rpcsvc.settlement.onchain.evm.keys import EvmSigner, TransactionPlan
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.node_types import EvmCall, Log, LogFilter, Reverted, Tag
from tests.regtest.daemons import Anvil, run_apart
from tests.regtest.token import Token, contract_address, deploy
from tests.simulation.daemons import Network
from tests.simulation.evm import EvmChain, Holding
from tests.simulation.evm_node import EvmNode
from tests.simulation.loop import new_loop

pytestmark = pytest.mark.slow

CHAIN_ID: Final = 42161
GWEI: Final = 10**9
USDC: Final = 10**6
HOT, OWNER, POOR = (EvmSigner(bytes([n] * 32)) for n in (1, 2, 3))
PAYEE: Final = usdc.read_address(bytes(12) + usdc.keccak256(b"payee")[12:])
DEPLOYER: Final = "0xf39Fd6e51aad88F6F4ce6aB8827279cffFb92266"  # the first account of Anvil
NOWHERE: Final = "0x" + "ab" * 32


class Stage(ABC):
    """A chain with USDC whose blocks come on command, and a client of its node."""

    def __init__(self, client: EvmClient, token: str) -> None:
        self.client = client
        self.token = token
        self.domain = usdc.Domain("USD Coin", "2", CHAIN_ID, token)

    @abstractmethod
    async def mine(self) -> None:
        """Add a block of what waits."""

    @abstractmethod
    async def lose(self, depth: int) -> None:
        """Replace the newest blocks by empty ones; no pool gets their transactions back."""

    @abstractmethod
    async def set_paused(self, *, paused: bool) -> None:
        """Have the token's owner pause it, or let it go on, in a block of its own."""

    @abstractmethod
    async def set_blacklisted(self, account: str, *, blacklisted: bool) -> None:
        """Have the token's owner blacklist an account, or not any more, in a block of its own."""


class ModelStage(Stage):
    """The model."""

    def __init__(self, client: EvmClient, chain: EvmChain) -> None:
        super().__init__(client, usdc.read_address(usdc.address_word(chain.token)))
        self._chain = chain

    async def mine(self) -> None:
        await asyncio.sleep(0.1)  # what was relayed has come to all pools
        self._chain.mine()

    async def lose(self, depth: int) -> None:
        self._chain.forgotten = 1.0
        self._chain.reorganise(depth, again=depth)

    async def set_paused(self, *, paused: bool) -> None:
        self._chain.mine()
        self._chain.state.set(("paused", ""), int(paused), self._chain.top)

    async def set_blacklisted(self, account: str, *, blacklisted: bool) -> None:
        self._chain.mine()
        key = ("blacklisted", account.lower())
        self._chain.state.set(key, int(blacklisted), self._chain.top)


class AnvilStage(Stage):
    """The real node."""

    def __init__(self, client: EvmClient, token: Token) -> None:
        super().__init__(client, token.address)
        self._token = token

    async def mine(self) -> None:
        await self._token.controls.mine()

    async def lose(self, depth: int) -> None:
        await self._token.controls.reorganise(depth)

    async def set_paused(self, *, paused: bool) -> None:
        await self._owner("pause()" if paused else "unpause()")

    async def set_blacklisted(self, account: str, *, blacklisted: bool) -> None:
        name = "blacklist" if blacklisted else "unBlacklist"
        await self._owner(f"{name}(address)", usdc.address_word(account))

    async def _owner(self, signature: str, words: bytes = b"") -> None:
        data = usdc.selector(signature) + words
        txid = await self._token.controls.send_from(self._token.owner, self.token, data)
        await self.mine()
        receipt = await self.client.receipt(txid)
        assert receipt is not None
        assert receipt.ok


class Script:
    """Questions for a stage, and what it said. Blocks are numbered from the first one on."""

    def __init__(self, stage: Stage, first: int) -> None:
        self._stage = stage
        self._client = stage.client
        self._first = first
        self.said: list[tuple[str, Any]] = []

    # --- what is sent --------------------------------------------------------------------------

    async def submit(
        self, what: str, nonce: int, data: bytes, *, signer: EvmSigner = HOT, gwei: int = 3,
        gas: int = 200_000, chain_id: int = CHAIN_ID,
    ) -> str:  # fmt: skip
        """Send a call of the token; its transaction id."""
        plan = TransactionPlan(
            chain_id, nonce, self._stage.token, gas, gwei * GWEI, gwei * GWEI // 4, data
        )
        signed = signer.sign(plan)
        said = await self._client.submit(signed.raw)
        self.said.append((what, said.submission.value))
        return signed.txid

    async def pay(self, what: str, nonce: int, units: int, to: str = PAYEE, **more: Any) -> str:
        """Send a transfer; its transaction id."""
        return await self.submit(what, nonce, usdc.transfer(to, units), **more)

    # --- what is asked -------------------------------------------------------------------------

    async def ask(self, what: str, answer: Awaitable[Any]) -> None:
        """Note an answer, or how it was refused."""
        try:
            self.said.append((what, await answer))
        except Reverted:
            self.said.append((what, "reverted"))
        except NodeError:
            self.said.append((what, "refused"))

    async def look_at(self, what: str, *txids: str) -> None:
        """Note all that the product asks of transactions and of their sender."""
        client = self._client
        for txid in txids:
            made = await client.transaction(txid)
            if made is not None:
                number = self._relative(made.block_number)
                known = (made.sender, made.to, made.nonce, made.value, made.data, number)
                assert (made.block_hash is None) is (made.block_number is None)
            self.said.append((what, None if made is None else known))
            receipt = await client.receipt(txid)
            if receipt is None:
                self.said.append((what, None))
                continue
            block = await client.block(receipt.block_number)
            assert block is not None
            assert block.hash == receipt.block_hash
            events = [self._event(log, txid, block.hash) for log in receipt.logs]
            self.said.append((what, (receipt.ok, self._relative(receipt.block_number), events)))
        for tag in (Tag.LATEST, Tag.PENDING):
            await self.ask(what, client.nonce(HOT.address, tag))
        for account in (HOT.address, OWNER.address, PAYEE):
            await self.ask(what, self._units(account))
        self.said.append((what, await self._listed()))

    async def try_out(self, what: str, data: bytes, sender: str = HOT.address) -> None:
        """Note whether the node would carry out a call, and whether it estimates its gas."""
        call = EvmCall(self._stage.token, data, sender)
        await self.ask(what, self._client.call(call))
        await self.ask(what, self._estimated(call))

    async def token(self, what: str, data: bytes) -> None:
        """Note an answer of the token."""
        await self.ask(what, self._client.call(EvmCall(self._stage.token, data)))

    async def history(self, what: str) -> None:
        """Note the payee's units after each block, and what lies beyond the newest."""
        top = await self._client.block()
        assert top is not None
        self.said.append((what, top.number - self._first))
        parent = None
        for number in range(self._first, top.number + 1):
            block = await self._client.block(number)
            assert block is not None
            assert parent in (None, block.parent)
            parent = block.hash
            await self.ask(what, self._units(PAYEE, number))
            await self.ask(what, self._client.nonce(HOT.address, number))
        await self.ask(what, self._client.block(top.number + 1))
        await self.ask(what, self._units(PAYEE, top.number + 1))

    async def _estimated(self, call: EvmCall) -> bool:
        return 21_000 < await self._client.estimate_gas(call) < 200_000

    async def _units(self, account: str, at: int | Tag = Tag.LATEST) -> int:
        call = EvmCall(self._stage.token, usdc.balance_of(account))
        return usdc.read_uint(await self._client.call(call, at))

    async def _listed(self) -> list[Any]:
        top = await self._client.block()
        assert top is not None
        topics = (usdc.TRANSFER_TOPIC, None, usdc.address_word(PAYEE))
        wanted = LogFilter(self._stage.token, topics)
        found = await self._client.logs(wanted, self._first, top.number)
        assert found.proven is not None
        assert found.proven.hash == top.hash
        return [self._event(log, log.txid, log.block_hash) for log in found.logs]

    def _event(self, log: Log, txid: str, block_hash: str) -> Any:
        assert (log.address, log.txid, log.block_hash) == (self._stage.token, txid, block_hash)
        return (log.topics, log.data, log.log_index, self._relative(log.block_number))

    def _relative(self, number: int | None) -> int | None:
        return None if number is None else number - self._first


async def play(stage: Stage) -> list[tuple[str, Any]]:
    """Play all scenes one after the other; what was said."""
    top = await stage.client.block()
    assert top is not None
    script = Script(stage, top.number)
    await replacing(script, stage)
    await gaps(script, stage)
    await refusals(script, stage)
    await failures(script, stage)
    await authorizations(script, stage)
    await reorganisation(script, stage)
    return script.said


async def replacing(script: Script, stage: Stage) -> None:
    """A payment waits, is replaced, and mined."""
    await script.look_at("nothing", NOWHERE)
    first = await script.pay("first", 0, 7)
    await script.pay("again", 0, 7)
    await script.look_at("waits", first)
    await script.pay("low", 0, 8)
    await script.look_at("low", first)
    second = await script.pay("high", 0, 9, gwei=4)
    await script.look_at("replaced", first, second)
    await stage.mine()
    await script.look_at("mined", first, second)
    await script.pay("late", 0, 10, gwei=5)
    await script.look_at("late", first, second)


async def gaps(script: Script, stage: Stage) -> None:
    """A payment whose nonce comes later waits for the one before; several are in one block."""
    later = await script.pay("later", 2, 3)
    await stage.mine()
    await script.look_at("gap", later)
    before = await script.pay("before", 1, 4)
    await script.look_at("filled", before, later)
    await stage.mine()
    await script.look_at("both", before, later)
    await script.history("history")


async def refusals(script: Script, stage: Stage) -> None:
    """Nodes take neither what can't be paid for nor what is of another chain."""
    await script.pay("poor", 0, 1, signer=POOR)
    await script.pay("other chain", 3, 1, chain_id=CHAIN_ID + 1)
    await script.ask("code", stage.client.code(PAYEE))
    await script.ask("no contract", stage.client.call(EvmCall(PAYEE, usdc.PAUSED)))
    await script.ask("chain", stage.client.chain_id())
    for call in (usdc.DECIMALS, usdc.NAME, usdc.VERSION, usdc.DOMAIN_SEPARATOR, usdc.PAUSED):
        await script.token("token", call)
    await script.token("no such call", usdc.selector("nothing()"))


async def failures(script: Script, stage: Stage) -> None:
    """A call that the token refuses is mined all the same, without events."""
    too_much = usdc.transfer(PAYEE, 1_000 * USDC)
    await script.try_out("too much", too_much)
    failed = [await script.submit("too much", 3, too_much)]
    failed.append(await script.pay("little gas", 4, 1, gas=25_000))
    await stage.mine()
    await script.look_at("failed", *failed)

    await stage.set_paused(paused=True)
    await script.token("paused", usdc.PAUSED)
    await script.try_out("paused", usdc.transfer(PAYEE, 1))
    failed = [await script.pay("paused", 5, 1)]
    await stage.mine()
    await script.look_at("paused", *failed)
    await stage.set_paused(paused=False)

    for account in (PAYEE, HOT.address):
        await stage.set_blacklisted(account, blacklisted=True)
        await script.token("blacklisted", usdc.is_blacklisted(account))
        await script.try_out("blacklisted", usdc.transfer(PAYEE, 1))
        await stage.set_blacklisted(account, blacklisted=False)
        await script.token("not blacklisted", usdc.is_blacklisted(account))
    await script.try_out("well again", usdc.transfer(PAYEE, 1))


async def authorizations(script: Script, stage: Stage) -> None:
    """A signature moves its owner's money once, in time, to the payee that calls."""
    given = usdc.Authorization(OWNER.address, HOT.address, 5 * USDC, 0, 2**40, bytes([9] * 32))
    signature = OWNER.sign_digest(usdc.receive_digest(stage.domain, given))
    data = usdc.receive_with_authorization(given, signature)
    used = usdc.authorization_state(OWNER.address, given.nonce)
    await script.token("unused", used)
    await script.try_out("signed", data)
    await script.try_out("not the payee", data, OWNER.address)
    await script.try_out(
        "changed", usdc.receive_with_authorization(replace(given, units=6 * USDC), signature)
    )
    for name, change in (("too early", {"valid_after": 2**39}), ("too late", {"valid_before": 9})):
        other = replace(given, **change)
        by = OWNER.sign_digest(usdc.receive_digest(stage.domain, other))
        await script.try_out(name, usdc.receive_with_authorization(other, by))
    much = replace(given, units=1_000 * USDC)
    by = OWNER.sign_digest(usdc.receive_digest(stage.domain, much))
    await script.try_out("too much", usdc.receive_with_authorization(much, by))
    sent = await script.submit("signed", 6, data)
    again = await script.submit("signed again", 7, data)
    await stage.mine()
    await script.look_at("signed", sent, again)
    await script.token("used", used)
    await script.try_out("used", data)


async def reorganisation(script: Script, stage: Stage) -> None:
    """Blocks that are replaced take payments and their effects away."""
    kept = await script.pay("kept", 8, 11)
    await stage.mine()
    lost = await script.pay("lost", 9, 12)
    await stage.mine()
    await stage.mine()
    await script.look_at("before", kept, lost)
    await stage.lose(2)
    await script.look_at("after", kept, lost)
    await script.history("after")
    back = await script.pay("back", 9, 12)
    assert back == lost
    await stage.mine()
    await script.look_at("back", kept, lost)


def on_model(token: str) -> list[tuple[str, Any]]:
    """Play on the model, whose token has this address."""
    loop, chance = new_loop(1), random.Random(1)
    holdings = {
        HOT.address: Holding(units=100 * USDC),
        OWNER.address: Holding(units=50 * USDC),
        POOR.address: Holding(ether=0, units=USDC),
    }
    chain = EvmChain(CHAIN_ID, token, lambda: 1_800_000_000, chance, holdings)
    node, network = EvmNode(chain, chance), Network(loop, chance)
    node.relay_seconds = 0.0
    url = network.serve("evm", node)

    async def run() -> list[tuple[str, Any]]:
        async with EvmClient(DaemonEndpoint("model", url)) as client:
            return await play(ModelStage(client, chain))

    with network.carrying():
        return loop.run_simulation(run())


async def on_anvil(anvil: Anvil, code: bytes) -> list[tuple[str, Any]]:
    """Play on Anvil."""
    async with EvmClient(anvil.endpoint) as client:
        token = await deploy(client, code)
        for signer in (HOT, OWNER):
            await token.controls.set_ether(signer.address, 10**18)
        for signer, units in ((HOT, 100 * USDC), (OWNER, 50 * USDC), (POOR, USDC)):
            await token.mint(signer.address, units)
        await token.controls.automine(enabled=False)
        return await play(AnvilStage(client, token))


def test_model_of_an_evm_node_answers_as_anvil(anvil: Anvil, token_code: bytes) -> None:
    real = run_apart(on_anvil(anvil, token_code))
    modelled = on_model(contract_address(DEPLOYER, 0))
    assert [pair for pair in zip(modelled, real, strict=True) if pair[0] != pair[1]] == []
