"""The choice of an executor: who trains a cohort."""

from dataclasses import replace

from fedcluster.errors import BadExperiment
from fedcluster.fleet.schedule import Cycle
from fedcluster.reporting import Say, silent
from fedcluster.secure_aggregation import checks as secure_checks
from fedcluster.state import Tensors
from fedcluster.training.executors.attacked import Attacked
from fedcluster.training.executors.distributed import Distributed, is_distributed
from fedcluster.training.executors.in_process import InProcess
from fedcluster.training.executors.processes import Workers, sendable
from fedcluster.training.executors.secure import SimulatedDevices
from fedcluster.training.executors.stacked import Stacked, faster, stackable
from fedcluster.training.setup import Setup


def choose_executor(setup: Setup, workers: int, cohorts: str, say: Say = silent) -> Setup:
    """The executor for this many processes, with the attacker between it and the server, and with updates summed
    securely, if the experiment says so."""
    attacker, privacy = setup.attacker, setup.experiment.privacy
    if secure_checks.is_secure(setup.experiment) and is_distributed():
        raise BadExperiment("privacy.secure_aggregation is not possible under torchrun: run it without")
    setup = share_out(setup, workers, cohorts, say)
    if attacker is not None and attacker.forges:
        upload_specs = [phase.upload_spec(setup.start) for phase in setup.algorithm.phases]
        setup = replace(setup, executor=Attacked(setup.executor, attacker, upload_specs))
    if privacy is None or not privacy.secure_aggregation:
        return setup
    return replace(setup, secure=SimulatedDevices(setup.executor, privacy.threshold))


def share_out(setup: Setup, workers: int, cohorts: str, say: Say) -> Setup:
    """Let a cohort be trained at once, or by several processes, torchrun's or our own, where there is something to
    share out."""
    experiment, here = setup.experiment, setup.executor
    assert isinstance(here, InProcess)
    setup.evaluate.threads = workers
    if is_distributed():
        if not hasattr(experiment.aggregation.find(), "reduce"):
            raise BadExperiment(
                f"aggregation.name: {experiment.to_dict()['aggregation']['name']} has no method reduce, by which ranks "
                "merge their parts of a cohort: run it without torchrun, or add reduce"
            )
        return replace(setup, executor=Distributed(here))
    largest = max(setup.schedule.round(0), key=lambda cycle: len(cycle.cohort))
    count = min(workers, len(largest.cohort)) if here.flat_model.device.type == "cpu" else 1
    if should_stack(here, cohorts, largest, setup.algorithm.phases[0].broadcast(setup.start), count, say):
        return replace(setup, executor=Stacked(here))
    if count < 2:
        return setup
    if not sendable(experiment):
        say("training in one process: a function of the experiment cannot be imported by another")
        return setup
    cycles = experiment.rounds * setup.clusters.count
    return replace(setup, executor=Workers(count, cycles, here, experiment, setup.start, say))


def should_stack(here: InProcess, cohorts: str, largest: Cycle, sent: Tensors, count: int, say: Say) -> bool:
    """Whether a cohort is to be trained in stacks; what cannot be, is not."""
    if cohorts == "sequential" or len(largest.cohort) < 2:
        return False
    why = stackable(here)
    if why is not None:
        say(f"training one device after the other: this model cannot be stacked ({why})")
        return False
    if cohorts == "stacked":
        return True
    won = faster(here, largest, sent, count)
    say(f"cohorts are trained {'in stacks' if won else 'one device after the other'}, which is faster here")
    return won
