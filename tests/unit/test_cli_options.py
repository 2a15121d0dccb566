"""Option values, and options given twice, over all commands."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.cli.context import Once
from rpcsvc.cli.main import build_parser, run

BAD = "\udcff"  # Python's decoding of the byte 0xff in an argument
TREE = build_parser()


def ended(words: list[str], data_dir: Path) -> int:
    """The exit status of a command line that is refused before it calls a service."""
    try:
        return run(
            words, {"RPCSVC_DATA_DIR": str(data_dir)}, serve=_never, local=_never, private=_never
        )
    except SystemExit as usage:
        assert isinstance(usage.code, int)
        return usage.code


def _never(*_: Any) -> Any:
    raise AssertionError("no service may be asked")


# --- given once ------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--url", "--token", "--data-dir", "--config", "--request-id"])
def test_option_that_directs_a_call_is_refused_twice(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(["agent:capabilities", flag, "a", flag, "b"], tmp_path) == 2
    reported = capsys.readouterr()
    assert json.loads(reported.out)["ok"] is False
    assert f"argument {flag}: is given twice" in reported.err


def options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every option with a value, of a command and of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from options(below)
        elif action.option_strings and action.nargs != 0:
            yield action


def test_options_given_twice_are_refused_by_all_commands() -> None:
    """Except for options with a default, which choose the output, and for lists."""
    free = {
        name
        for option in options(TREE)
        if not isinstance(option, Once)
        for name in option.option_strings
    }
    assert free == {"--check", "--every", "--internal-wei", "--journal"}


def test_number_that_a_method_refuses_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given in ("0", "1.5", "x"):
        assert ended(["webhooks", "replay", "o", "--sequence", given], tmp_path) == 2
        says = f"argument --sequence: must be 1 or more, not {given!r}"
        assert says in capsys.readouterr().err


# --- text ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["agent:swap:plan", "--amount", BAD], "--amount"),
        (["agent:swap:plan", f"--direction=x{BAD}"], "--direction"),
        (["agent:swap:status", "--order-id", BAD], "--order-id"),
        (["agent:swap:create", "--idempotency-key", BAD], "--idempotency-key"),
        (["agent:support:create", "--message", f"where is it? {BAD}"], "--message"),
        (["agent:capabilities", "--request-id", BAD], "--request-id"),
        (["agent:capabilities", "--url", f"http://{BAD}"], "--url"),
        (["agent:capabilities", "--token", BAD], "--token"),
        (["sandbox:fault", "--rate", BAD], "--rate"),
        (["sandbox:fund", BAD], "ORDER"),
        (["refund", BAD, "--to", "x"], "ORDER"),
        (["refund", "ord_1", "--to", BAD], "--to"),
        (["payouts", "show", BAD], "TRANSFER"),
        (["payouts", "pause", "--reason", BAD], "--reason"),
        (["payouts", "adopt", "t", BAD], "TXID"),
        (["relays", "close", BAD, "--note", "n"], "ORDER_ID"),
        (["relays", "close", "o", "--note", BAD], "--note"),
        (["treasury", "explain", "monero", "t", "--note", BAD], "--note"),
        (["receipt", "verify", "-", "--to", BAD], "--to"),
        (["verify", "attestation", BAD], "ATTESTATION"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_option_that_is_not_utf_8_is_named_in_a_usage_error(
    words: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(words, tmp_path) == 2
    reported = capsys.readouterr()
    has_envelope = words[0].startswith(("agent:", "sandbox:", "receipt", "verify"))
    assert (reported.out != "") is has_envelope
    assert f"argument {name}: holds a byte that is not UTF-8" in reported.err.replace("|-:", ":")


@pytest.mark.parametrize("flag", ["--data-dir", "--config"])
def test_a_path_may_hold_any_bytes(flag: str) -> None:
    found = build_parser().parse_args(["agent:capabilities", flag, f"/tmp/odd{BAD}"])
    assert BAD in str(vars(found)[flag.removeprefix("--").replace("-", "_")])
