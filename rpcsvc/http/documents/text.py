"""Markdown: tables, code blocks, links, and escaping."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

_SPECIAL = re.compile(r"([\\`*_\[\]<>#|])")


def escape_markdown(text: str) -> str:
    """``text`` so that no character of it is read as Markdown."""
    return _SPECIAL.sub(r"\\\1", text)


def link(label: str, url: str, note: str = "") -> str:
    """A list item with a link, in the form of the llms.txt convention."""
    return f"- [{escape_markdown(label)}]({url})" + (f": {note}" if note else "")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table. Cells may hold Markdown, but no line breaks; ``|`` is escaped here."""
    lines = [_row(columns), "|" + "---|" * len(columns)]
    lines += [_row([str(cell).replace("|", "\\|") for cell in row]) for row in rows]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def code(text: str, language: str = "") -> str:
    """A code block. ``text`` must not hold a fence of its own."""
    return f"```{language}\n{text}\n```"


def json_text(value: Any) -> str:
    """JSON for people to read."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def page(*parts: str) -> bytes:
    """Parts of a Markdown page, a blank line between them."""
    return ("\n\n".join(part for part in parts if part) + "\n").encode()


def mail_domain(domain: str) -> str:
    """``domain`` as a mailbox has it: an IP address goes into brackets (RFC 5321, 4.1.3)."""
    if ":" in domain:
        return f"[IPv6:{domain}]"
    return f"[{domain}]" if domain.replace(".", "").isdigit() else domain
