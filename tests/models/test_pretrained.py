"""Models of transformers, made from a configuration and saved to disk; they are trained, resumed and refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedcluster
from fedcluster.data.sources import open_dataset
from fedcluster.errors import BadData, BadExperiment
from fedcluster.runs.progress import Display
from tests.models.test_tasks import LABELS, TOKENS, X, dataset, experiment, tokens

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of two small layers."""
    place = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(
        vocab_size=9, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=8, eos_token_id=8
    )
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(place)
    return place


def run(data: fedcluster.Dataset, place: Path, out: Path | None = None, **keys: Any) -> Any:
    described = experiment(data, **{"model": {"name": f"transformers:{place}"}, "rounds": 3, "local": LOCAL} | keys)
    return fedcluster.run(described, out, display=Display(), resume=out is not None)


LOCAL = {"steps": 10, "batch": 10, "lr": 0.3}


def test_a_causal_model_learns_the_next_token(folder: Path, tmp_path: Path) -> None:
    result = run(tokens(), folder, tmp_path / "run", rounds=4)
    assert result.history[-1]["test_perplexity"] < result.history[0]["test_perplexity"] < 9
    again = run(tokens(), folder, tmp_path / "run", rounds=4)  # finished: loaded, not trained
    x = torch.from_numpy(TOKENS[:, :-1])
    assert torch.equal(again.model.eval()(x).logits, result.model.eval()(x).logits)


def test_sequences_are_classified(folder: Path) -> None:
    data = dataset(TOKENS[:, :-1], (TOKENS[:, 0] > 2).astype(int))
    fleet = {"partition": "natural"}
    first, second = (run(data, folder, fleet=fleet).history[-1] for _ in range(2))
    assert first["test_loss"] == second["test_loss"]  # also the head, which the weights lack
    assert first["test_accuracy"] >= 0.5


@pytest.mark.parametrize("padding", [0, 6])
def test_texts_are_prepared_as_transformers_does(padding: int, tmp_path: Path) -> None:
    """Special tokens, padding by the tokenizer's own token, and a mask: the outputs are those of the library."""
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "film", "was", "good", "bad", "not", "so"]
    words.insert(padding, "[PAD]")
    numbers = {word: number for number, word in enumerate(words)}
    rules = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    rules.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(word, numbers[word]) for word in ("[CLS]", "[SEP]")]
    )
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=rules, pad_token="[PAD]", unk_token="[UNK]")
    theirs.save_pretrained(tmp_path)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        pad_token_id=padding,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    texts = ["the film was good", "bad", "not so good not so bad not so good", "was the film so bad"]
    table = {"text": texts, "label": [1, 0, 1, 0]}
    described = fedcluster.Experiment(
        rounds=1,
        data={"name": {"train": table, "test": table}, "tokenizer": str(tmp_path), "length": 7},
        fleet={"devices": 2, "samples": 4},
        clusters={"count": 1},
        model={"name": f"transformers:{tmp_path}"},
        local={"steps": 1},
    )
    data = open_dataset(described.data, lambda line: None)
    expected = theirs(texts, padding="max_length", truncation=True, max_length=7, return_tensors="pt")
    assert torch.equal(data.x_test, expected["input_ids"])
    model = fedcluster.run(described, display=Display()).model.eval()
    with torch.no_grad():
        assert torch.equal(model(data.x_test).logits, model(**expected).logits)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(BadData, match="is not a tokenizer's configuration"):
        open_dataset(described.data, lambda line: None)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda: dataset(X, LABELS[:, 0]), r"takes token ids, but a sample is \[5\] numbers"),
        (lambda: dataset(TOKENS * 3, np.roll(TOKENS, 1) * 3), "knows 9 tokens, but the data have 16"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, data: Any, said: str) -> None:
    with pytest.raises(BadExperiment, match=said):
        run(data(), folder)


def test_a_model_that_is_not_there_or_is_a_pickle_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadExperiment, match="cannot be loaded from disk or from the cache"):
        run(tokens(), tmp_path / "nothing")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BadExperiment, match="cannot be loaded from disk or from the cache"):
        run(tokens(), tmp_path)


def test_the_model_of_a_run_is_loaded_without_asking_to_trust_its_code(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    result = run(tokens(), Path(folder.name), tmp_path / "run", rounds=1)  # transformers:<name>
    x = torch.from_numpy(TOKENS[:, :-1])
    assert torch.equal(fedcluster.load_model(tmp_path / "run")(x).logits, result.model.eval()(x).logits)
