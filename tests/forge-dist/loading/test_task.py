"""A directory of either kind → a reward model: the head new once or read, everything else read or an error, on any number of
ranks.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from forge_dist import (
    Classifier,
    ModelError,
    asks_before_pooling,
    check_export,
    check_model,
    check_model_path,
    directory_task,
    export_model,
    hidden_size,
    load_model,
    load_trained,
    merge_adapter,
    model_pooling,
    model_prompts,
)

from ...ranks import run_on_ranks
from ..divided import DIVIDED
from ..rewards import ROWS, loaded, padded, rewards


def load(path, seed=5):
    torch.manual_seed(seed)
    return load_model(path, dtype=torch.float32, device="cpu", task="reward")


@pytest.fixture(autouse=True)
def own_random_state():
    with torch.random.fork_rng():
        yield


@pytest.fixture
def classifier(base, tmp_path):
    """`classifier(labels)`: the directory of a classifier, as transformers writes it."""

    def save(labels=1):
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels, pad_token_id=1)
        model.save_pretrained(tmp_path / f"classifier-{labels}")
        return str(tmp_path / f"classifier-{labels}")

    return save


def test_a_new_head(save_base, architecture, make_model):
    """From a causal directory every weight but the head is the file's, the head follows from torch's seed, and is small."""
    path = save_base(architecture)
    model, causal = load(path), make_model(architecture).state_dict()
    assert type(model).__name__.endswith("ForSequenceClassification")
    assert model.config.num_labels == 1
    assert not model.training
    for name, tensor in model.state_dict().items():
        assert name == "score.weight" or torch.equal(tensor, causal[name]), name
    torch.manual_seed(5)
    assert torch.equal(model.score.weight, torch.randn(1, 16) * model.config.initializer_range)
    assert torch.equal(model.score.weight, load(path).score.weight)
    assert not torch.equal(model.score.weight, load(path, seed=6).score.weight)


def test_a_head_that_is_there(classifier):
    """From the directory of a classifier with one label the head is read, and no random number is drawn."""
    path = classifier()
    model = load(path)
    assert torch.equal(model.score.weight, load_file(Path(path, "model.safetensors"))["score.weight"])
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize("labels", [2, 3])
def test_another_number_of_labels(classifier, labels):
    """A classifier that is no reward model is refused by its config.json."""
    path = classifier(labels)
    with pytest.raises(ModelError, match=f"a classifier with {labels} labels; a reward model has one"):
        check_model_path(path, task="reward")
    with pytest.raises(ModelError, match=f"{labels} labels"):
        load(path)


def test_a_reward_model_is_no_causal_model(classifier):
    """Without the task a reward model is refused, as any classifier is."""
    with pytest.raises(ModelError, match="no causal language model but a classifier or reward model"):
        load_model(classifier(), dtype=torch.float32, device="cpu")


def test_an_architecture_without_rewards(tmp_path):
    """A causal model that transformers cannot make a classifier of is an error."""
    import transformers

    config = transformers.CohereConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    transformers.CohereForCausalLM(config).save_pretrained(tmp_path / "cohere")
    with pytest.raises(ModelError, match=r"model_path .*type cohere gives no rewards: .*ForSequenceClassification"):
        load(str(tmp_path / "cohere"))


DAMAGES = {
    "lacks weight model.norm.weight": lambda tensors: tensors.pop("model.norm.weight"),
    "has the unexpected weight model.other.weight": lambda tensors: tensors.update({"model.other.weight": torch.zeros(2)}),
    "has another shape of weight model.norm.weight": lambda tensors: tensors.update({"model.norm.weight": torch.zeros(2)}),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_every_other_weight_counts(save_base, message):
    """Beside a new head, a tensor that is missing, too many or of another shape is an error as ever."""
    path = save_base("llama-untied")
    file = Path(path, "model.safetensors")
    tensors = load_file(file)
    DAMAGES[message](tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load(path)


def test_a_classifier_without_its_head(classifier):
    """The head of a directory that should have one is not drawn anew."""
    path = classifier()
    tensors = load_file(Path(path, "model.safetensors"))
    del tensors["score.weight"]
    save_file(tensors, Path(path, "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lacks weight score.weight"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "pad"),
    [
        ({"pad_token_id": 9}, 9),  # the directory's own
        ({"pad_token_id": None}, 1),  # what no row ends with: here the token that begins one
        ({"pad_token_id": 2, "eos_token_id": 2}, 1),  # padding with the end of a text: the reward would be read before it
        ({"pad_token_id": None, "eos_token_id": [1, 2]}, None),  # nothing is left: one row at a time
    ],
)
def test_padding(base, edit_config, changes, pad):
    """The padding token is one that ends no row, and a padded batch then gives what single rows do."""
    edit_config(base, **changes)
    model = load(base)
    assert model.config.pad_token_id == pad
    if pad is not None:
        assert padded(model, pad) == pytest.approx(rewards(model), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("special", "pad"),
    [
        ({"pad_token": "<pad>", "eos_token": "<eos>"}, 0),
        ({"pad_token": "<eos>", "eos_token": "<eos>", "unk_token": "<unk>"}, 0),
    ],
)
def test_padding_of_the_tokenizer(base, edit_config, tokenizer, special, pad):
    """Where the configuration names none, the tokenizer's is taken, or one of its special tokens that is called so."""
    from transformers import PreTrainedTokenizerFast

    edit_config(base, pad_token_id=None, eos_token_id=1)
    own = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **special)
    own.add_special_tokens({"extra_special_tokens": ["<pad>"]})
    own.save_pretrained(base)
    assert load(base).config.pad_token_id == pad


