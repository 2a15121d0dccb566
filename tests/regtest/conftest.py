"""Fixtures of the on-chain tests: one monerod for all; a wallet and an EVM chain for each test."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from tests.postgres import new_database, own_server
from tests.regtest.daemons import (
    Anvil,
    Miner,
    Monerod,
    WalletRpc,
    missing,
    new_wallet,
    run_apart,
    running,
)
from tests.regtest.evm_payer import ETHER, HOT, USDC, EvmPayer, evm_payer
from tests.regtest.exchange import Exchange, exchange
from tests.regtest.payees import Payee, funded_accounts
from tests.regtest.replicas import OnchainReplicas
from tests.regtest.token import Token, compiled, deploy
from tests.regtest.trading import Trader, trading
from tests.regtest.treasury import Treasury, treasury

HERE = Path(__file__).parent
HINT = "run tools/regtest/install and pip install --editable '.[dev,onchain]'"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "regtest: needs monerod, monero-wallet-rpc and anvil")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this directory; skip them where their daemons are missing."""
    lacking = missing()
    if lacking and os.environ.get("REGTEST_REQUIRED"):
        raise pytest.UsageError(f"not installed: {', '.join(lacking)}; {HINT}")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.regtest)
            if lacking:
                reason = f"not installed: {', '.join(lacking)}; {HINT}"
                item.add_marker(pytest.mark.skip(reason=reason))
    # Files with tests of the whole stack take longest: none of them is begun last.
    long = {item.path for item in items if {"stack", "trader"} & set(_fixtures(item))}
    items.sort(key=lambda item: item.path not in long)


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return item.fixturenames if isinstance(item, pytest.Function) else ()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report missing daemons in the summary: a skipped test is easily overlooked."""
    if lacking := missing():
        terminalreporter.write_line(
            f"On-chain tests were skipped; not installed: {', '.join(lacking)}; {HINT}"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the daemons' logs to the report of a failed test."""
    report = yield
    if report.failed:
        for daemon in running:
            report.sections.append((f"{daemon.name}: end of {daemon.log}", daemon.log_tail()))
    return report


# --- Monero ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def monerod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monerod]:
    with Monerod(tmp_path_factory.mktemp("monerod")) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def miner(monerod: Monerod, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Miner]:
    """A chain with money on it. Tests share the chain, so they compare before and after."""
    with WalletRpc(tmp_path_factory.mktemp("bank"), monerod) as bank:
        ready = Miner(monerod, bank)
        run_apart(ready.begin())
        yield ready


@pytest.fixture
async def node(miner: Miner) -> AsyncIterator[MonerodClient]:
    """A client of the chain's monerod; the pool is empty before and after."""
    async with MonerodClient(miner.monerod.endpoint) as client:
        await client.flush_pool()
        yield client
        await client.flush_pool()


@pytest.fixture(scope="session")
def shared_wallet_rpc(
    monerod: Monerod, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WalletRpc]:
    """A wallet daemon for tests that leave it running. Opening a wallet takes a second or two."""
    with WalletRpc(tmp_path_factory.mktemp("shared"), monerod) as daemon:
        run_apart(new_wallet(daemon))
        yield daemon


@pytest.fixture
async def wallet(shared_wallet_rpc: WalletRpc, miner: Miner) -> AsyncIterator[WalletClient]:
    """A new account without money, in a wallet that tests share."""
    async with WalletClient(shared_wallet_rpc.endpoint) as client:
        client.account = await client.create_account()
        yield client


@pytest.fixture
def wallet_rpc(monerod: Monerod, tmp_path: Path) -> Iterator[WalletRpc]:
    """A wallet daemon of the test's own: it may be killed."""
    with WalletRpc(tmp_path / "wallets", monerod) as daemon:
        yield daemon


@pytest.fixture
async def own_wallet(wallet_rpc: WalletRpc, miner: Miner) -> AsyncIterator[WalletClient]:
    """A new wallet without money, in the test's own daemon."""
    await new_wallet(wallet_rpc)
    async with WalletClient(wallet_rpc.endpoint) as client:
        yield client


# --- EVM -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def token_code() -> bytes:
    return compiled()


@pytest.fixture
def anvil(tmp_path: Path) -> Iterator[Anvil]:
    with Anvil(tmp_path / "anvil") as daemon:
        yield daemon


@pytest.fixture
async def evm(anvil: Anvil) -> AsyncIterator[EvmClient]:
    async with EvmClient(anvil.endpoint) as client:
        yield client


@pytest.fixture
async def token(evm: EvmClient, token_code: bytes) -> Token:
    """A token nobody holds yet."""
    return await deploy(evm, token_code)


@pytest.fixture
async def payer(anvil: Anvil, token: Token, tmp_path: Path) -> AsyncIterator[EvmPayer]:
    """A hot wallet with 1 ether and 1,000 USDC."""
    await token.controls.set_ether(HOT, ETHER)
    await token.mint(HOT, 1000 * USDC)
    async with evm_payer(anvil, token, tmp_path) as made:
        yield made


# --- the XMR adapter ----------------------------------------------------------------------------


@pytest.fixture
async def payee(wallet: WalletClient) -> Payee:
    return Payee(wallet, await wallet.primary_address())


@pytest.fixture(scope="module")
def killable(monerod: Monerod, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WalletRpc]:
    """A wallet daemon that the tests of a module share and leave running."""
    with WalletRpc(tmp_path_factory.mktemp("killable"), monerod) as daemon:
        run_apart(new_wallet(daemon))
        yield daemon


@pytest.fixture(scope="module")
def accounts(request: pytest.FixtureRequest, killable: WalletRpc, miner: Miner) -> list[int]:
    """As many accounts with money as the module says (ACCOUNTS)."""
    return run_apart(funded_accounts(killable, miner, request.module.ACCOUNTS))


@pytest.fixture
async def own(
    killable: WalletRpc, accounts: list[int], node: MonerodClient, tmp_path: Path
) -> AsyncIterator[Treasury]:
    """An adapter on an account that holds two outputs."""
    async with treasury(killable, tmp_path, account=accounts.pop()) as made:
        await made.adapter.maintain()
        yield made


# --- the whole stack -------------------------------------------------------------------------


@pytest.fixture
async def stack(
    tmp_path: Path,
    miner: Miner,
    wallet_rpc: WalletRpc,
    own_wallet: WalletClient,  # open in the daemon
    anvil: Anvil,
    token: Token,
) -> AsyncIterator[Exchange]:
    """The stack of an operator without the service, and a user with money."""
    async with exchange(tmp_path, miner, wallet_rpc, anvil, token) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trader(
    tmp_path_factory: pytest.TempPathFactory,
    miner: Miner,
    shared_wallet_rpc: WalletRpc,
    token_code: bytes,
) -> AsyncIterator[Trader]:
    """One stack for all tests of a module; they run in the module's loop."""
    home = tmp_path_factory.mktemp("exchange")
    async with trading(home, miner, shared_wallet_rpc, token_code) as ready:
        yield ready


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(trader: Trader) -> AsyncIterator[OnchainReplicas]:
    """Replicas of the trader's service on a PostgreSQL server of their own."""
    with own_server() as server:
        async with new_database(server.url, empty=True) as url:
            made = OnchainReplicas(trader, url)
            try:
                yield made
            finally:
                made.end()
