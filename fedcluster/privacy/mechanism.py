"""Differential privacy of a run, as the server sees it: how much noise, in which aggregate, and what has been spent."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from fedcluster.errors import BadExperiment
from fedcluster.experiment import Experiment, Privacy
from fedcluster.fleet.clustering import registry as clusterings
from fedcluster.fleet.schedule import Cycle, Sampling, Schedule
from fedcluster.privacy.accounting import Accountant, Draw
from fedcluster.privacy.noisy_mean import ADAPTIVE, HISTORY, Noise, NoisyMean, initial_server_state
from fedcluster.privacy.on_device import CLIP, ClipOnDevice
from fedcluster.state import State, Tensors

LEAKY = ("labels", "gradients")  # what clusters may be made from that epsilon does not cover


@dataclass(frozen=True, eq=False)
class Mechanism:
    """`noise_multiplier` is z, the deviation of the noise in units of the clip. Noise and cohorts are drawn from the
    seed of `sampling`: the experiment's in a simulation, and in a federation one that only the server knows. `leaky` is
    what clusters were made from, if epsilon does not cover it."""

    section: Privacy
    accountant: Accountant
    noise_multiplier: float
    schedule: Schedule
    sampling: Sampling
    bands: int = 1
    leaky: str | None = None

    @property
    def central(self) -> bool:
        """Whether the server adds the noise."""
        return self.section.mechanism != "local"

    def initial_server_state(self, start: State) -> Tensors:
        return initial_server_state(self.bands, self.section.clip == "adaptive", start.model) if self.central else {}

    def broadcast(self, state: State) -> Tensors:
        """What devices need besides the model: the clip, where it adapts."""
        return {CLIP: state.server[ADAPTIVE]} if self.section.clip == "adaptive" else {}

    def aggregator(self, spec: Tensors, state: State, cycle: Cycle) -> NoisyMean:
        clip = None if self.section.clip == "adaptive" else float(self.section.clip or 0)
        noise = Noise(self.noise_multiplier, self.sampling.seed, self.sampling.repeats)
        # a cohort of a fixed size is the expected one, and its shares are rounded as those of equal devices are
        share = 1 / cycle.expected if self.sampling.poisson else float(cycle.shares[0])
        return NoisyMean(spec, noise, clip, share, state, cycle)

    def kept(self, before: State, undone: State) -> State:
        """The state before a cycle that is undone, with what `undone` keeps of the noise that was drawn for it."""
        ours = {name: undone.server[name] for name in (HISTORY, ADAPTIVE) if name in undone.server}
        return replace(before, server=before.server | ours)

    def rounds_spent(self, rounds: int) -> "Counter[Draw]":
        """The releases that a device may have been part of in the first rounds."""
        participation, spent = self.schedule.options.participation, Counter[Draw]()
        if self.accountant.local or not self.accountant.replace:
            spent[self.accountant.draw(participation, self.schedule.cluster_sizes(0))] = rounds
        else:
            for j in range(rounds):
                spent[self.accountant.draw(participation, self.schedule.cluster_sizes(j))] += 1
        again = Counter[int]()
        for (j, _), times in self.sampling.repeats.items():
            again[j] = max(again[j], times)
        for j, times in again.items():
            spent[self.accountant.draw(participation, self.schedule.cluster_sizes(j))] += times
        return spent

    def on_device(self) -> dict[str, Any]:
        """The section as a device of a federation needs it: how it clips, and its own noise."""
        section = self.section
        keys = {"mechanism": section.mechanism, "clip": section.clip, "delta": section.delta}
        return keys | {"noise_multiplier": self.noise_multiplier}

    def describe(self, rounds: int) -> list[str]:
        """What a run says of its privacy before it starts."""
        section, epsilon = self.section, self.epsilon(rounds)
        cohorts = "Poisson cohorts" if section.poisson else "cohorts of a fixed size" if self.central else "every round"
        said = [
            f"privacy: epsilon {epsilon:.3g} at delta {section.delta:.3g} after {rounds:,} rounds, noise of "
            f"{self.noise_multiplier:.4g} times the clip ({section.mechanism}, {cohorts}; the two fleets that are "
            f"compared: {self.accountant.adjacency})"
        ]
        if self.leaky:
            said.append(f"privacy: clusters are made from devices' {self.leaky}, which epsilon does not cover")
        return said

    def line(self, rounds: int) -> dict[str, Any]:
        """What the line of a round in metrics.jsonl says: epsilon, None where it is infinite."""
        epsilon = self.epsilon(rounds)
        leaky = {"leaky_clusters": self.leaky} if self.leaky else {}
        return {"epsilon": epsilon if math.isfinite(epsilon) else None} | leaky

    def epsilon(self, rounds: int) -> float:
        """What the first rounds spend, and cycles that were released more than once."""
        return self.accountant.epsilon(self.noise_multiplier, +self.rounds_spent(rounds))


def sampling(experiment: Experiment, seed: int) -> Sampling | None:
    """How a simulation draws cohorts; None without differential privacy."""
    section = experiment.differential_privacy
    return Sampling(seed, section.poisson) if section else None


def build(experiment: Experiment, schedule: Schedule) -> Mechanism | None:
    """What [privacy] says, for this fleet and these clusters; None without differential privacy."""
    section, drawn = experiment.differential_privacy, schedule.sampling
    if section is None or drawn is None:
        return None
    accountant, clusters = Accountant.of(section), schedule.clusters.count
    devices = len(schedule.fleet) - schedule.clusters.left_out()
    if accountant.delta >= 1 / devices:
        raise BadExperiment(
            f"privacy.delta = {accountant.delta:g} is not below 1 / {devices:,}, one over the number of devices: "
            "that would allow revealing all data of one device; use a tenth of it or less"
        )
    bands = 1 if section.mechanism != "banded" else section.bands or clusters
    if bands > clusters:
        raise BadExperiment(
            f"privacy.bands = {bands} is more than the {clusters} clusters, after which a device may take part again: "
            "use fewer"
        )
    draw = accountant.draw(schedule.options.participation, schedule.cluster_sizes(0))
    noise = noise_multiplier(section, accountant, Counter({draw: experiment.rounds}))
    needs = clusterings.needs(experiment.clusters)
    return Mechanism(section, accountant, noise, schedule, drawn, bands, needs if needs in LEAKY else None)


def noise_multiplier(section: Privacy, accountant: Accountant, rounds: "Counter[Draw]") -> float:
    """z, given or calibrated to spend `epsilon` in these rounds."""
    if section.epsilon is None:
        assert section.noise_multiplier is not None, "the section has one of both"
        return section.noise_multiplier
    return accountant.noise_multiplier(section.epsilon, rounds)


def clip_on_device(experiment: Experiment, secret: int) -> list[ClipOnDevice]:
    """The transform that devices apply last; none without differential privacy."""
    section, noise = experiment.differential_privacy, 0.0
    if section is None:
        return []
    if section.mechanism == "local":
        noise = noise_multiplier(section, Accountant.of(section), Counter({Draw(1.0): experiment.rounds}))
    return [ClipOnDevice(section, noise, secret)]
