"""The experiment: one frozen, validated description of a run. TOML in, TOML out, a hash.

Every default is the paper's where the paper has one. Where a key takes a name, Python code may give the object itself
(a function, a module, a data set) and a file may give `package.module:name`.
"""

from fedcluster.experiment.experiment import Experiment, changes
from fedcluster.experiment.files import load, parse, path_exists, read
from fedcluster.experiment.messages import format_value
from fedcluster.experiment.parts import Part, Section, check_name, import_object, one_of, options_class
from fedcluster.experiment.sections import (
    CLAIM_CAP,
    LOCAL_OPTIMIZERS,
    NORM_BOUND,
    SECTIONS,
    TRACE_FORMATS,
    WITH_DEVICES,
    Accept,
    Aggregation,
    Algorithm,
    Attack,
    Centralized,
    Clock,
    Clusters,
    Data,
    Eval,
    Fleet,
    LearningRateSchedule,
    Local,
    Model,
    Pluralistic,
    Privacy,
    Server,
    Stop,
    Task,
)
from fedcluster.experiment.types import Count, FilePath, NonNegative, Positive, Seconds, Share

__all__ = [
    "CLAIM_CAP",
    "LOCAL_OPTIMIZERS",
    "NORM_BOUND",
    "SECTIONS",
    "TRACE_FORMATS",
    "WITH_DEVICES",
    "Accept",
    "Aggregation",
    "Algorithm",
    "Attack",
    "Centralized",
    "Clock",
    "Clusters",
    "Count",
    "Data",
    "Eval",
    "Experiment",
    "FilePath",
    "Fleet",
    "LearningRateSchedule",
    "Local",
    "Model",
    "NonNegative",
    "Part",
    "Pluralistic",
    "Positive",
    "Privacy",
    "Seconds",
    "Section",
    "Server",
    "Share",
    "Stop",
    "Task",
    "changes",
    "check_name",
    "format_value",
    "import_object",
    "load",
    "one_of",
    "options_class",
    "parse",
    "path_exists",
    "read",
]
