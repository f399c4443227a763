"""The contract with Flower: every private name of `_compat` exists and has the parameters, fields and methods we use.
When this passes for a new minor version of Flower, `pyproject.toml` may allow it."""

import inspect
import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedcluster.flower import _compat

ROOT = Path(__file__).parents[2]
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {  # the arguments with which we call each function or class
    "Fab": (("hash", b"content", {}), {}),
    "HttpGrid": (("127.0.0.1:1", True, None), {"token": "t"}),
    "NodeAuthHttpInterceptor": ((1, 2), {}),
    "RetryInvoker": ((1, 2), {"max_tries": 4, "max_time": None}),
    "SuperExecAuthHttpInterceptor": ((), {"master_secret": b"", "protected_methods": []}),
    "build_fab_from_disk": ((Path(),), {}),
    "bytes_to_public_key": ((b"",), {}),
    "constant": ((0.5,), {}),
    "fab_to_proto": ((1,), {}),
    "flower_superlink": ((), {}),
    "generate_key_pairs": ((), {}),
    "get_all_nested_objects": ((1,), {}),
    "get_object_body": ((b"", object), {}),
    "get_object_children_ids_from_object_content": ((b"",), {}),
    "get_object_tree": ((1,), {}),
    "get_object_type_from_object_content": ((b"",), {}),
    "inflate_object_from_contents": (("id", {}), {}),
    "iterate_object_tree": ((1,), {}),
    "message_from_proto": ((1,), {}),
    "message_to_proto": ((1,), {}),
    "public_key_to_bytes": ((1,), {}),
    "remove_content_from_message": ((1,), {}),
    "run_from_proto": ((1,), {}),
    "start_parent_process_monitor": ((1,), {}),
    "verify_signature": ((1, b"", b""), {}),
}
FIELDS = {  # of the protocol's messages
    "AcquireTaskRequest": {"supported_task_types"},
    "ActivateNodeRequest": {"public_key", "heartbeat_interval"},
    "ActivateNodeResponse": {"node_id"},
    "ConfirmMessageReceivedRequest": {"node", "run_id", "message_object_id"},
    "DeactivateNodeRequest": {"node_id"},
    "Node": {"node_id"},
    "NodeInfo": {"node_id", "public_key", "last_activated_at"},
    "ObjectTree": {"object_id", "children"},
    "PullAppMessagesRequest": {"message_ids"},
    "PullMessagesRequest": {"node"},
    "PullMessagesResponse": {"messages_list", "message_object_trees"},
    "PullObjectRequest": {"node", "run_id", "object_id"},
    "PullObjectResponse": {"object_found", "object_available", "object_content"},
    "PullTaskInputRequest": set[str](),
    "PushMessagesRequest": {"node", "messages_list", "message_object_trees", "clientapp_runtime_list"},
    "PushMessagesResponse": {"objects_to_push", "session_id"},
    "PushObjectRequest": {"node", "run_id", "object_id", "object_content", "session_id"},
    "PushTaskOutputRequest": {"sub_status"},
    "RegisterNodeFleetRequest": {"public_key"},
    "RegisterNodeRequest": {"public_key", "name"},
    "SendNodeHeartbeatRequest": {"node", "heartbeat_interval"},
    "SendTaskHeartbeatRequest": set[str](),
    "StartRunRequest": {"fab"},
}
CLIENTS = {  # the methods that we call
    "ControlHttpClient": {"RegisterNode", "StartRun"},
    "FleetHttpClient": {
        "ActivateNode",
        "ConfirmMessageReceived",
        "DeactivateNode",
        "PullMessages",
        "PullObject",
        "PushMessages",
        "PushObject",
        "RegisterNode",
        "SendNodeHeartbeat",
    },
    "RuntimeHttpClient": {
        "AcquireTask",
        "ConfirmMessageReceived",
        "PullMessages",
        "PullObject",
        "PullTaskInput",
        "PushTaskOutput",
        "SendTaskHeartbeat",
    },
}
CONSTANTS = {
    "ErrorCode": {
        "CLIENT_APP_RAISED_EXCEPTION",
        "MESSAGE_UNAVAILABLE",
        "NODE_UNAVAILABLE",
        "REPLY_MESSAGE_UNAVAILABLE",
    },
    "SubStatus": {"COMPLETED", "FAILED"},
    "TaskIdentity": {"_task_id", "_run_id", "_node_id"},
    "TaskType": {"SERVER_APP"},
}
OWN = {"runtime_client", "set_max_tries", "set_message_id", "set_task_identity"}  # tested by themselves below


def test_every_name_is_tested() -> None:
    assert sorted([*CALLS, *FIELDS, *CLIENTS, *CONSTANTS, *OWN]) == sorted(_compat.__all__)


@pytest.mark.parametrize("name", CALLS)
def test_functions_take_our_arguments(name: str) -> None:
    args, kwargs = CALLS[name]
    inspect.signature(getattr(_compat, name)).bind(*args, **kwargs)


@pytest.mark.parametrize("name", FIELDS)
def test_protocol_messages_have_our_fields(name: str) -> None:
    assert FIELDS[name] <= set(getattr(_compat, name).DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("name", CLIENTS)
def test_clients_have_our_methods(name: str) -> None:
    client = getattr(_compat, name)
    inspect.signature(client.from_server_address).bind("127.0.0.1:1", True, None, [], retry_invoker=None)
    assert all(callable(getattr(client, method)) for method in CLIENTS[name])


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_exist(name: str) -> None:
    assert all(hasattr(getattr(_compat, name), constant) for constant in CONSTANTS[name])


def test_ids_and_retries_are_where_we_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(_compat.TaskIdentity, name, None)
    _compat.set_task_identity(1, 2, 3)
    message = Message(RecordDict(), 7, "train")
    assert (message.metadata.run_id, message.metadata.src_node_id) == (2, 3)
    _compat.set_message_id(message, "id")
    assert message.metadata.message_id == "id"
    grid = _compat.HttpGrid("127.0.0.1:1", True, None, token="t")
    assert isinstance(grid, Grid)
    assert grid.node.node_id > 0
    _compat.set_max_tries(grid, 3)
    client = _compat.runtime_client(grid)
    assert isinstance(client, _compat.RuntimeHttpClient)
    grid.close()


def test_the_package_allows_the_minor_version_that_is_tested() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["flower"]
    (allowed,) = [one for one in extras if one.startswith("flwr")]
    major, minor = map(int, version("flwr").split(".")[:2])
    lowest, below = (tuple(map(int, found)) for found in re.findall(r"[>=<]+(\d+)\.(\d+)", allowed))
    assert lowest <= (major, minor) < below, f"{allowed} does not allow Flower {major}.{minor}, which is installed"
    assert below == (major, minor + 1), f"{allowed} allows versions that this test has not seen"
