"""Reading settings: sources into layers, and values into the types of settings.

A layer maps dotted keys (``brand.name``) to a value and its origin. Problems of a source are
collected, not raised, so that one run reports all of them. A value's validator raises ValueError
with the whole text of what is allowed; it never repeats a secret.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    InstanceOf,
    SecretStr,
    TypeAdapter,
    ValidationError,
)

from rpcsvc.domain.integrators import Integrator, parse_integrators
from rpcsvc.domain.money import MAX_UNITS, decimal_pattern

ENV_PREFIX: Final = "RPCSVC_"
CONFIG_VARIABLE: Final = "RPCSVC_CONFIG"
TOKENS_KEY: Final = "agent_rpc_token"
TOKENS_VARIABLE: Final = "AGENT_RPC_TOKEN"
# A secret may come in a file that a variable of this name names: AGENT_RPC_TOKEN_FILE.
_FILE_SUFFIX: Final = "_FILE"
# Read by the command line before settings are loaded, and by the CLI client.
_OTHER_VARIABLES: Final = frozenset({CONFIG_VARIABLE, "RPCSVC_URL"})
_MAX_SECRET_FILE_BYTES: Final = 65_536
_TOKEN: Final = re.compile(r"[ -~]{16,1024}")
_HOSTNAME: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_INTEGER: Final = TypeAdapter(int)
_BOOLEAN: Final = TypeAdapter(bool)

Network = IPv4Network | IPv6Network

# Up to the last @: a password may hold what ends the host of a URL, such as a slash.

BLANK_IS_NONE: Final = BeforeValidator(lambda value: None if value == "" else value)
LOWER_CASE: Final = BeforeValidator(lambda value: str(value).lower())


class Group(BaseModel):
    """Settings that belong together: immutable, of known names only, silent about their input."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        validate_by_name=True,
        validate_by_alias=True,
    )


class TextValue(str):
    """A value that can only come as text, so that numbers and booleans have to be read from it."""

    __slots__ = ()


class Given(NamedTuple):
    """A value that some source gives, and the name of that source."""

    value: object
    origin: str


class Layer(NamedTuple):
    """The values of one source, by dotted key, and the problems of the source itself."""

    values: dict[str, Given]
    problems: list[str]


def variable_names(keys: Collection[str]) -> dict[str, str]:
    """The environment variable of each dotted key: variable name -> key."""
    names = {ENV_PREFIX + key.replace(".", "__").upper(): key for key in keys if key != TOKENS_KEY}
    return names | {TOKENS_VARIABLE: TOKENS_KEY}


def flag_name(key: str) -> str:
    """The command-line flag of a dotted key: ``data_dir`` -> ``--data-dir``."""
    return "--" + key.replace("_", "-").replace(".", "-")


def read_file(path: Path | None, keys: Collection[str]) -> Layer:
    """The layer of a TOML file; an empty one if there is no file to read."""
    layer = Layer({}, [])
    if path is None:
        return layer
    origin = f"file {path}"
    try:
        document = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        layer.problems.append(f"{origin}: can't be read ({error.strerror}); name a TOML file")
    except UnicodeDecodeError as error:
        layer.problems.append(f"{origin}: byte {error.start} is not UTF-8; save it as UTF-8")
    except ValueError as error:
        layer.problems.append(f"{origin}: is not TOML: {error}")
    else:
        _read_table(document, "", origin, keys, layer)
    return layer


def read_environment(
    environ: Mapping[str, str], keys: Collection[str], secrets: Collection[str]
) -> Layer:
    """The layer of the environment: ``RPCSVC_*`` and ``AGENT_RPC_TOKEN``; ``*_FILE`` of secrets."""
    layer = Layer({}, [])
    names = variable_names(keys)
    files = {name + _FILE_SUFFIX: name for name, key in names.items() if key in secrets}
    known = {*names, *_OTHER_VARIABLES, *files}
    for name, value in sorted(environ.items()):
        if name in names:
            layer.values[names[name]] = Given(TextValue(value), f"env {name}")
        elif name not in known and name.upper().startswith((ENV_PREFIX, TOKENS_VARIABLE)):
            layer.problems.append(_unknown(name, "environment", name.upper(), known))
    for file, name in files.items():
        if file in environ:
            _read_secret_file(environ, name, names[name], layer)
    return layer


