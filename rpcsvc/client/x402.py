"""x402 payments of an order: checks the offer of the service before it is signed.

Source: x402 version 2, scheme "exact" on EVM; EIP-3009; EIP-712.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from decimal import Decimal
from typing import Final, NamedTuple, NoReturn

from rpcsvc import verify
from rpcsvc.client.errors import Unverified
from rpcsvc.client.transport import Json

# Signs typed data (EIP-712, as eth_signTypedData_v4 takes it): the signature, or its hex.
Signed = bytes | str
Signer = Callable[[Json], Signed | Awaitable[Signed]]

VERSION: Final = 2
MOST_SECONDS: Final = 3_600
MAINNET: Final = "mainnet"

# The networks of an order (as attested) that have its USDC on test chains.
TEST_NETWORKS: Final = frozenset({"sandbox", "stagenet", "testnet"})


class ChainContracts(NamedTuple):
    """A chain by number, its USDC contract, and the same of its test network."""

    chain_id: int
    usdc: str
    test_chain_id: int
    test_usdc: str


CHAINS: Final[Mapping[str, ChainContracts]] = {
    "arbitrum": ChainContracts(
        42161,
        "0xaf88d065e77c8cC2239327C5EDb3A432268e5831",
        421614,
        "0x75faf114eafb1BDbe2F0316DF893fd58CE46AA4d",
    ),
    "ethereum": ChainContracts(
        1,
        "0xA0b86991c6218b36c1d19D4a2e9Eb0cE3606eB48",
        11155111,
        "0x1c7D4B196Cb0C7B01d743Fbc6116a902379C7238",
    ),
    "base": ChainContracts(
        8453,
        "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913",
        84532,
        "0x036CbD53842c5426634e7929541eC2318f3dCF7e",
    ),
    "optimism": ChainContracts(
        10,
        "0x0b2C639c533813f4Aa9D7837CAf62653d097Ff85",
        11155420,
        "0x5fd84259d66Cd46123540766Be93DFE6D43130D7",
    ),
    "polygon": ChainContracts(
        137,
        "0x3c499c542cEF5E3811e1192ce70d8cC03d5c3359",
        80002,
        "0x41E94Eb019C0762f9Bfcf9Fb1E58725BfB0e7582",
    ),
    "avalanche": ChainContracts(
        43114,
        "0xB97EF9Ef8734C71904D8002F8b6Bc66Dd9c48a6E",
        43113,
        "0x5425890298aed601595a70AB815c96711a31Bc65",
    ),
}


class Bill(NamedTuple):
    """The payment that the caller accepts: USDC units, the token contract, chain and address."""

    chain_id: int
    token: str
    to: str
    units: int


def bill(chain_id: int, to: str, units: int, network: str) -> Bill:
    """The bill of an order on a chain, or on its test chain where ``network`` is a test network.

    Raises BadInput for an unknown chain, and Unverified for an unknown network, which could mean
    either of the two chains.
    """
    for chain in CHAINS.values():
        if chain.chain_id == chain_id:
            if network in TEST_NETWORKS:
                return Bill(chain.test_chain_id, chain.test_usdc, to, units)
            if network != MAINNET:
                wrong = f"Which chain the network {network} means is not known here."
                raise Unverified(verify.TermsMismatch(wrong, ("network",)))
            return Bill(chain_id, chain.usdc, to, units)
    raise verify.BadInput(f"The USDC contract of chain {chain_id} is not known here.")


def units_of(amount: str) -> int:
    """A decimal amount of USDC in atomic units. Raises ValueError for more decimals."""
    units = Decimal(amount).scaleb(verify.DECIMALS["u2x"])
    if units != int(units):
        raise ValueError(amount)
    return int(units)


def offer_of(required: Json, due: Bill) -> Json:
    """The entry of PaymentRequired that pays exactly the bill. Raises Unverified."""
    try:
        if required["x402Version"] != VERSION:
            _refuse("x402Version", required["x402Version"], VERSION)
        (offer,) = (each for each in required["accepts"] if each["scheme"] == "exact")
        for name, expected in (
            ("network", f"eip155:{due.chain_id}"),
            ("asset", due.token),
            ("payTo", due.to),
            ("amount", str(due.units)),
        ):
            if str(offer[name]).lower() != expected.lower():
                _refuse(name, offer[name], expected)
        if offer["extra"].get("assetTransferMethod", "eip3009") != "eip3009":
            _refuse("assetTransferMethod", offer["extra"]["assetTransferMethod"], "eip3009")
        _ = str(offer["extra"]["name"]), str(offer["extra"]["version"]), _seconds(offer)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        wrong = verify.TermsMismatch("The offer is not one of x402, scheme exact.", ("accepts",))
        raise Unverified(wrong) from error
    return dict(offer)


def _refuse(name: str, found: object, expected: object) -> NoReturn:
    raise Unverified(
        verify.TermsMismatch(
            f"The service asks to sign {name} {found}, and the order has {expected}.", (name,)
        )
    )


def typed_data(offer: Json, due: Bill, payer: str, nonce: bytes, now: int) -> Json:
    """The typed data (EIP-712) that pays the bill when signed, valid from ``now`` (Unix
    seconds).
    """
    return {
        "types": {
            "EIP712Domain": _fields(
                "string name, string version, uint256 chainId, address verifyingContract"
            ),
            "TransferWithAuthorization": _fields(
                "address from, address to, uint256 value, uint256 validAfter, uint256 validBefore,"
                " bytes32 nonce"
            ),
        },
        "primaryType": "TransferWithAuthorization",
        "domain": {
            "name": str(offer["extra"]["name"]),
            "version": str(offer["extra"]["version"]),
            "chainId": due.chain_id,
            "verifyingContract": due.token,
        },
        "message": {
            "from": payer,
            "to": due.to,
            "value": due.units,
            "validAfter": 0,
            "validBefore": now + _seconds(offer),
            "nonce": f"0x{nonce.hex()}",
        },
    }


def _fields(text: str) -> list[Json]:
    parts = (field.split() for field in text.split(","))
    return [{"name": name, "type": kind} for kind, name in parts]


def _seconds(offer: Json) -> int:
    return min(int(offer["maxTimeoutSeconds"]), MOST_SECONDS)


def payment(offer: Json, data: Json, signature: Signed) -> Json:
    """PaymentPayload of x402: the typed data's message as signed."""
    text = signature.hex() if isinstance(signature, bytes) else signature.removeprefix("0x")
    message = {
        name: str(value) if isinstance(value, int) else value
        for name, value in data["message"].items()
    }
    return {
        "x402Version": VERSION,
        "accepted": offer,
        "payload": {"signature": f"0x{text}", "authorization": message},
    }


def nonce_of(order_id: str, session_id: str, attempt: int) -> bytes:
    """The nonce of an order's payment: the token contract accepts it once for each payer.

    Only the holder of the session can compute it. Otherwise anybody could send an authorization
    with this nonce and an invalid signature, and a service that can't verify signatures of
    contract wallets would take the nonce for used.
    """
    text = f"rpcsvc funding {order_id} {session_id.lower()} {attempt}"
    return hashlib.sha256(text.encode()).digest()
