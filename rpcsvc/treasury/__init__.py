"""The wallets of the engine onchain as the operator sees them: holdings, and annotations."""
