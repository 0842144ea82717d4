"""Data sets of one store, each in a format and with columns of its own."""

import json

import pytest
from hypothesis import given, strategies as st

from forge_data import DataError, check_first_row, lint, merge, prepare, prepare_prompts, stats
from forge_data.cli._parser import run

CHATS = [{"messages": [{"role": "user", "content": f"q {n}"}, {"role": "assistant", "content": f"a {n}"}]} for n in range(4)]
ALPACAS = [{"instruction": f"do {n}", "output": f"done {n}"} for n in range(3)]
QUESTIONS = [{"question": f"why {n}?", "answer": f"because {n}"} for n in range(5)]
ASKED = {"question": "instruction", "answer": "output"}
OWN = [
    ("chats.jsonl", CHATS, {}),
    ("asked.jsonl", ALPACAS, {"data_format": "axolotl:alpaca"}),
    ("turns.jsonl", ALPACAS, {"data_format": "alpaca"}),
    ("questions.jsonl", QUESTIONS, {"rename_columns": ASKED}),
    ("plain.jsonl", QUESTIONS, {"rename_columns": {"question": "prompt", "answer": "completion"}}),
    ("told.jsonl", QUESTIONS, {"data_format": "axolotl:alpaca_instruct", "rename_columns": ASKED}),
]
"""Name, rows and settings of data sets, no two of which are read alike."""
ALL = range(len(OWN))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Name → file of the rows."""
    folder = tmp_path_factory.mktemp("rows")
    for name, rows, _ in OWN:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: str(folder / name) for name, _, _ in OWN}


def mixture(files, numbers=ALL):
    """The mapping of some data sets."""
    return {files[name]: own for name, _, own in (OWN[number] for number in numbers)}


def samples(store):
    """Ids and labels of all samples."""
    return [(list(map(int, each.input_ids)), list(map(int, each.labels))) for each in store]


def alone(files, number, tokenizer, folder):
    """Samples of one data set, prepared alone with the settings of a run."""
    name, _, own = OWN[number]
    of_run = {{"data_format": "format"}.get(each, each): value for each, value in own.items()}
    return samples(prepare(files[name], tokenizer, folder / name, **of_run))


@pytest.fixture(scope="module")
def each_alone(files, module_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return [alone(files, number, module_tokenizer, folder) for number in range(len(OWN))]


@pytest.fixture(scope="module")
def module_tokenizer():
    from ..families import FAMILIES

    return FAMILIES["qwen2.5"].tokenizer()


@given(numbers=st.lists(st.integers(0, len(OWN) - 1), min_size=1, unique=True))
def test_each_is_read_as_it_would_be_alone(files, module_tokenizer, each_alone, tmp_path_factory, numbers):
    """Any of them in any order: the samples of the mixture are those of each data set prepared alone, one after another."""
    store = prepare(mixture(files, numbers), module_tokenizer, tmp_path_factory.mktemp("mixed") / "store")
    assert samples(store) == [sample for number in numbers for sample in each_alone[number]]
    assert store.weights is None


def test_processes_shards_and_stats(files, module_tokenizer, each_alone, tmp_path, capsys):
    """Worker processes and parts on several machines give the same store; its numbers name the format of each file."""
    whole = prepare(mixture(files), module_tokenizer, tmp_path / "store", num_proc=2)
    assert samples(whole) == [sample for each in each_alone for sample in each]
    parts = [tmp_path / str(part) for part in (1, 2, 3)]
    for part, directory in enumerate(parts, 1):
        prepare(mixture(files), module_tokenizer, directory, shard=f"{part}/3")
    assert merge(tmp_path / "merged", parts).fingerprint == whole.fingerprint
    formats = [each.format for each in stats(whole).sources]
    assert formats == ["messages", "axolotl:alpaca", "alpaca", "alpaca", "prompt_completion", "axolotl:alpaca_instruct"]
    assert whole.settings["own"][files["questions.jsonl"]] == {"data_format": None, "rename_columns": ASKED}
    assert run(["show", str(tmp_path / "store"), "told.jsonl:2"]) == 0
    assert "because" in capsys.readouterr().out


def test_on_the_command_line(files, module_tokenizer, tmp_path, capsys):
    """A data set's settings stand in JSON behind it; a setting that each has of its own is refused."""
    module_tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = ["--tokenizer", str(tmp_path / "tokenizer"), "--store-dir", str(tmp_path / "store"), "--quiet"]
    data = [f"{files['asked.jsonl']}={json.dumps(OWN[1][2])}", f"{files['turns.jsonl']}={json.dumps(OWN[2][2])}"]
    assert run(["prepare", *data, *words]) == 0
    assert run(["stats", str(tmp_path / "store")]) == 0
    assert "axolotl:alpaca" in capsys.readouterr().out
    for verb, more in (("prepare", words), ("lint", words[:2])):
        with pytest.raises(DataError, match="--format is alpaca, and has no effect: each entry of DATA has one of its own"):
            run([verb, *data, *more, "--format", "alpaca"])
    with pytest.raises(DataError, match="is no JSON"):
        run(["prepare", f"{files['asked.jsonl']}={{data_format: alpaca}}", *words])


