"""The best model as a callback: best.safetensors holds the model of the round with the best score."""

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedcluster.files import write_atomically
from fedcluster.reporting import Say
from fedcluster.runs.directory import BEST, Folder
from fedcluster.runs.metrics import Line
from fedcluster.state import State
from fedcluster.training.callbacks import Callback, check_score, direction
from fedcluster.training.setup import Setup


class BestModel(Callback):
    """Keeps the model of the first round with the best value of a score, such as "test_accuracy"."""

    def __init__(self, folder: Path, score: str, say: Say) -> None:
        self.path, self.score, self.say = folder / BEST, score, say

    def on_run_start(self, setup: Setup, state: State, history: list[Line]) -> None:
        self.sign, self.flat_model = direction(self.score, setup, "eval.best"), setup.flat_model
        self.best, best_round = -float("inf"), 0
        for line in history:
            if self.sign * line[self.score] > self.best:
                self.best, best_round = self.sign * line[self.score], line["round"]
        stored = stored_round(self.path)
        if best_round and stored != best_round and stored <= state.round:
            self.say(f"{self.path} is missing or damaged: the best model so far, of round {best_round}, is lost")

    def on_round_end(self, line: Line, state: State) -> None:
        value = self.sign * line[self.score]
        if value > self.best:
            self.best = value
            about = {"round": str(line["round"])}  # one entry: safetensors writes several in any order
            write_atomically(self.path, save(self.flat_model.state_dict(state.model), about))


def keep_best(setup: Setup, folder: Folder, say: Say) -> list[Callback]:
    """The callback that `eval.best` asks for, if it does."""
    score = setup.experiment.eval.best
    if score is None:
        return []
    check_score(score, setup, "eval.best")  # refused before the run begins
    return [BestModel(folder.path, score, say)]


def stored_round(path: Path) -> int:
    """The round of the best model on disk; 0 where there is none."""
    try:
        with safe_open(path, framework="pt") as tensors:
            return int((tensors.metadata() or {})["round"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return 0
