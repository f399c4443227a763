"""Keys of earlier versions, translated into today's."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from fedcluster.errors import BadExperiment
from fedcluster.experiment.messages import describe, format_value
from fedcluster.experiment.sections import NAMING, Algorithm

# Options of algorithms that were keys of [local] before there was [algorithm], with their defaults. The files of runs
# from then have all of them.
FORMERLY_LOCAL = {"mu": 0.1, "beta": 1.0, "eta": 1.0, "option": "II", "reset": "never", "statistics": "per_step"}
# Options of partitions and clusterings that every file of a run has from when they were keys of the section itself,
# with the parts that declare them now and the default.
FORMERLY_COMMON: dict[str, dict[str, tuple[tuple[str, ...], Any]]] = {
    "fleet": {"rho_device": (("major_class",), 0.5), "alpha": (("dirichlet",), 0.3)},
    "clusters": {
        "rho_cluster": (("major_class",), 0.1),
        "features": (("balanced", "similar"), "labels"),
        "free_seconds": (("availability",), 600.0),
        "soft": (("availability",), False),
    },
}


def current_key(dotted: str) -> str:
    """The key that a key of an earlier version is now."""
    section, _, key = dotted.partition(".")
    if section != "local" or (key not in FORMERLY_LOCAL and key != "algorithm"):
        return dotted
    return "algorithm.name" if key == "algorithm" else f"algorithm.{key}"


def current_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The same experiment with `local.algorithm` and the options of algorithms in [algorithm], where they are now, and
    without default options of other partitions and clusterings in [fleet] and [clusters]."""
    current, local = dict(keys), keys.get("local")
    for name, former in FORMERLY_COMMON.items():
        if isinstance(given := current.get(name), dict):
            part = given.get(NAMING[name].key, NAMING[name].default_part())
            unused = {key: default for key, (owners, default) in former.items() if part not in owners}
            current[name] = {key: value for key, value in given.items() if key not in unused or value != unused[key]}
    if not isinstance(local, dict) or not ({"algorithm", *FORMERLY_LOCAL} & local.keys()):
        return current
    given = current.get("algorithm", {})
    if not isinstance(given, dict | Algorithm):
        return current
    section = dict(given)
    name = local.get("algorithm", section.get("name", "fedavg"))
    if section.get("name", name) != name:
        raise BadExperiment(
            f"local.algorithm = {format_value(name)} and algorithm.name = {format_value(section['name'])} differ: "
            "remove the former"
        )
    section["name"] = name
    try:
        options = Algorithm(name=name).options_class().model_fields
    except ValidationError as error:
        raise BadExperiment(f"algorithm.{describe(error.errors(), Algorithm.model_fields)}") from None
    for key in FORMERLY_LOCAL.keys() & local.keys():
        if key in options:
            section.setdefault(key, local[key])
        elif local[key] != FORMERLY_LOCAL[key]:
            raise BadExperiment(
                f"local.{key} = {format_value(local[key])} is not allowed: the algorithm {format_value(name)} has no "
                "such option"
            )
    current["algorithm"] = section
    current["local"] = {key: value for key, value in local.items() if key not in {"algorithm", *FORMERLY_LOCAL}}
    return current
