"""What Schemathesis cannot know of the API from its document: which ids are there, and what would make it wait."""

import os

import schemathesis

SESSION = os.environ.get("PEPO_ST_SESSION")
COMMAND = os.environ.get("PEPO_ST_COMMAND")
PORT = os.environ.get("PEPO_ST_PORT")


@schemathesis.hook
def map_path_parameters(context, path_parameters):
    """Requests are for what is there."""
    if path_parameters and SESSION:
        if "session" in path_parameters:
            path_parameters["session"] = SESSION
        if "command" in path_parameters:
            path_parameters["command"] = COMMAND
        # A port that could be one is that on which a program answers; what can be none is for us to refuse.
        port = str(path_parameters.get("port", ""))
        if port.isdecimal() and 0 < int(port) < 65536:
            path_parameters["port"] = PORT
    return path_parameters


def impatient(values):
    """Nobody waits for minutes here; what is no number stays as it is."""
    if isinstance(values, dict) and isinstance(values.get("wait_seconds"), int) and values["wait_seconds"] > 1:
        values["wait_seconds"] = 1
    return values


@schemathesis.hook
def map_query(context, query):
    return impatient(query)


@schemathesis.hook
def map_body(context, body):
    return impatient(body)


@schemathesis.serializer("application/x-tar", "application/toml", "application/zstd")
def as_it_is(context, value):
    """Bytes of no format: what unpacks or parses them has to cope."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
