"""What a server can compute from updates, and what each defence leaves of it. Prints a table, draws reconstruction.png.

The model is one linear layer, with scores s = V x + b. Its loss has the gradients dV_c = g_c x and db_c = g_c, where
g_c is the probability of class c, minus 1 for the class of the sample. After one step on one sample, w_k - W is -lr
times these, so that x = dV_c / db_c. With W = 0 every probability is 1/10. After one step on all samples of a device,
db_c is 1/10 minus the share of class c, which counts the labels. More steps blur the counts, but the class that the
device has most of still shows.

The defences are limits that a device sets itself (`fedcluster join --limits FILE`), and secure aggregation.
"""

from dataclasses import replace
from typing import Any, ClassVar

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

import fedcluster
from fedcluster.flower.limits import Limits
from fedcluster.runs.ledger import Ledger
from fedcluster.secure_aggregation import integers
from fedcluster.state import Tensors, Update
from fedcluster.training.cycle import run_cycle
from fedcluster.training.executors.secure import MASKED, Asked, SimulatedDevices, SimulatedExchange
from fedcluster.training.setup import Setup, prepare

ONE_SAMPLE = {"steps": 1, "batch": 1, "lr": 0.1}
CLASSES, INPUTS = 10, 64


def federation(local: dict[str, Any], **sections: Any) -> Setup:
    """Ten devices with 50 samples each."""
    return prepare(
        fedcluster.Experiment(
            fleet={"devices": 10, "samples": 50},
            clusters={"count": 1, "participation": 1.0},
            model={"name": "logistic"},
            local=local,
            **sections,
        )
    )


def update_of(setup: Setup, W: Tensor, limits: Limits | None = None) -> Tensor:
    """w_0 - W, where W is the model that the server sends: any model that it likes."""
    received: Tensors = {"model": W}
    cycle = setup.schedule.round(0)[0]
    update = next(iter(setup.executor.train(cycle, received, 0, {})))
    assert isinstance(update, Update)
    message = (limits or Limits()).protect(update.message, received)
    return message["model"] - W


def reconstruct(movement: Tensor) -> Tensor:
    """The sample that the update of a device was trained on, if it was one sample: dV_c / db_c of the largest db_c."""
    V, b = movement[: CLASSES * INPUTS].reshape(CLASSES, INPUTS), movement[CLASSES * INPUTS :]
    c = int(b.abs().argmax())
    return V[c] / b[c]


def samples_of(setup: Setup, everything: bool = False) -> Tensor:
    """What the model sees of the samples of device 0, or of all."""
    assert setup.dataset is not None
    assert setup.partition is not None
    rows = torch.from_numpy(setup.partition.sample_indices(0)) if not everything else slice(None)
    return setup.dataset.inputs(setup.dataset.x_train[rows]).flatten(1)


def nearest(setup: Setup, found: Tensor) -> tuple[float, Tensor]:
    """The relative distance to the nearest sample of the device, and that sample."""
    x = samples_of(setup)
    distances = (x - found).norm(dim=1) / x.norm(dim=1)
    return float(distances.min()), x[int(distances.argmin())]


class Watched(SimulatedExchange):
    """Keeps what the server gets from each device."""

    uploads: ClassVar[dict[int, Tensor]] = {}

    def mask(self, update: Update, content: bytes) -> Update:
        sent = super().mask(update, content)
        self.uploads[update.device] = sent.message[MASKED]
        return sent


class WatchedDevices(SimulatedDevices):
    def exchange(self, asked: Asked) -> Watched:
        return Watched(self.executor, asked, self.limits)


def masked() -> tuple[Tensor, Tensor]:
    """What the server gets under secure aggregation: the masked update of device 0, read as if it were an update, and
    the mean of all ten."""
    setup = federation(ONE_SAMPLE, privacy={"secure_aggregation": True})
    setup = replace(setup, secure=WatchedDevices(setup.executor, threshold=2 / 3))
    W = setup.start.model
    after = run_cycle(setup, Ledger(10), setup.start, setup.schedule.round(0)[0]).state.model
    numbers = integers.unpack(Watched.uploads[0].numpy().tobytes()).view(np.int64) - 2**55
    return torch.from_numpy(numbers / 2**40).float() - W, after - W


def main() -> dict[str, float]:
    one = federation(ONE_SAMPLE)
    W = one.start.model
    many = federation({"steps": 5, "batch": 16, "lr": 0.1})
    upload, mean = masked()
    movements = {
        "no defence": update_of(one, W),
        "16 samples, 5 steps": update_of(many, W),
        "clip 0.1, noise 0.01": update_of(one, W, Limits(clip=0.1, noise=0.01)),
        "masked update": upload,
        "mean of ten": mean,
    }
    guesses = {name: reconstruct(movement) for name, movement in movements.items()}
    guesses["mean of the data"] = samples_of(one, everything=True).mean(0)
    distances = {name: nearest(one, guess)[0] for name, guess in guesses.items()}
    print("what the server computes     relative distance to the nearest sample of the device")
    for name, distance in distances.items():
        print(f"  {name:24s}   {distance:.1e}")
    draw({"sample": nearest(one, guesses["no defence"])[1]} | guesses)

    full, weak = federation({"steps": 1, "batch": "full", "lr": 0.1}), Limits(clip=0.1, noise=0.01)
    counts = {
        "true": label_counts(full),
        "no defence": count_labels(full, steps=1),
        "16 samples, 5 steps": count_labels(many, steps=5),
        "clip 0.1, noise 0.01": count_labels(full, steps=1, limits=weak),
        "both": count_labels(many, steps=5, limits=weak),
    }
    print("labels of the device")
    for name, count in counts.items():
        print(f"  {name:24s}   {count}")
    return distances


def count_labels(setup: Setup, steps: int, limits: Limits | None = None) -> list[int]:
    """How many samples of each class the server computes from the update of so many steps from W = 0."""
    movement = update_of(setup, torch.zeros_like(setup.start.model), limits)
    shares = 1 / CLASSES + movement[CLASSES * INPUTS :] / (0.1 * steps)
    return [round(float(share) * sum(label_counts(setup))) for share in shares]


def label_counts(setup: Setup) -> list[int]:
    """How many there are."""
    assert setup.partition is not None
    assert setup.dataset is not None
    labels = setup.dataset.y_train[torch.from_numpy(setup.partition.sample_indices(0))]
    counts: list[int] = torch.bincount(labels, minlength=CLASSES).tolist()
    return counts


def draw(pictures: dict[str, Tensor]) -> None:
    figure, axes = plt.subplots(1, len(pictures), figsize=(1.9 * len(pictures), 2.3))
    for axis, (name, picture) in zip(axes, pictures.items(), strict=True):
        axis.imshow(picture.reshape(8, 8).numpy(), cmap="gray")
        axis.set_title(name, fontsize=10)
        axis.set_axis_off()
    figure.tight_layout()
    figure.savefig("reconstruction.png", dpi=120)


if __name__ == "__main__":
    main()
