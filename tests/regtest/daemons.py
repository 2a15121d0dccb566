"""Real daemons as processes of a test, and controls of their chains for tests only.

Each listens on a free port of 127.0.0.1 and keeps data and log in a directory of its own.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from rpcsvc.settlement.onchain.daemon_rpc import (
    DaemonEndpoint,
    DaemonRpc,
    NodeError,
    NotSent,
    RpcFailure,
)
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.node_types import Receipt
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import Destination, WalletTransferKind
from tests.e2e.processes import TIMEOUT_SECONDS, free_port, until

_MINING_SECONDS: Final = 600.0

TOOLS: Final = Path(__file__).parents[2] / "tools" / "regtest"
QUICK: Final = TOOLS / "quick.so"
POLL_SECONDS: Final = 0.02
_CALL_GAS: Final = 500_000
LOG_TAIL: Final = 4000
WALLET_NAME: Final = "treasury"
WALLET_PASSWORD: Final = "wallet-password"
COINBASE_LOCK: Final = 60
SPENDABLE_AGE: Final = 10
_LISTENING: Final = "0A"

T = TypeVar("T")

running: list[Daemon] = []


# --- what is installed -----------------------------------------------------------------------


def anvil_path() -> Path | None:
    """Anvil as installed by tools/regtest/install, else the one on the PATH."""
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    package = f"anvil-{platform.system().lower()}-{machine}"
    pinned = TOOLS / "node_modules" / "@foundry-rs" / package / "bin" / "anvil"
    found = str(pinned) if pinned.exists() else shutil.which("anvil")
    return None if found is None else Path(found)


def missing() -> list[str]:
    """The programs that these tests need and that are not installed."""
    programs = [name for name in ("monerod", "monero-wallet-rpc") if shutil.which(name) is None]
    if anvil_path() is None:
        programs.append("anvil")
    modules = [name for name in ("eth_account", "vyper") if find_spec(name) is None]
    return programs + modules


# --- waiting ---------------------------------------------------------------------------------


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from a synchronous fixture, in a loop that no test uses."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def wait_for(look: Callable[[], bool], *, seconds: float = TIMEOUT_SECONDS) -> None:
    """Poll until ``look`` returns True; TimeoutError after ``seconds``."""
    give_up = time.monotonic() + seconds
    while not look():
        if time.monotonic() > give_up:
            raise TimeoutError
        time.sleep(POLL_SECONDS)


# --- processes -------------------------------------------------------------------------------


class Daemon:
    """One process. It may be killed and started again on the same port and data."""

    def __init__(self, name: str, directory: Path, probe: tuple[str, Any, str]) -> None:
        self.name = name
        self.directory = directory
        self.log = directory / f"{name}.log"
        self.port = free_port()
        self._method, self._params, self._rpc_path = probe
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> DaemonEndpoint:
        return DaemonEndpoint(self.name, self.url)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def command(self) -> Sequence[str | Path]:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        quick = {"LD_PRELOAD": str(QUICK)} if QUICK.exists() else {}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), cwd=self.directory, env=os.environ | quick,
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        running.append(self)
        try:
            wait_for(self._is_ready)
        except TimeoutError:
            raise AssertionError(f"{self.name} does not answer:\n{self.log_tail()}") from None

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it with SIGTERM."""
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """Stop it with SIGSTOP: it accepts connections and answers nothing, until ``thaw``."""
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def has_unread(self) -> bool:
        """Whether a connection has bytes that the process has not read yet."""
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, _, state, queues, *_ = line.split()
            is_here = local.endswith(f":{self.port:04X}") and state != _LISTENING
            if is_here and int(queues.split(":")[1], 16):
                return True
        return False

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL:]

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self in running:
            running.remove(self)
            self._signal(number)
            assert self._process is not None
            self._process.wait(timeout=TIMEOUT_SECONDS)

    def _is_ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"{self.name} ended by itself:\n{self.log_tail()}")
        return run_apart(self._answers())

    async def _answers(self) -> bool:
        async with DaemonRpc(self.endpoint, rpc_path=self._rpc_path) as rpc:
            try:
                await rpc.act(self._method, self._params, seconds=TIMEOUT_SECONDS)
            except NotSent:
                return False
            except RpcFailure as failure:
                raise AssertionError(f"{self.name}: {failure}\n{self.log_tail()}") from failure
            return True


