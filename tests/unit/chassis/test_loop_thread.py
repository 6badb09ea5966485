"""The thread between blocking code and an event loop."""

import asyncio
import gc
import threading
import weakref
from contextvars import Context, ContextVar
from typing import Any

import grpc
import pytest

from corolla.chassis.channels import bind, new_server, open_channel
from corolla.chassis.loop_thread import LoopStopped, LoopThread


async def nothing() -> None:
    pass


async def thread_name() -> str:
    return threading.current_thread().name


def test_work_runs_in_the_thread_until_it_is_stopped() -> None:
    thread = LoopThread("looping")
    assert thread.call(thread_name()) == "looping"
    thread.stop(nothing)
    with pytest.raises(LoopStopped):
        thread.call(thread_name())
    thread.post(pytest.fail)
    thread.stop(nothing)


def test_who_waits_learns_that_the_loop_is_stopped() -> None:
    thread, begun = LoopThread("looping"), threading.Event()
    ends: list[BaseException] = []

    async def wait() -> None:
        begun.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            thread.call(wait())
        except BaseException as end:
            ends.append(end)

    waiting = threading.Thread(target=call)
    waiting.start()
    begun.wait(30)
    thread.stop(nothing)
    waiting.join(30)
    assert [type(end).__name__ for end in ends] == ["CancelledError"]


def test_a_timer_of_the_loop_holds_nothing_of_its_caller() -> None:
    class Held:
        pass

    variable: ContextVar[Held] = ContextVar("variable")

    def start_timer() -> None:
        asyncio.get_running_loop().call_later(3600, print)

    async def start_timer_in_a_task() -> None:
        start_timer()

    def call() -> "weakref.ref[Held]":
        held = Held()
        variable.set(held)
        thread.call(start_timer_in_a_task())
        thread.post(start_timer)
        thread.call(nothing())
        return weakref.ref(held)

    thread = LoopThread("looping")
    held = Context().run(call)
    gc.collect()
    assert held() is None
    thread.stop(nothing)


def test_what_comes_last_has_run_when_the_thread_has_stopped() -> None:
    thread, done = LoopThread("looping"), threading.Event()

    async def last() -> None:
        await asyncio.sleep(0.05)
        done.set()

    thread.stop(last)
    assert done.is_set()


def test_a_loop_that_has_ended_does_not_disturb_the_others_use_of_grpc(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC delivers what is left of a call after its loop's end."""
    serving = LoopThread("serving")

    async def never(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await asyncio.sleep(60)
        return b""

    async def serve() -> tuple[grpc.aio.Server, int]:
        server = new_server()
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"Never": grpc.unary_unary_rpc_method_handler(never)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", handlers),))
        port = bind(server, "127.0.0.1", 0)
        await server.start()
        return server, port

    server, port = serving.call(serve())

    async def use() -> None:
        channel = open_channel(f"127.0.0.1:{port}")
        call_never: Any = channel.unary_unary("/a.B/Never")
        calls: list[Any] = [call_never(b"") for _ in range(3)]
        await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()
        await channel.close()

    for _ in range(60):
        thread = LoopThread("using")
        thread.call(use())
        thread.stop(nothing)

    async def stop() -> None:
        await server.stop(0)

    serving.stop(stop)
    assert "Event loop is closed" not in caplog.text
