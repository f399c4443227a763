"""Models of the Hugging Face library transformers: `model.name = "transformers:<name or folder>"`.

The architecture and its weights come from a folder or from the user's cache (from the hub only where it may be asked).
Weights are safetensors, never a pickle, and no code is loaded with them.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedcluster.data.dataset import DataSpec
from fedcluster.errors import BadExperiment

PREFIX = "transformers:"
HEADS = {"class": "AutoModelForSequenceClassification", "token": "AutoModelForCausalLM"}
HEADS |= dict.fromkeys(("number", "multilabel"), HEADS["class"])


def is_pretrained(name: Any) -> bool:
    return isinstance(name, str) and name.startswith(PREFIX)


def without_padding(padding: int, module: nn.Module, given: tuple[Any, ...], keys: dict[str, Any]) -> Any:
    """Let no position attend to padding, as the library's own tokenizers do by an `attention_mask`."""
    if given and "attention_mask" not in keys:
        keys = keys | {"attention_mask": (given[0] != padding).long()}
    return given, keys


def load(name: str, spec: DataSpec) -> nn.Module:
    """The model for this kind of targets, in float32. A head that the weights lack is initialised by torch's current
    random state."""
    place = name.removeprefix(PREFIX)
    try:
        import transformers
    except ImportError:
        raise BadExperiment(f'model.name = "{name}" needs transformers: pip install "fedcluster[text]"') from None
    if not spec.vocabulary:
        raise BadExperiment(f'model.name = "{name}" takes token ids, but a sample is {list(spec.shape)} numbers')
    labels = {} if spec.target == "token" else {"num_labels": spec.outputs}
    options = labels | {"trust_remote_code": False, "local_files_only": True}
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    try:
        module: Any = getattr(transformers, HEADS[spec.target]).from_pretrained(
            str(Path(place).expanduser()), use_safetensors=True, dtype=torch.float32, **options
        )
    except Exception as error:  # the library raises its own kind for each way that this can fail
        why = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise BadExperiment(
            f'model.name = "{name}" cannot be loaded from disk or from the cache ({why}): give a folder with '
            "config.json and safetensors weights, or fetch it once with `hf download`"
        ) from None
    words = module.get_input_embeddings().num_embeddings
    if spec.vocabulary > words:
        raise BadExperiment(
            f'model.name = "{name}" knows {words:,} tokens, but the data have {spec.vocabulary:,}: tokenise them with '
            "the model's own tokenizer"
        )
    if spec.target != "token":
        if module.config.pad_token_id is None:  # which position is the last is told by padding
            module.config.pad_token_id = module.config.eos_token_id
        if module.config.pad_token_id is not None:
            module.register_forward_pre_hook(partial(without_padding, module.config.pad_token_id), with_kwargs=True)
    found: nn.Module = module
    return found
