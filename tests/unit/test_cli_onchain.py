"""``rpcsvc onchain init`` and ``rpcsvc treasury`` without any node: keys, books, missing values."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.bootstrap import Running
from rpcsvc.errors import Unavailable
from rpcsvc.ids import system_random
from rpcsvc.operations.admin import bound
from rpcsvc.operations.service import Operation
from rpcsvc.orders.ports.venue import Rate
from rpcsvc.rates.sources import FixedRate, rate_source
from rpcsvc.settings import load_settings
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.gas import HotBalances
from rpcsvc.settlement.onchain.evm.keys import HdKeys, create_mnemonic, read_mnemonic
from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.settlement.onchain.readiness import MoneroFound, XmrHeld
from rpcsvc.settlement.onchain.wiring import KEY_FILE
from rpcsvc.store.backends.sqlite.database import OwnerLock, SqliteDatabase
from rpcsvc.store.operator_books import OperatorBooks
from rpcsvc.treasury import wallets
from rpcsvc.treasury.annotations import Annotations
from rpcsvc.treasury.operations import TREASURY
from rpcsvc.treasury.wallets import OnchainTreasury, WalletFindings
from tests.operator_cli import Cli, listening, served
from tests.rows import statement

NOWHERE = "http://127.0.0.1:9"
SETTINGS = {
    "RPCSVC_ENGINE": "onchain",
    "RPCSVC_RATES__FIXED_USDC_PER_XMR": "165.00",
    "RPCSVC_ONCHAIN__MONEROD_URL": NOWHERE,
    "RPCSVC_ONCHAIN__WALLET_URL": NOWHERE,
    "RPCSVC_ONCHAIN__NODES": f"arbitrum={NOWHERE}",
}


class Setup(Cli):
    """The command line of an on-chain service whose nodes are all down."""

    def checks(self) -> dict[str, Any]:
        """The checks of ``init``, by name."""
        assert self("onchain", "init", "--json") == 1, self.err
        return {check["name"]: check for check in json.loads(self.out)["checks"]}


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Setup:
    made = Setup(tmp_path / "data", capsys)
    made.environ = dict(SETTINGS)
    return made


def adopted(data_dir: Path, hot_wallet: str, *more: str) -> None:
    """A data directory as after a start with this hot wallet, with further SQL statements."""

    async def write() -> None:
        database = await SqliteDatabase.open(data_dir)
        await EvmDepositLedger(database).adopt_wallet(hot_wallet)
        for sql in more:
            await database.write([statement(sql, ())])
        await database.close()

    data_dir.mkdir(mode=0o700, exist_ok=True)
    asyncio.run(write())


# --- init --------------------------------------------------------------------------------------


def test_keys_are_made_once_and_their_words_never_shown(cli: Setup) -> None:
    first = cli.checks()["keys"]
    path = cli.data_dir / KEY_FILE
    words = path.read_text()
    assert (path.stat().st_mode & 0o777, cli.data_dir.stat().st_mode & 0o777) == (0o600, 0o700)
    assert first["ok"]
    assert "words down" in first["do"]
    # Some words of the mnemonic are common English: require that no two of them follow each other.
    pairs = zip(words.split(), words.split()[1:], strict=False)
    assert not [pair for pair in pairs if " ".join(pair) in cli.out]
    assert cli.checks()["keys"]["do"] is None
    assert path.read_text() == words
    assert HdKeys(read_mnemonic(path)).address(0) in first["detail"]


def test_onchain_check_names_the_setting_of_a_node_that_is_down(cli: Setup) -> None:
    found = cli.checks()
    assert {name for name, check in found.items() if not check["ok"]} == {
        "monero node", "arbitrum node",
    }  # fmt: skip
    assert "monerod_url" in found["monero node"]["do"]
    assert "onchain.nodes" in found["arbitrum node"]["do"]
    assert found["rates"]["ok"]
    assert cli("onchain", "init") == 1
    assert cli.out.count("MISSING ") == 2
    assert cli.out.endswith("Missing: 2\n")


def test_lost_keys_are_not_replaced_by_new_ones(cli: Setup) -> None:
    adopted(cli.data_dir, "0xFirst")
    keys = cli.checks()["keys"]
    assert not keys["ok"]
    assert "0xFirst" in keys["do"]
    assert not (cli.data_dir / KEY_FILE).exists()


def test_the_keys_of_another_service_are_recognised(cli: Setup) -> None:
    adopted(cli.data_dir, "0xFirst")
    create_mnemonic(cli.data_dir / KEY_FILE, system_random)
    keys = cli.checks()["keys"]
    assert "another mnemonic" in keys["detail"]
    assert "0xFirst" in keys["do"]


def test_beside_a_running_service_no_keys_are_made(cli: Setup) -> None:
    cli.data_dir.mkdir()
    with listening(cli.data_dir):
        assert not cli.checks()["keys"]["ok"]
    lock = OwnerLock(cli.data_dir)
    lock.acquire()
    assert not cli.checks()["keys"]["ok"]
    lock.release()
    assert not (cli.data_dir / KEY_FILE).exists()
    assert cli.checks()["keys"]["ok"]


def test_keys_that_others_may_read_are_refused(cli: Setup) -> None:
    cli.checks()
    (cli.data_dir / KEY_FILE).chmod(0o640)
    assert "0640" in cli.checks()["keys"]["detail"]


def test_another_engine_and_wrong_settings_are_usage_errors(cli: Setup) -> None:
    for name, value, says in (
        ("RPCSVC_ENGINE", "sandbox", "docs/operate/onchain.md"),
        ("RPCSVC_ONCHAIN__NODES", f"moon={NOWHERE}", "moon"),
    ):
        cli.environ = {**SETTINGS, name: value}
        assert cli("onchain", "init") == 2
        assert says in cli.err


def test_the_settings_of_a_regtest_stack_are_good(
    cli: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    cli.environ = {
        name: value for name, value in SETTINGS.items() if "URL" in name or "NODES" in name
    }
    assert cli("onchain", "init", "--config", "config/regtest.toml", "--json") == 1, cli.err
    found = {check["name"]: check["ok"] for check in json.loads(cli.out)["checks"]}
    assert found == {"keys": True, "monero node": False, "arbitrum node": False, "rates": True}


# --- treasury ----------------------------------------------------------------------------------


def treasury_of(cli: Setup) -> Callable[[Running], tuple[Operation, ...]]:
    """The treasury of a service with the settings of the command line."""
    flags = {"data_dir": str(cli.data_dir)}
    settings = load_settings(config_file=None, environ=cli.environ, flags=flags).settings

    def made(up: Running) -> tuple[Operation, ...]:
        switch = PauseSwitch(settings.data_dir)
        rates = rate_source(settings.rates, up.service.clock).source
        treasury = OnchainTreasury(settings, up.database, up.service.clock, switch.reason, rates)
        return bound(TREASURY, treasury)

    return made


def test_the_treasury_needs_a_service(cli: Setup) -> None:
    assert cli("treasury") == 3
    assert "rpcsvc serve" in cli.err


async def test_treasury_without_nodes_names_gaps_and_shows_the_rest(cli: Setup) -> None:
    async with served(cli.data_dir, treasury_of(cli)) as box:
        database = box.up.database
        await EvmDepositLedger(database).adopt_wallet("0xFirst")
        for sql in (
            "INSERT INTO evm_addresses VALUES (1, '0x1')",
            "INSERT INTO evm_deposits VALUES"
            " ('arbitrum', 'a', 0, 1, 2500000, '0x2', 1, 7, 'h', 'confirmed', 0)",
        ):
            await database.write([statement(sql)])
        PauseSwitch(cli.data_dir).pause("odd numbers")
        assert await cli.ask("treasury", "--json") == 1, cli.err
        said = json.loads(cli.out)
        assert await cli.ask("treasury") == 1
    assert said["paused"] == "odd numbers"
    (arbitrum,) = said["usdc"]
    assert arbitrum["hotWallet"] is None
    assert (arbitrum["unswept"], arbitrum["swept"], arbitrum["address"]) == ("2.5", "0", "0xFirst")
    assert said["xmr"]["unlocked"] is None
    assert said["ofNoOrder"] == [
        {"network": "arbitrum", "txid": "a", "amount": "2.5 USDC", "address": "0x1",
         "addressOf": None}
    ]  # fmt: skip
    assert said["caps"]["XMR"] == {"sentIn24Hours": "0", "perDay": "5000", "perTransfer": "500"}
    assert len(said["problems"]) == 2
    assert list(said) == [
        "asOf", "paused", "xmr", "usdc", "caps", "ofNoOrder", "problems"
    ]  # fmt: skip

    assert cli.out.startswith("payouts: PAUSED: odd numbers\n")
    assert "not known" in cli.out
    assert "\nunattributed deposits, to be paid back by hand\n" in cli.out
    assert "2.5 USDC" in cli.out
    assert cli.out.count("not asked: ") == 2


async def test_plan_without_nodes_names_the_gaps(cli: Setup) -> None:
    async with served(cli.data_dir, treasury_of(cli)):
        assert await cli.ask("treasury", "plan", "--json") == 1, cli.err
        said = json.loads(cli.out)
        assert await cli.ask("treasury", "plan") == 1
    assert (said["networks"], said["moves"], len(said["problems"])) == ([], [], 2)
    assert cli.out.count("not asked: ") == 2
    assert "nothing to move" in cli.out


def wallets_hold(monkeypatch: pytest.MonkeyPatch, xmr: XmrHeld, usdc: int) -> None:
    """Script the wallets' balances; USDC on arbitrum."""
    read = wallets.read_wallets

    async def answered(*given: Any, **more: Any) -> WalletFindings:
        found = await read(*given, **more)
        (network,) = found.networks
        full = replace(network, problem=None, hot=HotBalances(1, usdc, 9))
        return replace(found, monero=MoneroFound(held=xmr), networks=(full,))

    monkeypatch.setattr(wallets, "read_wallets", answered)


