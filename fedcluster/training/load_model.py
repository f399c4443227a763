"""fedcluster.load_model: the trained module of a run, from its folder."""

import re
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from fedcluster.data.dataset import DataSpec
from fedcluster.errors import BadRun, FedClusterError
from fedcluster.experiment import Experiment, parse, read
from fedcluster.models import pretrained, zoo
from fedcluster.runs.directory import BEST, DIVERGED, MODEL, cluster_model, run_facts
from fedcluster.runs.metrics import METRICS

OWN_CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # package.module:name


def load_model(
    run: str | Path, best: bool = False, allow: tuple[str, ...] = (), cluster: int | None = None
) -> nn.Module:
    """The module that a finished run trained, in evaluation mode; with `best`, the best model that the run kept; with
    `cluster`, the model that the devices of this cluster are served, where each has its own ([pluralistic]).

    The files are checked against the digests that the run noted when it finished. A model of one's own is code that the
    run's experiment names (`package.module:name`): it is imported only if `allow` has this name. The module takes
    samples as training saw them: see `Dataset.inputs`.
    """
    folder = Path(run)
    tensors, data = saved_tensors(folder, best, cluster), run_facts(folder).get("data")
    if not isinstance(data, dict):
        raise BadRun(f"{folder} was written by fedcluster 0.1, which did not note the shape of its samples")
    keys: dict[str, Any] = parse(read(folder / "experiment.toml"), str(folder / "experiment.toml"))
    given = keys.get("model", {}).get("name")
    own_code = isinstance(given, str) and OWN_CODE.fullmatch(given) and not pretrained.is_pretrained(given)
    if own_code and given not in allow:
        raise BadRun(f"the model of {folder} is code of its own: if you trust {given}, add allow=({given!r},)")
    experiment = Experiment(seed=keys.get("seed", 0), model={"name": given} if given else {})
    try:
        module = zoo.build(experiment.model.name, DataSpec.read(data), experiment.seed)
        module.load_state_dict(tensors)
    except FedClusterError:
        raise
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise BadRun(f"the saved model does not fit the model of {folder} ({str(error).splitlines()[0]})") from None
    return module.eval()


def saved_tensors(folder: Path, best: bool = False, cluster: int | None = None) -> dict[str, Tensor]:
    """The state dict that a finished run saved, checked against the digest that it noted."""
    if best and cluster is not None:
        raise BadRun(f"{folder}: the best model is one for all clusters: leave out best, or cluster")
    digests = finished(folder)
    name = BEST if best else MODEL if cluster is None else cluster_model(cluster)
    if name not in digests and cluster is not None:
        raise BadRun(f"{folder} has no model of a cluster {cluster}: it has those of [pluralistic], counted from 0")
    if name not in digests:
        raise BadRun(f"{folder} has no {name}: the run did not keep its best model (eval.best)")
    try:
        return load_tensors(content_of(folder, name))
    except SafetensorError:
        raise BadRun(f"{folder / name} is not a safetensors file") from None


def rounds_of(folder: Path) -> int:
    """The number of rounds that a finished run trained."""
    return len(content_of(folder, METRICS).splitlines())


def content_of(folder: Path, name: str) -> bytes:
    """A file of a finished run, as it was when the run finished."""
    with suppress(OSError):
        content = (folder / name).read_bytes()
        if sha256(content).hexdigest() == finished(folder).get(name):
            return content
    raise BadRun(f"{folder / name} is missing or altered since the run finished: restore it from a copy")


def finished(folder: Path) -> dict[str, str]:
    """The digests that a run noted of its files when it finished."""
    if not folder.is_dir():
        raise BadRun(f"there is no folder {folder}")
    digests = run_facts(folder).get("finished")
    if isinstance(digests, dict):
        return digests
    if (folder / DIVERGED).exists():
        raise BadRun(f"{folder} has no model: training diverged ({DIVERGED} says where)")
    raise BadRun(f"{folder} does not hold a finished run: finish it with --resume")
