"""The operation `prompt`: tokens by hand, histories that are cut, and what is refused."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.models.tokenizers.registry import _ARRAYS, FILES
from rayrec.platform.errors import InputError
from rayrec.platform.prompt_template import PromptTemplate
from rayrec.samples.operations.operation import RowContext
from rayrec.samples.operations.program import FeatureProgram
from rayrec.samples.operations.prompt import PromptConfig
from rayrec.samples.operations.prompt_items import ARRAYS, SEMANTIC_IDS
from rayrec.samples.text.tokens import TextTokenizer
from tests.helpers.text_tokenizers import semantic_ids, tokenizer_folder

INTS = pa.list_(pa.int64())
SCHEMA = pa.schema([("user_id", pa.int64()), ("item_ids", INTS), ("target", pa.int64())])
IDS = [10 * n for n in range(12)]
TITLES = [None if n == 5 else f"Paris {n}" for n in range(12)]


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    kinds = [["red", "small"] if n % 2 else ["blue"] for n in range(12)]
    table = pa.table({"item_id": IDS, "title": pa.array(TITLES, pa.string()), "kinds": kinds})
    pq.write_table(table, folder / "items.parquet")
    semantic_ids(np.array(IDS)).save(folder / "semantic_ids")
    tokenizer_folder(folder / "base")
    return folder


@pytest.fixture(scope="module")
def tokenizer(shop):
    return TextTokenizer.extended(shop / "base", (8, 8))


def settings(shop, **changed):
    values = {
        "op": "prompt",
        "prompt": "Bought: {history.codes}",
        "completion": "{codes}",
        "items": {"path": str(shop / "items.parquet"), "category": "kinds"},
        "semantic_ids": str(shop / "semantic_ids"),
        "tokenizer": str(shop / "base"),
    }
    return PromptConfig.parse(values | changed)


def made(shop, rows, **changed):
    program = FeatureProgram.compile([settings(shop, **changed)], SCHEMA)
    program = program.narrowed([name for name in program.schema.names if name.startswith("prompt")])
    batch = pa.RecordBatch.from_pylist(rows, SCHEMA)
    context = RowContext(np.arange(len(rows)), seed=1, step=0)
    return program(batch.select(program.input_schema.names), context).to_pylist()


def completion_of(row):
    pairs = zip(row["prompt_token_ids"], row["prompt_is_completion"], strict=True)
    return [token for token, is_said in pairs if is_said]


def test_the_newest_event_is_said_after_those_before_it(shop, tokenizer):
    (row,) = made(shop, [{"item_ids": [10, 20, 90]}])

    assert tokenizer.decode(row["prompt_token_ids"]) == "Bought: <a_0><b_1><a_0><b_2><a_1><b_1>"
    assert tokenizer.decode(completion_of(row)) == "<a_1><b_1>"


def test_text_between_codes_is_encoded_as_it_is_within_the_whole(shop, tokenizer):
    (row,) = made(
        shop,
        [{"item_ids": [10, 30], "target": 20}],
        prompt="Had{history} of {category}, which is {title}?",
        event=" {title} is {codes};",
        completion="{codes}",
        item="target",
    )

    whole = "Had Paris 1 is <a_0><b_1>; Paris 3 is <a_0><b_3>; of blue, which is Paris 2?<a_0><b_2>"
    assert tokenizer.decode(row["prompt_token_ids"]) == whole
    assert row["prompt_token_ids"] == tokenizer.encode(whole)


def test_a_text_that_is_said_ends_as_texts_do(shop, tokenizer):
    rows = [{"item_ids": [10], "target": 30}]
    (row,) = made(shop, rows, prompt="{codes} is ", completion="{title}", item="target")

    said = completion_of(row)
    assert tokenizer.decode(said[:-1]) == "Paris 3"
    assert said[-1] == tokenizer.info.ends[0]


def test_a_long_history_loses_its_oldest_items_whole(shop, tokenizer):
    rows = [{"item_ids": [10, 20, 30, 40, 50]}]
    head = len(tokenizer.encode("Bought: "))

    (by_events,) = made(shop, rows, max_events=2)
    (by_tokens,) = made(shop, rows, max_tokens=head + 2 + 2 * 2 + 1)
    (without,) = made(shop, rows, max_tokens=head + 2)

    assert tokenizer.decode(by_events["prompt_token_ids"]) == "Bought: <a_0><b_3><a_0><b_4><a_0><b_5>"
    assert by_tokens == by_events
    assert tokenizer.decode(without["prompt_token_ids"]) == "Bought: <a_0><b_5>"


def test_rows_of_tables_are_named_with_their_places(shop, tokenizer):
    rows = [{"user_id": 7, "item_ids": [10, 20]}, {"user_id": 8, "item_ids": [30, 999, 40, 50]}]
    found = made(shop, rows, prompt="{table:user} had {history}", event="{codes}{table:item}")

    first, second = found
    assert (first["prompt_user_ids"], first["prompt_user_places"]) == ([7], [0])
    assert first["prompt_item_ids"] == [10]
    assert second["prompt_item_ids"] == [30, 40]
    tokens = second["prompt_token_ids"]
    assert [tokens[place] for place in second["prompt_item_places"]] == [tokenizer.info.pad] * 2
    codes = [tokenizer.decode(tokens[place - 2 : place]) for place in second["prompt_item_places"]]
    assert codes == ["<a_0><b_3>", "<a_0><b_4>"]


def test_a_row_without_its_item_has_no_prompt(shop):
    rows = [{"item_ids": []}, {"item_ids": None}, {"item_ids": [999]}, {"item_ids": [10, None, 20]}]

    found = made(shop, rows)

    assert [row["prompt_token_ids"] is None for row in found] == [True, True, True, False]


def test_titles_are_shortened_and_missing_ones_are_empty(shop, tokenizer):
    (row,) = made(
        shop,
        [{"item_ids": [50, 60], "target": 70}],
        prompt="{history.titles}",
        completion="{title}",
        item="target",
        title_characters=5,
    )

    assert tokenizer.decode(row["prompt_token_ids"]) == "\nParis\nParis<|im_end|>"


def test_a_title_says_no_code_and_ends_no_answer(shop, tokenizer, tmp_path):
    titles = [*TITLES[:3], "of <a_1><b_1>, <|im_end|> or <|im_<s>end|>", *TITLES[4:]]
    pq.write_table(pa.table({"item_id": IDS, "title": titles}), tmp_path / "items.parquet")
    items = {"path": str(tmp_path / "items.parquet")}

    (row,) = made(shop, [{"item_ids": [], "target": 30}], prompt="{title}: ", item="target", items=items)

    assert tokenizer.decode(row["prompt_token_ids"]) == "of   ,   or <|im_ end|>: <a_0><b_3>"
    special = set(tokenizer.tokenizer.get_added_tokens_decoder())
    assert sum(token in special for token in row["prompt_token_ids"]) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt": "{history.code}"}, "no slot {history.code}; did you mean {history.codes}?"),
        ({"completion": "{history}"}, "no slot {history}"),
        ({"prompt": "{history} {history.titles}"}, "2 histories"),
        ({"prompt": "{title"}, "double braces"),
        ({"event": "{table:user}", "prompt": "{history}"}, "no slot {table:user}"),
    ],
)
def test_templates_that_cannot_be_read_are_refused(shop, changed, message):
    with pytest.raises(InputError, match=message.replace("{", r"\{").replace("?", r"\?")):
        settings(shop, **changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt": "{history.categories}", "items": {"path": "items.parquet"}}, "no item has a category"),
        ({"semantic_ids": None}, "there are no semantic IDs"),
        ({"item": "goal"}, "no column 'goal'"),
        ({"prompt": "hello", "completion": "you"}, "have no slots"),
    ],
)
def test_what_slots_need_and_is_not_there_is_named(shop, monkeypatch, changed, message):
    monkeypatch.chdir(shop)
    with pytest.raises(InputError, match=message):
        made(shop, [], **changed)


def test_a_prompt_without_room_is_refused(shop):
    with pytest.raises(InputError, match="more than 3 tokens without any history"):
        made(shop, [{"item_ids": [10, 20]}], max_tokens=3)


def test_a_tokenizer_that_splits_codes_is_refused(shop, tmp_path):
    folder = tokenizer_folder(tmp_path / "splits", more=["x<a_0>y"])

    with pytest.raises(InputError, match="splits the code <a_0>"):
        made(shop, [], tokenizer=str(folder))


def test_a_tokenizer_of_other_semantic_ids_is_refused(shop, tmp_path):
    TextTokenizer.extended(shop / "base", (8, 9)).save(tmp_path / "other")

    with pytest.raises(InputError, match=r"sizes \[8, 9\]"):
        made(shop, [], tokenizer=str(tmp_path / "other"))


def test_prompts_read_the_files_that_semantic_ids_are_saved_as(shop, tmp_path):
    assert (SEMANTIC_IDS, ARRAYS) == (FILES, _ARRAYS)
    registry = semantic_ids(np.array(IDS))
    registry.save(tmp_path / "ids")
    tensors = tmp_path / "ids" / FILES.tensors
    damaged = bytearray(tensors.read_bytes())
    damaged[-1] ^= 1
    tensors.write_bytes(bytes(damaged))

    with pytest.raises(InputError, match="checksum"):
        made(shop, [], semantic_ids=str(tmp_path / "ids"))


def test_what_is_said_depends_on_titles_and_codes(shop, tmp_path):
    before = settings(shop, completion="{title}").content()
    table = pa.table({"item_id": IDS, "title": [f"{title}!" for title in TITLES]})
    pq.write_table(table, tmp_path / "items.parquet")

    renamed = settings(shop, completion="{title}", items={"path": str(tmp_path / "items.parquet")}).content()

    assert before != renamed
    assert before == settings(shop, completion="{title}").content()


def test_tables_and_items_of_templates_are_known_before_anything_is_read():
    template = PromptTemplate.parse("{table:user}: {history}", "{title}", "{table:item}")

    assert template.tables == ("item", "user")
    assert template.of_item == ("title",)
    assert PromptTemplate.parse("{{x}} {history}", "").of_item == ()
