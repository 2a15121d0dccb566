"""Settings: precedence of layers, named mistakes, and no token in any output."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rpcsvc.engines import ENGINES
from rpcsvc.settings import (
    KEYS,
    SECRETS,
    LoadedSettings,
    Settings,
    SettingsError,
    check_bind,
    effective_config,
    load_settings,
    render_config,
)
from rpcsvc.settings_sources import variable_names

*_OTHERS, _LAST = map(repr, ENGINES)
ENGINES_LISTED = f"{', '.join(_OTHERS)} or {_LAST}"
CONFIG = Path(__file__).parents[2] / "config"
TOKEN = "correct-horse-battery"
OTHER_TOKEN = "staple-orthodox-pony"
PLACEHOLDER = "<your-token>"


def load(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> LoadedSettings:
    return load_settings(config_file=file, environ=environ or {}, flags=flags or {})


def refused(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load(file, environ, flags)
    return caught.value.problems


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rpcsvc.toml"
    path.write_text(text, encoding="utf-8")
    return path


def tokens(loaded: LoadedSettings) -> list[str]:
    return [token.get_secret_value() for token in loaded.settings.agent_rpc_tokens]


def everything_about(error: BaseException) -> str:
    """All text that a log of ``error`` could have, causes and contexts included."""
    text = "".join(traceback.format_exception(error)) + repr(error) + str(error)
    hidden = error.__cause__ or error.__context__
    return text + (everything_about(hidden) if hidden else "")


# Defaults


def test_without_any_source_the_documented_defaults_hold() -> None:
    loaded = load()

    settings = loaded.settings
    assert (settings.host, settings.port, settings.engine) == ("127.0.0.1", 8080, "sandbox")
    assert settings.data_dir == Path("./var")
    assert settings.agent_rpc_tokens == ()
    assert settings.rate_limit.rpc_requests_per_minute == 6000
    assert settings.limits.batch == 50
    assert settings.orders.min_received_bps == 9900
    assert settings.sandbox.usdc_per_xmr == "165.00"
    assert set(loaded.origins.values()) == {"default"}
    assert tuple(loaded.origins) == KEYS


def test_settings_and_origins_cannot_be_changed_after_loading() -> None:
    loaded = load()

    with pytest.raises(ValidationError):
        setattr(loaded.settings, "port", 1)  # noqa: B010 - tests the frozen model
    with pytest.raises(TypeError):
        loaded.origins["port"] = "elsewhere"  # type: ignore[index]  # tests the read-only mapping


# Layers


@given(
    file=st.none() | st.integers(0, 65_535),
    env=st.none() | st.integers(0, 65_535),
    flag=st.none() | st.integers(0, 65_535),
)
def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    tmp_path_factory: pytest.TempPathFactory, file: int | None, env: int | None, flag: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "layers.toml"
    path.write_text("" if file is None else f"port = {file}\n")

    loaded = load(path, {} if env is None else {"RPCSVC_PORT": str(env)}, {"port": flag})

    layers = [
        (flag, "flag --port"),
        (env, "env RPCSVC_PORT"),
        (file, f"file {path}"),
        (8080, "default"),
    ]
    expected = next((value, origin) for value, origin in layers if value is not None)
    assert (loaded.settings.port, loaded.origins["port"]) == expected


def test_layers_are_merged_key_by_key_within_a_group(tmp_path: Path) -> None:
    path = toml(tmp_path, '[brand]\nname = "File"\nmotto = "From the file"\n')

    loaded = load(path, {"RPCSVC_BRAND__NAME": "Environment"}, {"brand.slug": "flagged"})

    brand = loaded.settings.brand
    assert (brand.slug, brand.name, brand.motto) == ("flagged", "Environment", "From the file")
    assert loaded.origins["brand.slug"] == "flag --brand-slug"
    assert loaded.origins["brand.name"] == "env RPCSVC_BRAND__NAME"
    assert loaded.origins["brand.motto"] == f"file {path}"
    assert loaded.origins["brand.domain"] == "default"


def test_a_flag_of_several_words_is_named_as_it_is_typed() -> None:
    assert load(flags={"data_dir": Path("/srv")}).origins["data_dir"] == "flag --data-dir"


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("RPCSVC_PORT", "0", "port", 0),
        ("RPCSVC_RATE_LIMIT__ENABLED", "false", "rate_limit.enabled", False),
        ("RPCSVC_RATE_LIMIT__ENABLED", "0", "rate_limit.enabled", False),
        ("RPCSVC_RATE_LIMIT__ENABLED", "YES", "rate_limit.enabled", True),
        ("RPCSVC_ORDERS__LATE_WINDOW_SECONDS", "60", "orders.late_window_seconds", 60),
        ("RPCSVC_ORDERS__LATE_WINDOW_SECONDS", "", "orders.late_window_seconds", None),
        ("RPCSVC_ORDERS__HISTORY_KEEP_DAYS", "90", "orders.history_keep_days", 90),
        ("RPCSVC_ORDERS__HISTORY_KEEP_DAYS", "", "orders.history_keep_days", None),
        ("RPCSVC_DATA_DIR", "/srv/data", "data_dir", "/srv/data"),
        ("RPCSVC_LOG__LEVEL", "WARNING", "log.level", "warning"),
        ("RPCSVC_CONTACT", "", "contact", None),
        ("RPCSVC_SITE_URL", "https://swap.example/", "site_url", "https://swap.example"),
        ("RPCSVC_TRUSTED_PROXIES", "", "trusted_proxies", []),
        (
            "RPCSVC_TRUSTED_PROXIES",
            "10.0.0.1, fd00::/8",
            "trusted_proxies",
            ["10.0.0.1/32", "fd00::/8"],
        ),
        ("RPCSVC_SANDBOX__XMR_PAYOUT_FEE", "0", "sandbox.xmr_payout_fee", "0"),
        ("RPCSVC_SANDBOX__XMR_FLOAT", "0.000000000001", "sandbox.xmr_float", "0.000000000001"),
    ],
)
def test_text_of_the_environment_becomes_the_type_of_its_key(
    variable: str, text: str, key: str, value: object
) -> None:
    loaded = load(environ={variable: text})

    row = next(row for row in effective_config(loaded) if row["key"] == key)
    assert row == {"key": key, "value": value, "origin": f"env {variable}"}
    assert type(row["value"]) is type(value)


def _as_text(value: object) -> str:
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return "" if value is None else str(value)


def test_every_key_can_be_given_by_its_environment_variable() -> None:
    rows = {row["key"]: row["value"] for row in effective_config(load())}
    environ = {
        "RPCSVC_" + key.upper().replace(".", "__"): _as_text(value)
        for key, value in rows.items()
        if key not in {"agent_rpc_token", "telemetry.metrics_token", "tls_cert", "tls_key"}
    }
    environ |= {"AGENT_RPC_TOKEN": TOKEN, "RPCSVC_TLS_CERT": "/c", "RPCSVC_TLS_KEY": "/k"}
    environ["RPCSVC_TELEMETRY__METRICS_TOKEN"] = OTHER_TOKEN

    loaded = load(environ=environ)

    assert all(origin.startswith("env ") for origin in loaded.origins.values())


def test_token_for_metrics_is_no_token_for_rpc() -> None:
    both = f"{OTHER_TOKEN},{TOKEN}"
    environ = {"AGENT_RPC_TOKEN": TOKEN, "RPCSVC_TELEMETRY__METRICS_TOKEN": both}
    with pytest.raises(SettingsError, match="opens /metrics alone") as refused:
        load(environ=environ)
    assert TOKEN not in str(refused.value)


def test_config_variable_names_the_file_and_the_argument_wins(tmp_path: Path) -> None:
    path = toml(tmp_path, "port = 1\n")
    other = tmp_path / "other.toml"
    other.write_text("port = 2\n")

    assert load(environ={"RPCSVC_CONFIG": str(path)}).settings.port == 1
    assert load(other, {"RPCSVC_CONFIG": str(path)}).settings.port == 2
    assert load(environ={"RPCSVC_CONFIG": ""}).settings.port == 8080


def test_client_and_unrelated_variables_are_ignored() -> None:
    loaded = load(environ={"RPCSVC_URL": "http://x", "HOME": "/root", "PORT": "1", "AGENT_X": "y"})

    assert set(loaded.origins.values()) == {"default"}


# Unknown keys


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("prot = 1", "prot", "port"),
        ("Host = 'x'", "Host", "host"),
        ("[brand]\nnmae = 'x'", "brand.nmae", "brand.name"),
        ("orders_per_minute = 1", "orders_per_minute", "rate_limit.orders_per_minute"),
        ("[ratelimit]\nenabled = true", "ratelimit", "rate_limit"),
        ("agent_rpc_tokens = 'x'", "agent_rpc_tokens", "agent_rpc_token"),
    ],
)
def test_unknown_key_in_the_file_is_named_with_the_nearest(
    tmp_path: Path, text: str, key: str, nearest: str
) -> None:
    path = toml(tmp_path, text)

    assert refused(path) == (
        f"{key} (file {path}): is not a known key; the nearest known one is {nearest}",
    )


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("RPCSVC_PROT", "RPCSVC_PORT"),
        ("RPCSVC_BRAND_NAME", "RPCSVC_BRAND__NAME"),
        ("rpcsvc_host", "RPCSVC_HOST"),
        ("RPCSVC_AGENT_RPC_TOKEN", "AGENT_RPC_TOKEN"),
        ("AGENT_RPC_TOKENS", "AGENT_RPC_TOKEN"),
        ("AGENT_RPC_TOKEN_FIEL", "AGENT_RPC_TOKEN_FILE"),
    ],
)
def test_unknown_variable_error_names_the_nearest_and_no_value(variable: str, nearest: str) -> None:
    assert refused(environ={variable: TOKEN}) == (
        f"{variable} (environment): is not a known key; the nearest known one is {nearest}",
    )


def test_an_unknown_flag_is_named_with_the_nearest_known_one() -> None:
    assert refused(flags={"data_dri": "x"}) == (
        "--data-dri (command line): is not a known key; the nearest known one is --data-dir",
    )


def test_all_problems_of_all_sources_are_reported_at_once(tmp_path: Path) -> None:
    path = toml(tmp_path, "prot = 1\n[limits]\nbatch = 0\n")

    problems = refused(path, {"RPCSVC_ENGINE": "steam", "RPCSVC_NOPE": "1"}, {"port": "x"})

    assert [problem.split(" ")[0] for problem in problems] == [
        "prot",
        "RPCSVC_NOPE",
        "port",
        "engine",
        "limits.batch",
    ]


# Bad values


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('port = "8080"', "port: received '8080'; allowed: a whole number from 0 to 65535"),
        ("port = 8080.0", "port: received 8080.0; allowed: a whole number from 0 to 65535"),
        ("port = true", "port: received True; allowed: a whole number from 0 to 65535"),
        ("host = 1", "host: received 1; allowed: a string in quotes"),
        ("data_dir = 1", "data_dir: received 1; allowed: a path in quotes, not empty"),
        ('data_dir = ""', "data_dir: received ''; allowed: a path in quotes, not empty"),
        ("brand = 1", "brand: received int; allowed: a table, [brand]"),
        (
            "[rate_limit]\nenabled = 1",
            "rate_limit.enabled: received 1; allowed: true or false",
        ),
        (
            '[rate_limit]\nenabled = "true"',
            "rate_limit.enabled: received 'true'; allowed: true or false",
        ),
        (
            'engine = "steam"',
            f"engine: received 'steam'; allowed: {ENGINES_LISTED}",
        ),
        (
            '[brand]\nslug = "X"',
            "brand.slug: received 'X'; allowed: a string that matches ^[a-z][a-z0-9-]{0,30}$",
        ),
        (
            "[orders]\nhistory_keep_days = 30",
            "orders.history_keep_days: received 30; allowed: a whole number from 90 to 36500",
        ),
        (
            "[orders]\nidempotency_days = 100\nhistory_keep_days = 100",
            "orders.history_keep_days: received 100; allowed: more than 100, the larger one of"
            " idempotency_days and unpaid_keep_days; leave it out to keep the history for ever",
        ),
        (
            "[sandbox]\nusdc_per_xmr = 165.0",
            "sandbox.usdc_per_xmr: received 165.0; allowed: a decimal number in quotes such as"
            ' "1.5", above 0, with up to 6 decimals, at most 9223372036854',
        ),
    ],
)
def test_wrong_value_in_the_file_is_refused_with_what_is_allowed(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = toml(tmp_path, text)
    key, _, rest = problem.partition(":")

    assert refused(path) == (f"{key} (file {path}):{rest}",)


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "1e3", "1,5", " 1", "1.", ".5", "01", "٣", "1" * 200, "0.0000001", "NaN"],
)
def test_a_price_that_is_not_a_plain_decimal_is_refused(text: str) -> None:
    (problem,) = refused(environ={"RPCSVC_SANDBOX__USDC_PER_XMR": text})

    assert "a decimal number in quotes" in problem


def test_inventory_is_bounded_by_what_the_store_can_count() -> None:
    largest = "9223372.036854775807"

    loaded = load(environ={"RPCSVC_SANDBOX__XMR_FLOAT": largest})

    assert loaded.settings.sandbox.xmr_float == largest
    refused(environ={"RPCSVC_SANDBOX__XMR_FLOAT": "9223372.036854775808"})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("RPCSVC_PORT", "65536"),
        ("RPCSVC_PORT", ""),
        ("RPCSVC_PORT", "tcp://10.0.0.1:8080"),
        ("RPCSVC_HOST", ""),
        ("RPCSVC_HOST", "[::1]"),
        ("RPCSVC_HOST", "a b"),
        ("RPCSVC_HOST", "http://localhost"),
        ("RPCSVC_DATA_DIR", ""),
        ("RPCSVC_GRACEFUL_SECONDS", "0"),
        ("RPCSVC_RATE_LIMIT__ENABLED", "perhaps"),
        ("RPCSVC_ORDERS__DEPOSIT_WINDOW_SECONDS", "-1"),
        ("RPCSVC_ORDERS__LATE_WINDOW_SECONDS", "0"),
        ("RPCSVC_ORDERS__MIN_RECEIVED_BPS", "0"),
        ("RPCSVC_ORDERS__MIN_RECEIVED_BPS", "10001"),
        ("RPCSVC_RATES__MAX_AGE_SECONDS", "1.5"),
        ("RPCSVC_SANDBOX__USDC_PAYOUT_FEE", "-0.05"),
        ("RPCSVC_LOG__LEVEL", "loud"),
        ("RPCSVC_BRAND__NAME", "two\nlines"),
        ("RPCSVC_BRAND__SLUG", "service\n"),
        ("RPCSVC_BRAND__SLUG", "rpc"),
        ("RPCSVC_CONTACT", "ops@example.com"),
        ("RPCSVC_SITE_URL", "swap.example.com"),
        ("RPCSVC_SITE_URL", "ftp://swap.example.com"),
        ("RPCSVC_SITE_URL", "https://user:secret@swap.example.com"),
        ("RPCSVC_SITE_URL", "https://swap.example.com/path"),
        ("RPCSVC_SITE_URL", "https://swap.example.com?q"),
        ("RPCSVC_SITE_URL", "https://swap.example.com:port"),
        ("RPCSVC_SITE_URL", "https://"),
        ("RPCSVC_TRUSTED_PROXIES", "10.0.0.1/8"),
        ("RPCSVC_TRUSTED_PROXIES", "proxy"),
        ("RPCSVC_TRUSTED_PROXIES", "0.0.0.0/0"),
        ("RPCSVC_TRUSTED_PROXIES", "::/0"),
    ],
)
def test_wrong_environment_value_is_refused_by_variable_name(variable: str, text: str) -> None:
    (problem,) = refused(environ={variable: text})

    assert f"(env {variable})" in problem
    assert "; allowed: " in problem


def test_number_in_the_proxy_list_is_no_address(tmp_path: Path) -> None:
    (problem,) = refused(toml(tmp_path, "trusted_proxies = [5]"))

    assert problem.startswith("trusted_proxies ")


@pytest.mark.parametrize("given_one", ["RPCSVC_TLS_CERT", "RPCSVC_TLS_KEY"])
def test_certificate_and_key_are_refused_one_without_the_other(given_one: str) -> None:
    (problem,) = refused(environ={given_one: "/etc/tls.pem"})

    assert "tls_cert" in problem
    assert "both of them or neither" in problem


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"port = ", "is not TOML"), (b"\xff", "is not UTF-8"), (b"a = 1\na = 2", "is not TOML")],
)
def test_a_file_that_is_not_toml_is_refused_by_name(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)

    (problem,) = refused(path)

    assert problem.startswith(f"file {path}: ")
    assert words in problem


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    (problem,) = refused(tmp_path / "none.toml")

    assert problem.startswith(f"file {tmp_path / 'none.toml'}: can't be read (No such file")


def test_a_long_value_is_shortened_in_the_message() -> None:
    (problem,) = refused(environ={"RPCSVC_ENGINE": "x" * 10_000})

    assert len(problem) < 200


# Tokens


def test_comma_separates_several_tokens_for_rotation() -> None:
    loaded = load(environ={"AGENT_RPC_TOKEN": f"{TOKEN}, {OTHER_TOKEN},{TOKEN},"})

    assert tokens(loaded) == [TOKEN, OTHER_TOKEN]
    assert loaded.origins["agent_rpc_token"] == "env AGENT_RPC_TOKEN"


@pytest.mark.parametrize("value", [f'"{TOKEN},{OTHER_TOKEN}"', f'["{TOKEN}", "{OTHER_TOKEN}"]'])
def test_the_file_takes_tokens_as_a_string_or_as_a_list(tmp_path: Path, value: str) -> None:
    assert tokens(load(toml(tmp_path, f"agent_rpc_token = {value}"))) == [TOKEN, OTHER_TOKEN]


def test_a_token_file_is_read_without_its_line_end(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")

    loaded = load(environ={"AGENT_RPC_TOKEN_FILE": str(path)})

    assert tokens(loaded) == [TOKEN]
    assert loaded.origins["agent_rpc_token"] == "env AGENT_RPC_TOKEN_FILE"


def test_a_token_and_a_token_file_together_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)

    (problem,) = refused(environ={"AGENT_RPC_TOKEN": TOKEN, "AGENT_RPC_TOKEN_FILE": str(path)})

    assert "AGENT_RPC_TOKEN and env AGENT_RPC_TOKEN_FILE" in problem
    assert TOKEN not in problem


@pytest.mark.parametrize(
    "value",
    [
        "",
        ",",
        "  ",
        "fifteen-chars-x",
        f"{TOKEN},tiny-0451",
        f"{TOKEN}\nx",
        f"{TOKEN}ü",
        "x" * 1025,
    ],
)
def test_empty_short_or_non_ascii_token_is_refused_and_not_shown(value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(environ={"AGENT_RPC_TOKEN": value})

    assert "agent_rpc_token (env AGENT_RPC_TOKEN): received a value that is not shown" in str(
        caught.value
    )
    said = everything_about(caught.value)
    assert not [part for part in value.split(",") if len(part.strip()) > 4 and part in said]


@pytest.mark.parametrize("value", ['[""]', "5", '["correct-horse-battery", 5]', "{a = 1}"])
def test_a_token_of_the_wrong_type_in_the_file_is_refused_unseen(
    tmp_path: Path, value: str
) -> None:
    (problem,) = refused(toml(tmp_path, f"agent_rpc_token = {value}"))

    assert problem.startswith("agent_rpc_token ")
    assert TOKEN not in problem


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 32, b"x" * 70_000])
def test_a_token_file_that_holds_no_token_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)

    (problem,) = refused(environ={"AGENT_RPC_TOKEN_FILE": str(path)})

    assert problem.startswith("agent_rpc_token (env AGENT_RPC_TOKEN_FILE): ")


def test_token_in_the_file_variable_is_refused_and_not_shown() -> None:
    with pytest.raises(SettingsError) as caught:
        load(environ={"AGENT_RPC_TOKEN_FILE": TOKEN})

    assert "AGENT_RPC_TOKEN_FILE" in str(caught.value)
    assert TOKEN not in everything_about(caught.value)


def test_no_error_about_other_settings_shows_a_token(tmp_path: Path) -> None:
    path = toml(tmp_path, f'agent_rpc_token = ["{TOKEN}", "short-one"]\nport = 99999\n')

    with pytest.raises(SettingsError) as caught:
        load(path, {"RPCSVC_ENGINE": "x"})

    said = everything_about(caught.value)
    assert "99999" in said
    assert TOKEN not in said
    assert "short-one" not in said


def test_a_model_made_directly_does_not_show_its_input_either() -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"agent_rpc_tokens": [TOKEN, "tiny-0451"]})

    said = str(caught.value) + repr(caught.value)
    assert TOKEN not in said
    assert "tiny-0451" not in said


@pytest.mark.parametrize("values", [{"prot": 1}, {"brand": {"nmae": "x"}}])
def test_a_model_made_directly_refuses_unknown_names(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Settings.model_validate(values)


@given(
    st.lists(
        st.text(
            st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=","),
            min_size=16,
            max_size=40,
        ).map("~{}".format),  # so that none is a word that is printed anyway
        min_size=1,
        max_size=3,
    )
)
def test_no_way_of_printing_the_settings_shows_a_token(secrets: list[str]) -> None:
    loaded = load(environ={"AGENT_RPC_TOKEN": ",".join(secrets)})

    printed = f"{loaded!r} {loaded!s} {loaded.settings!r} {loaded.settings.model_dump()}"
    printed += loaded.settings.model_dump_json() + render_config(loaded)
    printed += json.dumps(effective_config(loaded))
    assert not [secret for secret in secrets if secret in printed]
    assert tokens(loaded) == list(dict.fromkeys(secrets))


# Reports


def test_effective_configuration_lists_each_key_with_its_origin() -> None:
    loaded = load(environ={"AGENT_RPC_TOKEN": f"{TOKEN},{OTHER_TOKEN}"}, flags={"port": 9000})

    rows = effective_config(loaded)

    assert tuple(row["key"] for row in rows) == KEYS
    by_key = {row["key"]: (row["value"], row["origin"]) for row in rows}
    assert by_key["port"] == (9000, "flag --port")
    assert by_key["agent_rpc_token"] == (["********", "********"], "env AGENT_RPC_TOKEN")
    assert by_key["data_dir"] == ("var", "default")
    assert by_key["tls_cert"] == (None, "default")
    assert json.loads(json.dumps(rows)) == rows


def test_the_rendered_configuration_stands_in_columns() -> None:
    lines = render_config(load(flags={"host": "::1"})).splitlines()

    assert len(lines) == len(KEYS)
    assert re.fullmatch(r'host +"::1" +flag --host', lines[0])
    assert len({line.index("default") for line in lines[1:]}) == 1


# Derived values


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, "http://127.0.0.1:8080"),
        ({"RPCSVC_HOST": "::1", "RPCSVC_PORT": "1"}, "http://[::1]:1"),
        ({"RPCSVC_HOST": "0.0.0.0"}, "http://localhost:8080"),
        ({"RPCSVC_TLS_CERT": "/c", "RPCSVC_TLS_KEY": "/k"}, "https://127.0.0.1:8080"),
        ({"RPCSVC_SITE_URL": "https://swap.example/"}, "https://swap.example"),
        ({"RPCSVC_SITE_URL": "http://[::1]:8080"}, "http://[::1]:8080"),
    ],
)
def test_the_site_url_is_derived_from_where_the_service_listens(
    environ: dict[str, str], url: str
) -> None:
    assert load(environ=environ).settings.effective_site_url == url


def test_the_domain_is_the_host_of_the_site_unless_it_is_given() -> None:
    site = {"RPCSVC_SITE_URL": "https://swap.example"}

    assert load(environ=site).settings.effective_domain == "swap.example"
    branded = load(environ=site | {"RPCSVC_BRAND__DOMAIN": "brand.example"})
    assert branded.settings.effective_domain == "brand.example"


def test_late_window_defaults_to_a_quarter_of_the_deposit_window() -> None:
    assert load().settings.orders.effective_late_window_seconds == 900
    short = load(environ={"RPCSVC_ORDERS__DEPOSIT_WINDOW_SECONDS": "3"})
    assert short.settings.orders.effective_late_window_seconds == 1
    given_one = load(environ={"RPCSVC_ORDERS__LATE_WINDOW_SECONDS": "7"})
    assert given_one.settings.orders.effective_late_window_seconds == 7


# Binding


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LocalHost"])
def test_plain_http_is_served_on_loopback(host: str) -> None:
    check_bind(load(flags={"host": host}).settings)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "8.8.8.8", "myhost", "127.1"])
def test_plain_http_beyond_loopback_is_refused_with_ways_out(host: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_bind(load(flags={"host": host}).settings)

    (problem,) = caught.value.problems
    assert repr(host) in problem
    for way_out in ("tls_cert and tls_key", "trusted_proxies", "127.0.0.1"):
        assert way_out in problem


@pytest.mark.parametrize(
    "environ",
    [
        {"RPCSVC_TRUSTED_PROXIES": "10.0.0.1"},
        {"RPCSVC_TLS_CERT": "/c", "RPCSVC_TLS_KEY": "/k"},
    ],
)
def test_another_address_is_bound_with_tls_or_behind_a_proxy(environ: dict[str, str]) -> None:
    check_bind(load(environ=environ | {"RPCSVC_HOST": "0.0.0.0"}).settings)


# Example files


def uncommented_example() -> str:
    text = (CONFIG / "example.toml").read_text(encoding="utf-8")
    return re.sub(r"^#(?=[a-z_]+ = )", "", text, flags=re.MULTILINE)


def test_the_example_as_it_stands_says_what_the_defaults_are() -> None:
    assert load(CONFIG / "example.toml").settings == load().settings


def test_example_lists_every_key_and_each_can_be_used(tmp_path: Path) -> None:
    path = toml(tmp_path, uncommented_example().replace(PLACEHOLDER, TOKEN))

    loaded = load(path)

    assert set(loaded.origins.values()) == {f"file {path}"}


def test_placeholder_of_the_example_is_no_valid_token(tmp_path: Path) -> None:
    (problem,) = refused(toml(tmp_path, uncommented_example()))

    assert problem.startswith("agent_rpc_token ")


def test_the_sandbox_file_serves_a_sandbox_on_this_machine() -> None:
    settings = load(CONFIG / "sandbox.toml").settings

    assert settings.engine == "sandbox"
    check_bind(settings)


@pytest.mark.parametrize("name", ["example.toml", "sandbox.toml"])
def test_each_key_of_a_shipped_file_has_a_comment_line_above_it(name: str) -> None:
    lines = (CONFIG / name).read_text(encoding="utf-8").splitlines()

    keys = [number for number, line in enumerate(lines) if re.match(r"#?[a-z_]+ = ", line)]
    assert keys
    assert [lines[number] for number in keys if not lines[number - 1].startswith("# ")] == []


# --- other secrets ---------------------------------------------------------------------------

SECRET_VARIABLES = {key: name for name, key in variable_names(KEYS).items() if key in SECRETS}


def test_the_secrets_are_known_by_their_type() -> None:
    assert {
        "agent_rpc_token",
        "database_url",
        "upstream.api_key",
        "onchain.monerod_password",
        "onchain.wallet_password",
        "onchain.wallet_file_password",
        "telemetry.metrics_token",
    } == SECRETS


@pytest.mark.parametrize("key", sorted(SECRETS))
def test_each_secret_may_come_in_a_file(tmp_path: Path, key: str) -> None:
    path = tmp_path / "secret"
    secret = f"postgresql://rpcsvc:{TOKEN}@db/rpcsvc" if key == "database_url" else TOKEN
    path.write_text(f"{secret}\n")
    variable = f"{SECRET_VARIABLES[key]}_FILE"

    loaded = load(environ={variable: str(path)})

    assert loaded.origins[key] == f"env {variable}"
    assert secret in values(loaded.settings, key)
    assert TOKEN not in render_config(loaded)


def values(settings: object, key: str) -> list[str]:
    """The revealed values of a secret."""
    for name in key.replace("agent_rpc_token", "agent_rpc_tokens").split("."):
        settings = getattr(settings, name)
    found = settings if isinstance(settings, tuple) else (settings,)
    return [item.get_secret_value() for item in found]


@pytest.mark.parametrize("key", sorted(SECRETS))
def test_a_secret_of_the_wrong_type_is_not_shown(tmp_path: Path, key: str) -> None:
    table, _, name = key.rpartition(".")
    text = f"[{table}]\n" if table else ""

    (problem,) = refused(toml(tmp_path, f'{text}{name} = ["{TOKEN}", 5]'))

    assert problem.startswith(key)
    assert TOKEN not in problem


@pytest.mark.parametrize(
    ("variable", "text", "shown"),
    [
        (
            "RPCSVC_ONCHAIN__NODES",
            "arbitrum=https://arb.example/v2/k3y, base=http://10.0.0.5:8545/",
            ["arbitrum=https://arb.example/********", "base=http://10.0.0.5:8545/"],
        ),
        ("RPCSVC_ONCHAIN__WALLET_URL", "http://127.0.0.1:18083", "http://127.0.0.1:18083"),
        (
            "RPCSVC_RATES__SOURCES",
            "mine=https://t.example?k3y=k3y#/last, kraken",
            ["mine=https://t.example/********", "kraken"],
        ),
        ("RPCSVC_UPSTREAM__URL", "https://u:k3y@a.example", "https://a.example/********"),
        ("RPCSVC_UPSTREAM__URL", "https://a.example/k3y", "https://a.example/********"),
        ("RPCSVC_UPSTREAM__URL", "https://k3y:k/3y@a.example", "https://********"),
        ("RPCSVC_UPSTREAM__URL", "htps://u:k3y@a.example", "********"),
        ("RPCSVC_ONCHAIN__MONEROD_URL", "u:k3y@127.0.0.1:18081", "********"),
        ("RPCSVC_ONCHAIN__MONEROD_URL", "127.0.0.1:18081/k3y", "********"),
        ("RPCSVC_ONCHAIN__MONEROD_URL", "127.0.0.1:18081", "127.0.0.1:18081"),
    ],
)
def test_of_a_url_that_may_hold_a_key_the_host_alone_is_shown(
    variable: str, text: str, shown: object
) -> None:
    loaded = load(environ={variable: text})

    (row,) = [row for row in effective_config(loaded) if row["origin"] == f"env {variable}"]
    assert row["value"] == shown
    assert "k3y" not in render_config(loaded)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("RPCSVC_UPSTREAM__URL", "https://u:k3y@a.example/\x01"),
        ("RPCSVC_SITE_URL", "https://u:k3y@a.example"),
        ("RPCSVC_SITE_URL", "https://u:k3/y@a.example"),
        ("RPCSVC_HOST", "https://k3y@a.example"),
    ],
)
def test_a_user_name_or_password_in_what_is_refused_is_not_shown(variable: str, text: str) -> None:
    (problem,) = refused(environ={variable: text})

    assert f"env {variable}" in problem
    assert "k3" not in problem


def test_a_url_that_is_refused_is_not_shown() -> None:
    (problem,) = refused(environ={"RPCSVC_ONCHAIN__NODES": "arbitrum=htps://arb.example/k3y"})

    assert "onchain.nodes" in problem
    assert "k3y" not in problem
