"""Patience: what the server does when no cycle of a round has succeeded.

Such a round is not one. It is taken again when devices are back; while they are on line but fail, after a pause that
grows. After `seconds` without a success the server gives up, with a run that can be resumed.
"""

import time
from dataclasses import dataclass

from fedcluster.errors import LostServer
from fedcluster.flower.executor import NodeDirectory

LOOK = 0.5  # seconds between two looks for devices
PAUSE, LONGEST = 3.0, 60.0  # seconds before a round is taken again with devices that failed in it: the first, the last


@dataclass(eq=False)
class RetryPolicy:
    """`resume` says how to go on after giving up."""

    directory: NodeDirectory
    seconds: float
    resume: str

    def __post_init__(self) -> None:
        self.round, self.until, self.pause = -1, 0.0, PAUSE

    def __call__(self, j: int) -> None:
        """Until it is worth taking round j again: someone has come, or a while has passed. LostServer: give up."""
        if j != self.round:
            self.round, self.until, self.pause = j, time.monotonic() + self.seconds, PAUSE
        self.directory.look()
        failed, said = set(self.directory.devices), ""
        again = time.monotonic() + self.pause
        while not self.directory.devices.keys() - failed and not (failed and time.monotonic() > again):
            why = f"too few updates of {len(failed)} devices on line" if failed else "nobody is on line"
            if why != said:
                self.directory.say(f"round {j + 1} did not take place: {why}; waiting for {self.left:.0f} s at most")
            if self.left == 0:
                raise LostServer(
                    f"round {j + 1}: {why}, for {self.seconds:g} s: see what is said of the devices above, wait "
                    f"longer (--wait), or go on with {self.resume}"
                )
            said = why
            time.sleep(LOOK)
            self.directory.look()
            failed &= self.directory.devices.keys()
        self.pause = min(2 * self.pause, LONGEST)

    @property
    def left(self) -> float:
        return max(0.0, self.until - time.monotonic())
