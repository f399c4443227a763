"""Mutated inputs: experiments, -o keys, data files, fleets, traces, folders of earlier runs; and hostile traces.

Every input goes through the real command, in a forked child with limits on memory and time. The command must end with
one of its exit codes; a traceback, a crash or a hang is a defect. `python -m torture.inputs [SEED [SECONDS]]` prints
the counts.
"""

import io
import json
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedcluster.experiment import SECTIONS, Experiment

Rng = np.random.Generator
Case = tuple[list[str], dict[str, bytes]]  # the command's words, and the files that lie beside it

MEMORY = 3 * 2**30  # bytes that a child may take beyond what it began with
PATIENCE = 30  # seconds of a child, after which it hangs
CODES = {0, 2, 3, 4, 5, 6, 9, 10}  # with which a command may end
DEFECTS = ("tracebacks", "crashes", "hangs", "unknown exit codes", "code executed")
HARMED = "harmed"  # the file that is there once code of an input was executed
TRACEBACK = 97  # with which a child ends that raised something else

EXPERIMENT = """
rounds = 1
[data]
name = "data.csv"
[fleet]
devices = 6
samples = 5
partition = "iid"
[clusters]
count = 2
participation = 0.5
[model]
name = "logistic"
[local]
steps = 1
batch = 2
lr = 0.1
"""
KEYS = [f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.model_fields]
KEYS += [*(key for key in Experiment.model_fields if key not in SECTIONS), "x", "a.b.c", ""]
VALUES = """
0 1 -1 2 0.5 1e-300 1e300 1e29 inf nan 1000000000000 [1,2] [2,1] [0.1,0.2] [] {} {a=1} true '' 'a' x full
~nosuchuser/x ~ / . /dev/zero /dev/null /proc/self/mem a\\u0000b "a\\u0000b" :x .x:y os:path os:getcwd builtins:int
nosuch.module:x a:b:c \udcff\udcfe ٣ 1٣ ² 2026-01-01 '2026-02-30' '9999-12-31' '0001-01-01' 12:00:00
natural dirichlet iid major_class diurnal centralized timezone availability similar balanced file redrawn
scaffold fednova mime vrl_sgd pr_spider adam yogi alexnet cnn mlp digits csv
data.csv data.npz data.parquet fleet.csv trace.yaml clusters.csv model.safetensors nosuch.csv
""".split()  # noqa: SIM905  as a list they would fill the screen
VALUES += ["9" * 5000, "0x" + "f" * 5000, "x" * 5000, "[" * 500 + "]" * 500]
TOKENS = b"""
\xff\xfe \xef\xbb\xbf , " ' [ ]]]]] { } : = # -1 1e309 nan inf 0x10 1_0 +5 18446744073709551615 1e20
-9223372036854775809 &a *a !!python/name:os.system 0202-01-15T22:00:00 99999-01-01 NA device label
""".split()
TOKENS += [
    b"[" * 3000,
    b"{" * 3000,
    b"-" * 3000,
    b"9" * 5000,
    "٣".encode(),
    b"",
    b" ",
    b"- ",
    b"\0",
    b"\n",
    b"\r",
    b"\t",
]


def fuzzed(rng: Rng, content: bytes) -> bytes:
    """A few bytes flipped, cut out, doubled or replaced by a token that parsers stumble over."""
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 4))):
        a, b = sorted(int(place) for place in rng.integers(len(data) + 1, size=2))
        match int(rng.integers(7)):
            case 0 if data:
                data[min(a, len(data) - 1)] ^= 1 << int(rng.integers(8))
            case 1:
                del data[a : min(b, a + 40)]
            case 2:
                data[a:a] = data[a : min(b, a + 200)]
            case 3:
                del data[b:]
            case _:
                data[a : a + int(rng.integers(3)) * int(rng.integers(6))] = TOKENS[int(rng.integers(len(TOKENS)))]
    return bytes(data)


def pick(rng: Rng, things: list[Any]) -> Any:
    return things[int(rng.integers(len(things)))]


