"""A data set that LLaMA-Factory's dataset_info.json describes is read as the description says."""

import json
import pickle

import datasets
import huggingface_hub
import pytest

from forge_data import DataError, check_first_row, lint, prepare, stats
from forge_data.formats._registry import convert, detect
from forge_data.reading._sources import resolve

from ..lint_rows import tokenizer


def write(folder, entry, *rows, name="rows.jsonl"):
    """Write rows and their description; return the entry of data_path that names them."""
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": name} | entry, "other": {"hf_hub_url": "a/b"}}))
    return f"{folder}/dataset_info.json:mine"


def read(folder, entry, *rows):
    (source,) = resolve(write(folder, entry, *rows))
    return [convert(detect(each.place, each.fields), each.place, each.fields, None) for each in source.records()]


def test_alpaca(tmp_path):
    """Instruction and input are joined by a new line; columns that the entry does not name are not read."""
    row = {"instruction": "i", "input": "d", "output": "o", "system": "s", "images": ["x.png"]}
    (made,) = read(tmp_path, {}, row)
    assert [message["content"] for message in made.messages] == ["i\nd", "o"]
    columns = {"prompt": "instruction", "response": "output", "system": "system"}
    (made,) = read(tmp_path, {"columns": columns}, row)
    assert [message["content"] for message in made.messages] == ["s", "i", "o"]
    with pytest.raises(DataError, match="field images is a list of 1, and only text is trained"):
        read(tmp_path, {"columns": columns | {"images": "images"}}, row)


@pytest.mark.parametrize("formatting", ["alpaca", "sharegpt", "openai"])
def test_images(formatting, tmp_path):
    """Each `<image>` becomes one of the row's images, whose paths begin beside the description, wherever the rows are."""
    columns = {"alpaca": {"prompt": "q", "response": "a"}}.get(formatting, {"messages": "talk"})
    role, content, user, assistant = (
        ("role", "content", "user", "assistant") if formatting == "openai" else ("from", "value", "human", "gpt")
    )
    tags = {"role_tag": role, "content_tag": content, "user_tag": user, "assistant_tag": assistant}
    talk = [{role: user, content: "<image>what?"}, {role: assistant, content: "A cat."}]
    row = {"q": "<image>what?", "a": "A cat.", "talk": talk, "photos": ["a.png"]}
    (tmp_path / "deep").mkdir()
    entry = {"formatting": formatting, "columns": columns | {"images": "photos"}, "tags": tags}
    (source,) = resolve(write(tmp_path, entry, row, name="deep/rows.jsonl"))
    (record,) = source.records()
    fields = record.fields
    made = convert(detect(record.place, fields), record.place, fields, None, media=True, directory=source.directory)
    assert made.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "what?"}]
    assert [image.path for image in made.media] == [str(tmp_path / "a.png")]


def test_text(tmp_path):
    """A prompt without an answer is a document, as its pretraining reads it."""
    (made,) = read(tmp_path, {"columns": {"prompt": "body"}}, {"body": "once", "title": "t"})
    assert made.text == "once"


def test_sharegpt(tmp_path):
    """Roles and fields have the names of the tags; a system turn wins over the column of that name."""
    entry = {
        "formatting": "sharegpt",
        "columns": {"messages": "talk", "system": "preamble"},
        "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "me", "assistant_tag": "it", "system_tag": "setting"},
    }
    talk = [{"who": "me", "what": "hi"}, {"who": "it", "what": "ho"}]
    one, two = read(
        tmp_path, entry, {"talk": talk, "preamble": "p"}, {"talk": [{"who": "setting", "what": "s"}, *talk], "preamble": "p"}
    )
    assert [(message["role"], message["content"]) for message in one.messages] == [
        ("system", "p"),
        ("user", "hi"),
        ("assistant", "ho"),
    ]
    assert two.messages[0]["content"] == "s"
    with pytest.raises(DataError, match=r"rows.jsonl:1: field conversations\[0\].from is the string 'you'; allowed"):
        read(tmp_path, entry, {"talk": [{"who": "you", "what": "hi"}], "preamble": None})


