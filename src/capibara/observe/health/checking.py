"""The health check: every device is asked, loaded and compared, then the links between them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from capibara.hardware import detect_chip
from capibara.hardware.accelerators import said
from capibara.measure.installation import package_versions
from capibara.observe.health.arguments import check_function, check_integer, check_mesh, is_number
from capibara.observe.health.deadline import DeadlineError, Task
from capibara.observe.health.errors import HealthError
from capibara.observe.health.expected import described_devices
from capibara.observe.health.links import check_axis, make_mesh, merged
from capibara.observe.health.memory import check_memory, is_exhausted, measure_bandwidth, size_to_test
from capibara.observe.health.products import DTYPES, make_problems, measure, wrong_elements
from capibara.observe.health.report import HealthReport
from capibara.observe.health.results import AxisHealth, DeviceHealth, MemoryHealth, ProductHealth, Temperature
from capibara.observe.health.temperature import ReadTemperatures, checked_temperatures, read_temperatures
from capibara.observe.health.verdicts import judge, slow_rates
from capibara.observe.health.work import DeviceWork
from capibara.train.processes import Processes

__all__ = ["Progress", "check_health"]

Progress = Callable[[str, int, int], None]
"""Told what is done now, how many parts are done, and how many there are."""

_Tested = TypeVar("_Tested", ProductHealth, MemoryHealth)
# What a device that fails raises. Any other error is one of this program.
_FAILURES = (JaxRuntimeError, DeadlineError)
_FRACTION, _MOST = 0.25, 2**30
_MOST_QUICK = {True: 2**29, False: 2**25}  # on an accelerator, on a CPU
_ROUNDS = 5  # timed repetitions of products, one device after another
_TRIES = 4  # how often a device that seems slow is measured again
_LONGEST = 86_400  # seconds of a time limit: threads cannot wait for any number of them
_SLOWEST_MEMORY = 50e6  # bytes per second of memory for which a memory test waits


def check_health(
    *,
    mesh: Mesh | None = None,
    expected_devices: int | None = None,
    memory_fraction: float | None = None,
    memory_limit_bytes: int | None = None,
    timeout: float = 60.0,
    quick: bool = False,
    work: DeviceWork | None = None,
    temperatures: ReadTemperatures | None = None,
    progress: Progress | None = None,
) -> HealthReport:
    """Exercise every device and the links between them.

    With several processes each calls it, with the same arguments; each gets the report of all devices.

    Args:
      mesh: whose devices and axes are checked; by default all devices, in the grid of chips that they report, or along
        one or two axes.
      expected_devices: how many devices there should be, over all processes. By default what the environment says
        (``TPU_TOPOLOGY``, ``CUDA_VISIBLE_DEVICES``, …), or the mesh.
      memory_fraction: share of each device's free memory to test, above 0 and at most 0.9. By default a quarter, but
        at most 1 GiB.
      memory_limit_bytes: the most memory to test on each device.
      timeout: seconds that one piece of work on a device may take, compilation included; at most a day.
      quick: test less memory, smaller and fewer products.
      work: what runs on devices.
      temperatures: reads them. Those of devices that it leaves out, or all if it raises an error, are unknown.
      progress: told what is done.

    Raises:
      HealthError: (a ``ValueError``) an invalid argument, or ``temperatures`` returns something else.
    """
    start = time.monotonic()
    check_mesh(mesh)
    check_integer("expected_devices", expected_devices, "the number of devices that there should be")
    check_integer("memory_limit_bytes", memory_limit_bytes, "the most bytes to test on each device")
    if memory_fraction is not None and not (is_number(memory_fraction) and 0 < memory_fraction <= 0.9):
        raise HealthError(
            f"memory_fraction: got {memory_fraction!r:.200}, expected a number above 0 and at most 0.9. "
            "Pass the share of free memory to test, such as 0.25."
        )
    if not (is_number(timeout) and 0 < timeout <= _LONGEST):
        raise HealthError(
            f"timeout: got {timeout!r:.200}, expected a number above 0 and at most {_LONGEST:,}. "
            "Pass seconds, such as 60.0."
        )
    if not isinstance(quick, bool):
        raise HealthError(f"quick: got {quick!r:.200}, expected a boolean. Pass True or False.")
    if work is not None and not isinstance(work, DeviceWork):
        raise HealthError(
            f"work: got {work!r:.200}, expected a DeviceWork or None. "
            "Pass an instance of DeviceWork or of a subclass."
        )
    check_function("temperatures", temperatures, "devices and returns temperatures by device.id")
    check_function("progress", progress, "a text, the parts that are done, and their number")
    check = _Check(
        mesh,
        memory_fraction,
        memory_limit_bytes,
        float(timeout),
        quick,
        work or DeviceWork(),
        temperatures or read_temperatures,
        progress or (lambda text, done, total: None),
    )
    return check.run(expected_devices, start)


class _Check:
    """One check: its settings, and what it has found so far."""

    def __init__(
        self,
        mesh: Mesh | None,
        memory_fraction: float | None,
        memory_limit: int | None,
        timeout: float,
        quick: bool,
        work: DeviceWork,
        temperatures: ReadTemperatures,
        progress: Progress,
    ) -> None:
        self.mesh, self.memory_fraction, self.memory_limit = mesh, memory_fraction, memory_limit
        self.timeout, self.quick, self.work = timeout, quick, work
        self.temperatures, self.progress = temperatures, progress
        self.found: dict[Any, DeviceHealth] = {}
        self.unfinished: list[str] = []
        self.done, self.parts = 0, 1
        self._accelerator = False

    @property
    def _size(self) -> int:
        """Rows and columns of the matrices."""
        if self._accelerator:  # a smaller product is over before the next one is started
            return 4096
        return 256 if self.quick else 512

    @property
    def _most_memory(self) -> int:
        """Bytes of memory to test at most."""
        if self.memory_limit is not None:
            return self.memory_limit
        if self.memory_fraction is not None:
            return 2**62
        return _MOST_QUICK[self._accelerator] if self.quick else _MOST

    @property
    def _calls(self) -> int:
        """Products that are timed together."""
        return 40 if self._accelerator else 1

    def run(self, expected: int | None, start: float) -> HealthReport:
        self._tell("starting JAX's backend", 0)
        try:
            every = self._within("starting JAX's backend", None, jax.devices)
        except RuntimeError as error:
            return self._report([], [], 0, expected, "expected_devices", start, problem=_line(error))
        if self.mesh is not None:
            every = list(self.mesh.devices.reshape(-1))
        expected_by = "expected_devices"
        if expected is None and self.mesh is not None:
            expected, expected_by = self.mesh.size, "the mesh"
        elif expected is None:
            expected, expected_by = described_devices(os.environ, every, jax.process_count())
        local = [device for device in every if device.process_index == jax.process_index()]
        if self.mesh is None:
            self.mesh = make_mesh(every)
        names = [name for name in self.mesh.axis_names if self.mesh.shape[name] > 1]
        self._accelerator = every[0].platform != "cpu"
        self.parts = 2 * len(local) + len(names) + 1
        self._answers(local)
        self._products()
        self._temperatures()
        self._memory()
        self._measure_again()
        devices, no_links = self._of_all_processes()
        axes: list[AxisHealth] = []
        if not no_links and not names:
            no_links = "there is one device, and no link to another"
        if not no_links:
            axes = self._links(names)
        return self._report(devices, axes, len(every), expected, expected_by, start, no_links=no_links)

    def _tell(self, text: str, done: int = 1) -> None:
        self.progress(text, self.done, self.parts)
        self.done += done

    def _within(self, name: str, device: Any, function: Callable[[], Any], seconds: float = 0.0) -> Any:
        """Run work with the time limit, and this many seconds more."""
        try:
            return self.work.within(self.timeout + seconds, name, device, function)
        except DeadlineError:
            self.unfinished.append(f"{name}{'' if device is None else f' on {device}'}")
            raise

    def _working(self) -> list[Any]:
        return [device for device, found in self.found.items() if found.answers]

    def _answers(self, devices: list[Any]) -> None:
        self._tell("asking every device")
        numbers = np.arange(256, dtype=np.int32)
        tasks: list[tuple[Any, Task]] = []
        for device in devices:

            def ask(device: Any = device) -> tuple[int, float]:
                begin = time.monotonic()
                answer = int(
                    jax.device_get(self.work.answer(jax.device_put(numbers + device.id % 1000, device)))
                )
                return answer, time.monotonic() - begin

            tasks.append((device, self.work.start("a small computation", device, ask)))
        for device, task in tasks:
            chip = detect_chip(device)
            found = DeviceHealth(
                id=device.id,
                name=str(device),
                kind=device.device_kind,
                platform=device.platform,
                process=device.process_index,
                online=False,
                peak_flops={dtype: chip.peak_flops[dtype] for dtype in DTYPES if dtype in chip.peak_flops},
                peak_bandwidth=None if device.platform == "cpu" else chip.hbm_bandwidth,
            )
            try:
                answer, seconds = task.wait(self.timeout)
            except DeadlineError as error:
                self.unfinished.append(f"a small computation on {device}")
                found = replace(found, problem=f"does not answer: {error}")
            except _FAILURES as error:
                found = replace(found, problem=f"does not compute: {_line(error)}")
            else:
                right = int(np.sum((numbers.astype(np.int64) + device.id % 1000) ** 2 + 1))
                if answer == right:
                    found = replace(found, online=True, seconds=seconds)
                else:
                    problem = f"answers {answer} instead of {right} to a small computation"
                    found = replace(found, problem=problem)
            self.found[device] = found

    def _products(self) -> None:
        working = self._working()
        problems = make_problems(self._size, (0,) if self.quick else (0, 1))
        operands: dict[Any, dict[str, Any]] = {}
        for device in working:
            self._tell(f"{device}: matrix products")
            result = ProductHealth(0)
            try:
                operands[device] = {}
                for problem in problems:
                    for dtype in DTYPES:

                        def multiply(device: Any = device, problem: Any = problem, dtype: str = dtype) -> Any:
                            matrices = problem.operands(dtype, device)
                            return matrices, jax.device_get(self.work.multiply(*matrices))

                        matrices, product = self._within(f"a {dtype} matrix product", device, multiply)
                        operands[device].setdefault(dtype, matrices)
                        result = _with_wrong(
                            result, *wrong_elements(problem, product), f"{dtype} {problem.name}"
                        )
            except _FAILURES as error:
                result = _problem(result, error)
                operands.pop(device, None)
            self.found[device] = replace(self.found[device], products=result)
        for _ in range(2 if self.quick else _ROUNDS):
            for device in list(operands):
                for dtype, matrices in operands[device].items():
                    if not self._rate(device, dtype, matrices, problems[0]):
                        del operands[device]
                        break

    def _rate(self, device: Any, dtype: str, matrices: Any, problem: Any) -> bool:
        """Time a product once more, and check it; whether the device answered."""
        found = self.found[device]
        assert found.products is not None
        result = found.products
        try:
            product, rate = self._within(
                f"{self._calls} {dtype} matrix products",
                device,
                lambda: measure(self.work, device, matrices, self._calls),
            )
            wrong, first = wrong_elements(problem, product)
        except _FAILURES as error:
            self.found[device] = replace(found, products=_problem(result, error))
            return False
        result = _with_wrong(result, wrong, first, f"{dtype} {problem.name}")
        self.found[device] = replace(found, products=result).with_rate(dtype, rate)
        return True

    def _temperatures(self) -> None:
        devices = list(self.found)
        try:
            readings = self._within("reading temperatures", None, lambda: self.temperatures(devices))
        except Exception as error:
            # Whatever another's function raises: what else is found counts without temperatures.
            why = str(error) if isinstance(error, DeadlineError) else f"temperatures: raised {said(error)}"
            readings = dict.fromkeys((device.id for device in devices), Temperature(None, reason=why))
        for device, reading in checked_temperatures(readings, devices).items():
            self.found[device] = replace(self.found[device], temperature=reading)

    def _memory(self) -> None:
        for number, device in enumerate(self._working()):
            self._tell(f"{device}: memory")
            size, why = size_to_test(device, self.memory_fraction or _FRACTION, self._most_memory)
            result = MemoryHealth(0, problem=why)
            if size:
                try:
                    result = self._within(
                        "a memory test",
                        device,
                        lambda device=device, size=size, seed=number: check_memory(
                            self.work, device, size, seed
                        ),
                        size / _SLOWEST_MEMORY,
                    )
                except _FAILURES as error:
                    result = _problem(result, error)
            self.found[device] = replace(self.found[device], memory=result)

    def _measure_again(self) -> None:
        """What seems slow is measured again, with its peers: another program may have taken the processor."""
        slow = slow_rates((found, found.rates()) for found in self.found.values() if found.answers)
        for _ in range(_TRIES):
            if not slow:
                return
            names = sorted({name for _, name in slow})
            kinds = {found.kind for found in self.found.values() if any(found.id == id for id, _ in slow)}
            measured = []
            for device in self._working():
                if self.found[device].kind in kinds:
                    rates = {name: self._once_more(device, name) for name in names}
                    known = self.found[device].rates()
                    fresh = {name: (rate, known[name][1]) for name, rate in rates.items() if rate is not None}
                    measured.append((self.found[device], fresh))
            again = slow_rates(measured)
            slow = {key: what for key, what in again.items() if key in slow}
        for device, found in self.found.items():
            own = {name: what for (number, name), what in slow.items() if number == found.id}
            self.found[device] = replace(found, slow=own)

    def _once_more(self, device: Any, name: str) -> float | None:
        """A rate of a device, measured now; None if it cannot be. The best one is kept."""
        found = self.found[device]
        if not found.answers or name not in found.rates():
            return None
        try:
            if name == "memory":
                rate = self._within(
                    "a test of memory bandwidth",
                    device,
                    lambda: measure_bandwidth(self.work, device, found.memory.tested if found.memory else 0),
                )
            else:
                problem = make_problems(self._size, (0,))[0]

                def multiply() -> float:
                    matrices = jax.block_until_ready(problem.operands(name, device))
                    return max(measure(self.work, device, matrices, self._calls)[1] for _ in range(3))

                rate = self._within(f"{name} matrix products", device, multiply)
        except _FAILURES as error:
            # Memory that others hold by now takes nothing from what was tested before.
            if not is_exhausted(error):
                part = "memory" if name == "memory" else "products"
                self.found[device] = replace(found, **{part: _problem(getattr(found, part), error)})
            return None
        self.found[device] = found.with_rate(name, rate)
        return rate

    def _of_all_processes(self) -> tuple[list[DeviceHealth], str]:
        """The devices of all processes, and why their links cannot be checked."""
        own = list(self.found.values())
        processes = Processes.here()
        if processes.count > 1:
            if self.unfinished:
                return own, "a device of this process hangs, and all have to take part"
            self._tell("waiting for the other processes", 0)
            mine = [asdict(found) for found in own]
            try:
                # They may have more to test, or be slower.
                said = self._within(
                    "an exchange with the other processes",
                    None,
                    lambda: processes.all_say(mine),
                    9 * self.timeout,
                )
            except _FAILURES as error:
                return own, f"the other processes could not be reached: {_line(error)}"
            own = [DeviceHealth.from_dict(one) for process in said for one in process]
        if silent := [found.name for found in own if not found.answers]:
            return own, f"{', '.join(silent[:4])} does not work, and all devices have to take part"
        return own, ""

    def _links(self, names: list[str]) -> list[AxisHealth]:
        assert self.mesh is not None
        words = (2**18 if self.quick else 2**22) if self._accelerator else (2**12 if self.quick else 2**16)
        axes = []
        for name in names:
            self._tell(f"axis {name!r}: all-reduce and exchange")
            size = self.mesh.shape[name]
            try:
                axis = self._within(
                    f"communication along axis {name!r}",
                    None,
                    lambda name=name: check_axis(
                        self.work,
                        self._given_mesh,
                        name,
                        words,
                        1 if self.quick else 3,
                        5 if self._accelerator else 1,
                        self._peak_link(name),
                    ),
                )
            except _FAILURES as error:
                axis = AxisHealth(name=name, size=size, problem=_line(error))
            axes.append(axis)
            if axis.problem:
                return axes  # what hangs holds the devices, so that what comes after would hang as well
        return self._axes_of_all_processes(axes)

    def _axes_of_all_processes(self, axes: list[AxisHealth]) -> list[AxisHealth]:
        """Each process has seen what its own devices received."""
        processes = Processes.here()
        if processes.count == 1:
            return axes
        mine = [asdict(axis) for axis in axes]
        try:
            said = self._within(
                "an exchange with the other processes",
                None,
                lambda: processes.all_say(mine),
                9 * self.timeout,
            )
        except _FAILURES as error:
            problem = f"the other processes did not report: {_line(error)}"
            return [*axes[:-1], replace(axes[-1], problem=problem)]
        return [merged([AxisHealth.from_dict(one) for one in each]) for each in zip(*said, strict=True)]

    @property
    def _given_mesh(self) -> Mesh:
        assert self.mesh is not None
        return self.mesh

    def _peak_link(self, axis: str) -> float | None:
        """The catalogue's bytes per second of a link along an axis."""
        device = self._given_mesh.devices.reshape(-1)[0]
        if axis in ("core", "slice") or device.platform == "cpu":
            return None
        chip = detect_chip(device)
        if chip.kind == "tpu":
            return chip.link_bandwidth
        # A GPU's figure is for both ways, and holds within a host.
        if chip.interconnect_bandwidth is None or jax.process_count() > 1:
            return None
        return chip.interconnect_bandwidth / 2

    def _report(
        self,
        devices: list[DeviceHealth],
        axes: list[AxisHealth],
        listed: int,
        expected: int | None,
        expected_by: str,
        start: float,
        *,
        no_links: str = "",
        problem: str = "",
    ) -> HealthReport:
        verdicts, faults = judge(
            devices,
            axes,
            listed=listed,
            expected=expected,
            expected_by=expected_by,
            no_links=no_links,
            no_backend=problem,
        )
        self.progress("done", self.parts, self.parts)
        return HealthReport(
            verdicts={name: ok for name, (ok, _) in verdicts.items()},
            reasons={name: reason for name, (_, reason) in verdicts.items()},
            faults=faults,
            devices=tuple(devices),
            axes=tuple(axes),
            expected=expected,
            seconds=time.monotonic() - start,
            unfinished=tuple(self.unfinished),
            versions=package_versions(),
        )


def _with_wrong(result: ProductHealth, wrong: int, first: str, name: str) -> ProductHealth:
    return replace(
        result,
        checked=result.checked + 1,
        wrong=result.wrong + wrong,
        first=result.first or (f"{first} ({name})" if first else ""),
    )


def _problem(result: _Tested, error: RuntimeError) -> _Tested:
    return replace(result, problem=_line(error), failed=not is_exhausted(error))


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
