"""Settlement from the operator's own inventory: real daemons, real chains.

engine.py        the engine: each call goes to its asset's adapter or to its network; the caps
adapter.py       the interfaces of networks and adapters, and watching deposit scans
evm/, monero/    the adapters; neither imports the other
pause.py         the switch that stops all outgoing money
journal/         the payment journal: one line for each payment before it is committed
unrecorded.py    transactions and deposits that no order knows; adopting them
daemon_rpc.py    JSON-RPC to a daemon, and the taxonomy of its failures
wiring.py        composes the engine from the settings
readiness.py     for the operator: what is there, what is missing
"""
