"""What a federation's server does before a round: it admits new devices, and waits after a round that failed. Where
cycles overlap, cohorts of the next round begin before this one is over, so that devices are admitted to the next one.

A round fails when none of its cycles got enough updates. It is repeated with cohorts drawn anew: as soon as a device
comes online, and while those online keep failing, after pauses of 3 s to 60 s. After `seconds` without success the
server gives up, and the run can be resumed.
"""

import time

from fedcluster.errors import LostServer
from fedcluster.flower.executor import NodeDirectory
from fedcluster.flower.registry import RegistrySchedule
from fedcluster.runs.metrics import Line
from fedcluster.state import State
from fedcluster.training.callbacks import Callback
from fedcluster.training.setup import Setup

POLL_SECONDS = 0.5  # between two looks for devices
FIRST_PAUSE, LAST_PAUSE = 3.0, 60.0  # seconds before a round is repeated with the devices that failed in it


class RoundStart(Callback):
    """`resume` are the options with which the run can be resumed. A round begins once `least` devices are online."""

    def __init__(
        self, directory: NodeDirectory, schedule: RegistrySchedule, seconds: float, resume: str, least: int = 0
    ) -> None:
        self.directory, self.schedule, self.seconds, self.resume = directory, schedule, seconds, resume
        self.least = least
        self.give_up_at, self.pause = 0.0, FIRST_PAUSE

    def on_run_start(self, setup: Setup, state: State, history: list[Line]) -> None:
        self.half_done = state.round if state.cycle else None  # the cohorts of its other cycles stay as they are

    def on_round_start(self, state: State) -> None:
        self.directory.update()
        self.wait_until_online(state.round + 1)
        begun = state.round == self.half_done or (self.schedule.options.overlap > 0 and self.schedule.attempt == 0)
        self.directory.registry.admit(state.round + begun, self.directory.say)

    def on_round_end(self, line: Line, state: State) -> None:
        self.schedule.attempt, self.pause = 0, FIRST_PAUSE

    def on_round_failed(self, state: State) -> None:
        if self.schedule.attempt == 0:
            self.give_up_at = time.monotonic() + self.seconds
        self.schedule.attempt += 1
        self.wait(state.round + 1)

    def wait_until_online(self, round: int) -> None:
        """Under differential privacy cycles do not fail, so that it is here that the server waits for devices."""
        directory, give_up_at = self.directory, time.monotonic() + self.seconds
        if len(directory.devices) < self.least:
            directory.say(
                f"round {round} waits until {self.least} devices are online, for at most {self.seconds:.0f} s"
            )
        while len(directory.devices) < self.least:
            if time.monotonic() > give_up_at:
                raise LostServer(
                    f"round {round}: only {len(directory.devices)} devices are online, and --min-updates asks for "
                    f"{self.least}: wait longer (--wait), or continue later with {self.resume}"
                )
            time.sleep(POLL_SECONDS)
            directory.update()

    def wait(self, round: int) -> None:
        """Return when it is worth repeating the round: a device has come, or the pause is over."""
        directory, reported = self.directory, ""
        directory.update()
        failed, repeat_at = set(directory.devices), time.monotonic() + self.pause
        while not directory.devices.keys() - failed and not (failed and time.monotonic() > repeat_at):
            reason = f"too few updates from {len(failed)} devices online" if failed else "no device is online"
            left = max(0.0, self.give_up_at - time.monotonic())
            if reason != reported:
                directory.say(f"round {round} failed: {reason}; waiting for at most {left:.0f} s")
            if left == 0:
                raise LostServer(
                    f"round {round}: {reason} for {self.seconds:g} s; the log says more about each device: wait longer "
                    f"(--wait), or continue later with {self.resume}"
                )
            reported = reason
            time.sleep(POLL_SECONDS)
            directory.update()
            failed &= directory.devices.keys()
        self.pause = min(2 * self.pause, LAST_PAUSE)
