"""Weights from safetensors files: a start W_0 that an experiment gives, checkpoints that are analysed."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedcluster.errors import BadData
from fedcluster.models.flat_model import FlatModel


def read_tensors(path: Path, key: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file that `key` asks for."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise BadData(f"{key}: there is no file {path}") from None
    except (OSError, SafetensorError) as error:
        raise BadData(f"{key}: {path} is not a safetensors file ({error})") from None


def load_weights(path: Path, flat_model: FlatModel, key: str) -> torch.Tensor:
    """The vector w of a safetensors file whose tensors are named as in the model's state dict; `key` asks for it."""
    tensors = read_tensors(path, key)
    try:
        vector = flat_model.from_state_dict(tensors)
    except ValueError as error:
        wanted = format_shapes(flat_model.state_shapes())
        raise BadData(f"{key}: {path} must have the tensors {wanted}, but {error} does not fit") from None
    if not torch.isfinite(vector).all():
        raise BadData(f"{key}: {path} has values that are not finite")
    return vector


def format_shapes(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