def test_a_store_is_known_by_what_its_data_sets_are_read_as(files, module_tokenizer, tmp_path):
    """The same settings open the store again, others make it anew; a weight alone is what it always was."""
    same = [prepare(mixture(files), module_tokenizer, tmp_path / "store") for _ in range(2)]
    assert same[0].inputs == same[1].inputs
    other = mixture(files) | {files["asked.jsonl"]: {"data_format": "axolotl:alpaca:phi"}}
    assert prepare(other, module_tokenizer, tmp_path / "store").inputs != same[0].inputs
    weights = [{files["chats.jsonl"]: value} for value in (2.0, {"weight": 2.0})]
    told = [prepare(each, module_tokenizer, tmp_path / f"w{at}") for at, each in enumerate(weights)]
    assert told[0].inputs == told[1].inputs
    assert told[0].weights == told[1].weights == [2.0]


@pytest.mark.parametrize(
    ("name", "own", "message"),
    [
        ("chats.jsonl", {"data_format": "alpaca"}, r"chats\.jsonl:1 has the fields 'messages', but the format alpaca needs"),
        ("questions.jsonl", {"data_format": "alpaca"}, r"questions\.jsonl:1 .* the format alpaca needs instruction"),
        (
            "questions.jsonl",
            {"rename_columns": {"questoin": "note", **ASKED}},
            r"of the entry questions\.jsonl rename_columns names the column 'questoin', which no row has; did you mean 'quest",
        ),
        # A column that another data set has is none of this one's.
        (
            "chats.jsonl",
            {"rename_columns": {"question": "x"}},
            r"of the entry chats\.jsonl rename_columns names the column 'question', which no row has",
        ),
        ("chats.jsonl", {"data_format": "alpacca"}, "data_format of the entry .* allowed: .*did you mean 'alpaca'"),
        ("chats.jsonl", {"data_format": ["alpaca"]}, "data_format of the entry .* is a list of 1; allowed: auto"),
        ("chats.jsonl", {"type": "alpaca"}, "the entry .*chats.jsonl has 'type', which is not known; here it is data_format"),
        ("chats.jsonl", {"rename_columns": {}}, "rename_columns of the entry .* is an object with no fields; it must be"),
        ("chats.jsonl", {"rename_columns": {"a": 1}}, "rename_columns of the entry .* holds int 1"),
        ("chats.jsonl", {"weight": 2.0}, "chats.jsonl has the weight 2, and .*plain.jsonl has none"),
        ("chats.jsonl", {"weight": -1}, "the weight of .*chats.jsonl is int -1; it must be a number above 0"),
    ],
)
def test_what_does_not_fit_is_named(files, module_tokenizer, tmp_path, name, own, message):
    """By file and row; and by the check before anything is loaded. Nothing is written."""
    data = {files["plain.jsonl"]: OWN[4][2], files[name]: own}
    with pytest.raises(DataError, match=message):
        prepare(data, module_tokenizer, tmp_path / "store")
    with pytest.raises(DataError, match=message):
        check_first_row(data)
    assert not (tmp_path / "store").exists()


def test_lint_reads_them_so_too(files, module_tokenizer):
    """No row of the mixture is refused, and each of a file whose format does not fit is, by its place."""
    assert not lint(mixture(files), module_tokenizer).stops
    report = lint({files["chats.jsonl"]: {"data_format": "alpaca"}}, module_tokenizer)
    assert {each.place for each in report.findings if each.severity == "stop"} == {f"chats.jsonl:{row}" for row in range(1, 5)}
    with pytest.raises(DataError, match=r"of the entry chats\.jsonl rename_columns names the column 'x'"):
        lint({files["chats.jsonl"]: {"rename_columns": {"x": "y"}}}, module_tokenizer)


def test_two_formats_in_a_file(module_tokenizer, tmp_path):
    """Rows of a file that is not the first are counted as that file is read."""
    (tmp_path / "a.jsonl").write_text(json.dumps(CHATS[0]) + "\n")
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, [QUESTIONS[0], CHATS[0]])) + "\n")
    data = {str(tmp_path / "a.jsonl"): {"data_format": "messages"}, str(tmp_path / "b.jsonl"): {"rename_columns": ASKED}}
    with pytest.raises(DataError, match="the first 2 rows are 1 of alpaca .* 1 of messages"):
        prepare(data, module_tokenizer, tmp_path / "store")


def test_prompts(files, module_tokenizer, tmp_path):
    """Columns of prompts may be a data set's own; a format they have not."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "one"}) + "\n")
    data = {str(tmp_path / "p.jsonl"): {}, files["questions.jsonl"]: {"rename_columns": {"question": "prompt"}}}
    store = prepare_prompts(data, module_tokenizer, tmp_path / "store")
    assert [store[at].prompt for at in range(3)] == ["one", "why 0?", "why 1?"]
    with pytest.raises(DataError, match="has data_format 'alpaca', and rows of this use have no data_format to be chosen"):
        prepare_prompts({files["asked.jsonl"]: {"data_format": "alpaca"}}, module_tokenizer, tmp_path / "other")
