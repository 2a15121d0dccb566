"""The sandbox engine: a deterministic pair of simulated chains inside the store.

ledger.py    simulated chains and their rows
engine.py    the settlement engine, its rate source and its signed authorizations
controls.py  the faults, times and rates that a developer may provoke, and funding
"""
