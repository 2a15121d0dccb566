"""Settlement from the operator's own inventory: real daemons, real chains.

This package's leaf modules speak to daemons (daemon_rpc, monero, evm), encode the token's calls
(usdc) and hold the keys (keys). They decide nothing about orders.
"""
