"""Parts that several processes prepare are joined into the very store that one process makes, or refused by name."""

import filecmp
import gzip
import json

import datasets
import pytest
from hypothesis import given, settings, strategies as st

from forge_data import DataError, PromptStore, StoreError, TokenStore, merge, prepare, prepare_prompts
from forge_data._shard import Shard
from forge_data.preparing import _prepare_prompts

LONGEST = 40


def chat(number, words):
    """A row of about so many words; every ninth repeats an earlier one."""
    number -= 5 if number % 9 == 8 else 0
    return {
        "messages": [
            {"role": "user", "content": f"count to {number}"},
            {"role": "assistant", "content": " ".join(map(str, range(words[number % len(words)])))},
        ]
    }


def rows(count, words=(1, 4, 9, 30)):
    """Rows of ragged lengths, some above LONGEST tokens."""
    return [chat(number, words) for number in range(count)]


def lines(some, blanks=()):
    """JSONL of rows, with blank lines before those of some numbers."""
    return "".join(("\n\n" if number in blanks else "") + json.dumps(row) + "\n" for number, row in enumerate(some))


def sources(kind, folder):
    """Rows as `data_path`, in every way that has a reader of its own."""
    some = rows(31)
    match kind:
        case "jsonl":
            (folder / "a.jsonl").write_text(lines(some, blanks=(0, 7, 30)) + "\n")
        case "no line end":
            (folder / "a.jsonl").write_text(lines(some).rstrip("\n"))
        case "gz":
            (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(some).encode()))
        case "json":
            (folder / "a.json").write_text(json.dumps(some, indent=1))
        case "csv":
            text = "".join(f'"question\n{number}","answer {number}"\n' for number in range(31))
            (folder / "a.csv").write_text("prompt,completion\n" + text)
        case "parquet":
            datasets.Dataset.from_list(some).to_parquet(folder / "a.parquet", batch_size=4)
        case "saved":
            datasets.Dataset.from_list(some).save_to_disk(str(folder / "a"))
            return folder / "a"
        case "several":
            (folder / "a.jsonl").write_text(lines(some[:3]))
            (folder / "b.json").write_text(json.dumps(some[3:4]))
            datasets.Dataset.from_list(some[4:]).to_parquet(folder / "c.parquet")
            return {str(folder / name): 1.0 for name in ("c.parquet", "a.jsonl", "b.json")}
        case "Dataset":
            return datasets.Dataset.from_list(some)
        case "list":
            return some
    return folder


KINDS = ["jsonl", "no line end", "gz", "json", "csv", "parquet", "saved", "several", "Dataset", "list"]


def same_files(one, other):
    """Whether two directories hold the same files of the same bytes."""
    names = sorted(path.relative_to(one).as_posix() for path in one.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(other).as_posix() for path in other.rglob("*") if path.is_file())
    return filecmp.cmpfiles(one, other, names, shallow=False)[0] == names


