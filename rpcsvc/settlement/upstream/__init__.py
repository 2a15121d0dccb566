"""The upstream engine: another swap API, called over HTTP."""
