"""Chat templates: rendered as transformers does, bounded, and what an assistant says found by difference."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rayrec.platform.errors import InputError
from rayrec.samples.text.chat import ChatTemplate, RenderLimits
from rayrec.samples.text.records import Message
from rayrec.samples.text.tokens import TextTokenizer
from tests.helpers.text_tokenizers import CHATML, TEMPLATES, tokenizer_folder

GENERATION = CHATML.replace(
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}",
)
# transformers gives the day of the test to the other one.
UNDATED = TEMPLATES["llama"].replace("strftime_now is defined", "false")
CONTENTS = st.text(st.sampled_from(list("ab{}<|>%\n \"'é東🙂")), min_size=1, max_size=12).filter(str.strip)


@st.composite
def chats(draw, with_system=True):
    roles = ["system"] if with_system and draw(st.booleans()) else []
    roles += ["user", "assistant"] * draw(st.integers(1, 3))
    return [Message(role, draw(CONTENTS)) for role in roles]


def plain(chat):
    return [{"role": one.role, "content": one.content} for one in chat]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        name: tokenizer_folder(root / name, template)
        for name, template in {**TEMPLATES, "generation": GENERATION, "llama_undated": UNDATED}.items()
    }


@pytest.fixture(scope="module")
def pairs(folders):
    """By template: ours, and the tokenizer of transformers."""
    made = {
        name: (ChatTemplate.of_folder(folder), AutoTokenizer.from_pretrained(folder))
        for name, folder in folders.items()
    }
    yield made
    for ours, _ in made.values():
        ours.close()


@pytest.mark.parametrize("name", ["chatml", "llama_undated", "strips", "no_system", "generation"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_texts_are_those_of_apply_chat_template(pairs, name, data):
    ours, theirs = pairs[name]
    chat = data.draw(chats(with_system=name != "no_system"))
    for some, opened in [(chat, False), (chat[:-1], True)]:
        expected = theirs.apply_chat_template(plain(some), tokenize=False, add_generation_prompt=opened)
        assert ours.render([some], open_turn=opened) == [expected]


@settings(max_examples=25, deadline=None)
@given(chat=chats())
def test_completions_are_what_a_template_that_marks_them_marks(pairs, folders, chat):
    ours, theirs = pairs["generation"]
    (rendered,) = ours.rendered([chat])
    expected = theirs.apply_chat_template(plain(chat), return_dict=True, return_assistant_tokens_mask=True)

    marked = TextTokenizer.extended(folders["generation"]).marked(rendered.text, rendered.completions)
    assert marked.ids_T.tolist() == expected["input_ids"]
    assert marked.is_completion_T.tolist() == [one == 1 for one in expected["assistant_masks"]]


@pytest.mark.parametrize("name", list(TEMPLATES))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_completion_is_what_follows_the_opening_of_its_turn(pairs, name, data):
    ours, _ = pairs[name]
    chat = data.draw(chats(with_system=name != "no_system"))
    learn = "last" if name == "strips" else "all"
    (rendered,) = ours.rendered([chat], learn)

    turns = [n for n, one in enumerate(chat) if one.role == "assistant"][-1 if learn == "last" else 0 :]
    assert len(rendered.completions) == len(turns)
    for (start, stop), turn in zip(rendered.completions, turns, strict=True):
        assert rendered.text[:start] == ours.render([chat[:turn]], open_turn=True)[0]
        assert chat[turn].content.strip() in rendered.text[start:stop]
        assert "assistant" not in rendered.text[start:stop]
    assert rendered.completions[-1][1] == len(rendered.text)


def test_a_template_that_changes_earlier_turns_is_learned_by_the_last_alone(pairs):
    ours, _ = pairs["strips"]
    chat = [
        Message("user", "a"),
        Message("assistant", "<think>b</think> c"),
        Message("user", "d"),
        Message("assistant", "e"),
    ]

    with pytest.raises(InputError, match=r"message 2 of conversation 1 .* learn the last one alone"):
        ours.rendered([chat], "all")
    (rendered,) = ours.rendered([chat], "last")
    assert [rendered.text[start:stop] for start, stop in rendered.completions] == ["e[/A]\n"]


def test_a_conversation_that_a_template_refuses_is_named(pairs):
    ours, _ = pairs["no_system"]
    good, bad = (
        [Message("user", "a"), Message("assistant", "b")],
        [Message("system", "a"), Message("user", "b")],
    )

    with pytest.raises(InputError, match=r"conversation 2: it refuses .*System role not supported"):
        ours.render([good, bad, good])
    assert len(ours.render([good, good])) == 2  # the program is still there


def test_today_is_what_the_settings_say(folders):
    chat = [Message("user", "a")]
    assert "26 Jul 2024" in ChatTemplate.of_folder(folders["llama"]).render([chat])[0]
    assert "05 Mar 2026" in ChatTemplate.of_folder(folders["llama"], date="2026-03-05").render([chat])[0]


def test_a_template_is_pickled_without_its_program(pairs):
    ours, _ = pairs["chatml"]
    chat = [Message("user", "a")]
    copy = pickle.loads(pickle.dumps(ours))

    assert copy.render([chat]) == ours.render([chat])
    copy.close()


FAST = RenderLimits(max_turns=20_000, max_characters=10_000, max_seconds=0.5, max_bytes=512 << 20)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "20,000 turns"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "calls itself without an end|20,000 turns"),
        ("{% for m in [1] recursive %}{{ loop([1]) }}{% endfor %}", "line 1 has a recursive loop"),
        ("{% for a in range(9000) %}{{ 'abc' }}{% endfor %}", "10,000 characters"),
        ("{{ 'a' * 10**11 }}", "more memory"),
        ("{{ '%99999999999d' % 1 }}", "more memory|too large|too big"),
        ("{{ 'a'.ljust(10**11) }}", "more memory"),
        ("{% set n = 9 ** (9 ** 9) %}{{ n }}", "computes for more than 0.5 s|more memory"),
        (
            "{% set s = namespace(x='ab') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
            "more memory|computes for",
        ),
        (
            "{{ range(90000)|sum }}{{ range(99999)|map('string')|map('list')|list|sort|list|length }}" * 40,
            "computes for|more memory|characters",
        ),
        ("{{ range(10**9)|list }}", "a number is too large"),
        ("{% include '/etc/passwd' %}", "line 1 reads another file"),
        ("\n{% import 'x' as y %}", "line 2 reads another file"),
        ("{% from 'x' import y %}", "reads another file"),
        ("{% extends 'x' %}", "reads another file"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined|no attribute"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ namespace(_x=1) }}", "cannot have an attribute '_x'"),
        ("{% for x in %}", "line 1 is no Jinja"),
        ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
    ],
)
def test_what_a_template_must_not_do_ends_in_one_sentence(template, said):
    made = ChatTemplate(template, {}, limits=FAST)
    with pytest.raises(InputError, match=said) as refused:
        made.render([[Message("user", "a")]])

    assert str(refused.value).startswith("the chat template cannot be rendered")
    assert "\n" not in str(refused.value)
    made.close()


def test_after_a_template_was_ended_others_render(pairs):
    slow = ChatTemplate(
        "{% if messages[0].content == 'slow' %}{{ 9 ** (9 ** (8 + messages|length)) }}{% endif %}x",
        {},
        limits=FAST,
    )
    with pytest.raises(InputError, match="for conversation 2"):
        slow.render([[Message("user", "fast")], [Message("user", "slow")]])

    assert slow.render([[Message("user", "fast")]]) == ["x"]
    slow.close()


def test_a_folder_without_a_template_is_refused(tmp_path):
    folder = tokenizer_folder(tmp_path / "base", template=None)
    with pytest.raises(InputError, match="no chat template"):
        ChatTemplate.of_folder(folder)


def test_of_several_templates_the_default_is_taken(tmp_path):
    several = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    made = ChatTemplate.of_folder(tokenizer_folder(tmp_path / "base", several))

    assert made.render([[Message("user", "a")]]) == ["d"]
    made.close()
