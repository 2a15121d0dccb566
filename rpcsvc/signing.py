"""The ring of signing keys, on disk and rotated; and signatures over responses and orders with it.

``<data-dir>/keys/`` (mode 0700) holds one file, ``ring.json`` (0600): the current key and the next
one with their private parts, and the public parts of the retired ones. The file says when the next
key begins to sign, so every process that has the file switches at the same second, without a write.
A write is one rename: after a crash the file holds the old ring or the new one, complete.
Source: RFC 8037 (Ed25519 in JWK), RFC 7638 (key ids).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

import structlog
from msgspec import Struct
from nacl.bindings import crypto_sign, crypto_sign_seed_keypair

from rpcsvc.clock import Clock, iso8601_second
from rpcsvc.domain.webhooks import public_key
from rpcsvc.durable_files import sync_directory, write_new
from rpcsvc.redacted import Redacted
from rpcsvc.verify import (
    ALGORITHM,
    UNREAD,
    VERSION,
    attestation_input,
    b64url,
    parse_time,
    signature_headers,
    signed_head,
    signed_rest,
    thumbprint,
    unb64url,
)

SEED_BYTES: Final = 32
# How long a replaced key's signatures count: servers notice later, and clocks differ.
HANDOVER_SECONDS: Final = 10
_FORMAT: Final = 1
Json = dict[str, Any]

KEYS_DIR: Final = "keys"
RING_NAME: Final = "ring.json"
FRESH_NAME: Final = "ring.json.new"
_LARGEST_RING: Final = 1024 * 1024
# How long a key is published before it signs. Verifiers keep a key set for up to ten minutes.
PUBLISHED_MINUTES: Final = 15
LEAST_PUBLISHED_MINUTES: Final = 10


class SigningKeyError(Exception):
    """The keys can't be used as they are; the message says what the operator has to do."""


class SigningKey(Redacted, frozen=True):
    """The key that signs. ``x`` is the public key, base64url; ``secret`` libsodium's 64 bytes."""

    HIDDEN = frozenset({"secret"})

    kid: str
    x: str
    secret: bytes
    created_at: str


class RetiredSigningKey(Struct, frozen=True):
    """A key that signed before. Only its public part is left."""

    kid: str
    x: str
    created_at: str
    retired_at: str


class NextSigningKey(Struct, frozen=True):
    """A key that is published, and signs from the second ``signs_from`` (since the epoch) on."""

    key: SigningKey
    signs_from: int


class Keys(Struct, frozen=True):
    """A ring: the key that signs, the next one, and those that signed before, the latest first."""

    current: SigningKey
    retired: tuple[RetiredSigningKey, ...] = ()
    next: NextSigningKey | None = None

    def at(self, second: int) -> Keys:
        """Return the ring as it is used at a moment: the next key takes over at its time."""
        if self.next is None or second < self.next.signs_from:
            return self
        old = retire(self.current, self.next.signs_from)
        return Keys(self.next.key, (old, *self.retired))

    def is_handed_over(self, second: int) -> bool:
        """Return whether every replica has left ``current`` for the next key."""
        return self.next is not None and second >= self.next.signs_from + HANDOVER_SECONDS


def retire(key: SigningKey, second: int) -> RetiredSigningKey:
    """Return the public part of a key that another one replaces at ``second``."""
    end = iso8601_second(second + HANDOVER_SECONDS)
    return RetiredSigningKey(key.kid, key.x, key.created_at, end)


def signing_key(seed: bytes, created_at: str) -> SigningKey:
    """The key of a seed of 32 bytes. Raises ValueError for another length."""
    if len(seed) != SEED_BYTES:
        raise ValueError(f"a seed has {SEED_BYTES} bytes, not {len(seed)}")
    public, secret = crypto_sign_seed_keypair(seed)
    x = b64url(public)
    return SigningKey(thumbprint(x), x, secret, created_at)


