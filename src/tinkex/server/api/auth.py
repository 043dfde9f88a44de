"""Who asks. Every look-up goes through the owner this answers."""

from starlette.requests import HTTPConnection

# A server without keys is bound to loopback, and everybody on the machine is this one.
LOCAL_OWNER = "local"


def owner_of(request: HTTPConnection) -> str:
    """The owner behind a request."""
    return LOCAL_OWNER
