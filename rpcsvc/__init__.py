"""rpcsvc: a self-hosted service that lets software agents swap XMR and USDC."""

__version__ = "0.1.0"