def jwk(key: SigningKey | RetiredSigningKey) -> Json:
    """The public part as a JWK (RFC 8037); ``whpk`` is the same in the form of webhooks."""
    return {
        "kty": "OKP",
        "crv": "Ed25519",
        "x": key.x,
        "kid": key.kid,
        "use": "sig",
        "alg": "EdDSA",
        "whpk": public_key(_bytes32(key.x)),
    }


def encode(keys: Keys) -> bytes:
    """The ring as it is kept, private part included."""
    rows = [_private_row(keys.current)]
    rows += [{"x": k.x, "createdAt": k.created_at, "retiredAt": k.retired_at} for k in keys.retired]
    value: Json = {"format": _FORMAT, "keys": rows}
    if keys.next is not None:
        signs_from = iso8601_second(keys.next.signs_from)
        value["next"] = {**_private_row(keys.next.key), "signsFrom": signs_from}
    return json.dumps(value, indent=2).encode() + b"\n"


def _private_row(key: SigningKey) -> Json:
    return {"x": key.x, "d": b64url(key.secret[:SEED_BYTES]), "createdAt": key.created_at}


def decode(raw: bytes) -> Keys:
    """The ring that ``encode`` wrote.

    Raises ValueError, KeyError, TypeError, AttributeError or RecursionError for anything else.
    """
    value = json.loads(raw)
    if value["format"] != _FORMAT:
        raise ValueError(f"format {value['format']!r}, not {_FORMAT}")
    first, *others = value["keys"]
    retired = tuple(_retired_key(row) for row in others)
    return Keys(_private_key(first), retired, _next_key(value["next"]) if "next" in value else None)


def _private_key(row: Json) -> SigningKey:
    key = signing_key(_bytes32(row["d"]), _moment(row["createdAt"]))
    if key.x != row["x"]:
        raise ValueError("the two halves of a key do not belong together")
    return key


def _next_key(row: Json) -> NextSigningKey:
    signs_from = parse_time(row["signsFrom"])
    if signs_from is None:
        raise ValueError("a time is not RFC 3339")
    return NextSigningKey(_private_key(row), int(signs_from.timestamp()))


def _retired_key(row: Json) -> RetiredSigningKey:
    x = b64url(_bytes32(row["x"]))
    return RetiredSigningKey(thumbprint(x), x, _moment(row["createdAt"]), _moment(row["retiredAt"]))


def _bytes32(text: str) -> bytes:
    data = unb64url(text)
    if data is None or len(data) != SEED_BYTES:
        raise ValueError("a key is not 32 bytes in base64url")
    return data


def _moment(text: str) -> str:
    if parse_time(text) is None:
        raise ValueError("a time is not RFC 3339")
    return text


log = structlog.get_logger(__name__)
# The mark of a file: a new or a changed file has another.
Mark = tuple[int, int, int, int]


@contextmanager
def explaining(directory: Path) -> Iterator[None]:
    """Raise what the system refuses within the block as a SigningKeyError."""
    try:
        yield
    except OSError as error:
        raise SigningKeyError(
            f"The signing keys in {directory} can't be used: {error}. The user that runs the"
            " service must own that directory and be able to write in it."
        ) from error


@contextmanager
def locked(directory: Path, *, shared: bool = False, wait: bool = True) -> Iterator[None]:
    """Hold the directory against other processes, and see that it is private.

    ``shared``: against writers only. Raises SigningKeyError; without ``wait`` BlockingIOError when
    another process has it.
    """
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check_private(directory, os.fstat(fd), 0o700)
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


def _check_private(path: Path, found: os.stat_result, mode: int) -> None:
    if found.st_uid != os.geteuid():
        raise SigningKeyError(
            f"{path} belongs to user {found.st_uid}, not to {os.geteuid()} who runs this. Run it as"
            " the service's user, or give the file to that one with chown."
        )
    if found.st_mode & 0o077:
        raise SigningKeyError(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}: others than its owner may use it."
            f" Run: chmod {mode:o} {path}. If somebody may have read the key, then also:"
            " rpcsvc keys rotate --revoke"
        )