def test_an_adapter_to_use(base, tmp_path):
    """`load_trained` with the task reads a reward model's adapter on its causal base."""
    from ..rewards import with_lora

    model = with_lora(load(base))
    export_model(model, tmp_path / "adapter")
    torch.manual_seed(99)
    found = load_trained(str(tmp_path / "adapter"), dtype=torch.float32, device="cpu", task="reward")
    ids = torch.tensor(ROWS[:1])
    with torch.no_grad():
        assert torch.equal(found(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


@pytest.mark.slow
@pytest.mark.together
def test_on_ranks(save_base, tmp_path):
    """Every strategy reads the same weights, draws the same head and leaves the same random state as one process does."""
    base = save_base("llama-untied")
    one = load(base)
    after = torch.rand(1).item()
    one.save_pretrained(tmp_path / "reward")
    read = load(str(tmp_path / "reward"))
    paths = {"new": base, "read": str(tmp_path / "reward")}
    assert json.loads(Path(paths["read"], "config.json").read_text())["id2label"] == {"0": "LABEL_0"}
    for name in DIVIDED:
        first, second = run_on_ranks(loaded, 2, name, paths)
        for what, whole in (("new", one), ("read", read)):
            weights, drawn, values = first[what]
            assert weights.keys() == whole.state_dict().keys(), name
            assert all(torch.equal(weights[key], tensor) for key, tensor in whole.state_dict().items()), name
            assert drawn == second[what][1], name
            assert values == pytest.approx(rewards(whole), rel=1e-5), name
            assert second[what][2] == values, name
        assert first["new"][1] == after, name


LABELS = Classifier(labels=("a", "b", "c"))


def test_several_labels(base, tmp_path):
    """From a causal directory the head has an output a label, drawn from torch's seed; the names are in the configuration
    and in an export, from which the same model is read.
    """
    torch.manual_seed(5)
    model = load_model(base, dtype=torch.float32, device="cpu", task=LABELS)
    torch.manual_seed(5)
    assert torch.equal(model.score.weight, torch.randn(3, 16) * model.config.initializer_range)
    assert model.config.problem_type == "single_label_classification"
    where = export_model(model, tmp_path / "out")
    check = check_export(model, where, [([5, 6, 7], [5, 6, 7])])
    assert check.loss_tokens == 3
    plain = AutoModelForSequenceClassification.from_pretrained(where)
    assert plain.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert directory_task(str(where)) == LABELS
    assert directory_task(base) == "causal"
    read = load_model(str(where), dtype=torch.float32, device="cpu", task=Classifier(multi_label=True))
    assert torch.equal(read.score.weight, model.score.weight)
    assert read.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert read.config.problem_type == "multi_label_classification"
    with pytest.raises(ModelError, match=r"a classifier with 3 labels \(a, b, c\); 2 are wanted \(x, y\)"):
        load_model(str(where), dtype=torch.float32, device="cpu", task=Classifier(labels=("x", "y")))


def test_a_reward_model_is_no_classifier_of_several(classifier):
    """A head of one number cannot tell two labels apart, and is refused by name."""
    with pytest.raises(ModelError, match="a reward model, which gives one number"):
        check_model_path(classifier(1), task=LABELS)


def test_an_adapter_names_its_labels(base, tmp_path):
    """Beside an adapter stands the configuration with the names, by which the base is loaded again."""
    from ..rewards import with_lora

    torch.manual_seed(5)
    model = with_lora(load_model(base, dtype=torch.float32, device="cpu", task=LABELS))
    where = export_model(model, tmp_path / "out")
    assert directory_task(str(where)) == LABELS
    assert check_export(model, where, [([5, 6, 7], [5, 6, 7])]).loss_tokens == 3
    found = load_trained(str(where), dtype=torch.float32, device="cpu", task=directory_task(str(where)))
    ids = torch.tensor(ROWS[:1])
    with torch.no_grad():
        assert torch.equal(found(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def _hidden(model, ids=(1, 5, 7, 9, 2)):
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([ids])).last_hidden_state


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "LlamaModel", "BertForMaskedLM", "BertForPreTraining", "BertModel"])
def test_a_model_without_a_head(kind, tmp_path):
    """AutoModel's class with every weight but a head's and a pooling layer's, exported as that class, for plain AutoModel."""
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = (transformers.LlamaConfig if kind.startswith("Llama") else transformers.BertConfig)(**sizes)
    getattr(transformers, kind)(config).save_pretrained(tmp_path / "model")
    path = str(tmp_path / "model")
    assert check_model(path, task="embedding") == 64
    model = load_model(path, dtype=torch.float32, device="cpu", task="embedding")
    assert type(model).__name__ == kind[: 5 if kind.startswith("Llama") else 4] + "Model"
    assert getattr(model, "pooler", None) is None
    assert torch.equal(_hidden(model), _hidden(transformers.AutoModel.from_pretrained(path, attn_implementation="sdpa")))
    export_model(model, tmp_path / "export")
    found = check_export(model, tmp_path / "export", [([1, 5, 7, 9, 2], [-100] * 5), ([4, 3], [-100] * 2)])
    assert found.difference == 0
    assert directory_task(str(tmp_path / "export")) == "embedding"
    assert torch.equal(_hidden(model), _hidden(transformers.AutoModel.from_pretrained(tmp_path / "export")))


def test_other_weights_count_without_a_head_too(base, tmp_path):
    """A tensor that is no head's is an error, and so are a classifier's directory and an encoder-decoder's."""
    state = load_file(Path(base) / "model.safetensors")
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "config.json").write_text((Path(base) / "config.json").read_text())
    save_file({**state, "extra.weight": torch.zeros(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"unexpected weight extra\.weight"):
        load_model(str(folder), dtype=torch.float32, device="cpu", task="embedding")
    config = json.loads((Path(base) / "config.json").read_text())
    for change, message in (
        ({"architectures": ["LlamaForSequenceClassification"]}, "without a head"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=message):
            check_model_path(str(folder), task="embedding")


def test_an_adapter_on_a_model_without_a_head(base, tmp_path):
    """Plain PEFT loads it on plain AutoModel; its directory says its task, and it merges."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModel

    model = load_model(base, dtype=torch.float32, device="cpu", task="embedding")
    adapted = get_peft_model(
        model, LoraConfig(task_type="FEATURE_EXTRACTION", target_modules=["q_proj"], init_lora_weights=False)
    )
    export_model(adapted, tmp_path / "adapter")
    assert check_export(adapted, tmp_path / "adapter", [([1, 5, 7], [-100] * 3)]).difference < 1e-6
    assert directory_task(str(tmp_path / "adapter")) == "embedding"
    plain = PeftModel.from_pretrained(AutoModel.from_pretrained(base), tmp_path / "adapter")
    assert torch.allclose(_hidden(plain), _hidden(adapted), atol=1e-6)
    merged = merge_adapter(tmp_path / "adapter", [[1, 5, 7]], task="embedding")
    assert torch.allclose(_hidden(merged.model), _hidden(adapted), atol=1e-5)


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
    from transformers import BertConfig

    assert model_pooling(base)[0] == "last"
    BertConfig().save_pretrained(tmp_path)
    assert model_pooling(str(tmp_path)) == ("mean", "a model of the type bert looks at a text from both sides")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}],
            "modules.json names the module Dense.*set `pooling`",
        ),
        ({"idx": 0}, "modules.json cannot be read"),
        ("{", "modules.json cannot be read"),
    ],
)
def test_modules_after_the_pooling_are_refused(content, message, tmp_path):
    """A layer of sentence-transformers after the pooling would be lost without a word; the three that are trained are none."""
    path = tmp_path / "modules.json"
    kinds = ("models.Transformer", "models.Pooling", "sentence_transformer.modules.normalize.Normalize")
    path.write_text(json.dumps([{"type": f"sentence_transformers.{kind}", "path": ""} for kind in kinds]))
    assert said(tmp_path, {"pooling_mode": "mean"}) == "mean"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ModelError, match=message):
        model_pooling(str(tmp_path))


def test_prompts_that_are_stored(tmp_path):
    """They are read by their names; without a file there are none, and one that cannot be read is named."""
    assert model_prompts(str(tmp_path)) == {}
    path = tmp_path / "config_sentence_transformers.json"
    path.write_text('{"prompts": {"query": "query: "}}')
    assert model_prompts(str(tmp_path)) == {"query": "query: "}
    path.write_text('{"__version__": {}}')
    assert model_prompts(str(tmp_path)) == {}
    for content in ("{", "[]", '{"prompts": {"query": 3}}', '{"prompts": ["query: "]}'):
        path.write_text(content)
        with pytest.raises(ModelError, match=r"config_sentence_transformers\.json cannot be read"):
            model_prompts(str(tmp_path))


def test_the_width_of_a_model(base):
    """The size of its hidden states."""
    model = load_model(base, dtype=torch.float32, device="cpu", task="embedding")
    assert hidden_size(model) == model.config.hidden_size


def test_a_generation_prompt_that_is_stored(tmp_path):
    """sentence-transformers is told of it; other arguments of the chat template are refused by name."""
    assert not asks_before_pooling(str(tmp_path))
    path = tmp_path / "sentence_bert_config.json"
    for arguments, asks in (({}, False), ({"add_generation_prompt": True, "restore_suffix": True}, True)):
        path.write_text(json.dumps({"processing_kwargs": {"chat_template": arguments}}))
        assert asks_before_pooling(str(tmp_path)) is asks
    path.write_text(json.dumps({"processing_kwargs": {"chat_template": {"enable_thinking": False}}}))
    with pytest.raises(ModelError, match="gives the chat template enable_thinking"):
        asks_before_pooling(str(tmp_path))
    for content in ("{", "[]", '{"processing_kwargs": {"chat_template": 3}}'):
        path.write_text(content)
        with pytest.raises(ModelError, match=r"sentence_bert_config\.json cannot be read"):
            asks_before_pooling(str(tmp_path))
