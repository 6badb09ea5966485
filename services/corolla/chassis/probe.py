"""Checks whether a service on this machine serves: `python -m corolla.chassis.probe PORT`, for a kubelet without gRPC.

The exit status is 0 if the health service says SERVING, else 1.
"""

import sys
from typing import Final

import grpc

_CHECK: Final = "/grpc.health.v1.Health/Check"
# The protocol's messages as bytes: importing their classes would take as long as the whole check.
_WHOLE_SERVER: Final = b""
_SERVING: Final = b"\x08\x01"


def is_serving(port: int, timeout_s: float = 4.0) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        check = channel.unary_unary(_CHECK, request_serializer=bytes, response_deserializer=bytes)
        try:
            return check(_WHOLE_SERVER, timeout=timeout_s) == _SERVING
        except grpc.RpcError:
            return False


if __name__ == "__main__":
    sys.exit(0 if is_serving(int(sys.argv[1])) else 1)
