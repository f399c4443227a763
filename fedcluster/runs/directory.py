"""The output folder of a run: its files, its lock, and where a stopped run continues.

experiment.toml    the experiment, resolved
run.json           what it ran on: versions, sizes, fingerprints, the start's loss; once finished, digests of its files
fleet.json         the fleet and its clusters: sizes, class mixes, free hours
metrics.jsonl      one line per round
cycles.jsonl       one line per cycle
checkpoint/        the two newest checkpoints
evaluated/         the newest one from before the current round
curves.png         loss and metrics over rounds
devices.jsonl      scores of devices, a line per evaluation; also as a table, devices.parquet, and drawn, devices.png
best.safetensors   the model of the round with the best score
cluster-K.safetensors  the model that cluster K is served, where each has its own
model.safetensors  the final W; its presence says that the run is finished
diverged.txt       why training diverged, in a run that ended so
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from torch import Tensor

from fedcluster.errors import BadRun
from fedcluster.experiment import Experiment, changes, parse, read
from fedcluster.files import write_atomically
from fedcluster.reporting import Say
from fedcluster.runs import checkpoint
from fedcluster.runs.devices import DEVICES, TABLE
from fedcluster.runs.ledger import Ledger
from fedcluster.runs.metrics import CYCLES, METRICS, Altered, Kept, beginning, read_lines
from fedcluster.state import State, Tensors

MODEL, BEST, DIVERGED, FLEET = "model.safetensors", "best.safetensors", "diverged.txt", "fleet.json"
WAIT = 0.2  # seconds for the lock, which `fedcluster runs` holds for a moment
HORIZON = ("rounds", "stop")
WATCHING = ("track",)  # sections that change nothing in what a run computes
VERSIONS = ("fedcluster", "torch", "numpy")


def cluster_model(K: int | str) -> str:
    """The file of the model that cluster K is served."""
    return f"cluster-{K}.safetensors"


class Resumed(NamedTuple):
    """Where a run continues."""

    state: State
    ledger: Ledger
    seconds: float
    kept: dict[str, Kept]  # of the files of lines
    movement: Tensor | None = None


class Folder:
    """Held by one process at a time, from opening to closing."""

    def __init__(self, path: Path, experiment: Experiment, resume: bool) -> None:
        self.path, self.experiment = path, experiment
        parts = [path / name for name in ("experiment.toml", "run.json", METRICS, CYCLES, MODEL)]
        parts += [file for name in ("checkpoint", checkpoint.ASIDE) for file in checkpoint.names(path / name)]
        self.begun = any(part.exists() for part in parts)
        if self.begun and not resume:
            raise BadRun(f"{path} already holds a run: continue it with --resume, or choose another folder with --out")
        try:
            self.made = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(path / ".lock")
            self.lock.acquire(timeout=WAIT)
        except Timeout:
            raise BadRun(f"{path} is being written by another process: wait for it, or choose another --out") from None
        except OSError as error:
            raise BadRun(f"cannot write to {path} ({error.strerror}): choose another folder with --out") from None
        try:
            self.check()
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """A run is resumed with the experiment that it began with, except that it may train longer."""
        file, keys = self.path / "experiment.toml", self.experiment.to_dict()
        before: dict[str, Any] | None = self.facts(check=False).get("horizon")
        changed = list[str]()
        if file.exists():
            old = parse(read(file), str(file))
            before, changed = horizon(old), changes(rest(old), rest(keys))
        elif self.noted("experiment") not in (None, digest(rest(keys))):
            changed = ["its digest (experiment.toml, which would say more, is missing)"]
        if changed:
            raise BadRun(
                f"{self.path} holds a run of another experiment, which differs in {', '.join(changed)}: "
                "resume it with the experiment it began with, or choose another --out"
            )
        self.extended = before is not None and before != horizon(keys)
        self.planned_rounds: int | None = (before or {}).get("rounds")  # of the run that is resumed
        if before is not None and before.get("rounds", 0) > self.experiment.rounds:
            raise BadRun(
                f"{self.path} holds a run of {before['rounds']} rounds, and rounds can be raised but not lowered (now "
                f"{self.experiment.rounds}): choose another --out"
            )

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do. A finished run that shall train longer is not finished."""
        return self.ended and not self.extended

    @property
    def ended(self) -> bool:
        return (self.path / MODEL).exists()

    def facts(self, check: bool = True) -> dict[str, Any]:
        """What the run has noted of itself in run.json, nothing where it has not come that far."""
        return run_facts(self.path, check)

    def noted(self, key: str) -> Any:
        """What a run that is continued has noted of itself."""
        return self.facts().get(key)

    def compare(self, fingerprints: dict[str, str]) -> None:
        """Make sure that a run is resumed with what it began with."""
        stored = self.facts(check=False).get("fingerprints")
        if isinstance(stored, dict) and stored != fingerprints:
            changed = [key for key in stored | fingerprints if stored.get(key) != fingerprints.get(key)]
            raise BadRun(
                f"{self.path} was started with different {' and '.join(changed)} under the same name: "
                "restore the old files, or choose another --out"
            )

    def begin(self, facts: dict[str, Any], say: Say) -> None:
        """Tidy up after a run that was killed, check what it stood on, and say what else is different now."""
        for torn in [*self.path.glob(".*.tmp"), *self.path.glob("checkpoint/.*.tmp")]:
            torn.unlink(missing_ok=True)
        (self.path / DIVERGED).unlink(missing_ok=True)
        self.compare(facts["fingerprints"])
        before = self.facts()
        precision = before.get("precision", "float32")
        if before and precision != facts["precision"]:
            raise BadRun(f"{self.path} was started with --precision {precision}: resume it with the same")
        for what in ("arithmetic", "cohorts"):
            if before.get(what) not in (None, facts[what]):
                kind = "cohorts" if what == "cohorts" else "steps"
                say(
                    f"started with {before[what]} {kind}, continued with {facts[what]} ones: "
                    "the last digits will differ"
                )
        other = [f"{name} {before[name]}" for name in VERSIONS if before.get(name) not in (None, facts[name])]
        if other:
            now = ", ".join(f"{name} {facts[name]}" for name in VERSIONS if before.get(name) not in (None, facts[name]))
            say(f"started under {', '.join(other)}, continued under {now}: the last digits may differ")
        self.run = digest(
            {"experiment": digest(rest(self.experiment.to_dict())), "fingerprints": facts["fingerprints"]}
        )

    def restore(
        self,
        start: State,
        initial_device_state: Tensors,
        devices: int,
        cycles: int,
        files: Sequence[str],
        say: Say,
    ) -> Resumed:
        """The newest checkpoint that is whole and whose lines are all in these files, else the start. What is of
        another run, or no longer belongs together, is refused."""
        altered: BadRun | None = None
        for path in checkpoint.names(self.path / "checkpoint"):
            try:
                stored = checkpoint.restore(path, start, initial_device_state, devices, cycles, self.run)
                kept = {name: beginning(self.path / name, stored.record[name]) for name in files}
                if [line["round"] for line in kept[METRICS].lines] != list(range(1, stored.state.round + 1)):
                    raise ValueError(f"ahead of {METRICS}")
            except checkpoint.OtherRun as error:
                raise BadRun(
                    f"{path} is {error}: resume the run that it belongs to, or remove it from {path.parent}"
                ) from None
            except Altered as error:
                altered = altered or BadRun(
                    f"{error.path} was altered after the run had written it, and the checkpoints depend on it: put the "
                    f"file back from a copy, or remove {path.parent} to train again from the start"
                )
            except (ValueError, KeyError) as error:
                say(f"checkpoint {path.stem} is {error}; using the one before")
            else:
                if altered:
                    say(f"{altered.args[0].split(',')[0]}; using checkpoint {path.stem}")
                return Resumed(stored.state, stored.ledger, stored.seconds, kept, stored.movement)
        if altered:
            raise altered
        return Resumed(start, Ledger(devices), 0.0, {name: Kept([], b"") for name in files})

    def reopen(self, round: int) -> None:
        """Let a finished run train longer, from the checkpoint of its last round. The model goes first: a process that
        is killed before the new number of rounds is noted leaves a run that resumes at its last round."""
        if not self.ended:
            return
        if round < len(read_lines(self.path / METRICS)):
            raise BadRun(
                f"{self.path} is finished, and the checkpoint of its last round, from which it would train longer, is "
                f"missing or damaged: put {self.path / 'checkpoint'} back from a copy, or choose another --out"
            )
        (self.path / MODEL).unlink()

    def note(self, facts: dict[str, Any]) -> None:
        """What this run is and stands on."""
        keys = self.experiment.to_dict()
        facts = {"experiment": digest(rest(keys)), "horizon": horizon(keys), **facts}
        self.write("run.json", json.dumps(facts | {"digest": digest(facts)}, indent=2) + "\n")
        self.write("experiment.toml", self.experiment.to_toml())

    def finish(self, model: bytes) -> None:
        """The final model, whose presence says that everything else is there; before it, the digests of all that a
        finished run is read from."""
        there = [name for name in (METRICS, CYCLES, DEVICES, TABLE, BEST) if (self.path / name).exists()]
        there += sorted(path.name for path in self.path.glob(cluster_model("*")))
        digests = {name: sha256((self.path / name).read_bytes()).hexdigest() for name in there}
        self.note(self.facts() | {"finished": digests | {MODEL: sha256(model).hexdigest()}})
        self.write(MODEL, model)

    def check_finished(self, say: Say) -> None:
        """That the files of a finished run are those that it wrote."""
        facts = self.facts()
        digests = facts.get("finished")
        if not facts:
            raise BadRun(f"{self.path}/run.json is missing: delete {MODEL} too, and --resume writes both again")
        if digests is None:
            say(f"{self.path} was written by fedcluster 0.1, without digests: its files are not checked")
            return
        for name, expected in digests.items():
            path = self.path / name
            if path.exists() and sha256(path.read_bytes()).hexdigest() == expected:
                continue
            if name == MODEL:
                raise BadRun(f"{path} is damaged: delete it, and --resume writes it again from the checkpoint")
            raise BadRun(
                f"{path} {'was altered' if path.exists() else 'was deleted'} after the run had finished: put it back "
                "from a copy, or run the experiment again in another --out"
            )

    def write(self, name: str, content: bytes | str) -> None:
        write_atomically(self.path / name, content)

    def close(self) -> None:
        """Let others in; a folder in which nothing came to be is not left behind."""
        self.lock.release()
        if not (self.path / "experiment.toml").exists():
            (self.path / ".lock").unlink(missing_ok=True)
            if self.made:
                with suppress(OSError):
                    self.path.rmdir()


