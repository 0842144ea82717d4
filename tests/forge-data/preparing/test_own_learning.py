"""Data sets of one store, of each of which something else is learned."""

import json
import sys

import pytest
from hypothesis import given, settings, strategies as st

from forge_data import DataError, ForgeDataError, TemplateError, lint, merge, prepare, prepare_prompts
from forge_data.cli._parser import run

from ..families import FAMILIES

CHATS = [
    {
        "messages": [
            *([{"role": "system", "content": "Known."}] if n == 1 else []),
            {"role": "user", "content": f"first {n}"},
            {"role": "assistant", "content": "yes " * n, **({"reasoning_content": "hm"} if n == 2 else {})},
            {"role": "user", "content": f"second {n}"},
            {"role": "assistant", "content": f"then {n}"},
        ]
    }
    for n in range(1, 4)
]
TEXTS = [{"prompt": f"ask {n}: ", "completion": f"told {n} " * n} for n in range(1, 4)]
ROWS = {"a": CHATS, "b": TEXTS, "c": CHATS[:2]}
LIMIT = 40
MODULE = "rows_of_own_learning"
OWN = st.fixed_dictionaries(
    {},
    optional={
        "train_on": st.sampled_from(["assistant", "last", "assistant,user", "completion"]),
        "train_on_turn_end": st.sampled_from(["turn", "last", "none", "all"]),
        "turns": st.sampled_from(["auto", "history"]),
        "system_prompt": st.sampled_from(["Be brief.", "Be kind."]),
        "chat_template_kwargs": st.sampled_from([{"enable_thinking": False}, {"enable_thinking": True}]),
        "on_overflow": st.sampled_from(["drop", "truncate", "split"]),
        "preprocess": st.just(f"{MODULE}:louder"),
    },
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of rows, and a module with a function that changes them."""
    folder = tmp_path_factory.mktemp("rows")
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{MODULE}.py").write_text("""import json

def louder(row):
    return json.loads(json.dumps(row).replace("first", "FIRST").replace("told", "SAID"))
""")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def qwen3():
    return FAMILIES["qwen3"].tokenizer()


def samples(store):
    """Ids and labels of all samples."""
    return [(each.input_ids.tolist(), each.labels.tolist()) for each in store]


def of_file(folder, name):
    return str(folder / f"{name}.jsonl")


def prepared(data, tokenizer, directory, **settings):
    """Samples of a store, or the first words of why there is none."""
    try:
        return samples(prepare(data, tokenizer, directory, max_seq_len=LIMIT, **settings))
    except ForgeDataError as error:
        return str(error)


@settings(max_examples=30)
@given(own=st.fixed_dictionaries(dict.fromkeys(ROWS, OWN)), order=st.permutations(sorted(ROWS)), of_run=OWN)
def test_a_mixture_is_each_data_set_alone(folder, qwen3, tmp_path_factory, own, order, of_run):
    """Ids and labels are those of each with its settings over the run's, in order; what is refused alone is refused."""
    of_run = {name: value for name, value in of_run.items() if name != "system_prompt"}
    work = tmp_path_factory.mktemp("stores")
    alone = [prepared(of_file(folder, name), qwen3, work / name, **{**of_run, **own[name]}) for name in order]
    mixed = prepared({of_file(folder, name): own[name] for name in order}, qwen3, work / "mixed", **of_run)
    wrong = [each for each in alone if isinstance(each, str) and "no row is left to train on" not in each]
    if wrong or all(isinstance(each, str) for each in alone):
        assert isinstance(mixed, str)
    else:
        assert mixed == [sample for each in alone if not isinstance(each, str) for sample in each]


DIFFERENT = {
    "a": {"train_on": "assistant,user", "system_prompt": "Be brief."},
    "b": {"train_on_turn_end": "none"},
    "c": {
        "train_on": "last",
        "train_on_turn_end": "none",
        "chat_template_kwargs": {"enable_thinking": False},
        "preprocess": f"{MODULE}:louder",
    },
}


def test_processes_and_shards(folder, qwen3, tmp_path):
    """Worker processes and parts give the same bytes; the store is known by the settings of its data sets."""
    data = {of_file(folder, name): own for name, own in DIFFERENT.items()}
    store = prepare(data, qwen3, tmp_path / "store", num_proc=2)
    for part in (1, 2):
        prepare(data, qwen3, tmp_path / str(part), shard=f"{part}/2")
    assert merge(tmp_path / "merged", [tmp_path / "1", tmp_path / "2"]).fingerprint == store.fingerprint
    assert prepare(data, qwen3, tmp_path / "store").inputs == store.inputs
    assert store.settings["own"][of_file(folder, "b")] == {
        "data_format": None, "rename_columns": None, "train_on_turn_end": "none",
    }  # fmt: skip
    for name, other in [("a", {"train_on": "assistant"}), ("a", {"system_prompt": "No."}), ("b", {"on_overflow": "error"})]:
        changed = data | {of_file(folder, name): DIFFERENT[name] | other}
        assert prepare(changed, qwen3, tmp_path / "other").inputs != store.inputs
    # A function without a name is called in this process, the settings of data sets hold in the workers all the same.
    here = prepare(data, qwen3, tmp_path / "here", num_proc=2, preprocess=lambda row: row)
    assert samples(here) == samples(store)


def test_lint_shows_and_reads_them_so(folder, qwen3, tmp_path, capsys):
    """The lint finds what the settings of a data set bring, in its rows alone; `show` marks what is learned of each."""
    data = {of_file(folder, name): own for name, own in DIFFERENT.items()}
    found = lint(data, qwen3).findings
    assert {each.file for each in found if each.rule == "untrained_turn_end"} == {"c.jsonl"}
    qwen3.save_pretrained(tmp_path / "tokenizer")
    words = [f"{path}={json.dumps(own)}" for path, own in data.items()]
    more = ["--tokenizer", str(tmp_path / "tokenizer"), "--store-dir", str(tmp_path / "store"), "--quiet"]
    assert run(["prepare", *words, *more]) == 0
    assert run(["show", str(tmp_path / "store"), "a.jsonl:1"]) == 0
    assert "first 1" in capsys.readouterr().out
    with pytest.raises(DataError, match="--train-on is last, and has no effect: each entry of DATA has one of its own"):
        run(["prepare", words[0], *more, "--train-on", "last"])


def test_prompts(folder, qwen3, tmp_path):
    """A system message, arguments of the template and a function may be those of prompts of one file."""
    rows = [{"prompt": [{"role": "user", "content": f"hello {n}"}]} for n in range(2)]
    for name in ("x", "y"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"x": {"system_prompt": "Be brief."}, "y": {"chat_template_kwargs": {"enable_thinking": False}}}
    alone = [
        list(each.input_ids)
        for name, settings in own.items()
        for each in prepare_prompts(tmp_path / f"{name}.jsonl", qwen3, tmp_path / name, **settings)
    ]
    data = {str(tmp_path / f"{name}.jsonl"): settings for name, settings in own.items()}
    assert [list(each.input_ids) for each in prepare_prompts(data, qwen3, tmp_path / "store")] == alone
    with pytest.raises(DataError, match=r"x\.jsonl has train_on 'last', and rows of this use have no train_on"):
        prepare_prompts({str(tmp_path / "x.jsonl"): {"train_on": "last"}}, qwen3, tmp_path / "no")


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        ({"train_on": "lest"}, DataError, r"of the entry .*b\.jsonl train_on must be one of assistant, last"),
        ({"train_on": "user"}, DataError, r"b\.jsonl:1: train_on of the entry is 'user', and the row is text"),
        ({"turns": 3}, DataError, "turns is 3; allowed: auto, history"),
        ({"train_on": "all", "train_on_turn_end": "none"}, DataError, "train_on_turn_end='none' has no effect with train_on"),
        ({"system_prompt": "Be brief."}, DataError, r"of the entry b\.jsonl the system_prompt has no effect: all of its rows"),
        ({"system_prompt": " "}, DataError, "system_prompt is empty"),
        ({"chat_template_kwargs": {"loud": True}}, TemplateError, r"of the entry .*b\.jsonl .*'loud'"),
        ({"chat_template_kwargs": [1]}, DataError, "chat_template_kwargs of the entry .* is a list of 1; it must be an object"),
        (
            {"preprocess": f"{MODULE}:quieter"},
            DataError,
            r"of the entry .*b\.jsonl preprocess is .* has no 'quieter'; its func",
        ),
        ({"preprocess": print}, DataError, "preprocess of the entry .* must name a function"),
        ({"chat_template": "chatml"}, DataError, "'chat_template', which is not known; a model is asked in one chat template"),
        ({"roles_to_train": ["user"]}, DataError, "'roles_to_train', which is not known; here it is train_on"),
    ],
)
def test_refused(folder, qwen3, tmp_path, own, error, message):
    """By entry and setting, before a store is there."""
    with pytest.raises(error, match=message):
        prepare({of_file(folder, "a"): {}, of_file(folder, "b"): own}, qwen3, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_path_twice(folder, qwen3, tmp_path, capsys):
    """A list names one file in two ways: the samples of each alone, in order, with names that tell them apart."""
    path = of_file(folder, "a")
    entries = [{"path": path, "train_on": "last"}, of_file(folder, "b"), {"path": path, "preprocess": f"{MODULE}:louder"}]
    store = prepare(entries, qwen3, tmp_path / "store")
    alone = [
        prepare(path, qwen3, tmp_path / "1", train_on="last"),
        prepare(of_file(folder, "b"), qwen3, tmp_path / "2"),
        prepare(path, qwen3, tmp_path / "3", preprocess=f"{MODULE}:louder"),
    ]
    assert samples(store) == [sample for each in alone for sample in samples(each)]
    assert store.source(0) == "a.jsonl#1:1"
    assert store.source(len(store) - 1) == "a.jsonl#2:3"
    assert store.settings["own"].keys() == {"a.jsonl#1", "a.jsonl#2"}
    assert run(["show", str(tmp_path / "store"), "a.jsonl#2:3"]) == 0
    assert "FIRST" in capsys.readouterr().out
    # What is one row stays on one side, however it is read.
    for part in store.split(0.4, seed=3):
        rows = {part.source(at).replace("#2", "#1") for at in range(len(part))}
        others = {store.source(at) for at in range(len(store))} - {part.source(at) for at in range(len(part))}
        assert not rows & {each.replace("#2", "#1") for each in others}
    assert not lint(entries, qwen3).stops


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"path": "a"}, {"path": "a", "weight": None}], "in the data; name it once, and to see its rows more often, give it"),
        ([{"path": "a", "train_on": "last"}, {"path": "a", "train_on": "last"}], "is named more than once in the data"),
        (["a", {"path": "?", "train_on": "last"}], "is named more than once in the data"),
        (["a", {"path": "a", "train_on": "last", "weight": 2}], "#2 has the weight 2, and .*a.jsonl#1 has none"),
        (["a", {"train_on": "last"}], "`data_path`: entry 2 has 'train_on', and no path; known: path, weight"),
        (
            [{"path": "a", "trian_on": "last"}],
            r"data_path\[0\] .* as an entry of .* has 'trian_on', which no data set has; did you",
        ),
        ([{"pth": "a", "weight": 2}], "it has 'pth', which no data set has; did you mean 'path'"),
        (
            [{"path": "a", "weight": 1}, {"path": "a", "weight": 2}],
            "alike each time; name it once, with the sum of its weights, 3$",
        ),
        ([{"path": "a", "train_on": "last", "wieght": 2}], "has 'wieght', which is not known; did you mean 'weight'"),
    ],
)
def test_lists_that_are_refused(folder, qwen3, tmp_path, entries, message):
    """A file that is read twice alike, or by a pattern too; an entry without a path."""

    def placed(each):
        return {**each, "path": of_file(folder, each["path"])} if "path" in each else each

    given = [of_file(folder, each) if isinstance(each, str) else placed(each) for each in entries]
    with pytest.raises(DataError, match=message):
        prepare(given, qwen3, tmp_path / "store")


def test_rows_with_a_path_are_rows(qwen3, tmp_path):
    """A list of mappings is one of data sets only where nothing else can be meant."""
    rows = [{"path": "x.py", "weight": 1.0, "prompt": "a", "completion": "b"}]
    assert len(prepare(rows, qwen3, tmp_path / "store")) == 1
