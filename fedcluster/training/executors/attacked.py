"""An executor some of whose devices are malicious: it lets another executor train the cohort, waits for all of its
updates, and passes on what the malicious devices send in place of theirs.

Under torchrun every rank gets all updates, because attackers know all of them, and passes on its own.
"""

from collections.abc import Iterator

import torch

from fedcluster.attacks.attack import Uploads
from fedcluster.attacks.attacker import Attacker
from fedcluster.fleet.schedule import Cycle
from fedcluster.state import Reply, Tensors, Update
from fedcluster.training.executors.distributed import all_reduce, rank_and_world
from fedcluster.training.executors.in_process import DeviceStates, Executor


class Attacked:
    """`upload_specs` has the names, shapes and types of an upload in each phase of the algorithm."""

    def __init__(self, inner: Executor, attacker: Attacker, upload_specs: list[Tensors]) -> None:
        self.inner, self.attacker, self.upload_specs = inner, attacker, upload_specs

    def train(self, cycle: Cycle, received: Tensors, phase: int, device_states: DeviceStates) -> Iterator[Reply]:
        replies = [copied(reply) for reply in self.inner.train(cycle, received, phase, device_states)]
        uploads = {reply.device: reply.message for reply in replies if isinstance(reply, Update)}
        if rank_and_world()[1] > 1:
            uploads = all_gather_uploads(uploads, cycle.cohort.tolist(), self.upload_specs[phase])
        sent = self.attacker.forge(uploads, received, cycle.round, cycle.cycle, phase)
        for reply in replies:
            if isinstance(reply, Update):
                yield Update(reply.device, reply.round, reply.cycle, sent[reply.device])
            else:
                yield reply

    def close(self) -> None:
        self.inner.close()


def honest(executor: Executor) -> Executor:
    """The executor without the attacker."""
    return executor.inner if isinstance(executor, Attacked) else executor


def copied(reply: Reply) -> Reply:
    """The reply with a copy of its message: executors use the memory of a message again."""
    if not isinstance(reply, Update):
        return reply
    message = {name: tensor.clone() for name, tensor in reply.message.items()}
    return Update(reply.device, reply.round, reply.cycle, message)


def all_gather_uploads(uploads: Uploads, cohort: list[int], upload_spec: Tensors) -> Uploads:
    """The uploads of all ranks, in the order of the cohort. Each is one rank's, so sums are exact; as whole numbers
    they keep -0, too."""
    gathered: Uploads = {device: {} for device in cohort}
    for name, like in upload_spec.items():
        rows = like.new_zeros((len(cohort), *like.shape))
        for row, device in enumerate(cohort):
            if device in uploads:
                rows[row] = uploads[device][name]
        all_reduce(rows.view(torch.int32) if rows.dtype == torch.float32 else rows)
        for row, device in enumerate(cohort):
            gathered[device][name] = rows[row]
    return gathered
