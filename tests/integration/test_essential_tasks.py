"""A process whose essential task fails reports NOT_SERVING and ends, and its supervisor starts it again."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2

from corolla.chassis.failpoints import VARIABLE
from corolla.chassis.lifecycle import EXIT_FAILED
from corolla.local.ports import Ports, is_free

Answer = TypeVar("Answer")

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def until_broken(stream: Iterator[Answer]) -> Iterator[Answer]:
    with contextlib.suppress(grpc.RpcError):
        yield from stream


def test_a_router_whose_placement_statistics_fail_reports_it_and_ends(redis_url: str) -> None:
    port = Ports().free()
    environment = {
        **os.environ, "COROLLA_REDIS_URL": redis_url, "COROLLA_HOST": "127.0.0.1", "COROLLA_PORT": str(port),
        "COROLLA_METRICS_HOST": "127.0.0.1", "COROLLA_METRICS_PORT": "0", "COROLLA_KUBERNETES": "off",
        VARIABLE: "fail:placement_statistics:12",
    }  # fmt: skip
    router = subprocess.Popen([sys.executable, "-m", "corolla.router"], env=environment, stderr=subprocess.PIPE)
    try:
        # A channel that failed to connect waits ever longer; by then the router might have come and gone.
        while is_free(port):
            assert router.poll() is None
            time.sleep(0.02)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            watch = channel.unary_stream(
                "/grpc.health.v1.Health/Watch",
                health_pb2.HealthCheckRequest.SerializeToString,
                health_pb2.HealthCheckResponse.FromString,
            )
            statuses = [each.status for each in until_broken(watch(health_pb2.HealthCheckRequest(), timeout=60))]
        # The watch may begin before the router serves, or on a machine that pauses when the task has failed already.
        assert statuses in ([SERVING, NOT_SERVING], [NOT_SERVING], [NOT_SERVING, SERVING, NOT_SERVING])
        _, log = router.communicate(timeout=30)
        assert router.returncode == EXIT_FAILED
        assert b"essential task ended" in log
        assert b'task=placement_statistics where="InjectedFailure' in log
    finally:
        router.kill()
        router.wait()
