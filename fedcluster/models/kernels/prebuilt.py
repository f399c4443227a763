"""The libraries that a wheel brings: one for each generation of processors, chosen by what this one can do.

All generations have fused multiply-add and sum in the same order, so that they compute the same bits, and the same as a
library built on the machine. It imports the standard library only, for build hooks to load it.
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "prebuilt"

AVX2 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"))
GENERATIONS = {  # the best first: gcc's names, and the flags of /proc/cpuinfo
    "x86-64-v4": AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": AVX2,
}


def file_name(generation: str) -> str:
    return f"engine-{generation}.so"


def prebuilt_library() -> Path | None:
    """The library for this processor; None in a pure wheel, from the sources, and on other processors."""
    able = features()
    fitting = (FOLDER / file_name(generation) for generation, needed in GENERATIONS.items() if needed <= able)
    return next((path for path in fitting if path.is_file()), None)


def features() -> frozenset[str]:
    """What the processor can do, as Linux names it; nothing where it does not say so."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())
