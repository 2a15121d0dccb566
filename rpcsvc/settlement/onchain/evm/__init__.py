"""The USDC adapter: EVM nodes, one hot wallet, deposit addresses of one mnemonic.

adapter.py       a network, and all networks together, as the engine sees them
node.py          a node: its client (types in node_types.py), and whether to rely on it
keys.py          mnemonic, derived accounts, signatures, bytes of transactions
records.py       records and options; as rows: deposit_ledger.py, payment_ledger.py

deposits:        addresses.py, deposits.py, scan.py
payments:        payments.py (sign, publish, look up), presence.py, upkeep.py, gas.py, adoption.py
sweeps:          sweeps.py
authorizations:  authorizations.py (signed by payers, and the budget for their gas)
"""
