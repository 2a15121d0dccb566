"""Write the generated files, or with ``--check`` name the stale ones.

docs/develop/lifecycle.md             the diagram and the table, between their markers
docs/operate/operations.md            the families of /metrics, between their markers
docs/generated/cli.md                 the command line, from its own parser
rpcsvc/cli/agent/commands.json        the commands of the operations, for that parser
docs/generated/modules.md             what each module holds, from its docstring
docs/generated/                       the documents of a default service, each schema once
config/grafana/rpcsvc.json            the dashboard of the metrics
rpcsvc/http/documents/recording.json  real answers, for the documents that show some
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rpcsvc.bootstrap import Running, running
from rpcsvc.cli.agent.operations import COMMANDS_FILE
from rpcsvc.cli.main import build_parser
from rpcsvc.domain.machine import TRANSITIONS
from rpcsvc.domain.order import AGENT_STATE_OF, OrderStatus
from rpcsvc.http.discovery import Sources, catalogue
from rpcsvc.http.documents.recording import EXAMPLE_KEY, FILE, load
from rpcsvc.http.metrics import FAMILIES
from rpcsvc.http.openapi.document import openapi_document
from rpcsvc.http.openrpc import openrpc_document
from rpcsvc.http.site import site_of
from rpcsvc.logs import configure_logging
from rpcsvc.operations.dispatch import LocalService
from rpcsvc.operations.params import plain_types
from rpcsvc.operations.service import option_of
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.settings import load_settings
from rpcsvc.strict_json import Json
from tools import recorder
from tools.dashboard import dashboard

ROOT = Path(__file__).parent.parent
_NO_BEAT_SECONDS = 60.0


def diagram() -> str:
    """The order machine as a Mermaid state diagram: every change of status in the table."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> awaiting_deposit"]
    for status, rules in TRANSITIONS.items():
        events_to: dict[OrderStatus, list[str]] = {}
        for event, rule in rules.items():
            for target in rule.targets:
                if target is not status:
                    events_to.setdefault(target, []).append(event.__name__)
        for target, events in events_to.items():
            lines.append(f"    {status} --> {target}: {', '.join(sorted(events))}")
    lines += [f"    {status} --> [*]" for status in OrderStatus if status.is_terminal]
    return "\n".join([*lines, "```"])


def table() -> str:
    """The events that each status accepts, and its state in answers to agents."""
    rows = ["| status | agent state | terminal | events |", "|---|---|---|---|"]
    for status, rules in TRANSITIONS.items():
        events = ", ".join(f"`{event.__name__}`" for event in rules)
        terminal = "yes" if status.is_terminal else "no"
        rows.append(f"| `{status}` | `{AGENT_STATE_OF[status]}` | {terminal} | {events} |")
    return "\n".join(rows)


def commands() -> str:
    """The command of each operation with its inputs, as cli/agent/operations.py reads them."""
    rows = [
        {
            "operation": operation.name,
            "name": operation.command,
            "summary": operation.summary,
            "idempotent": operation.idempotent,
            "creates": operation.creates,
            "sandbox_only": operation.sandbox_only,
            "inputs": [
                {
                    "name": wire_name,
                    "option": option_of(wire_name),
                    "kind": _kind(info.annotation),
                    "help": info.description,
                }
                for name, info in operation.params.model_fields.items()
                for wire_name in [info.alias or name]
            ],
        }
        for operation in OPERATIONS
    ]
    return json.dumps(rows, indent=2) + "\n"


def _kind(annotation: object) -> str:
    """The type of an input on the command line."""
    types = set(plain_types(annotation))
    if bool in types:
        return "boolean"
    return "integer" if int in types and str not in types else "text"


_CLI_INTRO = """\
Every command with its options, written by `make generate` from the parser.

## What do the exit statuses mean?

0: ok, 1: not ok, 2: a usage error, 3: no answer of the service or of a node. With every status,
stdout of `agent:...` and `sandbox:...` is one JSON envelope:

| status | `ok` | `state` and `error.code` | |
|---|---|---|---|
| 0 | true | those of the operation | |
| 1 | false | those of the operation | the service refused |
| 2 | false | `invalid_input`, `invalid_request` | nothing was sent; `data.network` is null |
| 3 | false | `unavailable`, `unavailable` | the call may have been carried out; as with 2 |

stdout of `verify` and `receipt verify` is one JSON object, whose `verified` or `proven` is false
with 1, 2 and 3."""


def cli_reference() -> str:
    """Every command with its options."""
    os.environ["COLUMNS"] = "96"
    parser = build_parser()
    parts = ["# Command line", "", _CLI_INTRO, ""]
    for name, command in _commands(parser, "rpcsvc"):
        parts += [f"## {name}", "", "```", command.format_help().rstrip(), "```", ""]
    return "\n".join(parts)


@asynccontextmanager
async def _staged(clock: recorder.StageClock) -> AsyncIterator[Running]:
    """Run a service with default settings and fixed time and randomness."""
    with TemporaryDirectory() as folder:
        settings = load_settings(config_file=None, environ={}, flags={"data_dir": folder}).settings
        async with running(settings, clock=clock, random=recorder.StageRandom()) as up:
            yield up


async def _recorded() -> str:
    clock = recorder.StageClock()
    async with _staged(clock) as up:
        # No call waits for the worker: on a busy machine it must not run in the middle of one.
        local = LocalService(up.dispatcher, up.service.venue, up.worker, _NO_BEAT_SECONDS)
        return recorder.dumps(await recorder.record(local, clock))


