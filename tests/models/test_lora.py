"""A transformer with LoRA adapters sends its adapters, and nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedcluster
from fedcluster.data.dataset import DataSpec
from fedcluster.models import zoo
from fedcluster.runs.progress import Display
from tests.federation import Federation

transformers = pytest.importorskip("transformers", reason="pip install transformers")
peft = pytest.importorskip("peft", reason="pip install peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft's use of transformers

WORDS, LENGTH, CLASSES = 40, 6, 3


class Scores(nn.Module):
    """A Hugging Face model that returns only its scores, for samples that are token ids."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.model(input_ids=x.long()).logits
        return scores


def adapted(shape: tuple[int, ...], classes: int) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_labels=classes,
    )
    model = transformers.BertForSequenceClassification(config)
    return Scores(
        peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))
    )


def sentences() -> fedcluster.Dataset:
    rng = np.random.default_rng(0)
    x = rng.integers(0, WORDS, (120, LENGTH)).astype(np.float32)
    y = x[:, 0].astype(np.int64) % CLASSES
    return fedcluster.Dataset(x[:100], y[:100], x[100:], y[100:], device_train=np.arange(100) % 5, classes=CLASSES)


def test_only_the_adapters_travel(tmp_path: Path) -> None:
    described = fedcluster.Experiment(
        rounds=2,
        data={"name": sentences()},
        fleet={"partition": "natural"},
        clusters={"count": 2, "participation": 1.0},
        model={"name": adapted},
        local={"epochs": 1, "batch": 8, "lr": 0.01, "optimizer": "adamw", "clip_norm": 1.0},
    )
    model = adapted((LENGTH,), CLASSES)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("lora_A" in name for name in trained)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    everything = sum(p.numel() for p in model.parameters())
    assert adapters < everything / 10
    result = fedcluster.run(described, tmp_path / "run", display=Display())
    line = result.history[-1]
    assert line["device_updates"] == 2 * 5
    assert line["bytes_up"] == line["bytes_down"] == 2 * 5 * 4 * adapters
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    start = zoo.build(adapted, DataSpec((LENGTH,), "class", CLASSES), described.seed)
    for name, tensor in start.state_dict().items():
        moves = name in trained and "lora_A" not in name  # lora_B is 0 at first, so lora_A hardly moves
        assert not moves or not torch.equal(saved[name], tensor), name
        assert name in trained or torch.equal(saved[name], tensor), name
    workers = fedcluster.run(described, display=Display(), workers=2)
    again = fedcluster.run(described, tmp_path / "run", resume=True, display=Display())
    for name, tensor in result.model.state_dict().items():
        assert torch.equal(workers.model.state_dict()[name], tensor), name
        assert torch.equal(again.model.state_dict()[name], tensor), name


def test_a_federation_on_loopback_sends_the_adapters_only(tmp_path: Path) -> None:
    """Both sides build the frozen weights from the seed; the model is the simulation's to the bit."""
    name, data = "tests.models.test_lora:adapted", sentences()
    parts = {part: getattr(data, part).numpy() for part in ("x_train", "y_train", "x_test", "y_test")}
    np.savez(tmp_path / "sentences.npz", **parts)
    described = fedcluster.Experiment(
        rounds=2,
        data={"name": str(tmp_path / "sentences.npz")},
        fleet={"devices": 2, "samples": 40, "partition": "iid"},
        clusters={"count": 2, "participation": 1.0},
        model={"name": name},
        local={"epochs": 1, "batch": 8, "lr": 0.01, "optimizer": "adamw"},
    )
    with Federation(tmp_path, described) as federation:
        for k in range(2):
            federation.join(k, "--allow", name)
        federation.finish(federation.serve("out"), "out")
        line = federation.lines("out", "metrics.jsonl")[-1]
    adapters = sum(p.numel() for p in adapted((LENGTH,), CLASSES).parameters() if p.requires_grad)
    assert line["bytes_up"] == line["bytes_down"] == 2 * 2 * 4 * adapters
    fedcluster.run(described, tmp_path / "simulated", display=Display())
    saved = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert saved == (tmp_path / "simulated" / "model.safetensors").read_bytes()