def test_openai(tmp_path):
    """Messages keep their tool calls; a turn of the function's tag holds them as JSON."""
    entry = {
        "formatting": "openai",
        "columns": {"messages": "messages", "system": "system", "tools": "tools"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
        | {"observation_tag": "tool", "function_tag": "function", "system_tag": "system"},
    }
    call = {"name": "f", "arguments": {"a": 1}}
    made = read(
        tmp_path,
        entry,
        *(
            {"messages": [{"role": "user", "content": "u"}, turn, {"role": "tool", "content": "1"}], "system": "s"}
            | {"tools": None}
            for turn in (
                {"role": "function", "content": json.dumps([call])},
                {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": call}]},
            )
        ),
    )
    for chat in made:
        assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "tool"]
        assert chat.messages[2]["tool_calls"][0]["function"] == call


@pytest.mark.parametrize("formatting", ["sharegpt", "openai"])
def test_only_tagged_fields_are_read(tmp_path, formatting):
    """A turn that has the format's own names beside those of the tags is read by the tags."""
    entry = {"formatting": formatting, "columns": {"messages": "talk"}, "tags": {"role_tag": "who", "content_tag": "what"}}
    web = {"from": "gpt", "value": "spam", "role": "assistant", "content": "spam"}
    (made,) = read(tmp_path, entry, {"talk": [{"who": "human", "what": "hi", **web}, {"who": "gpt", "what": "ho", **web}]})
    assert [(turn["role"], turn["content"]) for turn in made.messages] == [("user", "hi"), ("assistant", "ho")]


def test_a_question_of_another_kind_is_not_left_out(tmp_path):
    """A number in the place of the instruction is refused, with an input and without."""
    for row in ({"instruction": 5, "input": "d", "output": "o"}, {"instruction": "i", "input": 5, "output": "o"}):
        with pytest.raises(DataError, match="field instruction is int 5"):
            read(tmp_path, {}, row)


@pytest.mark.parametrize(
    ("entry", "asked"),
    [
        ({}, ("org/name", None, "train")),
        ({"subset": "en", "split": "test", "ms_hub_url": "other/name"}, ("org/name", "en", "test")),
    ],
)
def test_on_the_hub(entry, asked, tmp_path, monkeypatch):
    """The split that an entry names is read as the entry says, and is not fetched by the look at first rows."""
    loaded = []

    def load(name, config, split):
        loaded.append((name, config, split))
        return datasets.Dataset.from_list([{"q": "What?", "a": "That.", "output": "not read"}] * 3)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    named = write(tmp_path, {"hf_hub_url": "org/name", "columns": {"prompt": "q", "response": "a"}} | entry)
    check_first_row(named)
    assert loaded == []
    store = prepare(named, tokenizer(), tmp_path / "store")
    assert loaded == [asked]
    assert (len(store), store.source(2)) == (3, ":".join(part for part in asked if part) + ":3")
    assert prepare(named, tokenizer(), tmp_path / "store").inputs == store.inputs
    assert [each.format for each in stats(store).sources] == ["alpaca"]


def test_nulls_are_named(tmp_path):
    """A field that is null is no other fault."""
    with pytest.raises(DataError, match="field output is null"):
        read(tmp_path, {"columns": {"prompt": "q", "response": "a"}}, {"q": "x", "a": None})


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({"hf_hub_url": "org/name", "folder": "python"}, "folder is the string 'python', a part of the data set on the Hub"),
        ({"hf_hub_url": "org/name", "split": 1}, "hf_hub_url, subset and split must be names"),
        ({"ms_hub_url": "org/name"}, "ms_hub_url is the string 'org/name', which is not read"),
        ({"cloud_file_name": "s3://x/y.json"}, "give its URL, 's3://x/y.json'"),
        ({"num_samples": 0.5}, "num_samples is float 0.5; it must be a whole number of rows"),
        ({"num_samples": 5}, "random_rows of .*rows.jsonl is 5, and it has 1 row"),
        ({"split": "test"}, "split is the string 'test', and a file has none"),
        ({"formatting": "sharegtp"}, "did you mean 'sharegpt'"),
        ({"columns": {"promt": "x"}}, "columns has 'promt', which is not known; did you mean 'prompt'"),
        ({"columns": {"query": "x"}}, "its columns lack prompt"),
        ({"formatting": "sharegpt", "columns": {"prompt": "x"}}, "its columns lack messages"),
        ({"ranking": True}, "its columns lack chosen or rejected"),
        ({"ranking": "yes"}, "it must be true or false"),
        ({"tags": ["x"]}, "tags is a list of 1; it must be an object"),
        ({"file_name": None}, "has no file_name"),
        (
            {"file_name": ""},
            r"info.json: mine: file_name is the string ''; it must be the name of a file or a",
        ),
        ({"file_name": " "}, r"file_name is the string ' '; it must be the name of a file"),
        ({"file_name": 5}, "file_name is int 5; it must be the name of a file"),
        ({"file_name": "gone.jsonl"}, "no file at .*gone.jsonl"),
    ],
)
def test_refused(tmp_path, entry, error):
    """What an entry cannot mean is refused with what to give."""
    with pytest.raises(DataError, match=error):
        resolve(write(tmp_path, entry, {"instruction": "i", "output": "o"}))


