"""What a person can cause, said in one sentence, with an exit code that scripts can rely on."""


class FedClusterError(Exception):
    """A failure with a cause that its message names and a remedy that its message offers."""

    exit_code = 1


class BadExperiment(FedClusterError):
    """The experiment asks for something impossible: a bad key, value or combination of them."""

    exit_code = 2


class BadData(FedClusterError):
    """A data set, start, cluster or fleet file or trace is missing, unreadable or not what it should be."""

    exit_code = 3


class Diverged(FedClusterError):
    """Training left the finite numbers."""

    exit_code = 4


class BadRun(FedClusterError):
    """The output folder holds something that this run must not continue or overwrite."""

    exit_code = 5


class BudgetExceeded(FedClusterError):
    """A device would download or upload more than once in a round."""

    exit_code = 6


class LostRank(FedClusterError):
    """Another process of the run has ended. Under torchrun, with --max-restarts, all begin again where it was."""

    exit_code = 7


class TooLarge(FedClusterError):
    """The machine has not enough memory, or a number is beyond what it can count with."""

    exit_code = 10


class LostServer(FedClusterError):
    """In a federation, the other side is gone or never came."""

    exit_code = 8


class NotAlike(FedClusterError):
    """Processes that train one model do not compute alike: other versions, or other arithmetic."""

    exit_code = 9


class CallbackFailed(FedClusterError):
    """A callback of the user's raised an exception."""

    exit_code = 11


class Terminated(KeyboardInterrupt):
    """SIGTERM. Whoever cleans up after Ctrl-C cleans up after this, too."""

    exit_code = 143