class Monerod(Daemon):
    """monerod on a regtest chain of its own, or on the one that it shares with ``peers``.

    ``peers``: the p2p ports on this machine that it connects to; None: it stays offline.
    """

    def __init__(self, directory: Path, peers: Sequence[int] | None = None) -> None:
        super().__init__("monerod", directory, ("get_info", {}, "/json_rpc"))
        self._restricted_port = free_port()
        self.p2p_port = free_port()
        self._peers = peers

    def _network(self) -> Sequence[str]:
        if self._peers is None:
            return ["--offline"]
        listen = ["--p2p-bind-ip", "127.0.0.1", "--p2p-bind-port", str(self.p2p_port)]
        known = [f"--add-exclusive-node=127.0.0.1:{port}" for port in self._peers]
        return [*listen, "--allow-local-ip", "--hide-my-port", *known]

    @property
    def restricted_endpoint(self) -> DaemonEndpoint:
        """The node's restricted RPC, which shows broadcast transactions only."""
        return DaemonEndpoint("restricted monerod", f"http://127.0.0.1:{self._restricted_port}")

    def command(self) -> Sequence[str | Path]:
        return [
            "monerod", "--regtest", "--fixed-difficulty", "1", "--keep-fakechain",
            *self._network(),
            "--data-dir", self.directory, "--rpc-bind-port", str(self.port),
            "--rpc-restricted-bind-port", str(self._restricted_port), "--no-zmq",
            "--rpc-ssl", "disabled", "--check-updates", "disabled", "--no-igd",
            "--non-interactive", "--log-level", "0", "--log-file", self.directory / "bitmonero.log",
        ]  # fmt: skip


class WalletRpc(Daemon):
    """monero-wallet-rpc on a directory of wallets, without automatic refresh."""

    USERNAME: Final = "wallet-user"
    SECRET: Final = "wallet, with a comma: and colon"

    def __init__(self, directory: Path, monerod: Monerod) -> None:
        super().__init__("monero-wallet-rpc", directory, ("get_version", {}, "/json_rpc"))
        self._monerod = monerod

    @property
    def endpoint(self) -> DaemonEndpoint:
        return DaemonEndpoint(
            self.name, self.url, username=self.USERNAME, password=self.SECRET, serial=True
        )

    def command(self) -> Sequence[str | Path]:
        return [
            "monero-wallet-rpc", "--wallet-dir", self.directory, "--rpc-bind-port", str(self.port),
            "--rpc-login", f"{self.USERNAME}:{self.SECRET}", "--rpc-ssl", "disabled",
            "--daemon-address", self._monerod.url, "--daemon-ssl", "disabled", "--trusted-daemon",
            "--shared-ringdb-dir", self.directory / "ringdb", "--non-interactive", "--no-dns",
            "--log-level", "0", "--log-file", self.directory / "wallet.log",
        ]  # fmt: skip


class Anvil(Daemon):
    """Anvil: an EVM chain that mines each transaction at once unless automine is off."""

    def __init__(self, directory: Path, chain_id: int = 42161, *extra: str) -> None:
        super().__init__("anvil", directory, ("eth_chainId", [], ""))
        self.chain_id = chain_id
        self._extra = extra

    def command(self) -> Sequence[str | Path]:
        program = anvil_path()
        assert program is not None
        return [
            program, "--port", str(self.port), "--chain-id", str(self.chain_id), "--silent",
            *self._extra,
        ]  # fmt: skip


# --- their chains ----------------------------------------------------------------------------


async def generate_blocks(node: MonerodClient, count: int, address: str) -> tuple[str, ...]:
    """Mine blocks that pay ``address``; their hashes."""
    params = {"amount_of_blocks": count, "wallet_address": address, "starting_nonce": 0}
    answer = await node.rpc.act("generateblocks", params, seconds=_MINING_SECONDS)
    assert answer["status"] == "OK", answer
    return tuple(answer.get("blocks", []))


async def pop_blocks(node: MonerodClient, count: int) -> int:
    """Take the newest blocks off the chain of an unrestricted node; the height after."""
    answer = await node.rpc.act_path("/pop_blocks", {"nblocks": count})
    assert answer["status"] == "OK", answer
    return int(answer["height"])


