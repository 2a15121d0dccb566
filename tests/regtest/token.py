"""The test token: USDC's interface, compiled from contracts/FiatToken.vy and deployed on Anvil."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rpcsvc.domain import usdc
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.node_types import EvmCall, LogFilter
from tests.regtest.daemons import AnvilControls, mined

CONTRACTS: Final = Path(__file__).parent / "contracts"
SOURCE: Final = CONTRACTS / "FiatToken.vy"
NAME: Final = "USD Coin"


def compiled(source: Path = SOURCE) -> bytes:
    """A contract's creation code. The compiler runs in a subprocess because of its warnings."""
    command = [sys.executable, "-m", "vyper", "-f", "bytecode", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return bytes.fromhex(done.stdout.strip().removeprefix("0x"))


@dataclass(frozen=True, slots=True)
class Token:
    """A deployed token. Its owner mints, pauses and blacklists."""

    address: str
    owner: str
    domain: usdc.Domain
    client: EvmClient
    controls: AnvilControls

    @property
    def transfers(self) -> LogFilter:
        """All its Transfer events."""
        return LogFilter(self.address, (usdc.TRANSFER_TOPIC,))

    async def mint(self, to: str, units: int) -> str:
        return await self.own(
            "mint(address,uint256)", usdc.address_word(to) + usdc.uint_word(units)
        )

    async def pause(self) -> str:
        return await self.own("pause()")

    async def unpause(self) -> str:
        return await self.own("unpause()")

    async def blacklist(self, account: str) -> str:
        return await self.own("blacklist(address)", usdc.address_word(account))

    async def unblacklist(self, account: str) -> str:
        return await self.own("unBlacklist(address)", usdc.address_word(account))

    async def own(self, signature: str, words: bytes = b"") -> str:
        """Make a call that only the owner may make, mined; its transaction id."""
        data = usdc.selector(signature) + words
        txid = await self.controls.send_from(self.owner, self.address, data)
        assert (await mined(self.client, txid)).ok
        return txid

    async def ask(self, data: bytes) -> bytes:
        """The result of a call on the latest block."""
        return await self.client.call(EvmCall(self.address, data))

    async def balance(self, account: str) -> int:
        return usdc.read_uint(await self.ask(usdc.balance_of(account)))


async def deploy(client: EvmClient, code: bytes, name: str = NAME) -> Token:
    """Deploy a token; automine must be on."""
    controls = AnvilControls(client)
    owner = (await controls.accounts())[0]
    text = name.encode()
    argument = usdc.uint_word(32) + usdc.uint_word(len(text)) + text + bytes(-len(text) % 32)
    address = await deployed(client, controls, owner, code + argument)
    domain = usdc.Domain(name, "2", await client.chain_id(), address)
    return Token(address, owner, domain, client, controls)


async def deployed(client: EvmClient, controls: AnvilControls, by: str, code: bytes) -> str:
    """The address of a new contract, of creation code and its arguments."""
    nonce = await client.nonce(by)
    txid = await controls.send_from(by, None, code)
    assert (await mined(client, txid)).ok
    return contract_address(by, nonce)


def contract_address(creator: str, nonce: int) -> str:
    """The address of a new contract (keccak of the RLP of creator and nonce)."""
    assert nonce < 128
    rlp = b"\xd6\x94" + bytes.fromhex(creator[2:]) + bytes([nonce or 0x80])
    return usdc.read_address(bytes(12) + usdc.keccak256(rlp)[12:])