def parts_of(data, tokenizer, folder, count, **options):
    """Prepare every part."""
    return [
        prepare(data, tokenizer, folder / f"part{k}", shard=f"{k}/{count}", num_proc=1, progress=False, **options)
        for k in range(1, count + 1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_merged_parts_are_the_store_of_one_process(kind, chatml_tokenizer, tmp_path):
    """Every file of the store is the same, its accounting, its lint over all rows and its fingerprint included."""
    (tmp_path / "data").mkdir()
    data = sources(kind, tmp_path / "data")
    whole = prepare(data, chatml_tokenizer, tmp_path / "whole", max_seq_len=LONGEST, num_proc=1, progress=False)
    parts = parts_of(data, chatml_tokenizer, tmp_path, 4, max_seq_len=LONGEST)
    merged = merge(tmp_path / "merged", [part.path for part in parts[::-1]])
    assert same_files(whole.path, merged.path)
    assert sum(part.accounting.read for part in parts) == whole.accounting.read == 31
    assert merged.shard is None
    # It is the store of these rows: preparing again opens it.
    made = merged.path.stat().st_ino
    prepare(data, chatml_tokenizer, merged.path, max_seq_len=LONGEST, progress=False)
    assert merged.path.stat().st_ino == made


def test_parts_of_several_chunks(chatml_tokenizer, tmp_path, monkeypatch):
    """Borders of parts within chunks, at them, and parts of several chunks give the same rows; a part has its own places."""
    from forge_data.preparing import _pipeline

    monkeypatch.setattr(_pipeline, "_CHUNK_BYTES", 700)
    (tmp_path / "a.jsonl").write_text(lines(rows(31), blanks=(3,)))
    whole = prepare(tmp_path / "a.jsonl", chatml_tokenizer, tmp_path / "whole", num_proc=1, progress=False)
    for count in (2, 5):
        parts = parts_of(tmp_path / "a.jsonl", chatml_tokenizer, tmp_path / str(count), count)
        places = [part.source(index) for part in parts for index in range(len(part))]
        assert places == [whole.source(index) for index in range(len(whole))]
        assert str(parts[-1].shard).endswith("to a.jsonl:33")
        assert same_files(whole.path, merge(tmp_path / f"merged{count}", [part.path for part in parts]).path)


@pytest.mark.parametrize("kind", ["preference", "unpaired"])
def test_preferences_are_merged(kind, chatml_tokenizer, write_rows, tmp_path):
    """Margins and labels travel, and pairs stay pairs."""
    some = [{"prompt": f"{n}?", "completion": "yes", "label": n % 2 == 0} for n in range(7)]
    if kind == "preference":
        some = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no", "margin": n / 2} for n in range(7)]
    data = write_rows(some)
    whole = prepare(data, chatml_tokenizer, tmp_path / "whole", progress=False)
    merged = merge(tmp_path / "merged", [part.path for part in parts_of(data, chatml_tokenizer, tmp_path, 3)])
    assert same_files(whole.path, merged.path)


PROMPTS = [{"prompt": f"{n}?" if n % 3 else "", "answer": "é" * n} for n in range(11)]


@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_prompts_are_merged(kind, count, chatml_tokenizer, tmp_path):
    """Their tokens, rows, columns and accounting are those of one process, byte for byte, also with parts without any."""
    data = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        datasets.Dataset.from_list(PROMPTS).to_parquet(data)
    else:
        data.write_text(lines(PROMPTS) if kind == "jsonl" else json.dumps(PROMPTS))
    whole = prepare_prompts(data, chatml_tokenizer, tmp_path / "whole")
    parts = [prepare_prompts(data, chatml_tokenizer, tmp_path / f"part{k}", shard=f"{k}/{count}") for k in range(1, count + 1)]
    assert sum(len(part) for part in parts) == len(whole) == 7
    merged = merge(tmp_path / "merged", [part.path for part in parts[::-1]])
    assert isinstance(merged, PromptStore)
    assert same_files(whole.path, merged.path)
    made = merged.path.stat().st_ino
    assert prepare_prompts(data, chatml_tokenizer, merged.path).path.stat().st_ino == made
    again = prepare_prompts(data, chatml_tokenizer, parts[0].path, shard=f"1/{count}")
    assert (again.shard, again.inputs) == (parts[0].shard, whole.inputs)


def test_prompts_of_several_chunks(chatml_tokenizer, tmp_path, monkeypatch):
    """However many rows are read at once, and wherever parts begin, the store is the same."""
    monkeypatch.setattr(_prepare_prompts, "_ROWS", 2)
    (tmp_path / "a.jsonl").write_text(lines(PROMPTS, blanks=(3,)))
    whole = prepare_prompts(tmp_path / "a.jsonl", chatml_tokenizer, tmp_path / "whole")
    parts = [
        prepare_prompts(tmp_path / "a.jsonl", chatml_tokenizer, tmp_path / f"{k}", shard=f"{k}/4").path for k in (1, 2, 3, 4)
    ]
    assert same_files(whole.path, merge(tmp_path / "merged", parts).path)


def test_parts_of_prompts_are_refused_as_those_of_samples(chatml_tokenizer, write_rows, tmp_path):
    """Bad rows are counted over all parts, columns are those of all rows, and parts of nothing are nothing."""
    data = write_rows([{"question": "a?"}, {"question": 1}, *[{"question": f"{n}?"} for n in range(3)]])
    given = {"rename_columns": {"question": "prompt"}, "on_bad_row": "skip"}

    def parts(name, **options):
        return [
            prepare_prompts(data, chatml_tokenizer, tmp_path / f"{name}{k}", shard=f"{k}/7", **given | options).path
            for k in range(1, 8)
        ]

    with pytest.raises(DataError, match="1 of 5 rows"):
        merge(tmp_path / "merged", parts("few"))
    whole = prepare_prompts(data, chatml_tokenizer, tmp_path / "whole", **given, max_bad_rows=0.5)
    assert same_files(whole.path, merge(tmp_path / "merged", parts("many", max_bad_rows=0.5)).path)
    with pytest.raises(DataError, match="the column 'questoin', which no row has"):
        parts("no", rename_columns={"questoin": "prompt"})
    short = parts("short", max_bad_rows=0.5, max_prompt_len=1)
    with pytest.raises(StoreError, match="and all other parts hold no prompt: kept 0 of 5 rows"):
        merge(tmp_path / "none", short)
    with pytest.raises(StoreError, match="was made from other rows"):
        merge(tmp_path / "both", [*parts("first", max_bad_rows=0.5)[:6], short[6]])
    with pytest.raises(DataError, match="`shard` prepares a part of rows that can be read again"):
        prepare_prompts(iter(PROMPTS), chatml_tokenizer, tmp_path / "stream", shard="1/2")
    with pytest.raises(DataError, match="give K/N with K from 1 to N"):
        prepare_prompts(data, chatml_tokenizer, tmp_path / "none", shard="3/2")


def test_more_parts_than_rows(chatml_tokenizer, write_rows, tmp_path):
    """A part without rows is a store without samples, which can be merged, and looked at."""
    data = write_rows(rows(2))
    whole = prepare(data, chatml_tokenizer, tmp_path / "whole", progress=False)
    parts = parts_of(data, chatml_tokenizer, tmp_path, 5)
    assert [len(part) for part in parts] == [0, 0, 1, 0, 1]
    assert str(parts[0].shard) == "part 1 of 5"
    assert same_files(whole.path, merge(tmp_path / "merged", [part.path for part in parts]).path)
    made = parts[0].path.stat().st_ino
    assert prepare(data, chatml_tokenizer, parts[0].path, shard="1/5", progress=False).path.stat().st_ino == made
    again = prepare(data, chatml_tokenizer, parts[0].path, shard="3/5", progress=False)
    assert len(again) == 1, "another part of the same rows is no reason to keep this one"


def test_parts_that_do_not_belong_together_are_refused(chatml_tokenizer, write_rows, tmp_path):
    """One is missing, there twice, of another number, of other rows or settings, whole, or damaged: each is named."""
    data = write_rows(rows(9))
    first, second, third = (part.path for part in parts_of(data, chatml_tokenizer, tmp_path, 3))
    halves = parts_of(data, chatml_tokenizer, tmp_path / "halves", 2)
    whole = prepare(data, chatml_tokenizer, tmp_path / "whole", progress=False)
    others = parts_of(data, chatml_tokenizer, tmp_path / "others", 3, max_seq_len=LONGEST)
    cases = [
        ([], "no parts are given"),
        ([first], "of 3 parts 2, 3 are missing"),
        ([third, first], "of 3 parts 2 is missing"),
        ([first, second, second, third], "part2 and .*part2 are both part 2 of 3"),
        ([first, second, halves[0].path], "part1 is one of 2 parts, and .*part1 one of 3"),
        ([first, second, others[2].path], "others/part3 was made from other rows, or with another tokenizer"),
        ([first, second, whole.path], "whole is no part but a store of all its rows"),
        ([first, second, tmp_path], "is not a token store"),
    ]
    for paths, message in cases:
        with pytest.raises(StoreError, match=message):
            merge(tmp_path / "merged", paths)
    with pytest.raises(StoreError, match="part2 is one of the parts"):
        merge(second, [first, second, third])
    mask = bytearray((second / "loss_mask.bin").read_bytes())
    mask[3] ^= 1
    (second / "loss_mask.bin").write_bytes(mask)
    with pytest.raises(StoreError, match=r"part2/loss_mask\.bin does not hold what was written"):
        merge(tmp_path / "merged", [first, second, third])
    assert not (tmp_path / "merged").exists()


def test_rows_of_several_kinds_are_refused_as_in_one_process(chatml_tokenizer, write_rows, tmp_path):
    """Formats and margins that one process would refuse by row are refused by part."""
    margins = [{"prompt": "?", "chosen": "yes", "rejected": "no"} | ({"margin": 1.0} if n else {}) for n in range(2)]
    data = write_rows(margins)
    with pytest.raises(StoreError, match="hold rows of another margins: True and False"):
        merge(tmp_path / "merged", [part.path for part in parts_of(data, chatml_tokenizer, tmp_path, 2)])


def outcome(make):
    """The store that is made, or the message of the refusal."""
    try:
        return make()
    except DataError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [1, 2])
def test_bad_rows_are_counted_over_all_parts(bad, chatml_tokenizer, tmp_path):
    """A part with many of them is made; together they are as many as one process allows, or refused in its words."""
    some = [json.dumps(row) for row in rows(150)]
    some[3 : 3 + bad] = ['{"messages":'] * bad
    (tmp_path / "train.jsonl").write_text("\n".join(some))
    given = {"data_path": tmp_path / "train.jsonl", "tokenizer": chatml_tokenizer, "progress": False, "on_bad_row": "skip"}
    whole = outcome(lambda: prepare(store_dir=tmp_path / "whole", **given))
    parts = [prepare(store_dir=tmp_path / f"part{k}", shard=f"{k}/50", **given).path for k in range(1, 51)]
    merged = outcome(lambda: merge(tmp_path / "merged", parts))
    assert isinstance(whole, str) == (bad == 2)
    assert whole == merged if isinstance(whole, str) else same_files(whole.path, merged.path)


def test_rows_left_out_for_their_length_are_one_finding(chatml_tokenizer, write_rows, tmp_path):
    """As where `on_overflow` drops them, so that the lint of parts is that of all rows."""
    data = write_rows(rows(12))
    given = {"on_bad_row": "skip", "max_bad_rows": 0.5, "max_seq_len": LONGEST, "on_overflow": "error"}
    whole = prepare(data, chatml_tokenizer, tmp_path / "whole", progress=False, **given)
    assert whole.accounting.dropped["longer_than_max_seq_len"] > 1
    assert whole.lint.counts["lost_to_length"] == 1
    parts = parts_of(data, chatml_tokenizer, tmp_path, 3, **given)
    assert same_files(whole.path, merge(tmp_path / "merged", [part.path for part in parts]).path)


def test_columns_to_be_renamed_are_those_of_all_rows(chatml_tokenizer, write_rows, tmp_path):
    """A part whose rows lack one, or that has no rows, is made; a column that no row has is refused by each."""
    asked = write_rows([{"question": "?", "answer": "yes"}] * 2, "a.jsonl")
    data, names = [asked, write_rows(rows(3), "b.jsonl")], {"question": "prompt", "answer": "completion"}
    whole = prepare(data, chatml_tokenizer, tmp_path / "whole", rename_columns=names, progress=False)
    parts = parts_of(data, chatml_tokenizer, tmp_path, 7, rename_columns=names)
    assert same_files(whole.path, merge(tmp_path / "merged", [part.path for part in parts]).path)
    with pytest.raises(DataError, match="the column 'questoin', which no row has; did you mean 'question'"):
        parts_of(data, chatml_tokenizer, tmp_path, 7, rename_columns={"questoin": "prompt"})


# Reads `enable_thinking`, which is off where no turn has reasoning.
HYBRID = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '</think>' }}{% endif %}{% endif %}"
)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("thinking", [[], [4]])
def test_the_tokenizer_asks_as_all_parts_were_rendered(thinking, loaded, with_template, write_rows, tmp_path):
    """Rows with reasoning in one part alone change it; it is saved as one process saves it."""
    some = rows(6)
    for number in thinking:
        some[number]["messages"][1]["reasoning_content"] = "one more"
    data, tokenizer = write_rows(some), with_template(HYBRID)
    if loaded:
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        tokenizer = tmp_path / "tokenizer"
    whole = prepare(data, tokenizer, tmp_path / "whole", progress=False)
    assert ("set enable_thinking" in whole.tokenizer().chat_template) != bool(thinking)
    parts = parts_of(data, tokenizer, tmp_path, 3)
    assert same_files(whole.path, merge(tmp_path / "merged", [part.path for part in parts]).path)


