"""strict_json reads all unambiguous JSON, and refuses the rest with InvalidJson."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rpcsvc import strict_json
from rpcsvc.errors import InvalidJson

INT64 = st.integers(min_value=-(2**63), max_value=2**63 - 1)
SCALARS = st.none() | st.booleans() | INT64 | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(codec="utf-8"))
VALUES = st.recursive(
    SCALARS | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=20,
)
# Texts with many characters around which the fast path removes spaces, also within strings.
SPACED = st.lists(
    st.sampled_from(
        ['"', '": ', '":', ', "', ',"', ", {", ",{", "{", "}", "[", "]", "\\", "a", "1"]
    ),
    max_size=30,
).map(lambda parts: "".join(parts).encode())
JSON_LIKE = st.text(st.sampled_from('[]{}",:\\ud8c0-1.eE+ tfnNaIy\n\ufeff\u00e9'), max_size=60)


def refusal(body: bytes, **limits: int) -> str:
    with pytest.raises(InvalidJson) as caught:
        strict_json.loads(body, **limits)
    # The message must be printable for any body.
    orjson.dumps(caught.value.message)
    return caught.value.message


@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_loads_reads_what_pythons_json_writes(
    value: Any, ascii_only: bool, indent: int | None
) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()

    assert repr(strict_json.loads(body)) == repr(value)


@given(VALUES)
def test_loads_reads_what_dumps_writes(value: Any) -> None:
    assert strict_json.loads(strict_json.dumps(value)) == value


@given(JSON_LIKE.map(str.encode) | VALUES.map(lambda value: json.dumps(value).encode()) | SPACED)
@example(b'{"a":1,"a":2}')
@example(b'{"a": 1, "a": 2}')
@example(b'{"\\": ": 1, "\\":": 1}')
@example(b'[{"a": "x, "}, {"a": ", {"}]')
@example(b"9223372036854775808")
@example(b"-0")
@example(b"1e400")
@example(b"1e16")
@example(b"NaN")
def test_quick_reader_reads_as_the_strict_one_does(body: bytes) -> None:
    quick = strict_json._plain(body)

    if quick is not None:
        assert repr(strict_json._DECODER.decode(body.decode())) == repr(quick)


def test_quick_reader_takes_what_python_clients_write() -> None:
    call = {"jsonrpc": "2.0", "method": "m", "params": {"a": "1.5", "b": [{}, {}]}, "id": 1}
    assert strict_json._plain(json.dumps(call).encode()) == call


@given(st.binary(max_size=80) | JSON_LIKE.map(str.encode))
@example(b'{"\\ud800":1,"\\ud800":2}')
@example(b'"' + b"\\" * 99)
def test_any_bytes_are_read_or_refused_and_written_back(body: bytes) -> None:
    try:
        value = strict_json.loads(body)
    except InvalidJson as error:
        orjson.dumps(error.message)
    else:
        assert strict_json.loads(strict_json.dumps(value)) == value


@pytest.mark.parametrize(
    "body",
    [
        b" ",
        b"{",
        b"[1,]",
        b"{'a': 1}",
        b'{"a" 1}',
        b"[1] 2",
        b"01",
        b"+1",
        b".5",
        b"1.",
        b"0x10",
        b"1_000",
        b"// no\n1",
        b'"\t"',
        b'"\\x"',
        b'"open',
        "\u00a01".encode(),
        "\uff11".encode(),
        "\u0661".encode(),
        b"nul",
    ],
)
def test_loads_refuses_invalid_json_with_its_place(body: bytes) -> None:
    message = refusal(body)

    assert message.startswith("The body is not JSON: ")
    assert "(line " in message


def test_an_empty_body_is_called_empty() -> None:
    assert "empty" in refusal(b"")


@pytest.mark.parametrize("bad", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", "\u00e9".encode("latin-1")])
def test_invalid_utf8_is_refused_with_its_byte(bad: bytes) -> None:
    assert "byte 3 " in refusal(b'["a' + bad + b'"]')


def test_a_byte_order_mark_is_refused_by_name() -> None:
    assert "byte order mark" in refusal(b'\xef\xbb\xbf{"a":1}')


@pytest.mark.parametrize(
    "body",
    [b'{"amount":"1","amount":"9"}', b'[{"a":{"amount":1,"b":2,"\\u0061mount":1}}]'],
)
def test_a_duplicate_key_is_refused_by_name_at_any_level(body: bytes) -> None:
    assert '"amount"' in refusal(body)


def test_equal_keys_in_different_objects_are_fine() -> None:
    assert strict_json.loads(b'[{"a":1},{"a":{"a":2}}]') == [{"a": 1}, {"a": {"a": 2}}]


def test_a_long_duplicate_key_is_not_echoed_whole() -> None:
    key = b"k" * 50_000

    assert len(refusal(b'{"%s":1,"%s":2}' % (key, key))) < 300


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_loads_refuses_nan_and_infinity_by_name(name: str) -> None:
    assert refusal(b'{"amount":%s}' % name.encode()).startswith(f"{name} is not")


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1.0E309", "9" * 400 + ".0"])
def test_a_number_beyond_a_float_is_refused(number: str) -> None:
    message = refusal(number.encode())

    assert number[:20] in message
    assert "as a string" in message


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63), 10**18 - 1, -(10**18) + 1, 0])
def test_an_integer_within_64_bits_is_exact(number: int) -> None:
    assert strict_json.loads(str(number).encode()) == number


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**64, 10**30, 10**299])
def test_an_integer_beyond_64_bits_keeps_its_digits(number: int) -> None:
    assert strict_json.loads(b'{"a":[%d]}' % number) == {"a": [number]}


def test_an_integer_of_absurd_length_is_refused_in_few_words() -> None:
    assert len(refusal(b"9" * 60_000)) < 300


@pytest.mark.parametrize(
    "body",
    [
        b'"\\ud800"',
        b'"\\udc00"',
        b'"\\ud800\\ud800"',
        b'"\\udc00\\ud800"',
        b'"\\uD83D\\u0041"',
        b'["x",{"a":"\\udFFF"}]',
        b'{"\\ud800":1}',
        b'{"\\ud800x":1,"\\ud800x":2}',
    ],
)
def test_a_lone_surrogate_is_refused_in_strings_and_keys(body: bytes) -> None:
    refusal(body)


def test_escapes_that_are_whole_characters_are_read() -> None:
    assert strict_json.loads(b'{"\\u0061":"\\ud83d\\ude00\\u00e9\\u0000\\\\ud800"}') == {
        "a": "\U0001f600é\x00\\ud800"
    }


def nested(levels: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening * levels + b"1" + closing * levels


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_deepest_nesting_is_read_and_one_more_is_refused(opening: bytes, closing: bytes) -> None:
    strict_json.loads(nested(32, opening, closing))
    assert "32 levels" in refusal(nested(33, opening, closing))
    assert "2 levels" in refusal(nested(3, opening, closing), max_depth=2)


@pytest.mark.parametrize("unit", [b"[", b"{", b'{"a":', b"[{", b'["\\"",['])
def test_a_hundred_thousand_brackets_are_refused_as_too_deep(unit: bytes) -> None:
    assert "32 levels" in refusal(unit * 100_000)


def test_closing_brackets_first_do_not_hide_depth() -> None:
    refusal(b"]" * 100_000 + b"[" * 100_000)
    refusal(b"[" + b"]" * 50_000 + b"[" * 100_000)


def test_many_brackets_side_by_side_are_not_deep() -> None:
    assert strict_json.loads(b"[%s]" % b",".join([b"[{}]"] * 5_000)) == [[{}]] * 5_000


@pytest.mark.parametrize("text", ["[" * 100, '\\"[' * 40, "\\" * 41 + '"{' * 40, '"],"[{' * 20])
def test_brackets_inside_strings_are_not_depth(text: str) -> None:
    assert strict_json.loads(json.dumps({text: [text]}).encode()) == {text: [text]}


def test_an_unclosed_string_of_escaped_quotes_is_looked_at_once() -> None:
    # Quadratic work on this body would take minutes; the suite's time limit is the assertion.
    refusal(b"[" * 40 + b'\\"' * 500_000)
    refusal(b"[" * 10 + b'"' + b'\\"[' * 300_000)


def test_a_fragment_is_written_as_it_is() -> None:
    assert strict_json.dumps({"a": orjson.Fragment(b'{"b":1}')}) == b'{"a":{"b":1}}'
