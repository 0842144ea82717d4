"""What `hatch run families` makes of answers. The checks themselves: tests/whole."""

import families
import pytest

WHY = "FalconForCausalLM does not keep documents apart; documents are run alone, several in a forward"
RIGHT = {
    "built": {"ok": True, "says": "LlamaForCausalLM"},
    "numbers": {"ok": True, "loss": 1e-8, "gradients": 2e-7, "packed": True, "attention": "documents", "why": "it does"},
    "export": {"ok": True, "says": "read back"},
    "lora": {"ok": True, "says": "14 linear layers", "cell": "14"},
    "gguf": {"ok": None, "says": "no such type"},
}
FOUND = {
    "llama": RIGHT,
    "falcon": RIGHT | {"numbers": RIGHT["numbers"] | {"packed": False, "why": WHY}},
    "copies": RIGHT | {"ranks": {"ok": True, "says": "5e-08", "cell": "ddp", "reason": "StrategyError: several tensors"}},
    "half": RIGHT | {"lora": {"ok": False, "refused": True, "says": "PEFT has none"}},
    "leaks": {"built": RIGHT["built"], "numbers": RIGHT["numbers"] | {"ok": False, "says": "loss 1e-2, gradients 1e-1 (x)"}},
    "crashes": {"built": RIGHT["built"], "numbers": {"ok": False, "refused": False, "says": "KeyError: x"}},
    "refused": {"built": RIGHT["built"], "numbers": {"ok": False, "refused": True, "says": "too long"}},
    "drafts": {"built": RIGHT["built"], "numbers": {"ok": None, "says": "ValueError: needs_states"}},
    "timm": {"built": {"ok": False, "refused": False, "says": "ImportError: timm"}},
}


def test_each_family_is_in_one_state():
    """What was wrong, refused or crashed, what plain transformers cannot do, and what was not built are told apart."""
    states = ["right", "right", "right", "right, but", "wrong", "failed", "refused", "not plain", "not built"]
    assert [families.state(answers) for answers in FOUND.values()] == states


def test_the_page_counts_and_gives_every_reason():
    """Each family stands in the table or under a reason; totals are of those that were built."""
    text = families.page(families.parts(FOUND))
    assert "Of the 9 model types" in text
    assert "8 could be built tiny. **4 of these (50.0 %) train right**: 3 packed, 1 with each document alone" in text
    assert "1 are wrong, 1 fail, 1 are refused, and 1 cannot be trained by plain transformers. 3 pass every check" in text
    assert "| `llama` | LlamaForCausalLM | packed, documents | 1e-08 | 2e-07 | yes | - | - | 14 | - | - |" in text
    assert "| `copies` | LlamaForCausalLM | packed, documents | 1e-08 | 2e-07 | yes | - | ddp | 14 | - | - |" in text
    assert "| `half` | LlamaForCausalLM | packed, documents | 1e-08 | 2e-07 | yes | - | - | **refused** | - | - |" in text
    assert "| `leaks` | LlamaForCausalLM | **wrong**, documents | 1e-08 |" in text
    for reason in (
        "`copies`: StrategyError: several tensors",
        "`half`: LoRA: PEFT has none",
        "`leaks`: numbers: loss 1e-2",
        "`crashes`: numbers: KeyError",
        "`refused`: numbers: too long",
        "`drafts`: ValueError: needs\\_states",
        "`timm`: ImportError: timm",
        f"`falcon`: {WHY}",
    ):
        assert f"- {reason}" in text, reason


def test_some_families_are_checked_again():
    """What the page says of them is replaced, the rest and the totals of all stay; a page read and written is the same."""
    text = families.page(families.parts(FOUND))
    old = families.read_parts(text)
    assert families.page(old) == text
    again = {"half": RIGHT, "falcon": RIGHT, "timm": RIGHT, "llama": FOUND["crashes"]}
    new = families.replaced(old, families.parts(again), list(FOUND))
    assert families.page(new) == families.page(families.parts(FOUND | again))


def test_the_page_of_divided_layers(tmp_path, monkeypatch):
    """A family stands in the table where one way divides it, and under what is refused where none does."""
    monkeypatch.setattr(families, "RESULTS", tmp_path)
    yes, no = {"ok": True, "says": "5e-08"}, {"ok": None, "says": "StrategyError: no plan"}
    wrong = {"ok": False, "says": "8e-03"}
    asked = {"llama": (yes, no, no), "dots": (wrong, yes, yes), "bart": (no, no, no)}
    found = {name: {"built": RIGHT["built"], **dict(zip(families.INSIDE, ways, strict=True))} for name, ways in asked.items()}
    families.write_inside({**found, "timm": FOUND["timm"]})
    text = (tmp_path / "tensor_parallel.md").read_text()
    assert "Of 4 model types 3 train on one rank, and the layers of 2 of these can be divided" in text
    assert "| `llama` | 5e-08 | - | - |" in text
    assert "| `dots` | **fails** | 5e-08 | 5e-08 |" in text
    assert "## What is wrong or fails\n\n- `dots`: 8e-03" in text
    assert "## What is refused\n\n- `bart`: StrategyError: no plan" in text


def test_an_unknown_type_is_refused(capsys):
    """--only names model types of transformers."""
    with pytest.raises(SystemExit):
        families.main(["--only", "lama"])
    assert "no causal language model of transformers has the type 'lama'" in capsys.readouterr().err
