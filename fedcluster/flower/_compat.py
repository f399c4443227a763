"""Everything that we use of Flower outside its public modules, so that a new version of Flower breaks one file.

Public are `flwr.app`, `flwr.clientapp`, `flwr.serverapp` and `flwr.serverapp.strategy`. `tests/flower/test_compat.py`
checks every name of this file against the installed Flower: that it exists, and has the parameters, fields and methods
we use. `pyproject.toml` allows only the minor versions for which that test has passed.
"""

from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import fab_to_proto, message_from_proto, message_to_proto, run_from_proto
from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node, NodeInfo
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_body,
    get_object_children_ids_from_object_content,
    get_object_tree,
    get_object_type_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor
from flwr.supercore.primitives.asymmetric import (
    bytes_to_public_key,
    generate_key_pairs,
    public_key_to_bytes,
    verify_signature,
)
from flwr.supercore.retry.retry_invoker import RetryInvoker, constant
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.cli import flower_superlink
from flwr.superlink.grid import HttpGrid
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

__all__ = [
    "AcquireTaskRequest",
    "ActivateNodeRequest",
    "ActivateNodeResponse",
    "ConfirmMessageReceivedRequest",
    "ControlHttpClient",
    "DeactivateNodeRequest",
    "ErrorCode",
    "Fab",
    "FleetHttpClient",
    "HttpGrid",
    "Node",
    "NodeAuthHttpInterceptor",
    "NodeInfo",
    "ObjectTree",
    "PullAppMessagesRequest",
    "PullMessagesRequest",
    "PullMessagesResponse",
    "PullObjectRequest",
    "PullObjectResponse",
    "PullTaskInputRequest",
    "PushMessagesRequest",
    "PushMessagesResponse",
    "PushObjectRequest",
    "PushTaskOutputRequest",
    "RegisterNodeFleetRequest",
    "RegisterNodeRequest",
    "RetryInvoker",
    "RuntimeHttpClient",
    "SendNodeHeartbeatRequest",
    "SendTaskHeartbeatRequest",
    "StartRunRequest",
    "SubStatus",
    "SuperExecAuthHttpInterceptor",
    "TaskIdentity",
    "TaskType",
    "build_fab_from_disk",
    "bytes_to_public_key",
    "constant",
    "fab_to_proto",
    "flower_superlink",
    "generate_key_pairs",
    "get_all_nested_objects",
    "get_object_body",
    "get_object_children_ids_from_object_content",
    "get_object_tree",
    "get_object_type_from_object_content",
    "inflate_object_from_contents",
    "iterate_object_tree",
    "message_from_proto",
    "message_to_proto",
    "public_key_to_bytes",
    "remove_content_from_message",
    "run_from_proto",
    "runtime_client",
    "set_max_tries",
    "set_message_id",
    "set_task_identity",
    "start_parent_process_monitor",
    "verify_signature",
]


def runtime_client(grid: HttpGrid) -> RuntimeHttpClient:
    """The grid's own connection to the SuperLink's Runtime API."""
    return grid._runtime_client


def set_max_tries(grid: HttpGrid, tries: int) -> None:
    """How often the grid tries a request before it raises."""
    grid._retry_invoker.max_tries = tries


def set_message_id(message: Message, message_id: str) -> None:
    """A message gets its id from whoever sends or receives it."""
    message.metadata.__dict__["_message_id"] = message_id


def set_task_identity(task_id: int, run_id: int, node_id: int) -> None:
    """Creating a message needs the identity of the task that runs in this process."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task_id, run_id, node_id
