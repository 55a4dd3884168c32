"""Records of text: what is one, what is refused, and that a row keeps all of it."""

import pytest

from rayrec.samples.text.records import SCHEMA, BadRecordError, Record, record_of

CHAT = [("system", "Be brief."), ("user", "Capital of France?"), ("assistant", "Paris."), ("user", "Italy?")]


def messages(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


GOOD = {
    "text": {"text": "A tale."},
    "messages": messages(*CHAT, ("assistant", "Rome.")),
    "prompt": {"prompt": "2 + 2 =", "completion": " 4"},
    "spans": {
        "text": "Anna in Rom",
        "spans": [{"start": 8, "end": 11, "label": "city"}, {"start": 0, "end": 4, "label": "name"}],
    },
    "choice": {"text": "Sky?", "options": ["red", "blue"], "choice": "blue"},
}


@pytest.mark.parametrize("kind", GOOD)
def test_fields_say_the_kind_and_a_row_keeps_the_record(kind):
    record = record_of(GOOD[kind])

    assert record.kind == kind
    row = record.row()
    assert list(row) == SCHEMA.names
    assert Record.of_row(row) == record
    assert Record.of_row(row).key == record.key


def test_lists_of_text_files_are_json():
    values = {"text": "Sky?", "options": '["red", "blue"]', "choice": "blue"}

    assert record_of(values) == record_of(GOOD["choice"])


def test_spans_are_kept_in_the_order_of_the_text():
    assert [span.label for span in record_of(GOOD["spans"]).spans] == ["name", "city"]


def test_tools_answer_between_two_turns_of_an_assistant():
    turns = [("user", "Weather?"), ("assistant", '{"tool": "sky"}'), ("tool", "sun"), ("assistant", "Sunny.")]

    assert [one.role for one in record_of(messages(*turns)).messages] == [role for role, _ in turns]


def span(start, end, label="x"):
    return {"start": start, "end": end, "label": label}


@pytest.mark.parametrize(
    ("values", "reason", "said"),
    [
        (
            messages(("assistant", "Hi.")),
            "roles out of order",
            "message 1 is of assistant; first comes system or user",
        ),
        (
            messages(("user", "a"), ("user", "b")),
            "roles out of order",
            "message 2 is of user; after user comes assistant",
        ),
        (
            messages(("user", "a"), ("assistant", "b"), ("system", "c")),
            "roles out of order",
            "after assistant comes user or tool",
        ),
        (messages(("user", "a")), "roles out of order", "the last message is of user"),
        (messages(), "roles out of order", "there are no messages"),
        (messages(("narrator", "a")), "wrong types", "message 1 has the role 'narrator'"),
        (messages((["user"], "a")), "wrong types", "message 1 has the role ['user']"),
        (messages(({"name": "user"}, "a")), "wrong types", "message 1 has the role {'name': 'user'}"),
        (
            messages(("user", "a"), ("assistant", " \n")),
            "empty completions",
            "message 2 (assistant) is empty",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "name": "b"}]},
            "wrong types",
            "expected role and content",
        ),
        (
            {"prompt": "a", "completion": "  "},
            "empty completions",
            "completion is empty: there is nothing to learn",
        ),
        ({"prompt": "a", "completion": 4}, "wrong types", "completion is 4, expected a text"),
        (
            {"text": "abc", "spans": [span(1, 4)]},
            "spans outside of texts",
            "span 1 is from 1 to 4 of a text of 3",
        ),
        ({"text": "abc", "spans": [span(-1, 2)]}, "spans outside of texts", "from -1 to 2"),
        ({"text": "abc", "spans": [span(2, 2)]}, "spans outside of texts", "from 2 to 2"),
        ({"text": "abc", "spans": [span(True, 2)]}, "wrong types", "from True to 2, expected integers"),
        (
            {"text": "abcdef", "spans": [span(2, 5), span(0, 3)]},
            "overlapping spans",
            "from 0 to 3 and from 2 to 5",
        ),
        (
            {"text": "a", "options": ["b", "c"], "choice": "d"},
            "unknown choices",
            "'d' is none of the options ['b', 'c']",
        ),
        ({"text": "a", "options": ["b", "b"], "choice": "b"}, "wrong types", "two or more different ones"),
        ({"text": "a", "options": "b, c", "choice": "b"}, "wrong types", "expected a list as JSON"),
        ({"kind": "poem", "text": "a"}, "unknown kind", "'poem' is none of text, messages"),
        ({"title": "a"}, "unknown kind", "no kind of record has the fields title"),
        ({"kind": "prompt", "prompt": "a"}, "missing fields", "needs completion"),
        ({"text": "half \ud83d"}, "wrong types", "no Unicode"),
        ({"text": ["a"]}, "wrong types", "text is ['a'], expected a text"),
    ],
)
def test_what_is_no_record_is_said_in_a_clause(values, reason, said):
    with pytest.raises(BadRecordError) as refused:
        record_of(values)

    assert refused.value.reason == reason
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
