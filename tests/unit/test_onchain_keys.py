"""Keys of the EVM adapter: their file, the derived accounts, and signatures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import eth_account
import pytest
from msgspec.structs import asdict

from rpcsvc.settlement.onchain.evm import keys
from rpcsvc.settlement.onchain.evm.keys import (
    EvmSigner,
    HdKeys,
    KeyFileRefused,
    OnchainExtraMissing,
    TransactionPlan,
    create_mnemonic,
    read_mnemonic,
)

# The well-known mnemonic of development chains and its addresses.
WORDS = "test test test test test test test test test test test junk"
ADDRESSES = (
    "0xf39Fd6e51aad88F6F4ce6aB8827279cffFb92266",
    "0x70997970C51812dc3A010C7d01b50e0d17dc79C8",
    "0x3C44CdDdB6a900fa2b585dd299e03d12FA4293BC",
)
PLAN = TransactionPlan(
    chain_id=42161, nonce=7, to=ADDRESSES[1], gas=60_000, max_fee=2 * 10**9, tip=10**8, data=b"\1"
)


def zeros(count: int) -> bytes:
    return bytes(count)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mnemonic"


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


# --- the file --------------------------------------------------------------------------------


def test_new_words_are_in_a_file_of_this_user_alone(path: Path) -> None:
    old = os.umask(0)
    try:
        words = create_mnemonic(path, zeros)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
    assert words == "abandon " * 23 + "art"
    assert read_mnemonic(path) == words
    assert list(path.parent.iterdir()) == [path]


def test_different_randomness_gives_different_words(tmp_path: Path) -> None:
    made = {create_mnemonic(tmp_path / str(number), os.urandom) for number in range(3)}
    assert len(made) == 3


def test_a_file_that_is_there_is_never_written_over(path: Path) -> None:
    written(path, WORDS)
    with pytest.raises(KeyFileRefused, match="exists already"):
        create_mnemonic(path, zeros)
    assert path.read_text() == WORDS
    assert list(path.parent.iterdir()) == [path]


def test_dangling_link_is_not_followed_when_making_a_mnemonic(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere")
    with pytest.raises(KeyFileRefused):
        create_mnemonic(path, zeros)
    assert not (path.parent / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610, 0o601, 0o620])
def test_a_file_that_others_may_touch_is_refused(path: Path, mode: int) -> None:
    with pytest.raises(KeyFileRefused, match=f"mode {mode:04o}.*chmod 600"):
        read_mnemonic(written(path, WORDS, mode))


def test_a_file_of_mode_0400_is_taken(path: Path) -> None:
    assert read_mnemonic(written(path, WORDS, 0o400)) == WORDS


def test_words_may_stand_on_lines_of_their_own(path: Path) -> None:
    assert read_mnemonic(written(path, WORDS.replace(" ", "\n") + "\n")) == WORDS


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds 0 words"),
        ("test test", "holds 2 words"),
        (WORDS.replace("junk", "test"), "checksum"),
        (WORDS.replace("junk", "notaword"), "checksum"),
        (WORDS.replace("test", "tést", 1), "other than English"),
        ("test " * 2000, "over 4096 bytes"),
    ],
)
def test_words_that_can_not_be_right_are_refused_and_not_shown(
    path: Path, text: str, problem: str
) -> None:
    with pytest.raises(KeyFileRefused, match=problem) as raised:
        read_mnemonic(written(path, text))
    assert "junk" not in str(raised.value)


def test_a_missing_file_a_directory_and_a_pipe_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, problem in (("none", "opened"), (".", "not a regular file"), ("pipe", "regular")):
        with pytest.raises(KeyFileRefused, match=problem):
            read_mnemonic(tmp_path / name)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileRefused, match="can't be made"):
        create_mnemonic(tmp_path / "none" / "mnemonic", zeros)


# --- accounts --------------------------------------------------------------------------------


def test_accounts_are_those_that_every_wallet_derives() -> None:
    hd = HdKeys(WORDS)
    assert tuple(hd.address(index) for index in range(3)) == ADDRESSES


def test_a_passphrase_gives_other_accounts() -> None:
    assert HdKeys(WORDS, "more").address(0) != ADDRESSES[0]


@pytest.mark.parametrize("index", [-1, 2**31, True])
def test_an_index_that_bip_44_does_not_have_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match="index is 0 to"):
        HdKeys(WORDS).signer(index)


def test_no_secret_shows_in_a_repr() -> None:
    hd = HdKeys(WORDS)
    assert repr(hd) == "HdKeys(...)"
    assert repr(hd.signer(0)) == f"EvmSigner({ADDRESSES[0]})"


# --- signatures ------------------------------------------------------------------------------


def test_a_signed_transaction_is_known_by_id_before_it_is_sent() -> None:
    signer = HdKeys(WORDS).signer(0)
    signed = signer.sign(PLAN)
    assert signed == signer.sign(PLAN)
    assert signed.raw[0] == 2
    assert eth_account.Account.recover_transaction(signed.raw) == ADDRESSES[0]


def test_another_fee_gives_another_id_on_the_same_nonce() -> None:
    signer = HdKeys(WORDS).signer(0)
    dearer = TransactionPlan(42161, 7, ADDRESSES[1], 60_000, 3 * 10**9, 2 * 10**8, b"\1")
    assert signer.sign(dearer).txid != signer.sign(PLAN).txid


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chain_id", 0), ("nonce", -1), ("gas", 0), ("max_fee", 0), ("tip", -1),
        ("tip", 2 * 10**9 + 1), ("value", -1),
    ],
)  # fmt: skip
def test_a_transaction_that_can_not_be_right_is_not_signed(field: str, value: int) -> None:
    fields = asdict(PLAN) | {field: value}
    with pytest.raises(ValueError, match=r"chain_id|tip|nonce"):
        HdKeys(WORDS).signer(0).sign(TransactionPlan(**fields))


def test_a_signed_digest_leads_back_to_its_signer() -> None:
    signer = HdKeys(WORDS).signer(2)
    signature = signer.sign_digest(b"\7" * 32)
    assert signature.v in (27, 28)
    recovered = eth_account.Account._recover_hash(
        b"\7" * 32, vrs=(signature.v, signature.r, signature.s)
    )
    assert recovered == signer.address
    assert signature.packed() == (
        signature.r.to_bytes(32, "big") + signature.s.to_bytes(32, "big") + bytes([signature.v])
    )
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        signer.sign_digest(b"\7" * 31)


# --- the extra -------------------------------------------------------------------------------


def test_without_the_extra_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "eth_account", None)
    with pytest.raises(OnchainExtraMissing, match=r"pip install 'rpcsvc\[onchain\]'"):
        EvmSigner(b"\1" * 32)


def test_the_module_loads_without_eth_account() -> None:
    code = f"import sys, {keys.__name__}; sys.exit('eth_account' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_eth_account_does_not_raise_the_recursion_limit() -> None:
    code = (
        "import sys; before = sys.getrecursionlimit();"
        "from rpcsvc.settlement.onchain.evm.keys import HdKeys;"
        f"HdKeys({WORDS!r}).address(0); assert 'eth_account' in sys.modules;"
        "sys.exit(sys.getrecursionlimit() != before)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
