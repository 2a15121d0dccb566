"""The XMR adapter: monerod, monero-wallet-rpc, the operator's own XMR.

adapter.py      what the engine asks
monerod.py      what the node is asked
wallet.py       what the wallet is asked; wallet_types.py: what it answers
connection.py   whether both are there, in step, and the wallet of the first start
ledger.py       records, options, and the port to the database

deposits:       addresses.py, deposits.py
payments:       payments.py, presence.py
outputs:        inventory.py
not recorded:   unrecorded.py (at the start, and adopting)
"""