@pytest.mark.parametrize("text", ["", "\n \n\n"])
def test_a_file_without_rows_is_refused_in_parts_too(text, chatml_tokenizer, write_rows, tmp_path):
    """As one process refuses it; no store of the other files' rows comes of it."""
    data = [write_rows(rows(5), "a.jsonl"), tmp_path / "b.jsonl"]
    data[1].write_text(text)
    with pytest.raises(DataError, match=r"b\.jsonl .*holds no rows"):
        parts_of(data, chatml_tokenizer, tmp_path, 2)


# Turns are learned apart; those of a row that counts share not even their first token.
APART = (
    "{% if messages[0]['content'] == 'counts' %}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_what_turns_share_does_not_depend_on_other_rows(with_template, write_rows, tmp_path):
    """A row of several samples is one, whatever rows are in its chunk, or in its part; its turns are one conversation."""
    some = [
        {"messages": [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, texts, strict=True)]}
        for texts in (["counts", "1", "?", "2"], ["?", "1", "?", "2"])
    ]
    data, tokenizer = write_rows(some), with_template(APART)
    whole = prepare(data, tokenizer, tmp_path / "whole", progress=False)
    assert (whole.conversations.tolist(), whole.shared.tolist()[0]) == ([0, 2, 4], 0)
    parts = parts_of(data, tokenizer, tmp_path, 2)
    assert [part.conversations.tolist() for part in parts] == [[0, 2], [0, 2]]
    assert same_files(whole.path, merge(tmp_path / "merged", [part.path for part in parts]).path)


