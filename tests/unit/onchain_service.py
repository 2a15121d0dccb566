"""Settings of a service with the engine onchain whose daemons do not answer."""

from __future__ import annotations

import os
from pathlib import Path

from rpcsvc.settings import Settings, load_settings
from rpcsvc.settlement.onchain.evm.keys import create_mnemonic
from rpcsvc.settlement.onchain.wiring import KEY_FILE
from tests.e2e.processes import free_port


def unreachable(data_dir: Path, **onchain: str) -> Settings:
    """An operator's first settings for mainnet: a node for one chain, and a new mnemonic."""
    create_mnemonic(data_dir / KEY_FILE, os.urandom)
    nobody = f"http://127.0.0.1:{free_port()}"
    environ = {
        "RPCSVC_ENGINE": "onchain",
        "RPCSVC_DATA_DIR": str(data_dir),
        "AGENT_RPC_TOKEN": "t" * 32,
        "RPCSVC_ONCHAIN__NODES": f"arbitrum={nobody}",
        "RPCSVC_ONCHAIN__MONEROD_URL": nobody,
        "RPCSVC_ONCHAIN__WALLET_URL": nobody,
        "RPCSVC_RATES__FIXED_USDC_PER_XMR": "165",
        **{f"RPCSVC_ONCHAIN__{name}": value for name, value in onchain.items()},
    }
    return load_settings(config_file=None, environ=environ, flags={}).settings
