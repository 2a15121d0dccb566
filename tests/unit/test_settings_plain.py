"""What is read of the settings without pydantic is never anything but what pydantic would read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.settings import SettingsError, load_settings
from rpcsvc.settings_plain import PLAIN, plain_data_dir

FORMS = {name: st.from_regex(form, fullmatch=True) for name, form in PLAIN.items()}


def loaded(environ: dict[str, str], flag: str | None = None) -> Path:
    """The data directory with every setting validated. Raises SettingsError."""
    flags = {"data_dir": flag}
    return load_settings(config_file=None, environ=environ, flags=flags).settings.data_dir


def test_without_any_source_the_default_holds() -> None:
    assert plain_data_dir(None, {}, None) == loaded({}) == Path("./var")


def test_the_flag_wins_over_the_variable() -> None:
    environ = {"RPCSVC_DATA_DIR": "/of/variable"}
    assert plain_data_dir(None, environ, None) == Path("/of/variable")
    assert plain_data_dir(None, environ, "/of/flag") == Path("/of/flag")


@given(environ=st.fixed_dictionaries({}, optional=FORMS), flag=st.none() | st.text())
def test_values_in_plain_form_are_right_and_lead_to_the_same_directory(
    environ: dict[str, str], flag: str | None
) -> None:
    plain = plain_data_dir(None, environ, flag)

    assert plain is not None or flag is not None
    assert plain is None or plain == loaded(environ, flag)


@pytest.mark.parametrize("name", PLAIN)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0")))
def test_any_other_value_is_either_right_as_well_or_left_to_be_judged(name: str, text: str) -> None:
    plain = plain_data_dir(None, {name: text}, None)

    assert plain is None or plain == loaded({name: text})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RPCSVC_DATA_DIR", ""),
        ("RPCSVC_HOST", "[::1]"),
        ("RPCSVC_HOST", "a b"),
        ("RPCSVC_PORT", "65536"),
        ("RPCSVC_PORT", "tcp://10.0.0.1:8080"),
        ("RPCSVC_PORT", "8080\n1"),
        ("RPCSVC_ENGINE", "steam"),
        ("RPCSVC_SITE_URL", "https://swap.example/path"),
        ("RPCSVC_TRUSTED_PROXIES", "10.0.0.300"),
        ("RPCSVC_TRUSTED_PROXIES", "0.0.0.0/0"),
        ("RPCSVC_LOG__LEVEL", "loud"),
        ("AGENT_RPC_TOKEN", "too short"),
        ("AGENT_RPC_TOKEN", "0123456789abcdef,short"),
        ("AGENT_RPC_TOKEN_FILE", "/nowhere"),
        ("RPCSVC_TLS_CERT", "/cert.pem"),
        ("RPCSVC_CONFIG", "/nowhere/rpcsvc.toml"),
        ("RPCSVC_NOPE", "1"),
        ("rpcsvc_host", "127.0.0.1"),
    ],
)
def test_a_wrong_value_is_left_to_be_judged(name: str, text: str) -> None:
    with pytest.raises(SettingsError):
        loaded({name: text})

    assert plain_data_dir(None, {name: text}, None) is None
    assert plain_data_dir(None, {name: text}, "") is None


def test_a_file_is_left_to_be_judged(tmp_path: Path) -> None:
    assert plain_data_dir(tmp_path / "rpcsvc.toml", {}, "/srv") is None


def test_variables_of_other_programs_are_left_alone() -> None:
    assert plain_data_dir(None, {"HOME": "", "PORT": "x", "AGENT_X": "y"}, "/srv") == Path("/srv")
