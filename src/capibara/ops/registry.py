"""How an operation finds its implementation.

An operation is one public function with several implementations of the same mathematics. Which one runs must
be decided when the function is *lowered*, not when it is called: a function traced on a laptop may be
compiled ahead of time for a TPU. So :meth:`Op.run` determines for every platform JAX knows which implementation it
would use, and where these differ it leaves the choice to ``jax.lax.platform_dependent``.

An implementation declines a problem in its ``check`` by raising ``NotImplementedError`` with the reason, and the next
one is tried. Any other exception propagates, so a broken kernel is never hidden. The decision may depend only on the
*problem*: a frozen description (shapes, dtypes, options) of the call. This keeps the forward and the backward pass of
an operation on the same implementation. Parameters measured on this device (:mod:`capibara.ops.tuning`) become part
of the problem when the call is made.

Each implementation runs in a named scope (``capibara:flash_attention:xla``), so that profiles and compiled programs
show which one runs.

>>> from capibara.ops import explain
>>> from capibara.ops.attention import flash_attention
>>> import jax.numpy as jnp
>>> x = jnp.ones((1, 2, 8, 4))
>>> explain(flash_attention, x, x, x, platform="tpu").chosen
'pallas_tpu'
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from capibara.errors import did_you_mean
from capibara.ops import tuning as measured
from capibara.ops.errors import NoImplementationError, OpTypeError, OpValueError, OpWarning
from capibara.ops.one_program import one_program
from capibara.ops.tuning import Tuned, Tuning

__all__ = [
    "Choice",
    "Implementation",
    "Op",
    "Problem",
    "for_platform",
    "get_op",
    "is_portable",
    "list_ops",
    "only_platform",
    "portable",
    "public",
    "remark",
    "tpu_kind",
]

_F = TypeVar("_F", bound=Callable[..., Any])

# The names `jax.lax.platform_dependent` accepts as keywords. Any other platform (a plug-in) takes the default
# branch, which is what an operation would use on a platform that no implementation names.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


class Problem(Protocol):
    """The frozen, hashable description of one call: everything that determines which implementation runs."""

    @property
    def implementation(self) -> str: ...


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
      name: The value to pass as ``implementation=``.
      functions: The entry points (``"forward"``, ``"backward"`` …); each is called as
        ``f(problem, *arrays)``.
      platforms: The platforms on which ``"auto"`` may choose it; ``None``: all.
      check: Raises ``NotImplementedError`` with the reason if the problem is not supported.
      portable: False for code that runs only with this installation: see :func:`portable`.
      tuned_on: Further platforms, on which ``"auto"`` chooses it only if ``capibara tune`` found it to be the
        fastest: for implementations that are usually slower there or were never timed.
      tunables: Fields of the problem that ``capibara tune`` may set where they are None, and the values to try; see
        :mod:`capibara.ops.tuning`.
    """

    name: str
    functions: Mapping[str, Callable[..., Any]]
    platforms: tuple[str, ...] | None = None
    check: Callable[[Any], None] | None = None
    portable: bool = True
    tuned_on: tuple[str, ...] = ()
    tunables: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    # Of a problem that this runs: which arguments have no effect, and the remedy. `explain` shows it, calls warn of it.
    remarks: Callable[[Any], list[str]] = lambda _: []

    def refusal(self, problem: Any, platform: str | None) -> str | None:
        """Why this implementation does not support ``problem`` on ``platform``; ``None`` if it does.

        ``platform=None`` ignores the preferred platforms, as an explicit request does.
        """
        if platform is not None and self.platforms is not None:
            every = (*self.platforms, *self.tuned_on)
            if platform not in every:
                return f"is for {' and '.join(every)}, not {platform}"
        if not self.portable and _elsewhere.get():
            return "is native code of this installation, and the program is for elsewhere"
        if self.check is not None:
            try:
                self.check(problem)
            except NotImplementedError as reason:
                return str(reason)
        return None


