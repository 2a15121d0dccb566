"""The USDC adapter: EVM nodes, one hot wallet, deposit addresses of one seed.

adapter.py      all networks together, and what the engine asks
options.py      one EvmNetwork for each chain that is served
node.py         what a node is asked; node_types.py: what it answers
connection.py   whether the node is there and the right one, and its token USDC
usdc.py         the token's calls, events and typed data; usdc_calls.py: whom a call pays
keys.py         the mnemonic, the accounts derived from it, signatures

deposits:       addresses.py, deposits.py, deposit_events.py, fork.py, pool.py, deposit_ledger.py
payments:       payments.py, checks.py, nonces.py, publisher.py, presence.py, upkeep.py, raw.py,
                spent.py, receipts.py, adoption.py, conditions.py, payment_ledger.py
gas:            gas.py, fees.py, l1_fee.py, opening.py
home again:     sweeps.py
"""