@pytest.mark.parametrize("shard", ["0/3", "4/3", "3", "1/0", "-1/3", "1/3/5", " 1/3", 3])
def test_a_part_that_there_is_not(shard, chatml_tokenizer, write_rows, tmp_path):
    """The form of `shard` is said."""
    with pytest.raises(DataError, match="give K/N with K from 1 to N, such as 3/16"):
        prepare(write_rows(rows(3)), chatml_tokenizer, tmp_path / "store", shard=shard, progress=False)


def test_what_cannot_be_known_again_has_no_parts(chatml_tokenizer, write_rows, tmp_path):
    """A stream, which each process would read anew, and a function without a name are refused."""
    for data, options in ((iter(rows(3)), {}), (write_rows(rows(3)), {"preprocess": lambda row: row})):
        with pytest.raises(DataError, match="`shard` prepares a part of rows that can be read again"):
            prepare(data, chatml_tokenizer, tmp_path / "store", shard="1/2", progress=False, **options)


@settings(max_examples=60, deadline=None)
@given(total=st.integers(0, 1000), of=st.integers(1, 70))
def test_bounds_cover_all_once(total, of):
    """Parts follow one another without gap or overlap, and differ by one thing at most."""
    bounds = [Shard(index, of).bounds(total) for index in range(1, of + 1)]
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == total
    sizes = {stop - start for start, stop in bounds}
    assert max(sizes) - min(sizes) <= 1


def test_a_part_is_told_from_a_whole(chatml_tokenizer, write_rows, tmp_path):
    """An opened part says which rows it holds."""
    prepare(write_rows(rows(9)), chatml_tokenizer, tmp_path / "store", shard="2/3", progress=False)
    assert str(TokenStore.open(tmp_path / "store").shard) == "part 2 of 3: train.jsonl:4 to train.jsonl:6"