def read_flags(flags: Mapping[str, object], keys: Collection[str]) -> Layer:
    """The layer of the command line, by dotted key; ``None`` is a flag that was not given."""
    layer = Layer({}, [])
    for key, value in flags.items():
        flag = flag_name(key)
        if key not in keys:
            layer.problems.append(_unknown(flag, "command line", flag, map(flag_name, keys)))
        elif value is not None:
            typed = TextValue(value) if isinstance(value, str) else value
            layer.values[key] = Given(typed, f"flag {flag}")
    return layer


def nested(values: Mapping[str, Given]) -> dict[str, object]:
    """The values as nested dictionaries: ``brand.name`` becomes ``{"brand": {"name": ...}}``."""
    root: dict[str, Any] = {}
    for key, given in values.items():
        *groups, leaf = key.split(".")
        table = root
        for group in groups:
            table = table.setdefault(group, {})
        table[leaf] = given.value
    return root


def _read_table(
    table: Mapping[str, object], prefix: str, origin: str, keys: Collection[str], layer: Layer
) -> None:
    groups = {key.rpartition(".")[0] for key in keys} - {""}
    for name, value in table.items():
        key = prefix + name
        if key in keys:
            layer.values[key] = Given(value, origin)
        elif key not in groups:
            layer.problems.append(_unknown(key, origin, key.lower(), {*keys, *groups}))
        elif isinstance(value, dict):
            _read_table(value, f"{key}.", origin, keys, layer)
        else:
            layer.problems.append(
                f"{key} ({origin}): received {type(value).__name__}; allowed: a table, [{key}]"
            )


def _read_secret_file(environ: Mapping[str, str], name: str, key: str, layer: Layer) -> None:
    """Take a secret from the named file. Its path is not shown: it may be a secret by mistake."""
    file = name + _FILE_SUFFIX
    origin = f"env {file}"
    if name in environ:
        layer.problems.append(
            f"{key} (env {name} and {origin}): received both;"
            " allowed: one of the two variables, remove the other"
        )
        return
    try:
        content = _read_bounded(Path(environ[file]))
    except OSError as error:
        reason = error.strerror or "unreadable"
    except ValueError:
        reason = f"not a text file of up to {_MAX_SECRET_FILE_BYTES} bytes"
    else:
        layer.values[key] = Given(TextValue(content.strip()), origin)
        return
    layer.problems.append(
        f"{key} ({origin}): the file can't be read ({reason});"
        " allowed: the path of a readable file that holds the secret"
    )