@dataclass(frozen=True)
class Choice:
    """The choice of implementation for a problem on a platform.

    Attributes:
      implementation: The implementation.
      problem: The problem with the measured parameters filled in.
      reasons: Why each of the others does not run it.
      parameters: The measured parameters that were filled in.
    """

    implementation: Implementation
    problem: Any
    reasons: dict[str, str]
    parameters: dict[str, int | str] = field(default_factory=dict)


class Op:
    """An operation: its implementations in order of preference, and how a call becomes a problem.

    Args:
      name: The operation's name, as in ``explain("flash_attention", …)``.
      prepare: Validates a call's arguments; returns ``(problem, arrays)``.
      implementations: In order of preference; the last one supports every problem on every platform.
      tuning: How ``capibara tune`` measures it, if its problems have a field ``tuned``.
      own_program: A call outside of ``jax.jit`` is compiled as a whole, once for equal problems. False where a problem
        holds what belongs to one call.
    """

    def __init__(
        self,
        name: str,
        prepare: Callable[..., tuple[Any, Any]],
        implementations: list[Implementation],
        tuning: Tuning | None = None,
        own_program: bool = True,
    ) -> None:
        if name in _OPS:
            raise OpValueError(f"an operation called {name!r} is registered already")
        self.name = name
        self.tuning = tuning
        self.own_program = own_program
        self.face: Callable[..., Any] | None = None
        self._prepare = prepare
        self._implementations: list[Implementation] = list(implementations)
        _OPS[name] = self

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The problem and the arrays of a call, with the parameters measured for such problems on this device."""
        problem, arrays = self._prepare(*args, **kwargs)
        if self.tuning is None or _elsewhere.get():
            return problem, arrays
        tuned = measured.lookup(self, problem)
        return (problem if tuned is None else dataclasses.replace(problem, tuned=tuned)), arrays

    def check_call(self, *args: Any, **kwargs: Any) -> None:
        """Refuse invalid arguments of a call."""
        try:
            inspect.signature(self._prepare).bind(*args, **kwargs)
        except TypeError as error:
            raise OpTypeError(f"{self.name} cannot be called with these arguments: {error}") from None

    def tunables(self, implementation: str) -> Mapping[str, tuple[int | str, ...]]:
        """The tunable parameters of an implementation; empty if there is no such implementation."""
        return next((each.tunables for each in self._implementations if each.name == implementation), {})

    @property
    def implementations(self) -> tuple[str, ...]:
        return tuple(each.name for each in self._implementations)

    def check_name(self, implementation: object) -> str:
        """Return ``implementation`` if it is ``"auto"`` or one of this operation's names."""
        options = ("auto", *self.implementations)
        if not isinstance(implementation, str):
            raise OpTypeError(
                f"{self.name}: implementation must be a string, one of {', '.join(options)}; got "
                f"{implementation!r} of type {type(implementation).__name__}"
            )
        if implementation not in options:
            raise OpValueError(
                f"{self.name}: there is no implementation {implementation!r}; expected one of "
                f"{', '.join(options)}.{did_you_mean(implementation, options)}"
            )
        return implementation

    def usable(self, problem: Problem, platform: str) -> list[str]:
        """Implementations that support ``problem`` on ``platform``, in order of preference, without the reference."""
        each = (one for one in self._implementations if one.name != "reference")
        return [one.name for one in each if one.refusal(problem, platform) is None]

    def choose(self, problem: Problem, platform: str) -> tuple[Implementation, dict[str, str]]:
        """The implementation that runs ``problem`` on ``platform``, and why the others do not."""
        choice = self.select(problem, platform)
        return choice.implementation, choice.reasons

    def select(self, problem: Problem, platform: str) -> Choice:
        """The implementation that runs ``problem`` on ``platform``, the problem that it is passed, and the reasons.

        Raises:
          NoImplementationError: the requested implementation does not support the problem.
        """
        asked = problem.implementation
        tuned: Tuned | None = getattr(problem, "tuned", None)
        if tuned is not None and tuned.platform != platform:
            tuned = None
        order = self._implementations
        fastest = None if tuned is None or asked != "auto" else tuned.fastest
        if fastest is not None:
            order = sorted(order, key=lambda each: each.name != fastest)
        reasons: dict[str, str] = {}
        choice: Choice | None = None
        for each in order:
            if asked != "auto" and each.name != asked:
                reasons[each.name] = f"implementation={asked!r} was asked for"
            elif platform in each.tuned_on and asked == "auto" and each.name != fastest:
                why = each.refusal(problem, platform)
                reasons[each.name] = why or "was not measured to be faster here (capibara tune measures it)"
            elif choice is not None:
                chosen = choice.implementation.name
                slower = chosen == fastest and self._before(each.name, chosen)
                reasons[each.name] = (
                    f"{chosen} was measured to be faster here" if slower else f"{chosen} comes before it"
                )
            else:
                choice, why = self._try(each, problem, tuned, None if asked != "auto" else platform)
                if choice is None:
                    reasons[each.name] = why
        if choice is None:
            detail = "; ".join(f"{name} {why}" for name, why in reasons.items() if asked in ("auto", name))
            raise NoImplementationError(
                f"{self.name}: no implementation takes this problem on {platform} ({detail}). "
                f"Remedy: implementation='auto' or 'reference'."
            )
        listed = {name: reasons[name] for name in self.implementations if name in reasons}
        return dataclasses.replace(choice, reasons=listed)

    def _before(self, one: str, other: str) -> bool:
        return self.implementations.index(one) < self.implementations.index(other)

    def _try(
        self, each: Implementation, problem: Any, tuned: Tuned | None, platform: str | None
    ) -> tuple[Choice | None, str]:
        """The choice of one implementation, or why it does not take the problem."""
        parameters = {} if tuned is None else tuned.of(each.name)
        parameters = {n: v for n, v in parameters.items() if getattr(problem, n, 0) is None}
        if parameters:
            filled = dataclasses.replace(problem, **parameters)
            if each.refusal(filled, platform) is None:
                return Choice(each, filled, {}, parameters), ""
        why = each.refusal(problem, platform)
        return (Choice(each, problem, {}) if why is None else None), why or ""

    def run(self, entry: str, problem: Problem, *arrays: Any) -> Any:
        """Call the entry point ``entry`` of the implementation that the lowering's platform uses."""
        recorder = _recorder.get()
        if recorder is not None:
            recorder(self, problem)
        elif entry == "forward" and not _elsewhere.get():
            choice = self.select(problem, measured.lowering_platform())
            for text in choice.implementation.remarks(problem):
                remark(self.name, text)
        branches = self._branches(entry, problem)
        if recorder is not None or _elsewhere.get() or not self.own_program:
            return _run(branches, *arrays)
        return one_program(_run, branches)(*arrays)

    def _branches(self, entry: str, problem: Any) -> tuple[tuple[str, _Branch], ...]:
        """What runs on each platform; last, under the name ``"default"``, on those that are not named."""
        if (only := _only.get()) is not None:
            return (("default", self._branch(entry, self.select(problem, only))),)
        platforms = PLATFORMS
        if problem.implementation != "auto":
            here = measured.lowering_platform()
            choice = self.select(problem, here)
            if not choice.parameters:
                return (("default", self._branch(entry, choice)),)
            platforms = (here,)
        default = self.select(problem, "another platform")
        choices = {platform: self.select(problem, platform) for platform in platforms}
        special = [
            (platform, self._branch(entry, choice))
            for platform, choice in choices.items()
            if choice.implementation is not default.implementation or choice.parameters
        ]
        return (*special, ("default", self._branch(entry, default)))

    def _branch(self, entry: str, choice: Choice) -> _Branch:
        implementation = choice.implementation
        return _Branch(self.name, implementation.name, implementation.functions[entry], choice.problem)


