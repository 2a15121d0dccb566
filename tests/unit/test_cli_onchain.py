"""``rpcsvc onchain init`` and ``rpcsvc treasury`` where no node answers: keys, books, and gaps."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.cli.main import run
from rpcsvc.ids import system_random
from rpcsvc.settlement.onchain.evm.keys import HdKeys, create_mnemonic, read_mnemonic
from rpcsvc.settlement.onchain.guard import PauseSwitch
from rpcsvc.settlement.onchain.wiring import KEY_FILE
from rpcsvc.store.backends.sqlite.database import Database, OwnerLock
from rpcsvc.store.onchain_evm_deposits import SqliteEvmDepositLedger
from tests.rows import statement

NOWHERE = "http://127.0.0.1:9"
SETTINGS = {
    "RPCSVC_ENGINE": "onchain",
    "RPCSVC_RATES__FIXED_USDC_PER_XMR": "165.00",
    "RPCSVC_ONCHAIN__MONEROD_URL": NOWHERE,
    "RPCSVC_ONCHAIN__WALLET_URL": NOWHERE,
    "RPCSVC_ONCHAIN__NODES": f"arbitrum={NOWHERE}",
}


class Cli:
    """The command line of an on-chain service whose nodes are all down."""

    def __init__(self, data_dir: Path, output: pytest.CaptureFixture[str]) -> None:
        self.data_dir = data_dir
        self.environ = dict(SETTINGS)
        self.out, self.err = "", ""
        self._output = output

    def __call__(self, *arguments: str) -> int:
        environ = {**self.environ, "RPCSVC_DATA_DIR": str(self.data_dir)}
        self._output.readouterr()
        try:
            return run(arguments, environ, serve=_never, local=_never)
        finally:
            self.out, self.err = self._output.readouterr()

    def checks(self) -> dict[str, Any]:
        """What ``init`` says, by name."""
        assert self("onchain", "init", "--json") == 1, self.err
        return {check["name"]: check for check in json.loads(self.out)["checks"]}


def _never(*_: Any) -> Any:
    raise AssertionError("no service is needed")


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path / "data", capsys)


@contextmanager
def listening(data_dir: Path) -> Iterator[None]:
    """What a running service looks like from outside."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(data_dir / "rpcsvc.sock"))
        made.listen()
        yield


def adopted(data_dir: Path, hot_wallet: str, *more: str) -> None:
    """A service was started here once, with this hot wallet; and did what the SQL says."""

    async def write() -> None:
        database = await Database.open(data_dir)
        await SqliteEvmDepositLedger(database).adopt_wallet(hot_wallet)
        for sql in more:
            await database.write([statement(sql, ())])
        await database.close()

    data_dir.mkdir(mode=0o700, exist_ok=True)
    asyncio.run(write())


# --- init --------------------------------------------------------------------------------------


def test_keys_are_made_once_and_their_words_never_shown(cli: Cli) -> None:
    first = cli.checks()["keys"]
    path = cli.data_dir / KEY_FILE
    words = path.read_text()
    assert (path.stat().st_mode & 0o777, cli.data_dir.stat().st_mode & 0o777) == (0o600, 0o700)
    assert first["ok"]
    assert "words down" in first["do"]
    # Some of the words are English: not two of them stand in a row.
    pairs = zip(words.split(), words.split()[1:], strict=False)
    assert not [pair for pair in pairs if " ".join(pair) in cli.out]
    assert cli.checks()["keys"]["do"] is None
    assert path.read_text() == words
    assert HdKeys(read_mnemonic(path)).address(0) in first["detail"]


def test_what_is_down_is_named_with_its_setting(cli: Cli) -> None:
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


def test_lost_keys_are_not_replaced_by_new_ones(cli: Cli) -> None:
    adopted(cli.data_dir, "0xFirst")
    keys = cli.checks()["keys"]
    assert not keys["ok"]
    assert "0xFirst" in keys["do"]
    assert not (cli.data_dir / KEY_FILE).exists()


def test_the_keys_of_another_service_are_recognised(cli: Cli) -> None:
    adopted(cli.data_dir, "0xFirst")
    create_mnemonic(cli.data_dir / KEY_FILE, system_random)
    keys = cli.checks()["keys"]
    assert "another mnemonic" in keys["detail"]
    assert "0xFirst" in keys["do"]


