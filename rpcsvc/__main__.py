"""``rpcsvc`` on the command line. Puts the CLI and the service together; decides nothing."""

from __future__ import annotations

import os
import sys

from rpcsvc.health_probe import probe


def _open_standard_streams() -> None:
    """Open the null device for each standard stream that the caller has closed.

    Python has None there, which breaks every print; and the next file to be opened would get the
    descriptor of the stream, and what is printed to it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123 - never closed


def main() -> None:
    """The console script. A probe is answered before anything else is imported."""
    _open_standard_streams()
    words = sys.argv[1:]
    status = probe(words[1:], os.environ) if words[:1] == ["health"] else None
    if status is None:
        from rpcsvc.serving import run_command  # noqa: PLC0415 - it imports nearly everything

        status = run_command(words, os.environ)
    sys.exit(status)


if __name__ == "__main__":
    main()
