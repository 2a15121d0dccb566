"""A sidecar beside a service, over real sockets."""

from __future__ import annotations


def environ(port: int) -> dict[str, str]:
    return {
        "RPCSVC_ENGINE": "upstream",
        "RPCSVC_UPSTREAM__URL": f"http://127.0.0.1:{port}",
        "RPCSVC_UPSTREAM__MONERO_NETWORK": "stagenet",
        "RPCSVC_UPSTREAM__CREATIONS_PER_MINUTE": "1000",
        "RPCSVC_UPSTREAM__CALLS_PER_MINUTE": "6000",
    }
