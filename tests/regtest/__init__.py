"""Tests against real daemons: monerod, monero-wallet-rpc and Anvil, started by the fixtures.

`tools/regtest/install` installs them. Where they are missing, these tests are skipped.
"""
