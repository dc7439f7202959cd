"""Recurrent networks: cells that take one step, networks unrolled step by step, and layers over a sequence.

Unrolled networks take a batch whose rows are sorted by the length of their sequences, longest first: step t then
gets only the rows that are still running. A cell takes as many rows of the previous hidden state as its input
has, and gives the other ones out as ``hidden_compl``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from capibara.compose import primitives as p
from capibara.compose.errors import WiringError
from capibara.compose.initializers import Scaled, zeros
from capibara.compose.logical.arguments import whole
from capibara.compose.logical.model import Model

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Cell",
    "EncoderDecoder",
    "EncoderDecoderInference",
    "LSTMCell",
    "LSTMCellBody",
    "ManyToOne",
    "OneToMany",
    "OneToManyInference",
    "RNNCell",
]


class Cell(Model):
    """One step of a recurrent network. ``shared_keys``: parameters; ``state_keys``: what goes to the next step.

    Ports: ``input [n, *s, in]``, ``prev_hidden [m, *s, hidden]`` with ``m >= n`` → ``output [n, *s, out]``,
    ``hidden``
    and ``hidden_compl``, the rows of ``prev_hidden`` that the input does not have any more.
    """

    shared_keys: ClassVar[tuple[str, ...]] = ()
    state_keys: ClassVar[tuple[str, ...]] = ("hidden",)

    def __init__(
        self, hidden_size: int | None = None, output_size: int | None = None, *, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        whole("hidden_size", hidden_size, optional=True)
        whole("output_size", output_size, optional=True)
        self._arguments = (hidden_size, output_size)
        self._hidden_size: Any = hidden_size or "hidden"
        self._out: Any = output_size or "out"

    def again(self) -> Cell:
        """A cell made in the same way, with parameters of its own."""
        return type(self)(*self._arguments)

    def _running(self, key: str) -> str:
        """The rows of a previous state that still have an input; the others are ``<state>_compl``."""
        state = key.removeprefix("prev_")
        self.add(
            p.SplitLike(),
            f"{state}_rows",
            input=key,
            like="input",
            output=f"{key}_rows",
            rest=f"{state}_compl",
        )
        return f"{key}_rows"


class RNNCell(Cell):
    """``hidden = tanh(input w_ih + prev_hidden w_hh + bias_h)``, ``output = hidden w_ho + bias_o`` (Elman, 1990)."""

    shared_keys = ("w_ih", "w_hh", "w_ho", "bias_h", "bias_o")

    def __init__(
        self, hidden_size: int | None = None, output_size: int | None = None, *, name: str | None = None
    ) -> None:
        super().__init__(hidden_size, output_size, name=name)
        hidden, out = self._hidden_size, self._out
        self.add_input("input", "n *s in", "float")
        self.add_input("prev_hidden", ("m", "*s", hidden), "float")
        self.add_parameter("w_ih", ("in", hidden), Scaled())
        self.add_parameter("w_hh", (hidden, hidden), Scaled())
        self.add_parameter("w_ho", (hidden, out), Scaled())
        self.add_parameter("bias_h", (hidden,), zeros)
        self.add_parameter("bias_o", (out,), zeros)
        before = self._running("prev_hidden")
        self.add(p.Dense(), "from_input", input="input", weight="w_ih", output="given")
        self.add(p.Dense(), "from_hidden", input=before, weight="w_hh", output="kept")
        self.add(p.Add(), "sum", left="given", right="kept", output="both")
        self.add(p.Add(), "shifted", left="both", right="bias_h", output="raw")
        self.add(p.Tanh(), "tanh", input="raw", output="hidden")
        self.add(p.Dense(), "to_output", input="hidden", weight="w_ho", output="product")
        self.add(p.Add(), "result", left="product", right="bias_o", output="output")
        self.expose("hidden", "hidden_compl", "output")


class LSTMCellBody(Model):
    """The gates of an LSTM: ``input``, ``prev_hidden``, ``prev_cell`` → ``hidden``, ``cell``.

    Each gate is a product of input and hidden state side by side, ``[in + hidden, hidden]``: ``w_f`` forget,
    ``w_i`` input, ``w_c`` candidate, ``w_o`` output, with their biases.
    """

    def __init__(self, hidden_size: int | None = None, *, name: str | None = None) -> None:
        super().__init__(name=name)
        hidden: Any = hidden_size or "hidden"
        self.add_input("input", "n *s in", "float")
        self.add_input("prev_hidden", ("n", "*s", hidden), "float")
        self.add_input("prev_cell", ("n", "*s", hidden), "float")
        self.add(p.Concat(2, -1), "joined", input_0="input", input_1="prev_hidden", output="both")
        for key, squash in (("f", p.Sigmoid), ("i", p.Sigmoid), ("c", p.Tanh), ("o", p.Sigmoid)):
            self.add_parameter(f"w_{key}", ("sum", hidden), Scaled())
            self.add_parameter(f"bias_{key}", (hidden,), zeros)
            self.add(p.Dense(), f"product_{key}", input="both", weight=f"w_{key}", output=f"raw_{key}")
            self.add(
                p.Add(), f"shifted_{key}", left=f"raw_{key}", right=f"bias_{key}", output=f"biased_{key}"
            )
            self.add(squash(), f"gate_{key}", input=f"biased_{key}", output=f"gated_{key}")
        self.add(p.Multiply(), "kept", left="gated_f", right="prev_cell", output="old")
        self.add(p.Multiply(), "written", left="gated_i", right="gated_c", output="new")
        self.add(p.Add(), "next_cell", left="old", right="new", output="cell")
        self.add(p.Tanh(), "squashed", input="cell", output="seen")
        self.add(p.Multiply(), "next_hidden", left="gated_o", right="seen", output="hidden")
        self.expose("hidden", "cell")


class LSTMCell(Cell):
    """One step of long short-term memory (Hochreiter and Schmidhuber, 1997), with a linear output.

    Besides the ports of every :class:`Cell`: ``prev_cell`` → ``cell``. Parameters as in :class:`LSTMCellBody`,
    ``w_out [hidden, out]`` and ``bias_out``.
    """

    shared_keys = (
        *(f"{kind}_{gate}" for gate in "fico" for kind in ("w", "bias")),
        "w_out",
        "bias_out",
    )
    state_keys = ("hidden", "cell")

    def __init__(
        self, hidden_size: int | None = None, output_size: int | None = None, *, name: str | None = None
    ) -> None:
        super().__init__(hidden_size, output_size, name=name)
        hidden, out = self._hidden_size, self._out
        self.add_input("input", "n *s in", "float")
        for key in ("prev_hidden", "prev_cell"):
            self.add_input(key, ("m", "*s", hidden), "float")
        shared = {key: key for key in self.shared_keys if not key.endswith("_out")}
        self.add(
            LSTMCellBody(hidden_size),
            "body",
            input="input",
            prev_hidden=self._running("prev_hidden"),
            prev_cell=self._running("prev_cell"),
            hidden="hidden",
            cell="cell",
            **shared,
        )
        self.add_parameter("w_out", (hidden, out), Scaled())
        self.add_parameter("bias_out", (out,), zeros)
        self.add(p.Dense(), "to_output", input="hidden", weight="w_out", output="product")
        self.add(p.Add(), "result", left="product", right="bias_out", output="output")
        self.expose("hidden", "cell", "hidden_compl", "output")


class _Unrolled(Model):
    """Cells one after the other with the parameters of the first, which are this model's own."""

    def __init__(
        self, cell_type: Cell | Callable[[], Cell], max_sequence_length: int, *, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        whole("max_sequence_length", max_sequence_length)
        self.cell_type = cell_type
        self.length = max_sequence_length
        self.cells: list[Cell] = []

    def _step(self, given: Any, output: str) -> Cell:
        make = self.cell_type
        cell = make.again() if isinstance(make, Cell) else make() if callable(make) else None
        if not isinstance(cell, Cell):
            raise WiringError(
                f"cell_type={make!r} must be a cell such as RNNCell(16, 4), or make one when called"
            )
        before = self.cells[-1] if self.cells else None
        states = {
            f"prev_{key}": f"initial_{key}" if before is None else before.port(key) for key in cell.state_keys
        }
        shared = {key: key for key in cell.shared_keys}
        self.add(cell, f"cell_{len(self.cells)}", input=given, output=output, **states, **shared)
        self.cells.append(cell)
        return cell

    def _rows_of(self, source: Any, target: str, step: int) -> Any:
        """As many rows of ``source`` as ``target`` has."""
        return self.add(p.SplitLike(), f"rows_{step}", input=source, like=target).output


class OneToMany(_Unrolled):
    """From one input to a sequence: each step's output is the next one's input.

    Ports: ``input``, ``initial_hidden`` (and ``initial_cell``), ``target1``, ``target2`` … (step t runs as
    many rows as
    ``target<t>`` has) → ``output0``, ``output1`` …. With ``teacher_forcing`` step t reads ``target<t-1>`` instead
    of its own output, from ``target0`` on (Williams and Zipser, 1989).
    """

    def __init__(
        self,
        cell_type: Cell | Callable[[], Cell],
        max_sequence_length: int,
        teacher_forcing: bool = False,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(cell_type, max_sequence_length, name=name)
        cell = self._step("input", "output0")
        for step in range(1, max_sequence_length):
            source: Any = f"target{step - 1}" if teacher_forcing else cell.output
            cell = self._step(self._rows_of(source, f"target{step}", step), f"output{step}")
        self.expose(*(f"output{i}" for i in range(max_sequence_length)))


class OneToManyInference(_Unrolled):
    """:class:`OneToMany` without targets: every row runs for all steps."""

    def __init__(
        self,
        cell_type: Cell | Callable[[], Cell],
        max_sequence_length: int,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(cell_type, max_sequence_length, name=name)
        cell = self._step("input", "output0")
        for step in range(1, max_sequence_length):
            cell = self._step(cell.output, f"output{step}")
        self.expose(*(f"output{i}" for i in range(max_sequence_length)))


class ManyToOne(_Unrolled):
    """From a sequence to the last hidden state of every row.

    Ports: ``input0``, ``input1`` … (with no more rows than the one before), ``initial_hidden`` (and
    ``initial_cell``) →
    ``output0``, ``output1`` … and ``hidden_concat``: the hidden state in which each row ended, those that ran
    longest first.
    """

    def __init__(
        self,
        cell_type: Cell | Callable[[], Cell],
        max_sequence_length: int,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(cell_type, max_sequence_length, name=name)
        for step in range(max_sequence_length):
            self._step(f"input{step}", f"output{step}")
        # A row that has no input at step t ended in step t - 1; those of the first step never ran.
        ended = [self.cells[-1].hidden, *(c.port("hidden_compl") for c in reversed(self.cells[1:]))]
        joined = {f"input_{i}": port for i, port in enumerate(ended)}
        self.add(p.Concat(len(ended), 0), "ended", **joined, output="hidden_concat")
        self.expose(*(f"output{i}" for i in range(max_sequence_length)), "hidden_concat")


class _EncoderDecoder(Model):
    def _couple(self, encoder: Model, decoder: Model, hidden: str) -> None:
        self.add(encoder, "encoder", **{k: k for k in encoder.input_keys}, hidden_concat="encoded")
        into = {
            key: key if key.startswith("target") else f"decoder_{key}"
            for key in decoder.input_keys
            if key != "initial_hidden"
        }
        if hidden == "permuted":
            self.add(p.PermuteTensor(), "order", input="encoded", indices="indices", output="permuted")
        outputs = {key: key for key in decoder.output_keys}
        self.add(decoder, "decoder", initial_hidden=hidden, **into, **outputs)
        self.expose(*outputs)


class EncoderDecoder(_EncoderDecoder):
    """Sequence to sequence (Sutskever et al., 2014): :class:`ManyToOne`, then :class:`OneToMany` from where it ended.

    ``indices int [n]`` puts the rows, sorted by the length of their inputs, in the order of the lengths of their
    targets. The decoder's ports are ``decoder_input`` (and ``decoder_initial_cell``) and ``target<t>``.
    """

    def __init__(
        self,
        cell_type: Cell | Callable[[], Cell],
        max_input_sequence_length: int,
        max_target_sequence_length: int,
        teacher_forcing: bool = False,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self._couple(
            ManyToOne(cell_type, max_input_sequence_length),
            OneToMany(cell_type, max_target_sequence_length, teacher_forcing),
            "permuted",
        )


class EncoderDecoderInference(_EncoderDecoder):
    """:class:`EncoderDecoder` without targets and without a new order of rows."""

    def __init__(
        self,
        cell_type: Cell | Callable[[], Cell],
        max_input_sequence_length: int,
        max_target_sequence_length: int,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self._couple(
            ManyToOne(cell_type, max_input_sequence_length),
            OneToManyInference(cell_type, max_target_sequence_length),
            "encoded",
        )


class _Sequence(Model):
    gates: ClassVar[int]
    states: ClassVar[tuple[str, ...]] = ("hidden",)
    scan: ClassVar[type[p.RnnScan | p.LstmScan | p.GruScan]]
    biases: ClassVar[tuple[str, ...]] = ("bias",)

    def __init__(self, hidden_size: int, initial_state: bool = False, *, name: str | None = None) -> None:
        super().__init__(name=name)
        whole("hidden_size", hidden_size)
        width = self.gates * hidden_size
        self.add_input("input", "batch sequence in", "float", ("batch", "sequence", None))
        self.add_parameter("w_ih", ("in", width), Scaled())
        self.add_parameter("w_hh", (hidden_size, width), Scaled())
        for key in self.biases:
            self.add_parameter(key, (width,), zeros)
        start: dict[str, Any] = {s: f"initial_{s}" for s in self.states}
        if initial_state:
            for key in start.values():
                self.add_input(key, ("batch", hidden_size), "float")
        else:
            zero = self.add(p.ZeroState(hidden_size), "start", input="input")
            start = dict.fromkeys(self.states, zero.output)
        keys = {key: key for key in ("w_ih", "w_hh", *self.biases)}
        ends = {f"last_{s}": f"last_{s}" for s in self.states}
        self.add(self.scan(), "scan", input="input", output="output", **start, **keys, **ends)
        self.expose("output", *ends)


class RNN(_Sequence):
    """Elman's network over a sequence: ``input [batch, sequence, in]`` → ``output [batch, sequence, hidden]``.

    Also ``last_hidden``. It starts from zeros, or with ``initial_state`` from the input ``initial_hidden``.
    Parameters as in :class:`~capibara.compose.primitives.RnnScan`.
    """

    gates = 1
    scan = p.RnnScan


class LSTM(_Sequence):
    """Long short-term memory over a sequence: ``input [batch, sequence, in]`` → ``output [batch, sequence, hidden]``.

    Also ``last_hidden`` and ``last_cell``. It starts from zeros, or with ``initial_state`` from the inputs
    ``initial_hidden`` and ``initial_cell``. Parameters as in :class:`~capibara.compose.primitives.LstmScan`.
    """

    gates = 4
    states = ("hidden", "cell")
    scan = p.LstmScan


class GRU(_Sequence):
    """Gated recurrent units over a sequence: ``input [batch, sequence, in]`` → ``output [batch, sequence, hidden]``.

    Also ``last_hidden``. It starts from zeros, or with ``initial_state`` from the input ``initial_hidden``.
    Parameters as in :class:`~capibara.compose.primitives.GruScan`.
    """

    gates = 3
    scan = p.GruScan
    biases = ("bias", "bias_h")
