"""The steps at which the service is killed."""

from __future__ import annotations

STEPS = (
    "DepositSeen",
    "DepositConfirmed",
    "TransferPrepared",
    "TransferPublished",
    "TransferSettled",
)
