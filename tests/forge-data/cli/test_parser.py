"""The command line: arguments, help, exit statuses."""

import importlib
import json
import logging
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import forge_data
from forge_data.cli import _commands, _parser


@pytest.fixture
def model(chatml_tokenizer, tmp_path):
    """A directory with a tokenizer."""
    chatml_tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def store(small_chats, write_rows, chatml_tokenizer, tmp_path):
    """Directory of a store of twelve samples."""
    forge_data.prepare(write_rows(small_chats), chatml_tokenizer, tmp_path / "store", progress=False)
    return str(tmp_path / "store")


def printed(capsys):
    written = capsys.readouterr()
    return written.out, written.err


@pytest.mark.parametrize("verb", [[], ["prepare"], ["merge"], ["show"], ["lint"], ["stats"]])
def test_help(verb, capsys):
    """Help is there for all verbs, exits with 0, and its example is a line that the parser takes."""
    assert _parser.main([*verb, "--help"]) == 0
    out, err = printed(capsys)
    assert out.startswith("usage: forge-data")
    assert err == ""
    if verb:
        example = out.partition("Example: forge-data ")[2].split()
        assert example[0] == verb[0]
        assert _parser._parser("forge-data").parse_args(example).verb is getattr(_commands, verb[0])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "VERB"),
        (["shwo"], "shwo"),
        (["prepare", "x"], "--tokenizer"),
        (["prepare", "x", "--tokenizer", "t", "--store-dir", "s", "--max-seq-len", "1.5"], "1.5"),
        (["prepare", "x", "--tokenizer", "t", "--store-dir", "s", "--train-on", "everything"], "everything"),
        (["show", "nowhere"], "nowhere is not a token store"),
        (["stats", "nowhere"], "nowhere is not a token store"),
        (["lint", "rows.jsonl"], "give a --tokenizer"),
        (["show", "rows.jsonl", "--lr", "3", "0:1"], "unrecognized arguments: --lr 3 0:1; forge-data show --help lists"),
        (["show"], "required: STORE; "),
        (["stats", "store", "0:1"], "unrecognized arguments: 0:1; forge-data stats --help lists"),
    ],
)
def test_bad_input_is_one_line(words, expected, capsys):
    """Bad input is reported in one line on stderr, with status 2 and the flag that it is about."""
    assert _parser.main(words) == 2
    out, err = printed(capsys)
    assert out == ""
    assert expected in err
    assert err.startswith("forge-data")
    assert err.count("\n") == 1


def test_prepare(model, small_chats, write_rows, tmp_path, capsys):
    """`prepare` makes the store that the function makes, with every option, and prints what became of the rows."""
    rows, directory = str(write_rows(small_chats)), tmp_path / "store"
    options = ["--max-seq-len", "40", "--on-overflow", "truncate", "--train-on", "all", "--format", "messages", "--seed", "7"]
    assert (
        _parser.main(
            ["prepare", rows, "--tokenizer", model, "--store-dir", str(directory), "--num-proc", "1", "--quiet", *options]
        )
        == 0
    )
    out, _ = printed(capsys)
    made = forge_data.TokenStore.open(directory)
    same = forge_data.prepare(
        rows,
        model,
        tmp_path / "same",
        max_seq_len=40,
        on_overflow="truncate",
        train_on="all",
        format="messages",
        seed=7,
        progress=False,
    )
    assert made.fingerprint == same.fingerprint
    assert made.settings == same.settings
    assert f"fingerprint {made.fingerprint}" in out
    assert str(made.accounting) in out


def test_prepare_prints_what_the_lint_found(model, small_chats, write_rows, tmp_path, capsys, logged):
    """Each finding with its row and remedy, and what was dropped once."""
    rows = str(write_rows([*small_chats, {"messages": []}]))
    said, logger = logged(), logging.getLogger("forge_data.accounting")
    words = ["prepare", rows, "--tokenizer", model, "--store-dir", str(tmp_path / "store"), "--on-bad-row", "skip"]
    assert _parser.main([*words, "--max-bad-rows", "0.9"]) == 0
    out, _ = printed(capsys)
    assert f"{Path(rows).name}:{len(small_chats) + 1}" in out
    assert out.count("dropped 1") == 1
    assert not [message for message in said if "dropped" in message]
    assert not logger.disabled


