"""The fake service on a real socket, under the name that tests here import."""

from tinkex.testing import Loopback

__all__ = ["Loopback"]
