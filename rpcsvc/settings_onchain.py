"""The settings of the engine onchain, of the rates that it quotes, and the table of chains.

The table is read from the configured file, or else from the one in the package.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, SecretStr

from rpcsvc.domain.chains import ChainRegistry, load_chains
from rpcsvc.domain.finality import FinalityLimits
from rpcsvc.domain.money import USDC, as_units, decimal_pattern
from rpcsvc.errors import SettingsError
from rpcsvc.settings_sources import (
    BLANK_IS_NONE,
    FilePath,
    Flag,
    Group,
    decimal,
    folders,
    integer_in,
    line,
    pairs,
    words,
)

DAY: Final = 86_400
# In ``unfinal_usd``: the sum of all networks, and a network that is not named.
ALL_NETWORKS: Final = "all"
EACH_NETWORK: Final = "each"
# Above 0: gas is never free.
_DECIMAL: Final = f"(?=.*[1-9]){decimal_pattern(10, 6)}"

Url = Annotated[str, line(0, 300)]
Secret = Annotated[SecretStr | None, BLANK_IS_NONE]
Xmr = Annotated[str, decimal(12)]
XmrOrNone = Annotated[str, decimal(12, positive=False)]
Usdc = Annotated[str, decimal(6)]
UsdcOrNone = Annotated[str, decimal(6, positive=False)]
Words = Annotated[tuple[str, ...], BeforeValidator(words)]
Nodes = Annotated[tuple[str, ...], pairs(r"https?://[!-~]{1,290}", "arbitrum=http://10.0.0.5:8545")]
CoinPrices = Annotated[tuple[str, ...], pairs(_DECIMAL, "ETH=2500")]
Targets = Annotated[tuple[str, ...], pairs(decimal_pattern(10, 12), "monero=250")]
WithdrawTo = Annotated[tuple[str, ...], pairs(r"[0-9A-Za-z]{1,128}", "monero=4...", repeats=True)]
Places = Annotated[tuple[Path, ...], BeforeValidator(folders)]
Depths = Annotated[
    tuple[str, ...],
    pairs(r"[0-9.]{1,20}=[0-9a-z]{1,12}", "arbitrum=0=1, arbitrum=500=20", repeats=True),
]
UnfinalUsd = Annotated[tuple[str, ...], pairs(r"[0-9]{1,9}", "all=5000, arbitrum=2000")]
Thresholds = Annotated[tuple[str, ...], BeforeValidator(words)]


class OnchainSettings(Group):
    """The operator's own nodes and wallets. Amounts are decimal strings of whole XMR or USDC.

    ``nodes``: chain=URL for each chain that is served. ``key_file`` holds the mnemonic of the
    hot wallet and all deposit addresses. ``gas_prices``: coin=USD, of the coins that gas is paid
    in. ``usdc_confirmations``: chain=amount=confirmations, or a tag, in place of those in the table
    of chains. ``unfinal_usd``: all=USD, each=USD and network=USD: the most that may be paid out for
    deposits that are not final, in all and on a network; none where neither is given.
    ``finality_hours``: how long only final deposits count on a network after one was lost.
    ``authorization_gas_usd``: what gas for signed USDC payments (x402) may cost in 24 hours, that
    of orders that bear it left out.
    ``xmr_confirmations``: amount=confirmations, from 0 up. ``*_addresses``: so many deposit
    addresses are made ahead, so that orders do not wait for the wallet. ``*_floor``: below it the
    service is degraded, and takes no order that would be paid in that asset. ``journal_places``:
    folders that hold the payment journal too; ``journal_command`` takes its lines on stdin.
    """

    monero_network: Literal["mainnet", "stagenet", "testnet", "regtest"] = "mainnet"
    monerod_url: Url = "http://127.0.0.1:18081"
    monerod_username: Annotated[str, line(0, 100)] = ""
    monerod_password: Secret = None
    wallet_url: Url = "http://127.0.0.1:18083"
    wallet_username: Annotated[str, line(0, 100)] = ""
    wallet_password: Secret = None
    wallet_file: Annotated[str, line(0, 200)] = ""
    wallet_file_password: Secret = None
    nodes: Nodes = ()
    usdc_confirmations: Depths = ()
    unfinal_usd: UnfinalUsd = ("all=60000", "each=2000", "monero=50000")
    finality_hours: Annotated[int, integer_in(1, 8_760)] = 24
    key_file: Annotated[FilePath | None, BLANK_IS_NONE] = None
    gas_prices: CoinPrices = ("ETH=5000", "POL=2", "AVAX=100")
    highest_gas_usd: Annotated[int, integer_in(1, 10_000)] = 20
    authorization_gas_usd: Usdc = "25"
    xmr_confirmations: Thresholds = ("0=10", "50=20")
    xmr_settled_after: Annotated[int, integer_in(1, 1_000)] = 10
    xmr_outputs: Annotated[int, integer_in(0, 500)] = 16
    xmr_output: Xmr = "0.5"
    sweep_usdc: Usdc = "1"
    xmr_addresses: Annotated[int, integer_in(64, 100_000)] = 1_024
    usdc_addresses: Annotated[int, integer_in(64, 100_000)] = 256
    poll_ms: Annotated[int, integer_in(10, 60_000)] = 1_000
    xmr_per_transfer: Xmr = "500"
    xmr_per_day: Xmr = "5000"
    usdc_per_transfer: Usdc = "100000"
    usdc_per_day: Usdc = "1000000"
    xmr_floor: XmrOrNone = "0"
    usdc_floor: UsdcOrNone = "0"
    journal_places: Places = ()
    journal_command: Annotated[str, line(0, 300)] = ""
    audit_seconds: Annotated[int, integer_in(0, DAY)] = 600
    pause_on_difference: Flag = True

    @property
    def authorization_gas(self) -> int:
        """USDC units that gas for signed authorizations may cost in 24 hours."""
        return int(as_units(self.authorization_gas_usd, USDC))

    @property
    def finality(self) -> FinalityLimits:
        """The bounds on deposits that count before they are final."""
        given = (text.split("=", 1) for text in self.unfinal_usd)
        networks = {name: int(usd) * 10**USDC.decimals for name, usd in given}
        total, each = networks.pop(ALL_NETWORKS, 0), networks.pop(EACH_NETWORK, 0)
        return FinalityLimits(total, each, networks, self.finality_hours * 3_600_000)

    @property
    def has_test_networks(self) -> bool:
        """Whether the EVM side is of test networks: test XMR must not be swapped for real USDC."""
        return self.monero_network in ("stagenet", "testnet")


class InventorySettings(Group):
    """Targets by which ``rpcsvc treasury plan`` proposes moves (treasury/wallets.py), and addresses
    that ``rpcsvc treasury withdraw`` may send to.

    ``targets``: network=amount, whole XMR or USDC that is to be free there; a network without one
    is left as it is. ``days``: of how many the flows are taken. ``band_percent``: a network that is
    less than this below its target is not filled up. ``withdraw_to``: network=address, the only
    addresses that a withdrawal may pay; a network may come several times.
    """

    targets: Targets = ()
    days: Annotated[int, integer_in(1, 365)] = 7
    band_percent: Annotated[int, integer_in(0, 99)] = 10
    withdraw_to: WithdrawTo = ()


class RatesSettings(Group):
    """Where the price of XMR comes from, with engine onchain, and when it may be quoted.

    ``sources``: names of known tickers, or name=URL#pointer with the JSON pointer of the price.
    ``fixed_usdc_per_xmr`` is the price itself; with it, nothing is asked. ``max_age_seconds`` and
    ``max_spread_bps`` also bound how replicas' rates differ (orders/published_rates.py).
    """

    max_age_seconds: Annotated[int, integer_in(1, DAY)] = 60
    fixed_usdc_per_xmr: Annotated[Usdc | None, BLANK_IS_NONE] = None
    sources: Words = ("kraken", "coingecko", "kucoin")
    quorum: Annotated[int, integer_in(1, 20)] = 2
    max_spread_bps: Annotated[int, integer_in(1, 5_000)] = 150
    every_seconds: Annotated[int, integer_in(1, DAY)] = 10

    @property
    def max_age_ms(self) -> int:
        """The age of the oldest price that counts."""
        return self.max_age_seconds * 1000


def read_chains(configured: Path | None) -> ChainRegistry:
    """The table of chains. Raises SettingsError that says what is wrong with the configured one."""
    try:
        return load_chains(chains_toml(configured))
    except OSError as error:
        problem = f"can't be read ({error.strerror})"
    except UnicodeDecodeError:
        problem = "is not UTF-8"
    except ValueError as error:
        problem = f"is not a table of chains: {error}"
    raise SettingsError(
        [f"chains_file: {configured} {problem}; allowed: a file such as config/chains.toml"]
    )


def chains_toml(configured: Path | None) -> str:
    """The text of the table. Raises OSError."""
    if configured is not None:
        return configured.read_text(encoding="utf-8")
    packaged = resources.files("rpcsvc") / "config" / "chains.toml"
    if packaged.is_file():
        return packaged.read_text(encoding="utf-8")
    # An editable install keeps the file where it is edited.
    checkout = Path(__file__).parent.parent / "config" / "chains.toml"
    return checkout.read_text(encoding="utf-8")
