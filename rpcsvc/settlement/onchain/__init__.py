"""Settlement from the operator's own inventory: real daemons, real chains.

engine.py        the engine: two adapters, and each call goes to the one that it is about
adapter.py       what the engine asks of each of them
evm/, monero/    the adapters; neither knows of the other
adapter_watch.py scanning for deposits, so that a node that hangs delays no other
each.py          the same for all of them, though one fails
guard.py         the switch and the caps before everything that is signed
unrecorded.py       what moved in the wallets and is of no order
daemon_rpc.py    JSON over HTTP to a daemon, and the tree of its failures
unusable.py      what an adapter raises when what answers is not what it should be
wiring.py        putting it all together from the settings

For the operator, beside the service or before its start: readiness.py (is everything there),
inspection.py (what is there, and what do the wallets hold), adoption.py (taking up a payment that
only the chain has), address_skip.py (leaving addresses out), receipt_check.py (proving a payout).
"""
