"""The XMR adapter: monerod, monero-wallet-rpc, the operator's own XMR.

adapter.py      what the engine asks
monerod.py      what the node is asked
wallet.py       what the wallet is asked; wallet_types.py: what it answers
connection.py   whether both are there, in step, and the wallet the same as ever
ledger.py       what this adapter remembers, and its options

deposits:       addresses.py, deposits.py, deposit_proofs.py
payments:       payments.py, presence.py, reorg_recovery.py, receipts.py, adoption.py
holdings:       holdings.py, inventory.py
at the start:   startup_reconciliation.py
"""