TALK = {"formatting": "sharegpt", "columns": {"messages": "conversations"}}


@pytest.mark.parametrize(
    ("tags", "error"),
    [
        (
            {"user_tag": "x", "assistant_tag": "x"},
            "mine: tags: user_tag and assistant_tag are both 'x', two roles under one name",
        ),
        ({"user_tag": "gpt"}, r"tags: user_tag and assistant_tag \(its default\) are both 'gpt'"),
        ({"observation_tag": "t", "function_tag": "t"}, "tags: observation_tag and function_tag are both 't'"),
        ({"role_tag": "x", "content_tag": "x"}, "tags: role_tag and content_tag are both 'x', two fields of a turn"),
        ({"role_tag": "value"}, r"tags: role_tag and content_tag \(its default\) are both 'value'"),
        ({"content_tag": None}, "tags: content_tag is null, and no turn is read without it"),
    ],
)
@pytest.mark.parametrize("formatting", ["sharegpt", "openai"])
def test_tags_that_are_one(tmp_path, tags, error, formatting):
    """Two roles or fields of one name are refused by the names of their tags."""
    with pytest.raises(DataError, match=error):
        resolve(write(tmp_path, TALK | {"formatting": formatting, "tags": tags}, {"conversations": []}))


def test_a_role_that_no_row_has(tmp_path):
    """Tags of null are no names, of which several are not the same, and name no turn without a role."""
    tags = {"observation_tag": None, "function_tag": None, "system_tag": None}
    talk = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    (made,) = read(tmp_path, TALK | {"tags": tags}, {"conversations": talk})
    assert [turn["role"] for turn in made.messages] == ["user", "assistant"]
    with pytest.raises(DataError, match=r"rows.jsonl:1: field conversations\[0\]"):
        read(tmp_path, TALK | {"tags": tags}, {"conversations": [{"value": "hi"}, *talk[1:]]})
    assert read(tmp_path, {"tags": {"user_tag": "gpt"}}, {"instruction": "i", "output": "o"})  # rows of Alpaca have no turns


@pytest.mark.parametrize("name", ["a:b", ":", "org/a:b", "a::b:", "dataset_info.json", "x:dataset_info.json:y", "a\nb"])
def test_a_name_with_colons(tmp_path, name):
    """All that is behind the file is the name."""
    folder = tmp_path / "with:colon"
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"q": "i", "a": "o"}\n')
    entry = {"file_name": "rows.jsonl", "columns": {"prompt": "q", "response": "a"}}
    (folder / "dataset_info.json").write_text(json.dumps({name: entry}))
    path = f"{folder}/dataset_info.json:{name}"
    check_first_row(path)
    (source,) = resolve(path)
    assert [row.fields for row in source.records()] == [{"instruction": "i", "output": "o"}]
    with pytest.raises(DataError, match="has no data set"):
        resolve(f"{path}:x")


