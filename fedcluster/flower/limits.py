"""The limits of a device, which its owner sets (`join --limits FILE`) and the server cannot change.

    least_batch = 16       samples in a step, at least
    least_steps = 5        steps in a cycle, at least
    clip = 1.0             each part of an update moves at most so far: w_k <- W + (w_k - W) min(1, clip / ||w_k - W||)
    noise = 0.01           then normal noise of this standard deviation is added to every number
    most_seconds = 60.0    of training in a cycle
    most_megabytes = 2000  of memory that training takes, besides what the device has at its start
    unmasked = false       updates are sent under secure aggregation only
    least_devices = 10     in a secure sum, at least
    threshold = 0.5        of a cohort, more than which must stay until a secure sum is made; left out, two thirds

The noise comes from the operating system. If it followed from the experiment's seed, the server could subtract it.
"""

import resource
import secrets
import signal
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, ValidationError
from torch import Tensor

from fedcluster import algorithms
from fedcluster.algorithms import FedAvg
from fedcluster.errors import BadData, BadExperiment
from fedcluster.experiment import Count, NonNegative, Positive, Seconds, Section
from fedcluster.experiment.messages import describe
from fedcluster.fleet.schedule import steps_of
from fedcluster.inputs import MOST_TEXT, read_bytes
from fedcluster.models.flat_model import FlatModel
from fedcluster.secure_aggregation.device import LEAST_DEVICES, THRESHOLD
from fedcluster.state import Tensors
from fedcluster.training.executors.in_process import Trainer

MEGABYTE = 10**6


class Limits(Section):
    least_batch: Count = 1
    least_steps: Count = 1
    clip: Positive | None = None
    noise: NonNegative = 0.0
    most_seconds: Seconds | None = None
    most_megabytes: Annotated[int, Field(ge=1, le=10**8)] | None = None
    unmasked: bool = True
    least_devices: Annotated[int, Field(ge=LEAST_DEVICES, le=10_000)] = LEAST_DEVICES
    threshold: Annotated[float, Field(ge=0.5, lt=1)] = THRESHOLD

    def check(self, trainer: Trainer, samples: int) -> None:
        """Refuse training whose update would say too much of too few samples."""
        local = trainer.local
        batch = samples if local.batch == "full" else min(samples, local.batch)
        if local.epochs is not None:
            batch = samples % batch or batch  # the last one of a pass
        if batch < self.least_batch:
            raise BadExperiment(
                f"the server asks for batches of {batch} samples, and this device takes at least {self.least_batch} "
                "(least_batch)"
            )
        steps = local.step_range[0] if local.epochs is None else steps_of(local, 0, 0, 0, samples)
        if steps < self.least_steps:
            raise BadExperiment(
                f"the server asks for {steps} steps, and this device takes at least {self.least_steps} (least_steps)"
            )
        if self.least_steps > 1 and sends_gradients(trainer.algorithm, trainer.flat_model):
            raise BadExperiment(
                f"algorithm.name: {trainer.algorithm.name} sends a gradient, which is what one step says, and this "
                f"device takes at least {self.least_steps} steps (least_steps)"
            )

    def protect(self, update: Tensors, received: Tensors) -> Tensors:
        """The update clipped, and with noise."""
        if self.clip is None and not self.noise:
            return update
        rng = np.random.Generator(np.random.Philox(key=secrets.randbits(128)))
        return {name: self.protected(part, received if name == "model" else {}, rng) for name, part in update.items()}

    def protected(self, part: Tensor, received: Tensors, rng: np.random.Generator) -> Tensor:
        origin = received.get("model", torch.zeros_like(part)).double()
        movement = part.double() - origin
        if self.clip is not None:
            movement *= min(1.0, self.clip / max(float(movement.norm()), 1e-300))
        if self.noise:
            movement += torch.from_numpy(rng.normal(0.0, self.noise, movement.shape))
        return (origin + movement).to(part.dtype)

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Stop training that takes too long or too much memory, with a sentence."""
        try:
            with self.timed():
                yield
        except TimeLimit:
            raise BadExperiment(
                f"training takes more than the {self.most_seconds:g} s that this device allows (most_seconds)"
            ) from None
        except (MemoryError, RuntimeError) as error:
            if self.most_megabytes is None or not (isinstance(error, MemoryError) or "allocate memory" in str(error)):
                raise
            raise BadExperiment(
                f"training takes more than the {self.most_megabytes:,} MB that this device allows (most_megabytes)"
            ) from None

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Raise TimeLimit after `most_seconds`, between two steps or batches."""
        if self.most_seconds is None:
            yield
            return
        if threading.current_thread() is not threading.main_thread():
            raise BadExperiment("most_seconds cannot be kept where training is not in the main thread: leave it out")
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, self.most_seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def limit_memory(self) -> None:
        """From now on this process gets `most_megabytes` more memory, and no more."""
        if self.most_megabytes is not None:
            most = data_size() + self.most_megabytes * MEGABYTE
            resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))

    def describe(self) -> str:
        """What `join` shows when it starts."""
        given = [
            f"batches of at least {self.least_batch:,} samples" * (self.least_batch > 1),
            f"at least {self.least_steps:,} steps" * (self.least_steps > 1),
            "" if self.clip is None else f"updates clipped to {self.clip:g}",
            f"noise of {self.noise:g}" * (self.noise > 0),
            "" if self.most_seconds is None else f"at most {self.most_seconds:g} s",
            "" if self.most_megabytes is None else f"at most {self.most_megabytes:,} MB",
            "" if self.unmasked else "no updates without secure aggregation",
            f"sums of at least {self.least_devices:,} devices" * (self.least_devices > LEAST_DEVICES),
            f"sums of more than {self.threshold:.0%} of a cohort" * (self.threshold != THRESHOLD),
        ]
        limits = ", ".join(filter(None, given))
        if self.least_batch == self.least_steps == 1 and self.clip is None and self.unmasked:
            limits = f"{limits}; " * bool(limits) + (
                "none on what an update says: if the server asks for one step on one sample, it can compute the sample "
                "(--limits)"
            )
        return f"limits of this device: {limits}"


class TimeLimit(Exception):
    """The time is over."""


def stop(number: int, frame: Any) -> None:
    raise TimeLimit


def data_size() -> int:
    """Bytes of this process that count towards RLIMIT_DATA."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        raise BadData("most_megabytes: this system does not say how much memory a process has: leave it out") from None
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData"))


def sends_gradients(algorithm: FedAvg, flat_model: FlatModel) -> bool:
    """Whether an update has the gradient of all samples at one point."""
    state = algorithms.first_state(algorithm, None, flat_model.w, flat_model.size)
    _, uploads = algorithms.messages(algorithm, state)
    return any("gradient" in upload for upload in uploads) or getattr(algorithm.options, "option", None) == "I"


def read_limits(path: str) -> Limits:
    """The limits in a TOML file; none if there is no path."""
    if not path:
        return Limits()
    try:
        keys = tomllib.loads(read_bytes(Path(path), "limits", MOST_TEXT).decode())
        return Limits(**keys)
    except OSError as error:
        raise BadData(f"--limits {path}: {error.strerror}") from None
    except ValidationError as error:
        raise BadExperiment(f"--limits {path}: {describe(error.errors(), Limits.model_fields).lstrip('. ')}") from None
    except ValueError as error:
        raise BadExperiment(f"--limits {path}: not valid TOML ({error})") from None