class Miner:
    """A monerod and the wallet that its blocks pay: where the tests' XMR comes from."""

    PREMINED: Final = COINBASE_LOCK + 40

    def __init__(self, monerod: Monerod, bank: WalletRpc) -> None:
        self.monerod = monerod
        self.bank = bank
        self._address = ""

    async def begin(self) -> None:
        """Make the bank's wallet and mine until it can pay."""
        async with WalletClient(self.bank.endpoint) as bank:
            await bank.create("bank", WALLET_PASSWORD)
            self._address = await bank.primary_address()
        await self.mine(self.PREMINED)

    async def mine(self, blocks: int = 1) -> tuple[str, ...]:
        """Mine blocks; their hashes. What waits in the pool is mined with the first."""
        async with MonerodClient(self.monerod.endpoint) as node:
            await self._until_broadcast(node)
            return await generate_blocks(node, blocks, self._address)

    async def _until_broadcast(self, node: MonerodClient) -> None:
        """Wait until the pool is broadcast: Dandelion++ first hides transactions from mining."""
        async with MonerodClient(self.monerod.restricted_endpoint) as seen:

            async def broadcast() -> bool:
                return (await seen.info()).pool_size == (await node.info()).pool_size

            await until(broadcast)

    async def pay(self, address: str, *amounts: int) -> str:
        """Pay one output for each amount, up to 15, and leave it in the pool; its id."""
        async with WalletClient(self.bank.endpoint) as bank:
            await bank.refresh()
            payment = await bank.prepare([Destination(address, amount) for amount in amounts])
            txid = await bank.relay(payment.metadata)
            await bank.store()
            return txid

    async def offer_again(self) -> None:
        """Resubmit the bank's payments that monerod abandoned while blocks were replaced.

        They would stay in the pool, unmined. Payments of other wallets are not resubmitted.
        """
        async with WalletClient(self.bank.endpoint) as bank:
            mine = {item.txid for item in await bank.transfers(0, (WalletTransferKind.PENDING,))}
        async with MonerodClient(self.monerod.endpoint) as node:
            for item in await node.pool():
                if item.abandoned and item.txid in mine:
                    asked = {"txs_hashes": [item.txid], "prune": False}
                    found = await node.rpc.read_path("/get_transactions", asked)
                    await node.flush_pool([item.txid])
                    await node.submit(found["txs"][0]["as_hex"])

    async def reconnect(self) -> None:
        """Reconnect the bank's wallet to the node after the node was killed."""
        async with WalletClient(self.bank.endpoint) as bank:

            async def refreshed() -> bool:
                with suppress(NodeError):
                    await bank.refresh()
                    return True
                return False

            await until(refreshed)

    async def fund(self, address: str, *amounts: int) -> str:
        """Pay, and mine until it can be spent; the transaction id."""
        txid = await self.pay(address, *amounts)
        await self.mine(SPENDABLE_AGE)
        return txid


async def new_wallet(daemon: WalletRpc, name: str = WALLET_NAME) -> None:
    """Make a wallet and leave it open, without automatic refresh."""
    async with WalletClient(daemon.endpoint) as wallet:
        await wallet.create(name, WALLET_PASSWORD)
        await wallet.auto_refresh(enabled=False)


async def kill_and_reopen(daemon: WalletRpc, wallet: WalletClient, name: str = WALLET_NAME) -> None:
    """Kill a wallet daemon, start it again, and open the wallet from its file."""
    await asyncio.to_thread(daemon.kill)
    await asyncio.to_thread(daemon.start)
    await wallet.open(name, WALLET_PASSWORD)
    await wallet.auto_refresh(enabled=False)


async def mined(client: EvmClient, txid: str) -> Receipt:
    """The receipt, as soon as there is one: Anvil mines shortly after it accepted a transaction."""
    return await until(lambda: client.receipt(txid))


class AnvilControls:
    """Anvil's RPC methods that control its chain."""

    def __init__(self, client: EvmClient) -> None:
        self._rpc = client.rpc

    async def accounts(self) -> list[str]:
        """Accounts with ether that Anvil signs for."""
        return list(await self._rpc.read("eth_accounts", []))

    async def send_from(
        self, sender: str, to: str | None, data: bytes = b"", value: int = 0
    ) -> str:
        """Have Anvil sign and send a transaction; its id."""
        params = {"from": sender, "data": "0x" + data.hex(), "value": hex(value)}
        if to is not None:
            # Anvil estimates gas on the state without the pending transactions.
            params |= {"to": to, "gas": hex(_CALL_GAS)}
        return str(await self._rpc.act("eth_sendTransaction", [params]))

    async def mine(self, blocks: int = 1) -> None:
        await self._rpc.act("anvil_mine", [hex(blocks)])

    async def automine(self, enabled: bool) -> None:
        """Whether each transaction is mined at once; otherwise they wait for ``mine``."""
        await self._rpc.act("evm_setAutomine", [enabled])

    async def reorganise(self, depth: int) -> None:
        """Replace the newest ``depth`` blocks by empty ones."""
        await self._rpc.act("anvil_reorg", [depth, []])

    async def drop(self, txid: str) -> None:
        """Forget a transaction of the pool."""
        await self._rpc.act("anvil_dropTransaction", [txid])

    async def set_ether(self, address: str, wei: int) -> None:
        await self._rpc.act("anvil_setBalance", [address, hex(wei)])

    async def set_next_base_fee(self, wei: int) -> None:
        """The base fee of the next block, wei per gas."""
        await self._rpc.act("anvil_setNextBlockBaseFeePerGas", [hex(wei)])

    async def snapshot(self) -> str:
        return str(await self._rpc.act("evm_snapshot", []))

    async def revert(self, snapshot: str) -> None:
        """Go back to a snapshot, which is used up by it."""
        assert await self._rpc.act("evm_revert", [snapshot])

    async def impersonate(self, account: str) -> None:
        """From now on Anvil sends for this account without its key."""
        await self._rpc.act("anvil_impersonateAccount", [account])
