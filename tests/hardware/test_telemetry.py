"""What the machine reports: real figures, or None."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulation import emulated

from capibara.hardware import CpuTimes, cpu_times, device_memory, live_array_bytes
from capibara.hardware.telemetry import available_memory


def test_live_array_bytes_follow_allocation():
    gc.collect()  # arrays of earlier tests must not vanish in between
    before = live_array_bytes()
    array = jax.device_put(np.zeros((100, 100), np.float32))
    assert live_array_bytes() - before == 40_000
    array.delete()
    assert live_array_bytes() == before


def test_arrays_that_share_a_buffer_count_once():
    gc.collect()
    before = live_array_bytes()
    array = jax.device_put(np.zeros((100, 100), np.float32))
    views = [jax.device_put(array, jax.devices()[0]), array.addressable_shards[0].data]
    assert {view.unsafe_buffer_pointer() for view in views} == {array.unsafe_buffer_pointer()}
    other = jnp.array(array)  # a copy
    empty = jnp.zeros((0, 7))
    assert live_array_bytes() - before == 80_000
    assert live_array_bytes() - before == 80_000  # looking makes no arrays that count
    del array, views
    gc.collect()
    assert live_array_bytes() - before == other.nbytes + empty.nbytes == 40_000


@pytest.mark.parametrize(
    "error", [RuntimeError("Array has been deleted"), TypeError("'NoneType' is not iterable")]
)
def test_an_array_deleted_meanwhile_is_left_out(monkeypatch, error):
    class Array:
        deleted = True
        sharding = None

        @property
        def addressable_shards(self):
            raise error

        def is_deleted(self):
            return self.deleted

    array = Array()
    monkeypatch.setattr(jax, "live_arrays", lambda: [array])
    assert live_array_bytes() == 0
    array.deleted = False
    with pytest.raises(type(error)):
        live_array_bytes()


def test_a_runtime_that_hides_its_buffers_counts_every_array(monkeypatch):
    class Array(SimpleNamespace):
        nbytes = 100

        def unsafe_buffer_pointer(self):
            raise RuntimeError("not here")

        def is_deleted(self):
            return False

    arrays = [
        Array(sharding=None, addressable_shards=[SimpleNamespace(device=d, data=Array()) for d in (0, 1)])
        for _ in "ab"
    ]
    monkeypatch.setattr(jax, "live_arrays", lambda: arrays)
    assert live_array_bytes() == 400


def test_shards_count_on_each_of_their_devices():
    script = """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        from capibara.hardware import live_array_bytes
        mesh = jax.make_mesh((4,), ("x",))
        for spec, times in ((P("x"), 1), (P(), 4)):
            before = live_array_bytes()
            array = jax.device_put(np.zeros(1000, "float32"), NamedSharding(mesh, spec))
            for _ in range(3):
                shards = [shard.data for shard in array.addressable_shards]
                print((live_array_bytes() - before) / 4000 - times, end=" ")
            del array, shards
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": emulated(4),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["0.0"] * 6, done.stderr


def test_host_memory_grows_with_the_process():
    # A process of its own: one that ran other tests has memory to give that it was lent before.
    script = """
        import numpy as np
        from capibara.hardware import host_memory
        before = host_memory()
        block = np.ones(200_000_000 // 8)  # touched, so resident
        after = host_memory()
        assert after.peak >= before.peak > 0
        if before.in_use is not None and after.in_use is not None:
            assert after.in_use - before.in_use > 0.8 * block.nbytes
            assert after.peak >= after.in_use > 0
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_device_memory_of_this_machine():
    report = device_memory()
    assert [m.device for m in report] == [str(d) for d in jax.local_devices()]
    if jax.devices()[0].platform == "cpu":
        assert report[0].in_use is None  # not 0: the CPU runtime reports none


def test_device_memory_passes_on_what_a_device_says():
    class Fake(SimpleNamespace):
        def memory_stats(self):
            return {"bytes_in_use": 5, "peak_bytes_in_use": 7}

        def __str__(self):
            return "fake:0"

    (memory,) = device_memory([Fake()])
    assert (memory.device, memory.in_use, memory.peak, memory.limit) == ("fake:0", 5, 7, None)


def test_cpu_times_of_a_known_text():
    # user nice system idle iowait irq softirq steal guest guest_nice
    earlier = cpu_times("cpu  100 10 50 800 40 0 0 0 30 5\ncpu0 1 2 3\n")
    assert earlier == CpuTimes(busy=160, total=1000)
    assert earlier is not None
    later = CpuTimes(busy=190, total=1100)
    assert later.utilization_since(earlier) == pytest.approx(0.3)
    assert earlier.utilization_since(earlier) is None
    assert CpuTimes(161, 1001).utilization_since(earlier) is None  # too few ticks


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux only")
def test_cpu_times_advance():
    earlier = cpu_times()
    jnp.ones((8, 8)).block_until_ready()
    later = cpu_times()
    assert earlier is not None
    assert later is not None
    assert later.total >= earlier.total > 0
    assert earlier.total <= (os.cpu_count() or 1) * 1e12


def test_memory_that_the_kernel_says_is_available():
    assert available_memory("MemTotal: 900 kB\nMemAvailable:     123 kB\nBuffers: 1 kB\n") == 123 * 1024
    assert available_memory("MemTotal: 900 kB\n") is None
    found = available_memory()
    assert found is None or 0 < found < 1 << 50