async def test_plan_proposes_moves_to_the_targets(
    cli: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.environ["RPCSVC_INVENTORY__TARGETS"] = "monero=10,arbitrum=1000"
    wallets_hold(monkeypatch, XmrHeld(30 * 10**12, 10**12, 3, 3, 10), 10_000_000)
    async with served(cli.data_dir, treasury_of(cli)) as box:
        paid = await box.order("x2u")
        await paid.fund()
        await box.settle(8)
        said = await cli.json("treasury", "plan", "--json")
        assert await cli.json("treasury", "--json", "plan") == said
        assert await cli.ask("treasury", "plan") == 0
    monero, arbitrum = said["networks"]
    assert (monero["held"], monero["spendable"], monero["free"]) == ("31", "30", "31")
    assert (monero["received"], monero["sent"], monero["runsDryAt"]) == ("0.8", "0", None)
    assert (arbitrum["received"], arbitrum["target"], arbitrum["uncovered"]) == ("0", "1000", "0")
    assert 0 < float(arbitrum["sent"]) < 165
    (move,) = said["moves"]
    why = move.pop("why")
    assert move == {
        "from": "monero", "amount": "6", "asset": "XMR", "to": "arbitrum", "arrives": "990",
        "arrivesAsset": "USDC",
    }  # fmt: skip
    assert why.startswith("arbitrum has 10 USDC free of its target 1000, and runs dry at 20")
    assert said["problems"] == []
    assert "\nmove 6 XMR from monero to arbitrum, where 990 USDC arrive before fees: " in cli.out


async def test_plan_without_a_rate_exchanges_nothing(
    cli: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.environ["RPCSVC_INVENTORY__TARGETS"] = "monero=10,arbitrum=1000"
    wallets_hold(monkeypatch, XmrHeld(30 * 10**12, 0, 3, 3, 0), 10_000_000)

    def stale(_self: FixedRate) -> Rate:
        raise Unavailable("No fresh rate.")

    monkeypatch.setattr(FixedRate, "rate", stale)
    async with served(cli.data_dir, treasury_of(cli)):
        said = await cli.json("treasury", "plan", "--json")
    assert (said["usdcPerXmr"], said["moves"]) == (None, [])
    assert said["networks"][1]["uncovered"] == "990"


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        ("base=5", "received 'base'; allowed: monero, arbitrum"),
        ("arbitrum=0.0000001", "at most 6 decimals of USDC"),
        ("monero=-1", "name=value"),
    ],
)
def test_targets_are_checked_as_a_start_does(cli: Setup, targets: str, says: str) -> None:
    cli.environ["RPCSVC_INVENTORY__TARGETS"] = targets
    assert cli("config", "check") == 2
    assert says in cli.err


