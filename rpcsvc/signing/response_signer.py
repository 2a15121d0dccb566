"""Signs responses and the terms of orders."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import structlog
from nacl.bindings import crypto_sign

from rpcsvc.clock import Clock, iso8601_second
from rpcsvc.signing.keys import KeyRing, SigningKeyError, jwk
from rpcsvc.verify import (
    ALGORITHM,
    UNREAD,
    VERSION,
    attestation_input,
    b64url,
    signature_headers,
    signed_head,
    signed_rest,
)

log = structlog.get_logger(__name__)

_SIGNATURE_BYTES: Final = 64
_WORD: Final = b"rpcsvc operator's word\n"


class ResponseSigner:
    """Signs what goes out. One for a server; not for several threads at once.

    ``problem`` says why the keys on disk could not be read again, and is None when all is well;
    until then signing goes on with the keys that were read last.
    """

    def __init__(self, ring: KeyRing, clock: Clock, *, slug: str = "service") -> None:
        self.problem: str | None = None
        self._ring = ring
        self._clock = clock
        self._names = signature_headers(slug)
        self._second = -1
        self._kid = ""
        self._secret = b""
        self._head = b""
        self._fixed: dict[str, str] = {}
        self._keep_time()

    def headers(
        self, method: str, target: str, status: int, request_body: bytes | None, body: bytes
    ) -> dict[str, str]:
        """The six headers of a response (design part 3 "Signing").

        ``target`` is path and query as they came, bytes that are not UTF-8 as surrogates (PEP 383);
        ``body`` the exact bytes that are sent: none for HEAD and 304. ``request_body`` is None
        where the request's body was not read. Never raises for what a client sent.
        """
        self._keep_time()
        content = hashlib.sha256(body).hexdigest()
        request = UNREAD if request_body is None else hashlib.sha256(request_body).hexdigest()
        text = self._head + signed_rest(method, target, status, request, content)
        signature = b64url(crypto_sign(text, self._secret)[:_SIGNATURE_BYTES])
        return {**self._fixed, self._names[3]: content, self._names[5]: signature}

    def attest(self, terms: bytes) -> str:
        """An order's terms, as OrderTerms.canonical() writes them, as a compact JWS."""
        self._keep_time()
        text = attestation_input(self._kid, terms)
        return f"{text.decode()}.{b64url(crypto_sign(text, self._secret)[:_SIGNATURE_BYTES])}"

    def vouch(self, word: bytes) -> str:
        """A signature over the operator's word, base64url; what else is signed begins otherwise."""
        self._keep_time()
        return b64url(crypto_sign(_WORD + word, self._secret)[:_SIGNATURE_BYTES])

    def sign_message(self, content: bytes) -> bytes:
        """An Ed25519 signature over a webhook's message, which begins with its id, ``msg_``."""
        self._keep_time()
        return bytes(crypto_sign(content, self._secret)[:_SIGNATURE_BYTES])

    @property
    def webhook_key(self) -> str:
        """The public key that webhooks are signed with now, ``whpk_``."""
        self._keep_time()
        return str(jwk(self._ring.current)["whpk"])

    @property
    def kid(self) -> str:
        """Id of the key that signs now."""
        return self._kid

    def jwks(self) -> dict[str, Any]:
        """The public keys, the one that signs this very response included."""
        self._keep_time()
        return self._ring.jwks()

    def _keep_time(self) -> None:
        second = self._clock.now_ms() // 1000
        if second != self._second:
            self._begin(second)

    def _begin(self, second: int) -> None:
        """Prepare the parts that all responses of a second share; reread keys that changed."""
        self._refresh()
        key, signed_at = self._ring.current, iso8601_second(second)
        self._kid, self._secret = key.kid, key.secret
        self._head = signed_head(key.kid, signed_at)
        version, alg, kid, _, at, _ = self._names
        self._fixed = {version: VERSION, alg: ALGORITHM, kid: key.kid, at: signed_at}
        self._second = second

    def _refresh(self) -> None:
        try:
            if self._ring.refresh():
                upcoming = self._ring.next
                next_kid = None if upcoming is None else upcoming.key.kid
                log.info("signing_keys_changed", kid=self._ring.current.kid, next_kid=next_kid)
            self.problem = None
        except SigningKeyError as error:
            if self.problem != str(error):
                log.warning("signing_keys_unreadable", reason=str(error))
            self.problem = str(error)
