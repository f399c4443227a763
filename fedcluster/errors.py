"""Errors that a user can cause: one sentence each, and an exit code that scripts can rely on."""


class FedClusterError(Exception):
    """The message says what is wrong and what to do about it."""

    exit_code = 1


class BadExperiment(FedClusterError):
    """The experiment has a bad key or value, or a combination of them that is impossible."""

    exit_code = 2


class BadData(FedClusterError):
    """A data set, start model, cluster file, fleet file or trace is missing, unreadable or invalid."""

    exit_code = 3


class Diverged(FedClusterError):
    """The loss or the model is no longer finite."""

    exit_code = 4


class BadRun(FedClusterError):
    """The output folder holds something that this run must not resume or overwrite."""

    exit_code = 5


class BudgetExceeded(FedClusterError):
    """A device would download or upload more than once in a round."""

    exit_code = 6


class LostRank(FedClusterError):
    """Another process of the run has ended. Under torchrun with --max-restarts, all ranks resume."""

    exit_code = 7


class TooLarge(FedClusterError):
    """Memory has run out, or a number is too large to compute with."""

    exit_code = 10


class LostServer(FedClusterError):
    """In a federation, the server or the devices are gone or never came."""

    exit_code = 8


class NotAlike(FedClusterError):
    """Processes that train one model do not compute alike: versions or arithmetic differ."""

    exit_code = 9


class CallbackFailed(FedClusterError):
    """A user's callback raised an exception."""

    exit_code = 11


class Terminated(KeyboardInterrupt):
    """SIGTERM. Code that cleans up after Ctrl-C cleans up after this, too."""

    exit_code = 143
