"""A command line with an option that its command does not have."""

from __future__ import annotations

import pytest

from rpcsvc.cli.main import build_parser, unknown_words


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The stderr of a refused command line; stdout must be empty."""
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(words)
    reported = capsys.readouterr()
    assert (ended.value.code, reported.out) == (2, "")
    return reported.err


@pytest.mark.parametrize(
    ("command", "words", "near"),
    [
        ("agent:swap:plan", ["--amout", "1"], "--amount"),
        ("agent:swap:plan", ["--amout=1"], "--amount"),
        ("agent:swap:plan", ["--hasfunds"], "--has-funds"),
        ("agent:swap:create", ["--session_id", "x"], "--session-id"),
        ("agent:swap:status", ["--orderid", "x"], "--order-id"),
        ("serve", ["--prot", "1"], "--port"),
        ("agent:swap:plan", ["--dir", "x2u"], "--direction"),
        ("agent:swap:plan", ["--dir=x2u"], "--direction"),
        ("agent:swap:plan", ["--am", "1"], "--amount"),
        ("agent:swap:create", ["--session", "x"], "--session-id"),
        ("agent:swap:plan", ["--d", "x2u"], "--data-dir, --detail or --direction"),
        ("serve", ["--tls", "f"], "--tls-cert or --tls-key"),
    ],
)
def test_an_unknown_option_is_named_with_the_nearest_known_one(
    capsys: pytest.CaptureFixture[str], command: str, words: list[str], near: str
) -> None:
    reported = refusal(capsys, command, *words)
    assert f"unrecognized arguments: {' '.join(words)}." in reported
    assert f"Did you mean {near}?" in reported
    assert f"usage: rpcsvc {command}" in reported, "the usage of this command, not of all"


def test_misplaced_key_option_learns_where_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    reported = refusal(capsys, "agent:swap:quote", "--idempotency-key", "k-0123456789abcd")
    assert "Only calls that create an order take --idempotency-key." in reported


def test_unknown_option_has_a_hint_and_a_plain_word_none() -> None:
    reported = unknown_words(["--amout", "1", "--cain", "base"], "[--amount VALUE] [--chain VALUE]")
    assert reported == (
        "unrecognized arguments: --amout 1 --cain base."
        " Did you mean --amount? Did you mean --chain?"
    )
    assert unknown_words(["--a", "1"], "[--ab V] [--ac V] [--ad V] [--ae V]").endswith(
        " Did you mean --ab, --ac, --ad or --ae?"
    )
    assert unknown_words(["--zzz"], "[--amount VALUE]") == "unrecognized arguments: --zzz."
