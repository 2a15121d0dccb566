"""The USDC adapter: EVM nodes, one hot wallet, deposit addresses of one mnemonic.

adapter.py       all networks together, and what the engine asks
connection.py    a network's options, its node and token, conditions for the operator
node.py          what a node is asked, and what it answers
keys.py          mnemonic, derived accounts, signatures, bytes of transactions
ledger.py        records, and the ports to the database

deposits:        addresses.py, deposits.py, scan.py
payments:        payments.py (check, prepare), publisher.py, presence.py, gas.py, adoption.py
sweeps:          sweeps.py
authorizations:  authorizations.py (signed by payers, and the budget for their gas)
"""
