"""Errors on the command line name flags, not settings."""

from __future__ import annotations

import pytest

from forge.cli._flags import OF_AN_ENTRY, as_flags
from forge_data._own_reading import OWN

NAMES = "model_path data_path max_seq_len seed lint keep_best target_modules reference output resume num_epochs".split()
FLAGS = {name: f"--{name.replace('_', '-')}" for name in NAMES} | {"batch_size": "--effective-batch-size"}


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("max_seq_len=40 drops every row.", "--max-seq-len 40 drops every row."),
        ("raise max_seq_len, or leave it out.", "raise --max-seq-len, or leave it out."),
        ("(lint=off overrules it; `forge data lint` lists all)", "(--lint off overrules it; `forge data lint` lists all)"),
        ("set reference='stored' or reference=live.", "set --reference stored or --reference live."),
        ("keep_best=True has no effect", "--keep-best has no effect"),
        ("Give keep_best=false to resume it", "Give --no-keep-best to resume it"),
        ('Give target_modules=["q_proj", "v_proj"] to', "Give --target-modules q_proj v_proj to"),
        ("target_modules=('q_proj',) fits nothing", "--target-modules q_proj fits nothing"),
        ("target_modules=[q_proj, v_proj] with", "--target-modules [q_proj, v_proj] with"),
        ("seed must be at least 0", "--seed must be at least 0"),
        ("'seed' must be >= 0: -1 (flag)", "--seed must be >= 0: -1 (flag)"),
        ("output: exists", "--output: exists"),
        ("batch_size=32 is less than the 33 ranks", "--effective-batch-size 32 is less than the 33 ranks"),
        ("resume=/runs/full_state/step_3: there is none", "--resume /runs/full_state/step_3: there is none"),
    ],
)
def test_settings_become_flags(message: str, wanted: str) -> None:
    """With their values, without quotation marks and commas; a switch without a value."""
    assert as_flags(message, FLAGS) == wanted


@pytest.mark.parametrize(
    "message",
    [
        "unknown setting 'num_epoch' (recipe r.yaml). Did you mean 'num_epochs'?",
        "max_seq_len must be a whole number, not 'x' (recipe r.yaml).",
        "/runs/max_seq_len/model_path is no directory",
        "rows.jsonl:3 has a field 'data_path'",
        "the seed of the lint",
        "behind a.jsonl stands '{max_seq_len: 4}', which is no JSON",
        'a.jsonl has {"data_path": "b"} of its own',
        "config.max_seq_len and max_seq_len.json",
        "no such thing: max_seq_length",
    ],
)
def test_what_is_no_setting_stays(message: str) -> None:
    """Paths, fields of rows, words that happen to name a setting, and messages about a recipe."""
    assert as_flags(message, FLAGS) == message


def test_names_in_an_entry_stay() -> None:
    """A shell gives an entry's settings as JSON, where a flag is no name; the run's own are flags in such a message too."""
    flags = {name: f"--{name.replace('_', '-')}" for name in (*OWN, "data_path", "max_seq_len")}
    assert set(OWN) == OF_AN_ENTRY
    for name in OWN:
        said = f"of the entry a.jsonl {name}='x' has no effect with {name}; known: {', '.join(OWN)}"
        assert as_flags(f"data_path: {said}", flags) == f"--data-path: {said}"
    said = as_flags("`data_path`: of the entry a on_overflow='split' has no effect without a limit: set max_seq_len", flags)
    assert said == "--data-path: of the entry a on_overflow='split' has no effect without a limit: set --max-seq-len"
    assert as_flags("turns='x' has no effect: each entry of data_path has one", flags) == (
        "--turns x has no effect: each entry of --data-path has one"
    )


def test_without_flags_nothing_changes() -> None:
    """A command without options of its own passes messages on."""
    assert as_flags("seed=1 must be", {}) == "seed=1 must be"