def _read_bounded(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(_MAX_SECRET_FILE_BYTES + 1)
    if len(content) > _MAX_SECRET_FILE_BYTES:
        raise ValueError("too large")
    return content.decode()


def _unknown(name: str, source: str, wanted: str, known: Collection[str] | map[str]) -> str:
    """The problem of a name that is not known. Its value is not shown: it may be a secret."""
    nearest = difflib.get_close_matches(wanted, sorted(known), n=1, cutoff=0.0)
    return f"{name} ({source}): is not a known key; the nearest known one is {nearest[0]}"


def integer_in(low: int, high: int) -> BeforeValidator:
    """A whole number from ``low`` to ``high``."""

    def check(value: object) -> int:
        number = _from_text(_INTEGER, value)
        if type(number) is not int or not low <= number <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return number

    return BeforeValidator(check)


def decimal(places: int, *, positive: bool = True) -> BeforeValidator:
    """A decimal number as a string, of up to ``places`` decimals and 2^63 - 1 atomic units."""
    form = re.compile(decimal_pattern(19, places))
    least = "above 0" if positive else "at least 0"

    def check(value: object) -> str:
        match = form.fullmatch(value) if isinstance(value, str) else None
        units = int(match[1] + (match[2] or "")[1:].ljust(places, "0")) if match else -1
        if not int(positive) <= units <= MAX_UNITS:
            raise ValueError(
                f'a decimal number in quotes such as "1.5", {least}, with up to {places} decimals,'
                f" at most {MAX_UNITS // 10**places}"
            )
        return str(value)

    return BeforeValidator(check)


def line(low: int, high: int) -> AfterValidator:
    """A single line of ``low`` to ``high`` printable characters."""

    def check(value: str) -> str:
        if not (low <= len(value) <= high and value.isprintable()):
            raise ValueError(f"a single line of {low} to {high} printable characters")
        return value

    return AfterValidator(check)


def pairs(form: str, example: str, *, repeats: bool = False) -> BeforeValidator:
    """``name=value`` pairs, as a list or with commas; ``form`` is a pattern of the values.

    ``repeats``: a name may come with several values.
    """
    pair = re.compile(rf"[A-Za-z][A-Za-z0-9_-]{{0,30}}={form}")

    def check(value: object) -> tuple[str, ...]:
        parts = [str(part) for part in _parts(value)]
        names = [part.partition("=")[0].lower() for part in parts]
        is_twice = not repeats and len(set(names)) < len(names)
        if is_twice or not all(pair.fullmatch(part) for part in parts):
            once = "" if repeats else ", each name once"
            raise ValueError(f'name=value{once}, such as "{example}", with commas or as a list')
        return tuple(parts)

    return BeforeValidator(check)


def words(value: object) -> tuple[str, ...]:
    """The elements of a list, or of a comma separated string."""
    return tuple(str(part) for part in _parts(value))


def folders(value: object) -> tuple[Path, ...]:
    """Absolute paths, of a list or a comma separated string. Raises ValueError."""
    found = tuple(Path(part) for part in words(value))
    if any(not path.is_absolute() for path in found):
        raise ValueError("absolute paths of folders")
    return found


def parse_address(host: str) -> IPv4Address | IPv6Address | None:
    """The IP address that ``host`` is, or None if it is a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def _from_text(adapter: TypeAdapter[Any], value: object) -> object:
    """``value`` read leniently if it came as text, otherwise (TOML) as it is."""
    if not isinstance(value, TextValue):
        return value
    try:
        return adapter.validate_python(str(value))
    except ValidationError:
        return value


def _flag(value: object) -> bool:
    flag = _from_text(_BOOLEAN, value)
    if flag is not True and flag is not False:
        raise ValueError("true or false")
    return flag


def _path(value: object) -> str:
    path = str(value) if isinstance(value, str | Path) else ""
    if not path or "\0" in path:
        raise ValueError("a path in quotes, not empty")
    return path


def _is_host(text: str) -> bool:
    return parse_address(text) is not None or _HOSTNAME.fullmatch(text) is not None


def _host(value: str) -> str:
    if not _is_host(value):
        raise ValueError('an IP address without brackets, or a host name, such as "127.0.0.1"')
    return value


def _site_url(value: str) -> str:
    root = value.removesuffix("/")
    if value and not _is_site_root(root):
        raise ValueError(
            "http:// or https:// with a host and without user, path or query, such as"
            ' "https://swap.example.com"; or empty: the address that is listened on'
        )
    return root


def _is_site_root(url: str) -> bool:
    if not re.fullmatch(r"https?://[!-~]*[^:]", url):
        return False
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        return False
    return _is_host(host) and url == f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _contact(value: str) -> str:
    if not re.fullmatch(r"(mailto:|https://|tel:)[!-~]{1,200}", value):
        raise ValueError('a mailto:, https: or tel: URI, such as "mailto:ops@example.com"')
    return value


def _parts(value: object) -> list[object]:
    """The elements of a list, or of a comma separated string without the empty ones."""
    parts: list[object] = []
    for item in value if isinstance(value, list | tuple) else [value]:
        if isinstance(item, str):
            parts += [piece.strip() for piece in item.split(",")]
        else:
            parts.append(item)
    return [part for part in parts if part != ""]


def _networks(value: object) -> tuple[Network, ...]:
    return tuple(_network(part) for part in _parts(value))


def _network(value: object) -> Network:
    allowed = 'IP addresses or networks such as "10.0.0.0/8", separated by commas or as a list'
    try:
        network = ip_network(str(value))
    except ValueError as error:
        raise ValueError(f"{allowed} ({error})") from None
    if network.prefixlen == 0:
        raise ValueError(f"{allowed}, but not {network}: anyone's headers would be trusted")
    return network


def _host_names(value: object) -> tuple[str, ...]:
    names = tuple(str(part) for part in _parts(value))
    if not all(map(_is_host, names)):
        raise ValueError(
            'host names or IP addresses without port or brackets, such as "swap.internal", with'
            " commas or as a list"
        )
    return names


def _origins(value: object) -> tuple[str, ...]:
    origins = tuple(str(part).lower() for part in _parts(value))
    if not all(map(_is_site_root, origins)) or any(urlsplit(origin).path for origin in origins):
        raise ValueError(
            'origins of pages such as "https://app.example.com", with commas or as a list'
        )
    return origins


def _tokens(value: object) -> tuple[SecretStr, ...]:
    parts = _parts(_revealed(value))
    if not parts and value not in ([], ()):
        raise ValueError("at least one token; to run without tokens, remove the setting")
    for number, part in enumerate(parts, 1):
        if not (isinstance(part, str) and _TOKEN.fullmatch(part)):
            raise ValueError(
                "tokens of 16 to 1024 printable ASCII characters each, separated by commas or as"
                f" a list of strings; number {number} of {len(parts)} is not such a token"
            )
    return tuple(SecretStr(str(part)) for part in dict.fromkeys(parts))


def _integrators(value: object) -> tuple[Integrator, ...]:
    return parse_integrators(str(part) for part in _parts(value))


def _rate_path(value: object) -> tuple[int, ...]:
    parts = _parts(value)
    if len(parts) > 10_000 or not all(_is_step(part) for part in parts):
        raise ValueError("whole numbers from -5000 to 5000 in 1/10,000, as a list or with commas")
    return tuple(int(str(part)) for part in parts)


def _is_step(part: object) -> bool:
    return bool(re.fullmatch(r"-?[0-9]{1,4}", str(part), re.ASCII)) and abs(int(str(part))) <= 5_000


def _ports(value: object) -> tuple[int, ...]:
    parts = [str(part) for part in _parts(value)]
    if not all(re.fullmatch(r"[1-9][0-9]{0,3}", part) and int(part) < 1024 for part in parts):
        raise ValueError("ports from 1 to 1023, as a list or with commas")
    return tuple(map(int, parts))


def _revealed(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    return [item.get_secret_value() if isinstance(item, SecretStr) else item for item in value]


def _database_url(value: SecretStr) -> SecretStr:
    if not re.match(r"postgres(ql)?://.", value.get_secret_value()):
        raise ValueError(
            "the URL of a PostgreSQL database, such as"
            ' "postgresql://rpcsvc@db.internal/rpcsvc?sslmode=verify-full"'
        )
    return value


Flag = Annotated[bool, BeforeValidator(_flag)]
Host = Annotated[str, AfterValidator(_host)]
SiteUrl = Annotated[str, AfterValidator(_site_url)]
Contact = Annotated[str, AfterValidator(_contact)]
FilePath = Annotated[Path, BeforeValidator(_path)]
HostNames = Annotated[tuple[str, ...], BeforeValidator(_host_names)]
Origins = Annotated[tuple[str, ...], BeforeValidator(_origins)]
Networks = Annotated[tuple[Network, ...], BeforeValidator(_networks)]
Integrators = Annotated[tuple[InstanceOf[Integrator], ...], BeforeValidator(_integrators)]
RatePath = Annotated[tuple[int, ...], BeforeValidator(_rate_path)]
Ports = Annotated[tuple[int, ...], BeforeValidator(_ports)]
DatabaseUrl = Annotated[SecretStr, AfterValidator(_database_url)]
Tokens = Annotated[tuple[SecretStr, ...], BeforeValidator(_tokens)]