def run_facts(folder: Path, check: bool = True) -> dict[str, Any]:
    """The content of run.json, checked against its digest."""
    path = folder / "run.json"
    try:
        facts = json.loads(path.read_bytes())
        sealed = facts.pop("digest", None) in (None, digest(facts))  # 0.1 wrote none
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError, RecursionError):
        facts, sealed = {}, False
    if check and not sealed:
        raise BadRun(
            f"{path} is damaged: restore it from a copy, or delete it together with {MODEL}, if that is there, "
            "and --resume writes them again from the checkpoint"
        )
    return dict(facts)


def horizon(keys: dict[str, Any]) -> dict[str, Any]:
    """How long a run trains: the keys of its experiment that may change when it is resumed."""
    return {key: keys[key] for key in HORIZON if key in keys}


def rest(keys: dict[str, Any]) -> dict[str, Any]:
    """The other keys, which may not, without those of trackers."""
    return {key: value for key, value in keys.items() if key not in HORIZON + WATCHING}


def digest(values: dict[str, Any]) -> str:
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def fresh(name: str) -> Path:
    """A folder under runs/ that nobody has: name, name-2, name-3, ..."""
    number = 1
    while True:
        path = Path("runs", name if number == 1 else f"{name}-{number}")
        if not path.exists():
            return path
        number += 1
