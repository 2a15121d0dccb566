"""The sandbox engine: a deterministic pair of simulated chains inside the store.

chain.py     heights and confirmations as pure functions of time
ledger.py    the records and the port of the store that keeps them
engine.py    the settlement engine and rate source over them
controls.py  what a developer may provoke: funding, faults, time, rates
"""