def several(folder, entries, *rows):
    """Write rows and entries that all read them; return the paths of the entries."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    described = {name: {"file_name": str(folder / "rows.jsonl")} | entry for name, entry in entries.items()}
    (folder / "dataset_info.json").write_text(json.dumps(described))
    return [f"{folder}/dataset_info.json:{name}" for name in entries]


WAYS = {
    "one": {"columns": {"prompt": "q", "response": "a"}},
    "two": {"columns": {"prompt": "a", "response": "q"}},
    "talk": {"formatting": "sharegpt", "columns": {"messages": "t"}, "tags": {"user_tag": "me", "assistant_tag": "it"}},
}
ROW = {"q": "ask", "a": "say", "t": [{"from": "me", "value": "hi"}, {"from": "it", "value": "ho"}]}


def test_one_file_read_in_several_ways(tmp_path):
    """Each entry reads the file by its own columns and tags, in any order, and messages name the entry."""
    paths = several(tmp_path, WAYS, ROW, ROW)
    for order in (paths, paths[::-1]):
        sources = resolve(order)
        assert [source.name for source in sources] == [f"rows.jsonl:{path.rpartition(':')[2]}" for path in order]
        said = [source.records() for source in sources]
        made = [[convert(detect(row.place, row.fields), row.place, row.fields, None) for row in rows] for rows in said]
        texts = dict(zip(order, [[turn["content"] for turn in chats[1].messages] for chats in made], strict=True))
        assert texts == dict(zip(paths, [["ask", "say"], ["say", "ask"], ["hi", "ho"]], strict=True))
    assert [row.place for row in resolve(paths)[2].records()] == ["rows.jsonl:talk:1", "rows.jsonl:talk:2"]


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_store_of_one_file_read_in_several_ways(tmp_path, num_proc):
    """Its samples, rows that were left out and findings are told apart by the entry, and so are weights."""
    paths = several(
        tmp_path, WAYS, *[ROW | {"q": f"ask {at}", "a": f"say {at}"} for at in range(9)], {"q": "x", "a": 1, "t": []}
    )
    weights = dict(zip(paths, [1, 2, 3], strict=True))
    given = {"num_proc": num_proc, "progress": False, "on_bad_row": "skip", "max_bad_rows": 0.5}
    store = prepare(weights, tokenizer(), tmp_path / "store", **given)
    assert [store.source(at) for at in (0, 9, 18)] == ["rows.jsonl:one:1", "rows.jsonl:two:1", "rows.jsonl:talk:1"]
    assert [(each.name, each.samples, each.format) for each in stats(store).sources] == [
        ("rows.jsonl:one", 9, "alpaca"),
        ("rows.jsonl:two", 9, "alpaca"),
        ("rows.jsonl:talk", 9, "sharegpt"),
    ]
    assert store.weights == [1, 2, 3]
    left_out = ["rows.jsonl:one:10", "rows.jsonl:two:10", "rows.jsonl:talk:10"]
    assert [row["place"] for row in store.dropped()] == left_out
    found = lint(weights, tokenizer())
    assert {finding.place for finding in found.findings} >= {*left_out}


def test_one_file_twice_in_one_way(tmp_path):
    """It is refused with both entries; so is the file itself beside an entry."""
    one, two = several(tmp_path, {"one": WAYS["one"], "two": WAYS["one"]}, ROW)
    with pytest.raises(
        DataError, match=r"more than once in the data \(by .*: one and by .*: two, which read it alike\); name it"
    ):
        resolve([one, two])
    for more in ([one], [tmp_path / "rows.jsonl"], [two, tmp_path / "rows.jsonl"]):
        with pytest.raises(DataError, match="named more than once in the data; name it once"):
            resolve([one, *more])


def test_entries_of_one_name_in_two_directories(tmp_path):
    """They are told apart by the directories of their descriptions."""
    (one,) = several(tmp_path / "a", {"mine": WAYS["one"]}, ROW)
    (tmp_path / "b").mkdir()
    entry = {"file_name": str(tmp_path / "a" / "rows.jsonl")} | WAYS["two"]
    (tmp_path / "b" / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    sources = resolve([one, f"{tmp_path}/b/dataset_info.json:mine"])
    assert [source.name for source in sources] == ["rows.jsonl:a/mine", "rows.jsonl:b/mine"]


def test_names(tmp_path):
    """A name that is not there is answered with the nearest, the file alone with its names."""
    entry = write(tmp_path, {}, {"instruction": "i", "output": "o"})
    with pytest.raises(DataError, match="has no data set 'mien'; did you mean 'mine'"):
        resolve(entry.replace(":mine", ":mien"))
    with pytest.raises(DataError, match="describes data sets; name one: .*; it has 'mine', 'other'"):
        resolve(entry.removesuffix(":mine"))
    with pytest.raises(DataError, match=r"cannot be read: No such file or directory; check the path$"):
        resolve(str(tmp_path / "elsewhere" / "dataset_info.json:mine"))
    (tmp_path / "dataset_info.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read as JSON"):
        resolve(entry)


def test_a_column_that_no_row_has(tmp_path):
    """It is refused with the nearest name: a misspelt `query` was left out of every row. A row with it, or null, is enough."""
    entry = {"columns": {"prompt": "q", "query": "contxt", "response": "a"}}
    with pytest.raises(
        DataError, match=r"mine: columns says 'query' is 'contxt', .* mean 'context'\? The rows have 'q', 'context', 'a'"
    ):
        read(tmp_path, entry, {"q": "i", "context": "d", "a": "o"})
    rows = {"q": "i", "a": "o"}, {"q": "j", "a": "p", "contxt": "d"}
    assert [made.messages[0]["content"] for made in read(tmp_path, entry, *rows)] == ["i", "j\nd"]
    assert len(read(tmp_path, entry, {"q": "i", "a": "o", "contxt": None})) == 1
    with pytest.raises(DataError, match="did you mean 'talks'"):
        read(tmp_path, {"formatting": "sharegpt", "columns": {"messages": "talk"}}, {"talks": [], "conversations": []})


def test_a_store(tmp_path):
    """A store is made of it, by any number of processes, and is another one where the description is another."""
    rows = [{"q": f"say {at}", "a": f"number {at}"} for at in range(40)]
    columns = {"columns": {"prompt": "q", "response": "a"}}
    path = write(tmp_path, columns, *rows)
    check_first_row(path)
    stores = [prepare(path, tokenizer(), tmp_path / f"s{n}", num_proc=n, progress=False) for n in (1, 2)]
    assert stores[0].fingerprint == stores[1].fingerprint
    assert len(stores[0]) == 40
    write(tmp_path, {"columns": {"prompt": "a", "response": "q"}}, *rows)
    assert prepare(path, tokenizer(), tmp_path / "s3", num_proc=1, progress=False).fingerprint != stores[0].fingerprint
    write(tmp_path, {"columns": {"prompt": "q", "response": "b"}}, *rows)
    with pytest.raises(DataError, match="columns says 'response' is 'b', which no row of"):
        check_first_row(path)


def test_parts(tmp_path):
    """Chunks pickle, and a part of one has its rows."""
    (source,) = resolve(write(tmp_path, {}, *({"instruction": str(at), "output": "o"} for at in range(5))))
    (chunk,) = source.chunks()
    part = pickle.loads(pickle.dumps(chunk)).part(2, 3)
    assert (part.first_row, part.last_row, source.count()) == (2, 3, 5)
    assert [each.fields["instruction"] for each in part.records()] == ["1", "2"]
    assert chunk.size > 0
