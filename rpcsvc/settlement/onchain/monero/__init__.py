"""The XMR adapter: monerod, monero-wallet-rpc, the operator's own XMR.

adapter.py      the network as the engine sees it
monerod.py      the client of the node
wallet.py       the client of the wallet; wallet_types.py: its answers
connection.py   whether both are there, in step, and the wallet of the first start
records.py      records and options; ledger.py: as rows

deposits:       addresses.py, deposits.py
payments:       payments.py, presence.py
outputs:        inventory.py
not recorded:   unrecorded.py (at the start, and adopting)
"""
