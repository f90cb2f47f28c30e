"""Seconds by phase, and the idle part of them."""

import time

from hermes_jax.engines.device import DeviceThread
from hermes_jax.telemetry.stopwatch import Stopwatch


def test_idle_time_is_what_the_device_thread_did_not_work():
    with DeviceThread() as device:
        seconds = Stopwatch(device.busy_s)
        with seconds("collect"):
            device.submit(time.sleep, 0.1).result()
            time.sleep(0.3)
        with seconds("update"):
            device.submit(time.sleep, 0.3).result()
        with seconds("pack"):
            time.sleep(0.1)
        found = seconds.idle_metrics()
    assert found["device/collect_idle_s"] >= 0.29
    assert seconds.taken["collect"] - found["device/collect_idle_s"] >= 0.09, "it worked that long"
    assert found["device/collect_idle_share"] == found["device/collect_idle_s"] / seconds.taken["collect"]
    assert found["device/update_idle_s"] >= 0.09, "packing is host work"
    assert seconds.taken["update"] + seconds.taken["pack"] - found["device/update_idle_s"] >= 0.29
    assert found["device/update_idle_share"] < 0.75
    assert seconds.taken.keys() == seconds.idle.keys() == {"collect", "update", "pack"}


def test_a_step_without_updates_has_no_idle_share():
    assert Stopwatch(lambda: 0.0).idle_metrics()["device/update_idle_share"] == 0.0