def saved(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def csv_data(rng: Rng) -> bytes:
    rows = [f"{rng.normal():.3f},{int(rng.integers(9)) + 0.5},{i % 3},p{i % 4}" for i in range(20)]
    return ("a,b,label,device\n" + "\n".join(rows) + "\n").encode()


def parquet_data(rng: Rng) -> bytes:
    """Columns of every kind as labels, features and devices."""
    n = 12
    columns: list[Any] = [
        [i % 3 for i in range(n)],
        np.arange(n, dtype=np.uint64) + np.uint64(2**63 * int(rng.integers(2))),
        [float(i % 3) if i else float("nan") for i in range(n)],
        [[i] for i in range(n)],
        [{"a": i} for i in range(n)],
        [{"bytes": b"x", "path": "/etc/passwd"}] * n,
        [b"\xff"] * n,
        [None] * n,
        [f"c{i % 3}" for i in range(n)],
        pa.array([f"c{i % 3}" for i in range(n)]).dictionary_encode(),
        [i % 2 == 0 for i in range(n)],
        pa.array(range(n), pa.timestamp("us")),
        pa.array(range(n), pa.decimal128(30, 3)),
        pa.array(range(n), pa.duration("s")),
        [10**9 * i for i in range(n)],
    ]
    table = pa.table({name: pick(rng, columns) for name in ("a", "b", "label", "device")})
    return saved(lambda file: pq.write_table(table, file))


def npz_data(rng: Rng) -> bytes:
    kinds: list[Any] = [
        np.float32,
        np.float64,
        np.uint8,
        np.int64,
        np.uint64,
        bool,
        np.complex64,
        "U3",
        "datetime64[s]",
    ]
    shapes: list[tuple[int, ...]] = [(20, 3), (20,), (20, 2, 2), (20, 1, 4, 4), (0, 3), (20, 0), (20, 3, 1, 1, 1), ()]

    def array(kind: Any, shape: tuple[int, ...]) -> Any:
        return rng.integers(0, 3, shape).astype(kind)

    y = (20,) if rng.random() < 0.8 else pick(rng, shapes)
    x = shapes[0] if rng.random() < 0.6 else pick(rng, shapes)
    arrays = {f"x_{split}": array(pick(rng, kinds[:4]), x) for split in ("train", "test")}
    arrays |= {f"y_{split}": array(pick(rng, kinds), y) for split in ("train", "test")}
    if rng.random() < 0.3:
        arrays["y_train"] = arrays["y_test"] = np.full(20, pick(rng, [2**64 - 1, 2**63, 10**9, 5]), np.uint64)
    if rng.random() < 0.3:
        arrays["device_train"] = array(pick(rng, kinds), (20,))
    return saved(lambda file: np.savez_compressed(file, **arrays))


FLEET = b"device,timezone,utc_offset,latitude,samples,seconds_per_sample\n" + b"".join(
    f"d{i},{'Europe/Berlin' if i % 2 else ''},{i % 5 - 2},{i * 7 % 80},{i % 4 + 1},0.{i}1\n".encode() for i in range(8)
)
MESSAGES = "2020-01-28 22:00:00\tbattery_charged_on\n2020-01-28 22:10:00\twifi\n2020-01-28 22:20:00\tscreen_lock\n"
CLIENT = {"active": [0, 40000], "inactive": [3600, 50000], "finish_time": 86400, "model": "x"}
TRACES = [
    b"device,start,end\n" + b"".join(b"d%d,%d,%d\n" % (i, i * 3600, i * 3600 + 9000) for i in range(8)),
    b"device,start,end,timezone\n" + b"d0,2026-01-15 22:00:00,2026-01-16 06:00:00,Asia/Tokyo\n" * 3,
    b"".join(b"d%d: [[0, busy], [%d, free], [80000, off]]\n" % (i, i * 3600 + 1) for i in range(8)),
    json.dumps([{"guid": f"d{i}", "messages": MESSAGES + "2020-01-29 06:00:00\t4G"} for i in range(8)]).encode(),
    *(pickle.dumps({f"d{i}": CLIENT | {"duration": i} for i in range(8)}, protocol) for protocol in (2, 4, 5)),
]
FORMS = {"data.csv": csv_data, "data.parquet": parquet_data, "data.npz": npz_data}


def experiment_case(rng: Rng) -> Case:
    """Good files, and an experiment with other values or other bytes."""
    files = {name: make(np.random.default_rng(0)) for name, make in FORMS.items()} | {"e.toml": EXPERIMENT.encode()}
    files |= {"fleet.csv": FLEET, "trace.yaml": TRACES[2]}
    words = ["run", "e.toml", "--out", "out", "--workers", "1"]
    if rng.random() < 0.2:
        words = ["partition", "e.toml", "--out", "out"]
    if rng.random() < 0.3:
        files["e.toml"] = fuzzed(rng, files["e.toml"])
    for _ in range(int(rng.integers(1, 3))):
        words += ["-o", f"{pick(rng, KEYS)}={pick(rng, VALUES)}"]
    if words[0] == "run" and rng.random() < 0.1:
        words += ["--device", pick(rng, ["meta", "cuda:99", "x", "", "cpu:-1", "\udcff"])]
    return words, files


def data_case(rng: Rng) -> Case:
    name = pick(rng, list(FORMS))
    content = FORMS[name](rng)
    if name != "data.parquet" or rng.random() < 0.5:
        content = fuzzed(rng, content)
    words = ["run", "e.toml", "--out", "out", "--workers", "1", "-o", f"data.name={name}"]
    if rng.random() < 0.3:
        words += ["-o", "fleet={partition='natural'}"]
    return words, {"e.toml": EXPERIMENT.encode(), name: content}


def fleet_case(rng: Rng) -> Case:
    words = [
        "plan",
        "fleet.csv",
        "--count",
        pick(rng, ["1", "2", "3", "3", "8", "500", "1000000000000"]),
        "--out",
        "out",
    ]
    if rng.random() < 0.2:
        words += [pick(rng, ["--free-seconds", "--date", "--seed"]), pick(rng, VALUES)]
    fleet, trace = FLEET, pick(rng, TRACES)
    if rng.random() < 0.7:
        words += ["--availability", "trace"]
        trace = fuzzed(rng, trace)
    else:
        fleet = fuzzed(rng, fleet)
    return words, {"fleet.csv": fleet, "trace": trace}


def folder_case(rng: Rng) -> Case:
    """A run that stopped, one of whose files is no longer what it was."""
    files = {"e.toml": EXPERIMENT.replace("rounds = 1", "rounds = 3").replace("data.csv", "digits").encode()}
    files |= {f"out/{name}": content for name, content in earlier_run(files).items()}
    for name in rng.permutation([name for name in files if name.startswith("out/")])[: int(rng.integers(1, 3))]:
        if rng.random() < 0.2:
            del files[name]
        else:
            files[name] = fuzzed(rng, files[name])
    if rng.random() < 0.7:
        files.pop("out/model.safetensors", None)
    return ["run", "e.toml", "--out", "out", "--workers", "1", "--resume"], files


class Reduced:
    """Pickled as a call of any function."""

    def __init__(self, call: Callable[..., object], *words: object) -> None:
        self.call, self.words = call, words

    def __reduce__(self) -> Any:
        return self.call, self.words


def hostile_case(rng: Rng) -> Case:
    """A trace that was made to do harm: to run code, to nest without end, or to grow far beyond its bytes."""
    depth, protocol = int(rng.integers(100, 60_000)), int(rng.integers(2, 6))
    client = CLIENT | {"active": list(range(1000)), "inactive": [n + 0.5 for n in range(1000)]}
    head = b"\x80" + bytes([protocol])
    calls = [(os.mkdir, HARMED), (os.system, f"touch {HARMED}"), (eval, f"open('{HARMED}', 'w')"), (bytearray, 2**33)]
    trace = pick(
        rng,
        [
            pickle.dumps({1: Reduced(*pick(rng, calls))}, protocol),
            pickle.dumps(dict.fromkeys(range(depth), client), protocol),  # all of them share one
            head + b"}(K\x01K\x01\x86" + b"q\x00h\x00\x86" * (depth % 200) + b"K\x02u.",  # a key that doubles
            head + b"]r" + rng.bytes(4) + b".",  # a memo of up to 2^32 places
            head + b"\x8b" + rng.bytes(4) + b"\x01.",  # a number of up to 2^31 bytes
            head + b"X" + rng.bytes(4) + b"x.",  # a text of up to 2^32 bytes
            head + pick(rng, [b"(", b"]", b"}", b"("]) * depth + pick(rng, [b"a", b"t", b"l", b"s"]) * depth + b".",
            head + rng.bytes(int(rng.integers(1, 200))),
            b"a: " + pick(rng, [b"[", b"{", b"- ", b"? "]) * depth,
            b"a: &a [x]\n" + b"".join(b"b%d: [%s]\n" % (k, b"*a," * 99) for k in range(depth % 50)),
            b'[{"guid": 1, "messages": ' + pick(rng, [b"[", b'{"a":']) * depth,
        ],
    )
    return ["plan", "fleet.csv", "--count", "2", "--availability", "trace", "--out", "out"], {
        "fleet.csv": FLEET,
        "trace": trace,
    }


EARLIER: dict[str, bytes] = {}


def earlier_run(files: dict[str, bytes]) -> dict[str, bytes]:
    if not EARLIER:
        with tempfile.TemporaryDirectory() as folder:
            run(["run", "e.toml", "--out", "out", "--workers", "1"], files, Path(folder))
            out = Path(folder, "out")
            EARLIER.update({str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()})
            del EARLIER["curves.png"]
    return dict(EARLIER)


CASES: list[Callable[[Rng], Case]] = [
    experiment_case,
    data_case,
    fleet_case,
    hostile_case,
    experiment_case,
    data_case,
    folder_case,
]


def run(words: list[str], files: dict[str, bytes], folder: Path) -> tuple[int, str]:
    """The command in a child of its own: its exit code, negative for a signal, and what it said."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    child = os.fork()
    if child == 0:
        code = TRACEBACK
        try:
            os.chdir(folder)
            handle = os.open("said", os.O_WRONLY | os.O_CREAT)
            for stream in (1, 2):
                os.dup2(handle, stream)
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
            resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE, PATIENCE))
            code = command(words)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + 4 * PATIENCE  # the machine may be busy
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    said = (folder / "said").read_text(errors="replace") if (folder / "said").exists() else ""
    return os.waitstatus_to_exitcode(status), said


def command(words: list[str]) -> int:
    from fedcluster.cli.main import app

    try:
        app(words)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    return 0


def inputs(seed: int, seconds: float) -> dict[str, int]:
    """Mutated inputs for so long; how many there were, and how they ended."""
    import torch

    import fedcluster.analysis.plan
    import fedcluster.training.run  # noqa: F401  loaded once, before the forks

    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    until = time.monotonic() + seconds
    number = 0
    while time.monotonic() < until:
        rng = np.random.default_rng([seed, number])
        case = CASES[number % len(CASES)]
        words, files = case(rng)
        with tempfile.TemporaryDirectory() as folder:
            code, said = run(words, files, Path(folder))
            harmed = Path(folder, HARMED).exists()
        number += 1
        counts["inputs"] += 1
        counts[case.__name__.replace("_case", " inputs")] += 1
        if harmed:
            counts["code executed"] += 1
            report(seed, number - 1, words, said, "code executed")
        hung = code in (-signal.SIGKILL, -signal.SIGXCPU)
        if "Traceback (most recent call last)" in said:
            code = TRACEBACK
        kind = "hangs" if hung else "crashes" if code < 0 else "tracebacks" if code == TRACEBACK else f"exit {code}"
        if code not in CODES and not kind.startswith(("hangs", "crashes", "tracebacks")):
            kind = "unknown exit codes"
        counts[kind] += 1
        if code not in CODES:
            report(seed, number - 1, words, said, kind)
    return dict.fromkeys(DEFECTS, 0) | dict(counts)


def report(seed: int, number: int, words: list[str], said: str, kind: str) -> None:
    shown = " ".join(words).encode(errors="backslashreplace").decode()[:300]
    print(f"{kind}: seed {seed}, input {number}: {shown}\n{said[-1500:]}\n", flush=True)


def again(seed: int, number: int, folder: Path) -> None:
    """Write one input's files, to look at it."""
    words, files = CASES[number % len(CASES)](np.random.default_rng([seed, number]))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(words, *run(words, files, folder))


if __name__ == "__main__":
    arguments = [float(word) for word in sys.argv[1:]] + [0.0, 60.0][len(sys.argv) - 1 :]
    found = inputs(int(arguments[0]), arguments[1])
    print(json.dumps(found, indent=1))
    sys.exit(any(found[kind] for kind in DEFECTS))