def test_a_store_that_is_replaced(model, small_chats, write_rows, tmp_path, capsys):
    """`prepare` and `merge` say that a store of other rows was replaced, and nothing of it for a new or the same one."""
    rows, place = str(write_rows(small_chats)), str(tmp_path / "store")
    words = ["prepare", rows, "--tokenizer", model, "--store-dir", place, "--quiet"]
    said = f"{place}: replaced the store that was there"
    for options, expected in (([], False), ([], False), (["--train-on", "all"], True), (["--train-on", "all"], False)):
        assert _parser.main([*words, *options]) == 0
        assert (said in printed(capsys)[0]) is expected, options
    assert _parser.main(["prepare", rows, "--tokenizer", model, "--store-dir", f"{place}1", "--shard", "1/1"]) == 0
    assert _parser.main(["merge", place, f"{place}1"]) == 0
    assert said in printed(capsys)[0]


def test_weights(model, small_chats, write_rows, tmp_path, capsys):
    """Several files can have a weight each, and then each must have one."""
    files = [str(write_rows(small_chats[at::2], f"{at}.jsonl")) for at in range(2)]
    words = ["--tokenizer", model, "--store-dir", str(tmp_path / "store"), "--quiet"]
    assert _parser.main(["prepare", f"{files[0]}=0.75", files[1], *words]) == 2
    assert f"{files[0]} has the weight 0.75, and {files[1]} has none" in printed(capsys)[1]
    assert _parser.main(["prepare", f"{files[0]}=0.75", f"{files[1]}=0.25", *words]) == 0
    assert forge_data.TokenStore.open(tmp_path / "store").weights == [0.75, 0.25]


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (["0"], [1]),
        (["-1"], [12]),
        (["2:4"], [3, 4]),
        (["10:"], [11, 12]),
        (["train.jsonl:5", "0"], [5, 1]),
        ([], [1, 2, 3, 4, 5]),
    ],
)
def test_show_names_samples(store, words, rows, capsys):
    """Samples are named by number, range or source row; the first few otherwise."""
    assert _parser.main(["show", store, *words]) == 0
    out, _ = printed(capsys)
    shown = [line.split(" ")[0] for line in out.splitlines() if " · sample " in line]
    assert shown == [f"train.jsonl:{row}" for row in rows]


@pytest.mark.parametrize(
    ("word", "expected"), [("12", "0 to 11"), ("train.jsonl:13", "train.jsonl:13"), ("nonsense", "nonsense")]
)
def test_show_refuses(store, word, expected, capsys):
    """A sample that the store does not have is refused."""
    assert _parser.main(["show", store, word]) == 2
    assert expected in printed(capsys)[1]


def test_show_findings(model, chat, write_rows, tmp_path, capsys):
    """`--finding` selects samples on whose rows the lint found it; for another rule it names those that were found."""
    rows = [chat(("user", f"What is {n}?"), ("assistant", f"{n} it is")) for n in range(4)]
    rows.append(rows[1])
    forge_data.prepare(write_rows(rows), model, tmp_path / "store", progress=False)
    assert _parser.main(["show", str(tmp_path / "store"), "--finding", "duplicate_row"]) == 0
    out, _ = printed(capsys)
    assert [line.split(" ")[0] for line in out.splitlines() if " · sample " in line] == ["train.jsonl:5"]
    assert _parser.main(["show", str(tmp_path / "store"), "--finding", "nonsense"]) == 2
    assert "duplicate_row" in printed(capsys)[1]


def test_show_findings_of_other_samples(model, chat, write_rows, tmp_path, capsys):
    """Samples without the finding, or a finding on a row that was left out, are reported, not shown as nothing."""
    rows = [chat(("user", f"What is {n}?"), ("assistant", f"{n} it is")) for n in range(4)]
    rows += [rows[1], chat(("user", "Hi"))]
    store = str(tmp_path / "store")
    forge_data.prepare(write_rows(rows), model, store, progress=False)
    assert _parser.main(["show", store, "0", "--finding", "duplicate_row"]) == 2
    assert "none of these samples" in printed(capsys)[1]
    assert _parser.main(["show", store, "--finding", "no_trained_token"]) == 2
    assert "train.jsonl:6" in (expected := printed(capsys)[1])
    assert "dropped.jsonl" in expected


