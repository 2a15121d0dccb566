"""Where the table of chains is read from: the configured file, or the one in the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from rpcsvc.domain.chains import ChainRegistry, load_chains
from rpcsvc.settings_sources import SettingsError


def read_chains(configured: Path | None) -> ChainRegistry:
    """The table of chains. Raises SettingsError that says what is wrong with the configured one."""
    try:
        return load_chains(chains_toml(configured))
    except OSError as error:
        problem = f"can't be read ({error.strerror})"
    except UnicodeDecodeError:
        problem = "is not UTF-8"
    except ValueError as error:
        problem = f"is not a table of chains: {error}"
    raise SettingsError(
        [f"chains_file: {configured} {problem}; allowed: a file such as config/chains.toml"]
    )


def chains_toml(configured: Path | None) -> str:
    """The text of the table. Raises OSError."""
    if configured is not None:
        return configured.read_text(encoding="utf-8")
    packaged = resources.files("rpcsvc") / "config" / "chains.toml"
    if packaged.is_file():
        return packaged.read_text(encoding="utf-8")
    # An editable install keeps the file where it is edited.
    checkout = Path(__file__).parent.parent / "config" / "chains.toml"
    return checkout.read_text(encoding="utf-8")
