"""A check of our own, loaded by schemathesis: what is well formed is refused for its meaning only.

Schemathesis would have every request accepted that the schemas allow. Some refusals can't be said
in a schema: a checksum that does not hold, an amount outside limits that move with the rate, a
destination of the other direction's kind. They pass here, and nothing else does: such a refusal
must name the field, and must not say that the request could not be read.
"""

from __future__ import annotations

from typing import Any

import schemathesis

MEANING = frozenset(
    {
        "missing_input", "invalid_input", "invalid_destination", "unsupported_chain",
        "amount_below_minimum", "amount_above_maximum", "unsupported_token",
    }
)  # fmt: skip


@schemathesis.check
def refused_for_its_meaning_only(_context: Any, response: Any, case: Any) -> None:
    """A request that keeps to the schemas is refused with 400 for what a field means."""
    if case.meta is None or case.meta.generation.mode.is_negative or response.status_code != 400:
        return
    answer = response.json()
    sent = {**(case.path_parameters or {}), **(case.query or {})}
    known = set(sent) | set(case.body if isinstance(case.body, dict) else ())
    problems = answer.get("validationErrors") or answer["error"].get("details", {}).get("problems")
    named = {problem["field"].partition(".")[0] for problem in problems or ()}
    assert answer["error"]["code"] in MEANING, answer["error"]
    assert named | set(answer.get("missingInputs", ())), answer
    assert named <= known | {"orderId", "amount"}, f"{named - known} was not sent"
