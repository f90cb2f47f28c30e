"""The device thread: order, exceptions, an event loop that stays free, a clean end."""

import asyncio
import threading
import time

import jax.numpy as jnp
import pytest

from hermes_jax.engines.device import DeviceThread


def test_calls_run_in_order_on_one_other_thread():
    seen = []

    def call(i):
        seen.append((i, threading.current_thread()))
        return i * i

    with DeviceThread() as device:
        results = [device.submit(call, i) for i in range(20)]
        assert [r.result() for r in results] == [i * i for i in range(20)]
    assert [i for i, _ in seen] == list(range(20))
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] is not threading.current_thread()


def test_awaiting_gives_the_value_and_raises_the_exception():
    def fail():
        raise KeyError("lost")

    async def main(device):
        assert float(await device.submit(lambda: jnp.ones(3).sum())) == 3.0
        with pytest.raises(KeyError, match="lost"):
            await device.submit(fail)
        assert await device.submit(lambda: "still alive") == "still alive"

    with DeviceThread() as device:
        asyncio.run(main(device))


def test_the_event_loop_goes_on_while_the_device_works():
    async def main(device):
        work = asyncio.ensure_future(_awaited(device.submit(time.sleep, 0.3)))
        gaps, last = [], time.monotonic()
        while not work.done():
            await asyncio.sleep(0.005)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        assert len(gaps) > 10
        assert max(gaps) < 0.2

    with DeviceThread() as device:
        asyncio.run(main(device))


async def _awaited(submitted):
    return await submitted


def test_a_cancelled_call_that_waits_never_runs():
    ran = []

    async def main(device):
        gate = threading.Event()
        first = device.submit(gate.wait)
        second = asyncio.ensure_future(_awaited(device.submit(ran.append, 1)))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        gate.set()
        await first
        await device.submit(int)

    with DeviceThread() as device:
        asyncio.run(main(device))
    assert ran == []


def test_close_finishes_the_running_call_and_drops_the_rest():
    gate, ran = threading.Event(), []
    device = DeviceThread("mine")
    running = device.submit(gate.wait, 5)
    dropped = device.submit(ran.append, 1)
    threading.Timer(0.05, gate.set).start()
    device.close()
    device.close()
    assert running.result() is True
    assert dropped._future.cancelled()
    assert ran == []
    with pytest.raises(RuntimeError, match="'mine' is closed"):
        device.submit(int)


def test_busy_time_is_the_time_in_calls():
    def fail():
        time.sleep(0.1)
        raise KeyError("lost")

    with DeviceThread() as device:
        assert device.busy_s() == 0
        device.submit(time.sleep, 0.2).result()
        with pytest.raises(KeyError):
            device.submit(fail).result()
        busy = device.busy_s()
        assert 0.3 <= busy < 0.5
        time.sleep(0.2)
        assert device.busy_s() == busy, "nothing ran"
        running = device.submit(time.sleep, 0.3)
        time.sleep(0.15)
        assert busy + 0.05 < device.busy_s() < busy + 0.3, "the call that runs counts so far"
        running.result()


def test_waiting_for_a_call_on_the_thread_itself_is_refused():
    with DeviceThread() as device, pytest.raises(RuntimeError, match="call the function directly"):
        device.submit(lambda: device.submit(int).result()).result()