@pytest.mark.parametrize("words", ["3:1", "20:", "5:2"])
def test_show_of_no_range(store, words, capsys):
    """A range without samples is refused, with the samples that there are."""
    assert _parser.main(["show", store, words]) == 2
    assert f"no sample lies in {words}: the store has 0 to 11" in printed(capsys)[1]


def test_a_home_that_is_not_there(model, store, tmp_path, capsys):
    """An unknown `~user` is named wherever a path is given, and nothing is made."""
    away = "~nouser-of-this-machine/x"
    for words in (["show", away], ["stats", away], ["show", store, "--html", away], ["lint", away, "--tokenizer", model]):
        assert _parser.main([str(word) for word in words]) == 2
        assert "~nouser-of-this-machine" in (expected := printed(capsys)[1])
        assert "Traceback" not in expected


def test_show_html(store, tmp_path, capsys):
    """`--html` writes the page and prints its path."""
    page = tmp_path / "page.html"
    assert _parser.main(["show", store, "3:5", "--html", str(page)]) == 0
    assert printed(capsys)[0].strip() == str(page)
    assert "2 chosen of 12 samples" in page.read_text("utf-8")


def test_lint_status(model, chat, write_rows, tmp_path, capsys):
    """`lint` exits with 1 where something stops a training, else with 0; for rows, for a store, and as JSON."""
    good = [chat(("user", f"What is {n}?"), ("assistant", f"{n} it is")) for n in range(4)]
    rows = str(write_rows(good))
    assert _parser.main(["lint", rows, "--tokenizer", model, "--json"]) == 0
    report = json.loads(printed(capsys)[0])
    assert report["stops"] == 0
    assert report["rows"] == 4
    bad = str(write_rows([*good, '{"messages": 1}'], "bad.jsonl"))
    assert _parser.main(["lint", bad, "--tokenizer", model]) == 1
    assert "bad.jsonl:5" in printed(capsys)[0]
    assert _parser.main(["lint", bad, "--tokenizer", model, "--quiet"]) == 1
    head, rule = printed(capsys)[0].splitlines()
    assert head == "1 stop, 0 warnings in 5 rows"
    assert rule.startswith("stop unreadable_row (1): ")
    assert _parser.main(["lint", bad, "--tokenizer", model, "--quiet", "--json"]) == 2
    assert "not allowed with argument" in printed(capsys)[1]
    assert _parser.main(["lint", rows, "--tokenizer", model, "--eval-data", rows]) == 1, "held-out rows that are trained on"
    forge_data.prepare(rows, model, tmp_path / "store", progress=False)
    assert _parser.main(["lint", str(tmp_path / "store")]) == 0


def test_stats(store, capsys):
    """`stats` prints the table, or the same numbers as JSON."""
    assert _parser.main(["stats", store]) == 0
    counted = forge_data.stats(forge_data.TokenStore.open(store))
    assert printed(capsys)[0] == f"{counted}\n"
    assert _parser.main(["stats", store, "--json"]) == 0
    assert json.loads(printed(capsys)[0])["tokens"] == counted.tokens


