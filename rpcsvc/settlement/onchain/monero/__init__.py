"""The XMR side: monerod, monero-wallet-rpc, the operator's own XMR."""