def test_beside_a_running_service_no_keys_are_made(cli: Cli) -> None:
    cli.data_dir.mkdir()
    with listening(cli.data_dir):
        assert not cli.checks()["keys"]["ok"]
    lock = OwnerLock(cli.data_dir)
    lock.acquire()
    assert not cli.checks()["keys"]["ok"]
    lock.release()
    assert not (cli.data_dir / KEY_FILE).exists()
    assert cli.checks()["keys"]["ok"]


def test_keys_that_others_may_read_are_refused(cli: Cli) -> None:
    cli.checks()
    (cli.data_dir / KEY_FILE).chmod(0o640)
    assert "0640" in cli.checks()["keys"]["detail"]


def test_another_engine_and_wrong_settings_are_usage_errors(cli: Cli) -> None:
    for name, value, says in (
        ("RPCSVC_ENGINE", "sandbox", "docs/onchain.md"),
        ("RPCSVC_ONCHAIN__NODES", f"moon={NOWHERE}", "moon"),
    ):
        cli.environ = {**SETTINGS, name: value}
        assert cli("onchain", "init") == 2
        assert says in cli.err


def test_the_settings_of_a_regtest_stack_are_good(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    cli.environ = {
        name: value for name, value in SETTINGS.items() if "URL" in name or "NODES" in name
    }
    assert cli("onchain", "init", "--config", "config/regtest.toml", "--json") == 1, cli.err
    found = {check["name"]: check["ok"] for check in json.loads(cli.out)["checks"]}
    assert found == {"keys": True, "monero node": False, "arbitrum node": False, "rates": True}


# --- treasury ----------------------------------------------------------------------------------


def test_the_treasury_needs_a_database(cli: Cli) -> None:
    assert cli("treasury") == 2
    assert "rpcsvc onchain init" in cli.err


def test_a_treasury_without_nodes_names_the_gaps_and_tells_the_rest(cli: Cli) -> None:
    adopted(
        cli.data_dir,
        "0xFirst",
        "INSERT INTO evm_addresses VALUES (1, '0x1')",
        "INSERT INTO evm_deposits VALUES"
        " ('arbitrum', 'a', 0, 1, 2500000, '0x2', 1, 7, 'h', 'confirmed', 0)",
    )
    PauseSwitch(cli.data_dir).pause("odd numbers")
    assert cli("treasury", "--json") == 1
    said = json.loads(cli.out)
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

    assert cli("treasury") == 1
    assert cli.out.startswith("payouts: PAUSED: odd numbers\n")
    assert "not known" in cli.out
    assert "\ndeposits that are of no order, to be paid back by hand\n" in cli.out
    assert "2.5 USDC" in cli.out
    assert cli.out.count("not asked: ") == 2


def test_a_data_directory_that_can_t_be_made_is_a_usage_error(cli: Cli) -> None:
    cli.data_dir.parent.joinpath("file").write_text("")
    cli.data_dir = cli.data_dir.parent / "file" / "data"
    assert cli("onchain", "init") == 2
    assert "can't be used" in cli.err


# --- onchain reread --------------------------------------------------------------------------


def test_deposits_are_read_again_where_a_node_is_configured(cli: Cli) -> None:
    adopted(cli.data_dir, "0xFirst")
    assert cli("onchain", "reread", "monero", "--from", "5") == 2
    assert "received 'monero'; allowed, by onchain.nodes: arbitrum" in cli.err


def test_deposits_are_read_again_once_there_were_any(cli: Cli) -> None:
    adopted(cli.data_dir, "0xFirst")
    assert cli("onchain", "reread", "arbitrum", "--from", "5") == 2
    assert "No deposits were read on arbitrum yet" in cli.err
    assert "Nothing was changed" in cli.err


def test_nothing_is_read_again_while_the_node_is_down(cli: Cli) -> None:
    cursor = "INSERT INTO evm_cursor (network, number, hash) VALUES ('arbitrum', 9, '0x09')"
    adopted(cli.data_dir, "0xFirst", cursor)
    assert cli("onchain", "reread", "arbitrum", "--from", "5") == 3
    assert "Nothing was changed" in cli.err
