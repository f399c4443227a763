"""Accept: the trust boundary between what devices send and what reaches the average."""

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from fedcluster.fleet.schedule import Cycle
from fedcluster.models.kernels.vectors import all_finite
from fedcluster.state import Accepted, Tensors, Update
from fedcluster.training.norm_bound import Norms


def accept(
    updates: Iterable[Update],
    cycle: Cycle,
    upload_spec: Tensors,
    refuse: Callable[[Update, str, bool], None],
    norms: Norms | None = None,
) -> Iterator[Accepted]:
    """Let through what is finite, of the names, shapes and types of `upload_spec`, within the bounds of `norms`, from a
    member of this cohort, for this cycle, once. Everything else goes to `refuse` with the reason, and whether that
    lies in its values."""
    members = dict(zip(cycle.cohort.tolist(), cycle.shares.tolist(), strict=True))
    done: set[int] = set()
    for update in updates:
        if reason := fault(update, cycle, members, done) or misfit(update.message, upload_spec):
            refuse(update, reason, False)
            continue
        if reason := norms.fault(update.device, update.message) if norms else unbounded(update.message):
            refuse(update, reason, True)
            continue
        done.add(update.device)
        yield Accepted(update.device, members[update.device], update.message)


def fault(update: Update, cycle: Cycle, members: dict[int, float], done: set[int]) -> str | None:
    """Why this update does not belong here."""
    if update.fault is not None:
        return update.fault
    if (update.round, update.cycle) != (cycle.round, cycle.cycle):
        return f"for round {update.round}, cycle {update.cycle}"
    if update.device not in members:
        return "not of this cohort"
    if update.device in done:
        return "a second time"
    return None


def misfit(message: Tensors, upload_spec: Tensors) -> str | None:
    """Why this message cannot be averaged."""
    if not isinstance(message, dict) or message.keys() != upload_spec.keys():
        return "wrong names"
    for name, expected in upload_spec.items():
        tensor = message[name]
        if not isinstance(tensor, Tensor) or tensor.dtype != expected.dtype or tensor.shape != expected.shape:
            return f"{name}: wrong shape or type"
    return None


def unbounded(message: Tensors) -> str | None:
    """Why this message is refused where nothing bounds it."""
    return next((f"{name}: not finite" for name, tensor in message.items() if not all_finite(tensor)), None)
