"""The sandbox engine: a deterministic pair of simulated chains inside the store.

chain.py     simulated chains, records, and the port of the store
engine.py    the settlement engine and rate source over them
controls.py  what a developer may provoke: funding, faults, time, rates
"""