def make_directory(directory: Path) -> None:
    """Make the directory, private, if it is not there."""
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)


def read(directory: Path) -> tuple[Keys, Mark]:
    """The ring on disk and the mark of its file. The directory must be locked."""
    _check_files(directory)
    path = directory / RING_NAME
    # O_NONBLOCK: opening a pipe in the file's place must not wait for a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise SigningKeyError(f"{path} is not a file. Move it away.")
        _check_private(path, found, 0o600)
        raw = file.read(_LARGEST_RING)
    try:
        return decode(raw), _mark_of(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SigningKeyError(
            f"{path} is not a key ring that this version can use"
            f" ({error or type(error).__name__}). Put a backup of it in place. Without one, move it"
            " away: a new key is made at the next start, and old signatures can't be checked."
        ) from error


def _check_files(directory: Path) -> None:
    unexpected = sorted({path.name for path in directory.iterdir()} - {RING_NAME, FRESH_NAME})
    if unexpected:
        raise SigningKeyError(
            f"{directory} is for signing keys only, but has {', '.join(unexpected[:5])} in it. Move"
            " away what you put there; if it was not you, find out who can write there."
        )


def mark(directory: Path) -> Mark:
    """The mark of the ring's file as it is now."""
    return _mark_of((directory / RING_NAME).stat())


def _mark_of(found: os.stat_result) -> Mark:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def commit(directory: Path, keys: Keys) -> None:
    """Replace the ring on disk whole, then overwrite what the old file held.

    The directory must be locked. Whatever stops this leaves the old ring or the new one.
    """
    _check_files(directory)
    (directory / FRESH_NAME).unlink(missing_ok=True)
    write_new(directory / FRESH_NAME, encode(keys))
    with _held(directory / RING_NAME) as old:
        (directory / FRESH_NAME).replace(directory / RING_NAME)
        sync_directory(directory)
        if old is not None:
            _overwrite(old)


@contextmanager
def _held(path: Path) -> Iterator[int | None]:
    """An open descriptor of a file that is about to be replaced, if it is there."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _overwrite(fd: int) -> None:
    """Destroy the private key in a file that no name leads to any more.

    The file system may keep copies of its own; and the rotation is done, whether this works or not.
    A file that has another name besides is somebody's copy, and stays.
    """
    found = os.fstat(fd)
    if found.st_nlink:
        return
    try:
        os.pwrite(fd, bytes(found.st_size), 0)
        os.fsync(fd)
    except OSError as error:
        log.warning("signing_key_overwrite_failed", reason=str(error))


RandomBytes = Callable[[int], bytes]


class KeyRing:
    """The keys in one directory. Made by ``load_or_create`` or ``load``."""

    def __init__(self, directory: Path, clock: Clock, random: RandomBytes) -> None:
        self._directory = directory
        self._clock = clock
        self._random = random
        self._stored: Keys
        self._keys: Keys
        self._mark: Mark

    @classmethod
    def load_or_create(cls, directory: Path, clock: Clock, random: RandomBytes) -> Self:
        """The ring in ``directory``; at the first start, a new one. Raises SigningKeyError.

        ``random`` returns that many secret random bytes. The files are made with modes 0700 and
        0600, and are on disk when this returns.
        """
        ring = cls(directory, clock, random)
        with explaining(directory):
            make_directory(directory)
            with locked(directory):
                if not (directory / RING_NAME).exists():
                    commit(directory, Keys(ring._new_key()))
                    sync_directory(directory.parent)
                ring._adopt()
        return ring

    @classmethod
    def load(cls, directory: Path, clock: Clock, random: RandomBytes) -> Self:
        """The ring in ``directory``, which must be there. Raises SigningKeyError."""
        ring = cls(directory, clock, random)
        with explaining(directory):
            if not (directory / RING_NAME).exists():
                raise SigningKeyError(
                    f"There are no signing keys in {directory}. They are made when the service"
                    " first starts (rpcsvc serve). If it has, name its data directory with"
                    " --data-dir."
                )
            with locked(directory, shared=True):
                ring._adopt()
        return ring

    @property
    def current(self) -> SigningKey:
        """The key that signs now."""
        return self._keys.current

    @property
    def next(self) -> NextSigningKey | None:
        """The key that is published and does not sign yet."""
        return self._keys.next

    @property
    def retired(self) -> tuple[RetiredSigningKey, ...]:
        """Keys that signed before, the latest first."""
        return self._keys.retired

    def jwks(self) -> dict[str, Any]:
        """The public keys as a JWKS (RFC 7517, RFC 8037): the current one, the next, the retired.

        A retired key has ``retiredAt``: what says that it was signed later is not to be believed.
        The next key has ``signsFrom``.
        """
        keys = [jwk(self.current)]
        if self.next is not None:
            signs_from = iso8601_second(self.next.signs_from)
            keys.append({**jwk(self.next.key), "signsFrom": signs_from})
        return {"keys": keys + [{**jwk(key), "retiredAt": key.retired_at} for key in self.retired]}

    def prepare(self, minutes: int = PUBLISHED_MINUTES) -> NextSigningKey:
        """Make the next key. It signs ``minutes`` after every server has noticed and published it.

        The switch needs no further call. Raises SigningKeyError, also while a next key is there.
        """
        with explaining(self._directory), locked(self._directory):
            keys = self._read()
            if keys.next is not None:
                raise SigningKeyError(
                    f"The next key {keys.next.key.kid} is prepared already, and signs from"
                    f" {iso8601_second(keys.next.signs_from)}. Wait for that. If a key may be"
                    " stolen: rpcsvc keys rotate --now"
                )
            start = self._second() + HANDOVER_SECONDS + minutes * 60
            prepared = NextSigningKey(self._new_key(), start)
            commit(self._directory, Keys(keys.current, keys.retired, prepared))
            self._adopt()
        return prepared

    def rotate(self, *, revoke: bool = False) -> SigningKey:
        """Make a new key the current one at once, and return it.

        Verifiers that fetched the JWKS just before refuse its signatures until they fetch it again.
        The old public key stays in the JWKS with the time from which it is not believed; with
        ``revoke`` it is removed, and its signatures no longer verify: for a key that may be stolen.
        A next key is dropped, because it lay beside the old one.
        The new key is on disk before the old private key is destroyed. Raises SigningKeyError; what
        is on disk then is the old ring or the new one, complete.
        """
        with explaining(self._directory), locked(self._directory):
            old = self._read()
            gone = () if revoke else (retire(old.current, self._second()),)
            commit(self._directory, Keys(self._new_key(), (*gone, *old.retired)))
            self._adopt()
        return self.current

    def refresh(self) -> bool:
        """Take over what another process or the time has changed; True if something did.

        Costs one stat when nothing has changed, and one write after the next key has taken over:
        it destroys the old private key. Never waits: while another process is at it, the keys stay
        as they are, and the next call looks again. Raises SigningKeyError; the next key takes over
        even so.
        """
        before, now = self._keys, self._second()
        self._keys = self._stored.at(now)
        with explaining(self._directory), suppress(BlockingIOError):
            if mark(self._directory) != self._mark:
                with locked(self._directory, shared=True, wait=False):
                    self._adopt()
            elif self._stored.is_handed_over(now):
                with locked(self._directory, wait=False):
                    commit(self._directory, self._read())
                    self._adopt()
        return self._keys != before

    def _adopt(self) -> None:
        self._stored, self._mark = read(self._directory)
        self._keys = self._stored.at(self._second())

    def _read(self) -> Keys:
        """Return the ring on disk as it is used now."""
        return read(self._directory)[0].at(self._second())

    def _second(self) -> int:
        return self._clock.now_ms() // 1000

    def _new_key(self) -> SigningKey:
        return signing_key(self._random(SEED_BYTES), iso8601_second(self._second()))


# --- signing --------------------------------------------------------------------------------------


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
