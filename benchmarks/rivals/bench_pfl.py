"""pfl-research 0.6.0, PyTorch, FederatedAveraging on its SimulatedBackend, 2 processes.

Configuration, for 2 cores: the script starts itself under torchrun with 2 processes (torch.distributed, gloo), one
torch thread each; pfl gives every other user of the cohort to each process, each sums its users' updates, and one
all-reduce per round adds the two sums. Users are in-memory tensors; users are weighted by their datapoints; metrics,
platform output and evaluation are off (pfl insists on "evaluating" in round 1, the warm-up, at no cost here).
pfl's use_torch_compile would have no effect: it compiles `forward`, and pfl calls `loss`.

Batches: pfl walks through a user's data once in order, so a user is made for each round of 600 of the device's rows,
drawn uniformly with replacement: 20 batches of 30. Cohorts come from pfl's "minimize_reuse" sampler over the devices
in random order: no device twice in a cohort. A round is timed from the end of the one before to the updated model.
"""

import os
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"
if __name__ == "__main__" and "LOCAL_RANK" not in os.environ:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor
from torch.nn import functional as F

import rival_torch as work


class FlatModel(torch.nn.Module):
    """The module with the two methods that pfl asks for."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.module(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"nothing": Weighted(0, 1)}


class Clock(TrainingProcessCallback):
    """Notes the seconds of each round."""

    def __init__(self, shown: bool) -> None:
        self.seconds: list[float] = []
        self.shown = shown

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.begun = time.perf_counter()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        now = time.perf_counter()
        self.seconds.append(now - self.begun)
        self.begun = now
        if self.shown:
            work.progress(central_iteration + 1, self.seconds[-1])
        return False, Metrics()


def main() -> None:
    args = work.parser(__doc__).parse_args()
    torch.set_num_threads(1)
    rank = pytorch_ops.distributed.global_rank
    data, module = work.load(args.data, args.model), FlatModel(work.build(args.model))
    np.random.seed(0)  # the same cohorts in both processes
    torch.manual_seed(rank + 1)  # other batches

    def user(device: int) -> PyTorchTensorDataset:
        picked = data.rows[device][torch.randint(work.SAMPLES, (work.STEPS * work.BATCH,))]
        return PyTorchTensorDataset((data.x_train[picked], data.y_train[picked]), user_id=str(device))

    users = FederatedDataset(user, get_user_sampler("minimize_reuse", np.random.permutation(work.DEVICES).tolist()))
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    clock = Clock(shown=rank == 0)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=args.rounds,
            evaluation_frequency=args.rounds,
            train_cohort_size=args.cohort,
            val_cohort_size=None,
        ),
        SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.RATE, local_batch_size=work.BATCH),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    torch.distributed.destroy_process_group()
    if rank == 0:
        work.report("pfl", args.model, clock.seconds, work.accuracy(module.module, data))


if __name__ == "__main__":
    main()
