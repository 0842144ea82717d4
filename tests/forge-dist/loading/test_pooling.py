"""Which hidden states are an embedding: what a directory of sentence-transformers says, else what the model's type suggests."""

import json

import pytest
import transformers

from forge_dist import ModelError, hidden_size, load_model, model_pooling


def said(folder, content):
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return model_pooling(str(folder))[0]


@pytest.mark.parametrize(
    ("content", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 3}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_what_the_file_says(content, pooling, tmp_path):
    """In the form of every version of sentence-transformers."""
    assert said(tmp_path, content) == pooling


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"pooling_mode_max_tokens": True}, "pools by pooling_mode_max_tokens"),
        (
            {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True},
            "pools by pooling_mode_max_tokens, pooling_mode_mean",
        ),
        ({"include_prompt": True}, "pools by nothing"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
    ],
)
def test_another_pooling_is_named(content, message, tmp_path):
    """An error that says what to set."""
    with pytest.raises(ModelError, match=f"{message}.*set `pooling`"):
        said(tmp_path, content)


def test_without_a_file_the_type_decides(base, tmp_path):
    """The last token of a causal model, the mean of one of masked language models."""
    assert model_pooling(base)[0] == "last"
    transformers.BertConfig().save_pretrained(tmp_path)
    assert model_pooling(str(tmp_path)) == ("mean", "a model of the type bert looks at a text from both sides")


def test_the_width_of_a_model(base):
    """The size of its hidden states."""
    import torch

    model = load_model(base, dtype=torch.float32, device="cpu", task="embedding")
    assert hidden_size(model) == model.config.hidden_size