@dataclass(frozen=True)
class _Branch:
    """One implementation's function for one problem."""

    op: str
    implementation: str
    function: Callable[..., Any]
    problem: Any

    def __call__(self, *arrays: Any) -> Any:
        with jax.named_scope(f"capibara:{self.op}:{self.implementation}"):
            return self.function(self.problem, *arrays)


def _run(branches: tuple[tuple[str, _Branch], ...], *arrays: Any) -> Any:
    # NumPy's float64 becomes JAX's default silently here, as in `jnp` functions; `astype` would warn of it.
    arrays = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, arrays)
    if len(branches) == 1:
        return branches[0][1](*arrays)
    return jax.lax.platform_dependent(*arrays, **dict(branches))


_OPS: dict[str, Op] = {}
_only: contextvars.ContextVar[str | None] = contextvars.ContextVar("only", default=None)
_kind: contextvars.ContextVar[str | None] = contextvars.ContextVar("kind", default=None)
_elsewhere: contextvars.ContextVar[bool] = contextvars.ContextVar("elsewhere", default=False)
# Where `remark` puts what it is told, in place of a warning.
_remarks: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("remarks", default=None)
# Told of every problem that is traced: how `explain` finds the operations inside another function.
_recorder: contextvars.ContextVar[Callable[[Op, Any], None] | None] = contextvars.ContextVar(
    "recorder", default=None
)