def module_map() -> str:
    """Every module with the first sentence of its docstring, package by package."""
    parts = ["# Modules", "", "The first sentence of each module, written by `make generate`."]
    for package in sorted(path.parent for path in (ROOT / "rpcsvc").rglob("__init__.py")):
        modules = sorted(set(package.glob("*.py")) - {package / "__init__.py"})
        about = _first_sentence(package / "__init__.py")
        parts += ["", f"## `{package.relative_to(ROOT)}/`", "", about]
        if modules:
            parts += ["", "| module | holds |", "|---|---|"]
        parts += [f"| `{module.name}` | {_first_sentence(module)} |" for module in modules]
    return "\n".join([*parts, ""])


def _first_sentence(module: Path) -> str:
    said = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(said.partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph, maxsplit=1)[0]


# Documents that are the same for every start: no keys, no times, no fresh idempotency keys.
_COMMITTED = (
    "agent.json", "ai-plugin.json", "api-catalog", "llms-full.txt", "llms.txt", "openapi.json",
    "openrpc.json", "robots.txt", "sitemap.xml",
)  # fmt: skip


async def documents() -> dict[str, str]:
    """Every committed document by its file name, JSON indented."""
    clock = recorder.StageClock()
    async with _staged(clock) as up:
        site = site_of(up.settings, up.service)
    sources = Sources(
        openapi=partial(openapi_document, site),
        openrpc=partial(openrpc_document, site),
        jwks=dict,
        recording=load,
        new_key=lambda: EXAMPLE_KEY,
    )
    rendered = {
        document.path.rpartition("/")[2]: document.render(clock.now_ms()).decode()
        for document in catalogue(site, sources)
        if document.path.rpartition("/")[2] in _COMMITTED
    }
    openapi, openrpc = json.loads(rendered["openapi.json"]), json.loads(rendered["openrpc.json"])
    rendered["openrpc.json"] = _without_copies(openrpc, openapi)
    return {name: _readable(text) for name, text in rendered.items()}


def _without_copies(openrpc: Json, openapi: Json) -> str:
    """OpenRPC as it is committed: it refers to the schemas that the OpenAPI document has, too."""
    components, known = openrpc["components"], openapi["components"]["schemas"]
    own = {name: s for name, s in components["schemas"].items() if known.get(name) != s}
    text = json.dumps({**openrpc, "components": {**components, "schemas": own}})
    for name in components["schemas"].keys() - own.keys():
        reference = f'#/components/schemas/{name}"'
        text = text.replace(f'"{reference}', f'"openapi.json{reference}')
    return text


def _readable(text: str) -> str:
    return json.dumps(json.loads(text), indent=2) + "\n" if text.startswith("{") else text


def _commands(
    parser: argparse.ArgumentParser, name: str
) -> list[tuple[str, argparse.ArgumentParser]]:
    """Every command that can be run: leaves, and commands with optional subcommands."""
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    own = [(name, parser)] if not groups or parser.get_default("command") else []
    below = groups[0].choices.items() if groups else ()
    return own + [found for word, sub in below for found in _commands(sub, f"{name} {word}")]


def metrics() -> str:
    """The families of /metrics."""
    rows = ["| family | type | labels | |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        series = f"{name}_total" if family.kind == "counter" else name
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{series}` | {family.kind} | {labels} | {family.help} |")
    return "\n".join(rows)


def _between_markers(text: str, name: str, content: str) -> str:
    pattern = rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)"
    replaced, count = re.subn(pattern, lambda m: f"{m[1]}{content}\n{m[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"there are no markers for {name}")
    return replaced


def generated() -> dict[Path, str]:
    """Every generated file with the text that it should have."""
    lifecycle = ROOT / "docs" / "develop" / "lifecycle.md"
    text = lifecycle.read_text(encoding="utf-8")
    for name, content in (("diagram", diagram()), ("table", table())):
        text = _between_markers(text, name, content)
    operations = ROOT / "docs" / "operate" / "operations.md"
    folder = ROOT / "docs" / "generated"
    return {
        **{folder / name: text for name, text in asyncio.run(documents()).items()},
        lifecycle: text,
        operations: _between_markers(operations.read_text(encoding="utf-8"), "metrics", metrics()),
        ROOT / "config" / "grafana" / "rpcsvc.json": dashboard(),
        folder / "cli.md": cli_reference(),
        folder / "modules.md": module_map(),
    }


def main() -> int:
    """Write the files, or check them."""
    checking = "--check" in sys.argv[1:]
    configure_logging("json", "critical")
    # The API descriptions show answers of the recording, and the parser reads the commands: these
    # come first.
    recorded = ROOT / "rpcsvc" / "http" / "documents" / FILE
    first = {recorded: asyncio.run(_recorded()), COMMANDS_FILE: commands()}
    stale = _bring_up(first, checking=checking)
    stale += _bring_up(generated(), checking=checking)
    for name in stale:
        sys.stdout.write(f"{'stale' if checking else 'written'}: {name}\n")
    return 1 if checking and stale else 0


def _bring_up(files: dict[Path, str], *, checking: bool) -> list[str]:
    """Return the names of the stale files; rewrite them unless ``checking``."""
    stale = []
    for path, text in files.items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not checking:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main())