async def test_annotate_asks_the_running_service(
    cli: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def poll(*_: Any) -> str:
        return "sent 2.5 XMR"

    monkeypatch.setattr(Annotations, "poll", poll)
    txid = "ab" * 32
    async with served(cli.data_dir, treasury_of(cli)) as box:
        say = ("treasury", "explain", "monero", txid.upper())
        assert await cli.ask(*say, "--note", " to  cold ") == 0, cli.err
        assert cli.out == f"{txid} on monero, sent 2.5 XMR: to cold\n"
        books = OperatorBooks(box.up.database)
        assert await books.annotation("monero", txid) == "to cold"
        assert await cli.ask(*say, "--note", "again") == 2
        assert "explained already: to cold" in cli.err
        assert await cli.ask(*say, "--take-back") == 0
        assert cli.out.startswith(f"{txid} is a difference again")
        assert await cli.ask(*say, "--take-back") == 1
        assert await books.annotation("monero", txid) is None


def test_a_data_directory_that_can_t_be_made_is_a_usage_error(cli: Setup) -> None:
    cli.data_dir.parent.joinpath("file").write_text("")
    cli.data_dir = cli.data_dir.parent / "file" / "data"
    assert cli("onchain", "init") == 2
    assert "can't be used" in cli.err


# --- onchain reread --------------------------------------------------------------------------


def test_deposits_are_read_again_where_a_node_is_configured(cli: Setup) -> None:
    adopted(cli.data_dir, "0xFirst")
    assert cli("onchain", "reread", "monero", "--from", "5") == 2
    assert "received 'monero'; allowed, by onchain.nodes: arbitrum" in cli.err


def test_deposits_are_read_again_once_there_were_any(cli: Setup) -> None:
    adopted(cli.data_dir, "0xFirst")
    assert cli("onchain", "reread", "arbitrum", "--from", "5") == 2
    assert "No deposits were read on arbitrum yet" in cli.err
    assert "Nothing was changed" in cli.err


def test_nothing_is_read_again_while_the_node_is_down(cli: Setup) -> None:
    cursor = "INSERT INTO evm_cursor (network, number, hash) VALUES ('arbitrum', 9, '0x09')"
    adopted(cli.data_dir, "0xFirst", cursor)
    assert cli("onchain", "reread", "arbitrum", "--from", "5") == 3
    assert "Nothing was changed" in cli.err
