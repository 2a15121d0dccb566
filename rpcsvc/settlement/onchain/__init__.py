"""Settlement from the operator's own inventory: real daemons, real chains.

engine.py        the engine: two adapters, and each call goes to the one that it is about
adapter.py       the interface of an adapter, and watching its deposit scans
evm/, monero/    the adapters; neither imports the other
guard.py         the pause switch and the caps before everything that is signed
journal/         the payment journal: one line for each payment before it is committed
unrecorded.py    transactions and deposits that no order knows; adopting them
daemon_rpc.py    JSON-RPC to a daemon, and the taxonomy of its failures
wiring.py        composes the engine from the settings
readiness.py     for the operator: what is there, what is missing
"""
