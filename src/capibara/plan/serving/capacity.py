"""The largest batch that fits, and the largest that is fast enough, with few compilations.

Memory and time of a decoding step grow almost linearly with the rows of its batch. Two compilations determine the
line, and a third at the limit confirms it; if it does not, the next is tried between the largest batch known to fit
and the smallest known not to fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from capibara.plan.compiler import CompiledProgram, Job, ProgramCache, compile_programs
from capibara.plan.errors import CompilationError
from capibara.plan.planning import memory_by_kind
from capibara.plan.program import read_program
from capibara.plan.serving.result import ServingPoint
from capibara.plan.serving.task import Mesh, ServingTask
from capibara.plan.targets import Target
from capibara.plan.time import StepTime, predict_step

__all__ = ["Measured", "MeshSearch", "Progress"]

Progress = Callable[[str, str, CompiledProgram | None], None]

# A batch that is within this part of the largest counts as the largest.
_RESOLUTION = 0.03


@dataclass(frozen=True)
class Measured:
    """A compiled step; ``time`` is None if it does not fit, ``needed`` the bytes if the compiler reports them."""

    rows: int
    program: CompiledProgram
    needed: int | None
    time: StepTime | None

    @property
    def fits(self) -> bool:
        """Whether it is within the limit."""
        return self.time is not None


@dataclass
class MeshSearch:
    """The search on one mesh of one slice; rows are counted per device along ``data``.

    Attributes:
      budget: remaining number of programs to compile.
    """

    task: ServingTask
    target: Target
    mesh: Mesh
    limit: int
    budget: int
    most_rows: int
    cache: ProgramCache | None = None
    workers: int | None = None
    progress: Progress | None = None
    decoded: dict[int, Measured] = field(default_factory=dict)
    prefilled: dict[int, Measured] = field(default_factory=dict)
    compiled: int = 0

    @property
    def data(self) -> int:
        """Devices along ``data``."""
        return dict(self.mesh)["data"]

    # ---- compiling ----------------------------------------------------------------------------------------

    def decode(self, *rows: int) -> list[Measured]:
        """Decoding steps with the given numbers of rows, compiled in parallel."""
        return self._all(self.decoded, self.task.decode_job, "decoding", rows)

    def prefill(self, *rows: int) -> list[Measured]:
        """Prefills into caches with the given numbers of rows."""
        return self._all(self.prefilled, self.task.prefill_job, "prefill", rows)

    def _all(
        self,
        known: dict[int, Measured],
        job: Callable[[Target, Mesh, int], Job],
        what: str,
        rows: tuple[int, ...],
    ) -> list[Measured]:
        new = [n for n in dict.fromkeys(rows) if n not in known]
        jobs = [job(self.target, self.mesh, n) for n in new]
        mesh = " × ".join(f"{axis} {size}" for axis, size in self.mesh)
        titles = [f"{self.target.text}, {mesh}: {what}, {n * self.data} requests" for n in new]

        def started(number: int) -> None:
            if self.progress is not None:
                self.progress("start", titles[number], None)

        # Closed at once when something fails here: nothing goes on compiling behind a traceback.
        with contextlib.closing(
            compile_programs(jobs, cache=self.cache, workers=self.workers, started=started)
        ) as results:
            for number, program in results:
                known[new[number]] = self._measured(new[number], program)
                self.compiled += 1
                self.budget -= 1
                if self.progress is not None:
                    self.progress("done", titles[number], program)
        return [known[n] for n in rows]

    def _measured(self, rows: int, program: CompiledProgram) -> Measured:
        if program.status == "error":
            raise CompilationError(
                f"a step for {rows * self.data} requests on {self.target} could not be made or compiled:\n"
                f"{program.message}"
            )
        if program.memory is None:
            return Measured(rows, program, program.needed_bytes, None)
        needed = program.memory.total
        if needed > self.limit:
            return Measured(rows, program, needed, None)
        facts = read_program(program.text)
        time = predict_step(facts, self.target, self.mesh, places=program.coordinates)
        return Measured(rows, program, needed, time)

    # ---- searching ----------------------------------------------------------------------------------------

    def largest(self) -> ServingPoint | None:
        """The most requests that fit; None if one per device does not, or none is found within the budget."""
        rough = max(1, min(self.most_rows, self.task.rough(self.mesh).capacity(self.limit)))
        # The whole of what was estimated is hardly ever right: the compiler's temporaries come on top.
        self.decode(max(1, rough // 8), max(1, rough // 2))
        while following := self._towards(self._fits_line(), self.most_rows):
            # Once something fits, two programs more are left for a prefill that needs more than decoding does.
            if self.budget <= (3 if self._decoded_within(self.most_rows) else 1):
                break
            self.decode(following)
        rows = max(self._decoded_within(self.most_rows), default=0)
        # The part of the rows that is given up if a prefill does not fit: at least that much, since memory grows in
        # steps of tiles and one row less is often not one byte less.
        part = _RESOLUTION
        while rows and self.budget > 0:
            prefill = self.prefill(rows)[0]
            if prefill.fits and (rows in self.decoded or self.budget > 0) and self.decode(rows)[0].fits:
                return self.point(rows)
            if rows == 1:
                return None
            # What a prefill needs beyond the limit, in rows of cache.
            over = max(0, (prefill.needed or self.limit * 5 // 4) - self.limit)
            each = max(1, self.task.rough(self.mesh).row)
            below = rows - 1
            rows = max(1, min(below, rows - -(-over // each), int(rows * (1 - part))))
            part = min(2 * part, 0.5)
            if self.budget == 1:
                # Only the prefill can be compiled: a batch whose decoding is known.
                known = self._decoded_within(below)
                rows = max((n for n in known if n <= rows), default=min(known, default=0))
        return None

    def _decoded_within(self, most: int) -> list[int]:
        """Batches of at most that many rows whose decoding fits."""
        return [n for n, m in self.decoded.items() if m.fits and n <= most]

    def within(
        self, largest: ServingPoint, latency: float | None, first: float | None
    ) -> ServingPoint | None:
        """The most requests, up to those of ``largest``, that meet the latency target; None if none do."""

        def meets(rows: int) -> bool:
            decoded, prefilled = self.decoded.get(rows), self.prefilled.get(rows)
            if decoded is None or decoded.time is None or prefilled is None or prefilled.time is None:
                return False
            point = self.point(rows)
            return (latency is None or point.seconds_per_token <= latency) and (
                first is None or point.time_to_first_token <= first
            )

        top = largest.concurrency // self.data
        if meets(top):
            return largest
        if first is not None and largest.time_to_first_token > first:
            group = self.task.group(top)
            top = max(1, min(top, int(first / largest.prefill.seconds) * group))
        rows = top
        if latency is not None:
            if top not in self.decoded and self.budget > 1:
                self.decode(top)
            while self.budget > 1 and (following := self._towards(self._time_line(latency, top), top)):
                self.decode(following)
            fast = [n for n, m in self.decoded.items() if n <= top and m.time and m.time.seconds <= latency]
            rows = max(fast, default=1)
        while rows >= 1:
            missing = (rows not in self.decoded) + (rows not in self.prefilled)
            if self.budget < missing:
                break
            if self.decode(rows)[0].fits and self.prefill(rows)[0].fits and meets(rows):
                return self.point(rows)
            rows = rows * 3 // 4
        return None

    def busiest(self, largest: ServingPoint) -> ServingPoint:
        """The batch with the most tokens per second, which is smaller if token time grows faster than the rows."""
        prefill = largest.prefill.seconds / largest.group

        def rate(measured: Measured) -> float:
            count = measured.rows * self.data
            seconds = 0.0 if measured.time is None else measured.time.seconds
            return count / (count * prefill + (self.task.output_length - 1) * seconds)

        fitting = [m for m in self.decoded.values() if m.fits and m.rows * self.data <= largest.concurrency]
        best = max(fitting, key=rate)
        known = best.rows in self.prefilled or self.budget > 0
        if known and self.prefill(best.rows)[0].fits:
            found = self.point(best.rows)
            return max((found, largest), key=lambda point: point.tokens_per_second)
        return largest

    def fastest(self) -> ServingPoint | None:
        """The smallest batch with both programs compiled."""
        rows = [
            n for n, m in self.decoded.items() if m.fits and n in self.prefilled and self.prefilled[n].fits
        ]
        return self.point(min(rows)) if rows else None

    def _fits_line(self) -> dict[int, tuple[float | None, bool]]:
        """Of every batch that was compiled, the share of the limit that it takes, and whether that is right."""
        return {
            n: (None if m.needed is None else m.needed / self.limit, m.fits) for n, m in self.decoded.items()
        }

    def _time_line(self, latency: float, top: int) -> dict[int, tuple[float | None, bool]]:
        return {
            n: (m.time.seconds / latency, m.time.seconds <= latency)
            for n, m in self.decoded.items()
            if m.time is not None and n <= top
        }

    def _towards(self, known: dict[int, tuple[float | None, bool]], most: int) -> int | None:
        """The next batch to compile on the way to where the line reaches 1; None where the largest is found."""
        low = max((n for n, (_, right) in known.items() if right), default=0)
        high = min((n for n, (_, right) in known.items() if not right and n > low), default=most + 1)
        if high - low <= max(1, int(_RESOLUTION * low)) or low >= most:
            return None
        following = (low + high) // 2
        right = sorted(n for n, (value, ok) in known.items() if ok and value is not None)
        if len(right) >= 2:
            below, above = right[-2], right[-1]
            first, second = known[below][0] or 0.0, known[above][0] or 0.0
            if second > first:
                following = int(above + (1 - second) * (above - below) / (second - first))
                if following <= low:
                    # The line says that what is known is the largest.
                    return None
        elif len(right) == 1 and high <= most and known[high][0]:
            first, second = known[right[0]][0] or 0.0, known[high][0] or 0.0
            if second > 1 > first:
                following = int(right[0] + (1 - first) * (high - right[0]) / (second - first))
        if following >= high:
            # The line led past one that is known to be wrong: between the two, nearer to that one.
            following = low + max(1, (high - low) * 3 // 4) if high <= most else most
        return max(low + 1, min(following, high - 1, most))

    # ---- result -------------------------------------------------------------------------------------------

    def point(self, rows: int) -> ServingPoint:
        """The compiled point for the given number of rows."""
        decoded, prefilled = self.decoded[rows], self.prefilled[rows]
        assert decoded.time is not None
        assert prefilled.time is not None
        return ServingPoint(
            target=self.target,
            mesh=self.mesh,
            concurrency=rows * self.data,
            group=self.task.group(rows) * self.data,
            prompt_length=self.task.prompt_length,
            output_length=self.task.output_length,
            decode=decoded.time,
            prefill=prefilled.time,
            decode_memory=memory_by_kind(decoded.program, {}),
            prefill_memory=memory_by_kind(prefilled.program, {}),
            cache_bytes=rows * self.data * self.task.cache_bytes_per_request,
            source="compiler",
            program_hashes=(decoded.program.program_hash, prefilled.program.program_hash),
            versions=decoded.program.versions,
        )
