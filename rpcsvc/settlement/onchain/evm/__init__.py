"""The USDC adapter: EVM nodes, one hot wallet, deposit addresses of one mnemonic.

adapter.py       all networks together, and what the engine asks
node.py          a node: what it is asked (node_types.py), whether it can be relied on
keys.py          mnemonic, derived accounts, signatures, bytes of transactions
records.py       records and options; deposit_ledger.py, payment_ledger.py: the same as rows

deposits:        addresses.py, deposits.py, scan.py
payments:        payments.py (sign, publish, look up), presence.py, upkeep.py, gas.py, adoption.py
sweeps:          sweeps.py
authorizations:  authorizations.py (signed by payers, and the budget for their gas)
"""
