"""Renders pages: complete HTML documents that load nothing from elsewhere.

Style and script are inline, and the content security policy allows exactly these bytes: injected
markup can neither run nor load anything. Libraries of pages are loaded with the first page: without
them a service starts sooner and is smaller.
Sources: CSP Level 3 (hashes, section 6.7.2); WHATWG HTML.
"""

from __future__ import annotations

import hashlib
import io
import string
import tomllib
from base64 import b64encode
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web
from markupsafe import Markup
from msgspec import Struct

from rpcsvc.http.site import Site

if TYPE_CHECKING:
    from jinja2 import Environment, Template

ENGLISH: Final = "en"
FOLDER: Final = Path(__file__).with_name("texts")

_HERE: Final = Path(__file__).parent
_GROUP: Final = 4


class Texts(Struct, frozen=True):
    """The texts of one language by key, such as ``checkout.pay_before``.

    ``dir`` is the direction of its script: ltr or rtl.
    """

    lang: str
    dir: str
    entries: Mapping[str, str]

    def say(self, key: str, **values: object) -> str:
        """A text with its blanks filled in. Raises KeyError for an unknown key or blank."""
        return self.entries[key].format(**values)


class Catalogues:
    """The texts of all languages. Raises ValueError for a catalogue that does not match English."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._by_tag = {each.lang.lower(): each for each in map(_read, sorted(folder.iterdir()))}
        english = self._by_tag[ENGLISH]
        for texts in self._by_tag.values():
            _require_same(texts, english)

    def choose(self, accept_language: str) -> Texts:
        """The language that a reader likes most of those there are (RFC 9110, section 12.5.4).

        English for a reader who names none of them.
        """
        ranges = [_quality(part) for part in accept_language.lower().split(",")[:32]]
        for _, tag in sorted(ranges, key=lambda each: -each[0]):
            found = self._by_tag.get(tag) or self._by_tag.get(tag.partition("-")[0])
            if found is not None:
                return found
        return self._by_tag[ENGLISH]


def _quality(part: str) -> tuple[float, str]:
    tag, _, weight = part.strip().partition(";")
    try:
        return float(weight.strip().removeprefix("q=") or 1), tag.strip()
    except ValueError:
        return 0.0, tag.strip()


@cache
def _read(path: Path) -> Texts:
    groups = tomllib.loads(path.read_text(encoding="utf-8"))
    lang, direction = groups.pop("lang"), groups.pop("dir")
    entries = {f"{g}.{name}": text for g, texts in groups.items() for name, text in texts.items()}
    return Texts(lang, direction, entries)


def _require_same(texts: Texts, english: Texts) -> None:
    for key in texts.entries.keys() | english.entries.keys():
        ours, theirs = english.entries.get(key), texts.entries.get(key)
        if ours is None or theirs is None or _blanks(ours) != _blanks(theirs):
            raise ValueError(f"texts/{texts.lang}.toml: {key} is not as texts/en.toml has it")


def _blanks(text: str) -> set[str | None]:
    return {blank for _, blank, _, _ in string.Formatter().parse(text) if blank is not None}


_HEADERS: Final = {
    "content-type": "text/html; charset=utf-8",
    # An order's page is private. no-transform: the signature covers these bytes.
    "cache-control": "no-store, no-transform",
    "vary": "accept-language",
    # Links send no referrer to other sites.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def groups(value: str) -> list[str]:
    """An address in groups of four characters, which can be compared by eye."""
    return [value[start : start + _GROUP] for start in range(0, len(value), _GROUP)]


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415 - as above

    templates = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["groups"] = groups
    return templates


def _template(name: str) -> Template:
    return _templates().get_template(name)


class Renderer:
    """Renders the templates of this folder for a site."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._css = (_HERE / "page.css").read_text(encoding="utf-8")
        self._script = (_HERE / "page.js").read_text(encoding="utf-8")

    def page(
        self,
        template: str,
        texts: Texts,
        values: Mapping[str, Any],
        *,
        status: int = 200,
        style: str = "",
        has_script: bool = False,
    ) -> web.Response:
        """A page as a response that no cache keeps. ``style`` is CSS of this page alone."""
        script = self._script if has_script else ""
        html = _template(template).render(
            **values,
            t=texts.say,
            text=texts,
            brand=self._site.brand,
            contact=self._site.contact,
            is_listed=template == "home.html",
            simulated=self._site.is_simulated,
            css=Markup(self._css),  # noqa: S704 - files and numbers of our own
            style=Markup(style),  # noqa: S704 - as above
            script=Markup(script),  # noqa: S704 - as above
        )
        policy = content_security_policy([self._css, style], script)
        headers = {**_HEADERS, "content-language": texts.lang, "content-security-policy": policy}
        return web.Response(body=html.encode(), status=status, headers=headers)

    def app(self, name: str, texts: Texts, values: Mapping[str, Any]) -> str:
        """A page that a host shows in a frame of its own: ``name`` with its .html, .css and .js.

        Its policy is in a meta element. ``values`` are passed to its script.
        """
        from jinja2.utils import htmlsafe_json_dumps  # noqa: PLC0415 - as above

        style = (_HERE / f"{name}.css").read_text(encoding="utf-8")
        script = (_HERE / f"{name}.js").read_text(encoding="utf-8")
        return _template(f"{name}.html").render(
            t=texts.say,
            text=texts,
            brand=self._site.brand,
            simulated=self._site.is_simulated,
            policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)};"
            " img-src data:; base-uri 'none'; form-action 'none'",
            texts=htmlsafe_json_dumps(values),
            style=Markup(style),  # noqa: S704 - files of our own
            script=Markup(script),  # noqa: S704 - as above
        )


def content_security_policy(styles: list[str], script: str) -> str:
    """The policy of a page with these inline styles and this script, each empty for none."""
    rules = {
        "default-src": "'none'",
        "style-src": " ".join(_hash(style) for style in styles if style),
        "img-src": "'self'",
        "script-src": _hash(script) if script else "'none'",
        "connect-src": "'self'" if script else "'none'",
        "form-action": "'self'",
        "base-uri": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@lru_cache(maxsize=256)
def qr_svg(text: str, title: str) -> Markup:
    """A QR code (ISO/IEC 18004, error correction M) as an SVG element with a title for readers."""
    import segno  # noqa: PLC0415 - as above

    out = io.BytesIO()
    code = segno.make_qr(text, error="m")
    code.save(
        out, kind="svg", xmldecl=False, svgns=False, title=title, border=4, omitsize=True,
        dark="#000", light="#fff", svgclass="qr-code", lineclass=None,
    )  # fmt: skip
    svg = out.getvalue().decode().replace("<svg ", '<svg role="img" ', 1)
    return Markup(svg)  # noqa: S704 - segno escapes the title


@lru_cache(maxsize=256)
def qr_image(text: str) -> str:
    """A QR code as a data URI of a PNG image, one pixel for each module."""
    import segno  # noqa: PLC0415 - as above

    # A fixed mask is as readable as the best of eight, which takes five times as long to find.
    code = segno.make_qr(text, error="m", mask=0)
    return str(code.png_data_uri(border=4))