def remark(op: str, text: str) -> None:
    """Warn once (by Python's warning filters) about arguments without effect. ``explain`` collects these instead."""
    found = _remarks.get()
    if found is not None:
        found.append(f"{op}: {text}")
    else:
        warnings.warn(f"{op}: {text}", OpWarning, stacklevel=1)


def is_portable() -> bool:
    """Whether what is traced now has to run elsewhere: see :func:`portable`."""
    return _elsewhere.get()


@contextlib.contextmanager
def portable() -> Iterator[None]:
    """Programs traced in this context run in any process that has JAX: they use no native code of this installation.

    For programs that are written to a file (``jax.export``). Functions traced before keep their implementations.
    """
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


@contextlib.contextmanager
def for_platform(platform: str, kind: str | None = None) -> Iterator[None]:
    """Programs traced in this context are lowered for this platform alone: what others would use is not traced.

    Kernels of other platforms take as long to trace as all the rest. Functions traced before keep all of them.

    Args:
      platform: as lowering calls it; only for functions that are traced for one program, and not kept.
      kind: of its devices (``jax.Device.device_kind``), where they are not those of this process.
    """
    tokens = _only.set(platform), _kind.set(kind)
    try:
        yield
    finally:
        _only.reset(tokens[0])
        _kind.reset(tokens[1])


def only_platform() -> str | None:
    """The platform that :func:`for_platform` names; ``None`` outside of such a context."""
    return _only.get()


def tpu_kind() -> str:
    """The kind of the TPU that is traced for: as :func:`for_platform` says, or that of this process; else empty.

    What a process without one compiles for other machines is not known here unless it says so.
    """
    if (kind := _kind.get()) is not None:
        return kind
    return jax.devices()[0].device_kind if jax.default_backend() == "tpu" else ""


def list_ops() -> Mapping[str, Op]:
    """Every registered operation by name (read-only)."""
    from capibara.ops import import_all

    import_all()  # each is there once its module is imported
    return MappingProxyType(_OPS)


@contextlib.contextmanager
def recording(recorder: Callable[[Op, Any], None], remarks: list[str]) -> Iterator[None]:
    """In this context, call ``recorder`` with every operation and problem that is traced; collect ``remarks``."""
    tokens = _recorder.set(recorder), _remarks.set(remarks)
    try:
        yield
    finally:
        _recorder.reset(tokens[0])
        _remarks.reset(tokens[1])


def public(op: Op) -> Callable[[_F], _F]:
    """Mark a function as the public function of ``op``, so that ``explain`` accepts it."""

    def mark(function: _F) -> _F:
        function.__capibara_op__ = op.name  # pyright: ignore[reportFunctionMemberAccess]
        op.face = op.face or function
        return function

    return mark


def get_op(op: str) -> Op:
    """The registered operation of that name."""
    if not isinstance(op, str):
        raise OpTypeError(f"an operation's name must be a string, got {op!r}")
    if op not in _OPS and op not in list_ops():
        raise OpValueError(
            f"there is no operation {op!r}. Registered: {', '.join(sorted(_OPS))}.{did_you_mean(op, _OPS)}"
        )
    return _OPS[op]