def test_interrupted(monkeypatch, capsys):
    """Ctrl-C is 130 and one line; an error of this package's own code is not hidden."""

    def fail(words):
        raise error

    monkeypatch.setattr(_commands, "stats", fail)
    error = KeyboardInterrupt()
    assert _parser.main(["stats", "x"]) == 130
    assert printed(capsys)[1] == "forge-data: interrupted.\n"
    error = RuntimeError("a defect")
    with pytest.raises(RuntimeError):
        _parser.main(["stats", "x"])


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        (
            [{"text": "a b c d e f"}],
            ["--max-seq-len", "2", "--on-overflow", "error"],
            "tokens, and --max-seq-len is 2; raise it",
        ),
        ([{"text": "a"}], ["--train-on", "last"], "train.jsonl:1: --train-on is 'last', and the row is plain text"),
        ([{"text": "a"}], ["--format", "txt"], "--format is 'txt'; allowed: auto, messages"),
        ([{"text": "a", "messages": []}], [], "say which is meant with --format, such as messages"),
        ([{"text": "a"}], ["--preprocess", "nothing"], "--preprocess is 'nothing'; name a function as"),
        ([{"text": "a"}], ["--num-proc", "0"], "--num-proc must be a whole number of at least 1"),
        ([{"text": "a"}], ["--max-seq-len", "0"], "--max-seq-len must be a whole number of at least 1"),
    ],
)
def test_errors_name_flags(model, rows, words, message, write_rows, tmp_path, capsys):
    """An error about an option names its flag, and neither an argument of Python nor a function."""
    command = ["prepare", str(write_rows(rows)), "--tokenizer", model, "--store-dir", str(tmp_path / "store"), "--quiet"]
    assert _parser.main([*command, *words]) == 2
    error = printed(capsys)[1]
    assert message in error
    assert "`" not in error
    assert "(...)" not in error


def test_every_option_of_rows_has_a_flag():
    """Whatever option an error may name in backticks, the command line has a flag for it."""
    named = set()
    for file in Path(forge_data.__file__).parent.rglob("*.py"):
        # Messages, not docstrings: a name in backticks within a line of an f-string or string.
        named |= {
            name
            for line in file.read_text("utf-8").splitlines()
            if re.match(r'\s*(raise \w+\()?f?"(?!"")', line)
            for name in re.findall(r"`([a-z_]+)`", line)
        }
    of_other_callers = {"max_prompt_len", "validation_split", "eval_data_path"}
    assert named - of_other_callers <= set(_commands._FLAGS)
    assert {"max_seq_len", "on_overflow", "format", "tokenizer", "train_on"} <= named


def test_a_command_of_its_own():
    """The console script `forge-data` is the command line."""
    project = tomllib.loads((Path(__file__).parents[3] / "packages" / "forge-data" / "pyproject.toml").read_text("utf-8"))
    module, _, name = project["project"]["scripts"]["forge-data"].partition(":")
    assert getattr(importlib.import_module(module), name) is _parser.main
    assert _parser.main.__defaults__ == (None, "forge-data")


