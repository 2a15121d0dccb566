"""Results of the operations: one declaration gives the JSON, its schema and the handlers' types."""

from __future__ import annotations

from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
from msgspec import UNSET, UnsetType

from rpcsvc.domain.order import OrderStatus
from rpcsvc.http.schemas import lifted
from rpcsvc.operations.models import Time, View, about, schema_of
from rpcsvc.operations.service import Answer, Operation
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.strict_json import dumps


class Sample(View, frozen=True):
    """A sample.

    With a second paragraph.
    """

    order_status: OrderStatus
    ended_at: Annotated[Time | None, about("When it ended.")]
    gas: Annotated[int | UnsetType, about(minimum=0)] = UNSET


def test_result_is_written_with_its_wire_names() -> None:
    sample = Sample(OrderStatus.EXPIRED, None)
    assert dumps({"a": [sample]}) == b'{"a":[{"orderStatus":"expired","endedAt":null}]}'
    assert dumps(Sample(OrderStatus.FAILED, None, 3)).endswith(b',"gas":3}')


def test_dumps_refuses_other_objects() -> None:
    with pytest.raises(TypeError):
        dumps({"a": object()})


def test_schema_says_what_the_declaration_says() -> None:
    schema = schema_of(Sample)

    assert schema["description"] == "A sample.\n\nWith a second paragraph."
    assert (schema["required"], schema["additionalProperties"]) == (
        ["orderStatus", "endedAt"],
        False,
    )
    assert schema["properties"]["gas"] == {"minimum": 0, "type": "integer"}
    ended = schema["properties"]["endedAt"]
    assert ended["description"] == "When it ended."
    assert [each["type"] for each in ended["anyOf"]] == ["string", "null"]


def test_documents_keep_what_a_nullable_value_is() -> None:
    ended = lifted(schema_of(Sample), is_answer=True)["Sample"]["properties"]["endedAt"]
    assert (ended["type"], ended["description"]) == (["string", "null"], "When it ended.")


def test_schema_of_an_enum_keeps_its_order() -> None:
    part = schema_of(Sample)["$defs"]["OrderStatus"]
    assert (part["type"], part["enum"]) == ("string", list(OrderStatus))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_handler_answers_with_the_declared_result(operation: Operation) -> None:
    returned = get_type_hints(operation.handler)["return"]
    answers = [each for each in (returned, *get_args(returned)) if get_origin(each) is Answer]
    assert all(get_args(each) == (operation.result,) for each in answers)
