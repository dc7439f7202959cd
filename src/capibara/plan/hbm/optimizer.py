"""``HBMOptimizer``: the cheapest way of running a step that fits a device's memory.

Everything that a backward pass needs can be kept, recomputed, or sent to the host. Each way is compiled, for the device
here or for a described TPU slice (:func:`capibara.plan.plan`), and the memory is the compiler's figure; of those that
fit, the fastest is chosen. Times do not include the link to the host's memory, whose speed no source here states:
offloading is chosen where nothing else fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from capibara.errors import did_you_mean
from capibara.measure.sizes import size_text
from capibara.memory import DeviceCache, MemoryManager, device_budget, offload_support, rematerialise
from capibara.memory.rematerialisation import REMAT
from capibara.plan.errors import CompilationError, DoesNotFitError, PlanError
from capibara.plan.hbm.choice import Considered, HBMChoice
from capibara.plan.hbm.donation import choose_donation

__all__ = ["HBMOptimizer"]

_PATTERNS = {"sequential": 2, "mixed": 1, "random": 0}
_POLICIES = ("lru", "lfu")

MakeStep = Callable[[Callable[..., Any]], Callable[..., Any]]


class HBMOptimizer:
    """Chooses donation and rematerialisation for a step, and the options of a cache for a pattern of access.

    Args:
      access_pattern: in which order cached arrays are used. ``"sequential"``: the two that followed last time are
        brought to the device ahead, ``"mixed"``: one, ``"random"``: none.
      cache_policy: ``"lru"`` or ``"lfu"``: which array leaves a cache first.
      bandwidth_limit_gbps: GB/s (10**9 bytes) of the device's memory that a step may count on: no way of running it is
        predicted to take less than its memory traffic over that. By default the catalogue's bandwidth of the chip
        counts. Where the chip's rate is not known (CPU) no time is predicted.

    Raises:
      PlanError: an argument is invalid.
    """

    def __init__(
        self,
        access_pattern: str = "mixed",
        cache_policy: str = "lru",
        bandwidth_limit_gbps: float | None = None,
    ) -> None:
        for name, value, choices in (
            ("access_pattern", access_pattern, tuple(_PATTERNS)),
            ("cache_policy", cache_policy, _POLICIES),
        ):
            if value not in choices:
                listed = ", ".join(map(repr, choices))
                hint = did_you_mean(str(value), choices)
                raise PlanError(f"{name}: got {value!r}, expected one of {listed}.{hint}")
        limit = bandwidth_limit_gbps
        number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if limit is not None and not (number and 0 < limit < float("inf")):
            raise PlanError(f"bandwidth_limit_gbps: got {limit!r}, expected GB/s above 0, such as 900.")
        self.access_pattern = access_pattern
        self.cache_policy = cache_policy
        self.bandwidth_limit_gbps = limit

    def create_cache(self, manager: MemoryManager, cache_size_gb: float, **options: Any) -> DeviceCache:
        """A cache of a manager, with the policy and the prefetching of this access pattern.

        Args:
          manager: a ``TpuMemoryManager``; with ``prefetch_enabled=False`` nothing is prefetched.
          cache_size_gb: GiB on the device.
          options: further arguments of ``manager.create_cache``.
        """
        depth = _PATTERNS[self.access_pattern] if manager.prefetch_enabled else 0
        return manager.create_cache(
            cache_size_gb, policy=self.cache_policy, **{"prefetch_depth": depth, **options}
        )

    def choose(
        self,
        make_step: MakeStep,
        args: Sequence[Any],
        *,
        memory_limit_gb: float | None = None,
        topology: str | None = None,
        donate_argnums: Sequence[int] = (0,),
        remat: Sequence[str] = REMAT,
        **planning: Any,
    ) -> HBMChoice:
        """The fastest way of running a step that fits.

        Args:
          make_step: called as ``make_step(block_wrapper)``; returns the step, in which every block of the model is
            wrapped: ``block = block_wrapper(block)``. Wrapping is what rematerialises
            (:func:`capibara.memory.rematerialise`).
          args: of the step: arrays, or ``jax.ShapeDtypeStruct``s. Nothing is computed.
          memory_limit_gb: GiB that it may need on a device; by default what the device has.
          topology: a TPU slice to compile for, such as ``"v4:2x2x1"``, with the layout that :func:`capibara.plan.plan`
            finds; by default the device here.
          donate_argnums: arguments that nothing needs after the step, such as the state. Those that can be are donated.
          remat: the ways to consider, from the one that is preferred where no time is known.
          planning: further arguments of :func:`capibara.plan.plan`, such as ``max_compiles``.

        Raises:
          DoesNotFitError: none fits; the message has the memory of each.
          PlanError: an argument is invalid.
        """
        if not callable(make_step):
            raise PlanError(
                f"make_step: got {type(make_step).__name__}, expected a function of a block's wrapper."
            )
        unknown = [how for how in remat if how not in REMAT]
        if unknown or not remat:
            raise PlanError(f"remat: got {list(remat)}, expected some of {', '.join(map(repr, REMAT))}.")
        args = tuple(args)
        for number in donate_argnums:
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(args):
                raise PlanError(
                    f"donate_argnums: got {number!r}, expected numbers from 0 to {len(args) - 1}."
                )
        steps = {how: make_step(lambda block, how=how: rematerialise(block, how)) for how in remat}
        donated, others = choose_donation(steps[remat[0]], args, donate_argnums)
        if topology is None:
            from capibara.plan.hbm.here import compile_here

            budget = device_budget(None, memory_limit_gb)
            limit, source = int(budget.limit), budget.limit.source
            found = [self._here(how, step, args, donated, limit, compile_here) for how, step in steps.items()]
            plans: dict[str, Any] = {}
        else:
            from capibara.plan.hbm.slices import compile_for, limit_of

            limit, source = limit_of(topology, memory_limit_gb)
            results = {
                how: compile_for(
                    how, step, args, donated, topology, memory_limit_gb, self.bandwidth_limit_gbps, planning
                )
                for how, step in steps.items()
            }
            found = [one for one, _ in results.values()]
            plans = {how: made for how, (_, made) in results.items()}
        fitting = [one for one in found if one.fits]
        if not fitting:
            lines = "\n".join(f"  {one}" for one in found)
            raise DoesNotFitError(
                f"nothing fits {size_text(limit)} ({source}):\n{lines}\nTake smaller batches or more devices."
            )
        best = min(fitting, key=self._order(fitting))
        considered = tuple(
            one if one is best or one.reason else replace(one, reason="slower, or needs more for no gain")
            for one in found
        )
        return HBMChoice(
            remat=best.remat,
            donate_argnums=donated,
            not_donated=others,
            bytes=best.bytes or 0,
            limit=limit,
            limit_source=source,
            considered=considered,
            step=steps[best.remat],
            plan=plans.get(best.remat),
        )

    def _order(self, fitting: list[Considered]) -> Callable[[Considered], Any]:
        """By predicted time where it is known of all, else by operations; ties in the order of ``remat``.

        Offloading comes last: how fast the host's memory is reached is not in any prediction here.
        """
        timed = all(one.seconds is not None for one in fitting)
        return lambda one: (one.remat == "offload", one.seconds if timed else one.flops or 0.0)

    def _here(
        self,
        how: str,
        step: Any,
        args: tuple[Any, ...],
        donated: tuple[int, ...],
        limit: int,
        compile_here: Any,
    ) -> Considered:
        if how == "offload" and not (support := offload_support()).frees_memory:
            return Considered(remat=how, reason=support.reason)
        try:
            one = compile_here(how, step, args, donated, self.bandwidth_limit_gbps)
        except CompilationError as error:
            return Considered(remat=how, reason=str(error))
        if one.bytes > limit:
            return replace(one, reason=f"more than {size_text(limit)}")
        return replace(one, fits=True)