@pytest.mark.slow
def test_as_a_module(store):
    """`python -m forge_data` is the command line; a reader that leaves early (head) is no error."""
    command = [sys.executable, "-W", "error", "-m", "forge_data"]
    done = subprocess.run([*command, "stats", store], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("12 samples")
    shown = subprocess.Popen([*command, "show", store, *["0:"] * 60], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    shown.stdout.read(10)
    shown.stdout.close()
    assert shown.stderr.read() == b""
    shown.stderr.close()
    assert shown.wait() == 0


@pytest.mark.slow
def test_help_is_free():
    """Help and bad words load neither transformers nor numpy."""
    code = "import sys; from forge_data.cli._parser import main; main(['show', '--help']); "
    code += "assert not {'transformers', 'datasets', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_parts_are_prepared_and_merged(model, small_chats, write_rows, tmp_path, capsys):
    """`prepare --shard` says which rows are in the part, and `merge` prints the fingerprint that one process prints."""
    data = [str(write_rows(small_chats)), "--tokenizer", model, "--quiet", "--store-dir"]
    for part in (1, 2):
        assert _parser.main(["prepare", *data, str(tmp_path / f"part{part}"), "--shard", f"{part}/2"]) == 0
    assert "part 2 of 2: train.jsonl:7 to train.jsonl:12\n" in printed(capsys)[0]
    assert _parser.main(["merge", str(tmp_path / "merged"), str(tmp_path / "part2"), str(tmp_path / "part1")]) == 0
    merged = printed(capsys)[0]
    assert _parser.main(["prepare", *data, str(tmp_path / "whole")]) == 0
    assert merged == printed(capsys)[0].replace("whole", "merged")
    assert _parser.main(["prepare", *data, str(tmp_path / "part1"), "--shard", "3/2"]) == 2
    assert "--shard is '3/2'; give K/N" in printed(capsys)[1]
    assert _parser.main(["merge", str(tmp_path / "other"), str(tmp_path / "part2")]) == 2
    assert printed(capsys)[1] == "forge-data: of 2 parts 1 is missing\n"


def test_show_what_is_not_prepared(model, small_chats, write_rows, tmp_path, capsys):
    """Rows of a file are tokenised and shown as `prepare` would make them, and nothing is left on the disk."""
    data = str(write_rows(small_chats))
    assert _parser.main(["show", data, "--tokenizer", model]) == 0
    out = printed(capsys)[0]
    assert "train.jsonl:1 · sample 0 · " in out
    assert "kept 12 of 12 rows" in out
    assert "name samples" not in out
    assert _parser.main(["show", data, "train.jsonl:9", "--tokenizer", model, "--train-on", "all", "--max-seq-len", "40"]) == 0
    assert "sample 8" in (out := printed(capsys)[0])
    assert "(100%)" in out
    for options in (["0:2", "--tokenizer", model, "4"], ["--tokenizer", model, "0:2", "--train-on", "all", "-8"]):
        assert _parser.main(["show", data, *options]) == 0, "samples may stand behind options"
        out = printed(capsys)[0]
        assert [line.split(" ")[0] for line in out.splitlines() if " · sample " in line] == [
            f"train.jsonl:{row}" for row in (1, 2, 5)
        ]
    assert _parser.main(["show", data, "--tokenizer", model, "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "train.jsonl:12" in page
    assert "<h1>train.jsonl</h1>" in page
    entry = f'{data}={{"train_on": "all", "random_rows": 3}}'
    assert _parser.main(["show", entry, "--tokenizer", model]) == 0, "with settings of its own, as prepare reads it"
    assert "kept 3 of 3 rows" in (out := printed(capsys)[0])
    assert out.count("(100%)") == 3
    assert not list(tmp_path.glob("forge-data-show-*"))


def test_show_reads_the_start_of_a_long_file(model, write_rows, monkeypatch, capsys):
    """A file of many rows is read to its first ones; a row further on that cannot be read is none of them."""
    monkeypatch.setattr(_commands, "_FIRST_ROWS", 20)
    row = {"prompt": "a?", "completion": "b"}
    data = str(write_rows([*[row] * 20, "{"]))
    assert _parser.main(["show", data, "--tokenizer", model]) == 0
    assert "of the first 20 rows of each file; name samples" in printed(capsys)[0]
    assert _parser.main(["show", data, "0", "--tokenizer", model]) == 2
    assert "train.jsonl:21 is not valid JSON" in printed(capsys)[1]


def test_show_a_run_and_its_prompts(store, model, write_rows, tmp_path, capsys):
    """A run directory stands for its training data; prompts are shown as the model is asked them."""
    (tmp_path / "run" / "data").mkdir(parents=True)
    Path(store).rename(tmp_path / "run" / "data" / "train")
    assert _parser.main(["show", str(tmp_path / "run"), "3"]) == 0
    assert "train.jsonl:4 · sample 3 · " in printed(capsys)[0]
    assert _parser.main(["show", str(tmp_path / "run"), "0:2", "--html", str(tmp_path / "page.html")]) == 0
    assert "<h1>run: train</h1>" in (tmp_path / "page.html").read_text("utf-8")
    capsys.readouterr()
    assert _parser.main(["stats", str(tmp_path / "run")]) == 0
    assert printed(capsys)[0].startswith("12 samples (supervised)")
    prompts = str(write_rows([{"prompt": "who?", "answer": 3}], "prompts.jsonl"))
    assert _parser.main(["show", prompts, "--tokenizer", model, "--prompts"]) == 0
    assert "  answer: 3\n" in printed(capsys)[0]


def test_prompts_in_parts(model, write_rows, tmp_path, capsys):
    """`prepare --prompts` makes the store of prompts that the function makes; its parts are merged into it."""
    rows = str(write_rows([{"prompt": f"who is {n}?", "answer": n} for n in range(5)]))
    words = ["prepare", rows, "--tokenizer", model, "--prompts", "--max-prompt-len", "20", "--seed", "3", "--store-dir"]
    assert _parser.main([*words, str(tmp_path / "whole")]) == 0
    whole = forge_data.PromptStore.open(tmp_path / "whole")
    out, _ = printed(capsys)
    assert f"{tmp_path / 'whole'}: 5 prompts, {int(whole.lengths.sum())} tokens\nkept 5 of 5 rows" in out
    assert (whole.settings["max_prompt_len"], whole.settings["seed"]) == (20, 3)
    parts = [str(tmp_path / str(k)) for k in (1, 2)]
    for k, part in enumerate(parts, 1):
        assert _parser.main([*words, part, "--shard", f"{k}/2"]) == 0
    assert "part 2 of 2: train.jsonl:3 to train.jsonl:5" in printed(capsys)[0]
    assert _parser.main(["merge", str(tmp_path / "merged"), *parts]) == 0
    assert f"fingerprint {whole.fingerprint}" in printed(capsys)[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompts", "--turns", "history"], "--turns is for rows that are learned, and these are --prompts; leave it out"),
        (["--prompts", "--max-seq-len", "9"], "--max-seq-len is for rows that are learned"),
        (["--prompts", "--num-proc", "2"], "--num-proc is for rows that are learned"),
        (["--prompts", "--on-overflow", "truncate"], "--on-overflow is 'truncate'; allowed: drop, error"),
        (["--max-prompt-len", "9"], "--max-prompt-len is for --prompts; give both, or --max-seq-len"),
    ],
)
def test_prompts_refuse_what_has_no_effect(words, message, model, write_rows, tmp_path, capsys):
    """By flag, and nothing is written."""
    rows = str(write_rows([{"prompt": "who?"}]))
    assert _parser.main(["prepare", rows, "--tokenizer", model, "--store-dir", str(tmp_path / "store"), *words]) == 2
    assert message in printed(capsys)[1]
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ROWS"], "is not prepared yet; give a --tokenizer to see what would be learned of it"),
        (["STORE", "--tokenizer", "x"], "is prepared already, and --tokenizer is for rows that are not; leave it out"),
        (["STORE", "--train-on", "all"], "is prepared already, and --train-on is for rows that are not; leave it out"),
        (["STORE", "--prompts"], "is prepared already, and --prompts is for rows that are not; leave it out"),
        (["nowhere.jsonl", "--tokenizer", "MODEL"], "no file at 'nowhere.jsonl'"),
        (['nowhere.jsonl={"turns": "history"}', "--tokenizer", "MODEL"], "no file at 'nowhere.jsonl'"),
        (["ENTRY"], "is not prepared yet; give a --tokenizer to see what would be learned of it"),
        (["ENTRY", "--tokenizer", "MODEL", "--train-on", "all"], "--train-on is all, and has no effect: each entry of DATA"),
        (["RECIPE"], "; a recipe holds settings and no rows: give the files that its data_path names"),
    ],
)
def test_show_refuses_by_flag(words, message, store, model, tmp_path, capsys):
    """What has no effect, or lacks a tokenizer, is refused in one line."""
    rows, recipe = str(tmp_path / "train.jsonl"), tmp_path / "recipe.yaml"
    recipe.write_text("data_path: train.jsonl\n")
    places = {"ROWS": rows, "ENTRY": f'{rows}={{"train_on": "last"}}', "RECIPE": str(recipe), "STORE": store, "MODEL": model}
    assert _parser.main(["show", *[places.get(word, word) for word in words]]) == 2
    assert message in printed(capsys)[1]
    if words == ["RECIPE"]:
        assert _parser.main(["lint", str(recipe)]) == 2
        assert message in printed(capsys)[1]


def test_other_words_for_the_verbs(capsys):
    """They are answered with the verb here."""
    for word, here in (("validate", "lint"), ("info", "stats"), ("tokenize", "prepare")):
        assert _parser.main([word, "x.jsonl"]) == 2
        said = (
            f"forge-data: {word} is none of the verbs; here it is `forge-data {here}`; forge-data --help lists what there is\n"
        )
        assert capsys.readouterr().err == said
