"""The USDC side: EVM nodes, the hot wallet, deposit addresses of one seed."""
