"""Text for a terminal: callers, nodes and services at a URL may have written parts of it.

It imports nothing, because a probe prints too.
"""


def printable(text: str) -> str:
    """Replace what a terminal obeys or hides (controls, bidi overrides) by its escape in JSON.

    Line feeds stay, so JSON stays the same JSON.
    """
    lines = text.split("\n")
    return "\n".join(line if line.isprintable() else _escaped(line) for line in lines)


def _escaped(line: str) -> str:
    return "".join(each if each.isprintable() else _escape(each) for each in line)


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
