"""Cells, and networks unrolled from them, with Mithril's weights ``[out, in]`` and its names of parameters."""

from __future__ import annotations

from typing import Any

from capibara import compose
from capibara.compose import TBD
from mithril.model import Model
from mithril.models.stored import stored

__all__ = [
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


class Cell(Model, compose.Cell):
    """Base of the cells: one step of a recurrent network."""

    def _keep(self, cell: compose.Cell) -> None:
        stored(self, cell, turned=[key for key in cell.shared_keys if key.startswith("w_")])


class RNNCell(Cell):
    __doc__ = compose.RNNCell.__doc__

    shared_keys = compose.RNNCell.shared_keys
    places = "input prev_hidden w_ih w_hh w_ho bias_h bias_o hidden hidden_compl output"

    def __init__(
        self,
        input: Any = TBD,
        w_ih: Any = TBD,
        w_hh: Any = TBD,
        w_ho: Any = TBD,
        bias_h: Any = TBD,
        bias_o: Any = TBD,
        *,
        name: str | None = None,
    ) -> None:
        values = {
            "input": input,
            "w_ih": w_ih,
            "w_hh": w_hh,
            "w_ho": w_ho,
            "bias_h": bias_h,
            "bias_o": bias_o,
        }
        super().__init__(name=name, **values)
        self._keep(compose.RNNCell())


class LSTMCell(Cell):
    __doc__ = compose.LSTMCell.__doc__

    shared_keys = compose.LSTMCell.shared_keys
    state_keys = compose.LSTMCell.state_keys
    places = (
        "input prev_hidden prev_cell w_i w_f w_c w_o w_out bias_f bias_i bias_c bias_o bias_out hidden cell "
        "hidden_compl output"
    )

    def __init__(
        self,
        input: Any = TBD,
        w_i: Any = TBD,
        w_f: Any = TBD,
        w_c: Any = TBD,
        w_o: Any = TBD,
        w_out: Any = TBD,
        bias_f: Any = TBD,
        bias_i: Any = TBD,
        bias_c: Any = TBD,
        bias_o: Any = TBD,
        bias_out: Any = TBD,
        *,
        name: str | None = None,
    ) -> None:
        values = {"input": input, "w_i": w_i, "w_f": w_f, "w_c": w_c, "w_o": w_o, "w_out": w_out}
        biases = {
            "bias_f": bias_f,
            "bias_i": bias_i,
            "bias_c": bias_c,
            "bias_o": bias_o,
            "bias_out": bias_out,
        }
        super().__init__(name=name, **values, **biases)
        self._keep(compose.LSTMCell())


class LSTMCellBody(Model):
    __doc__ = compose.LSTMCellBody.__doc__

    places = "input prev_hidden prev_cell w_i w_f w_c w_o bias_f bias_i bias_c bias_o hidden cell"

    def __init__(self, *, name: str | None = None, **values: Any) -> None:
        super().__init__(name=name, **values)
        stored(self, compose.LSTMCellBody(), turned=("w_i", "w_f", "w_c", "w_o"))


class OneToMany(Model, compose.OneToMany):
    __doc__ = compose.OneToMany.__doc__

    signature = "cell_type max_sequence_length teacher_forcing=False input"


class OneToManyInference(Model, compose.OneToManyInference):
    __doc__ = compose.OneToManyInference.__doc__

    signature = "cell_type max_sequence_length"


class ManyToOne(Model, compose.ManyToOne):
    __doc__ = compose.ManyToOne.__doc__

    signature = "cell_type max_sequence_length"


class EncoderDecoder(Model, compose.EncoderDecoder):
    """:class:`capibara.compose.EncoderDecoder`, with the decoder's parameters named ``decoder_…``."""

    signature = "cell_type max_input_sequence_length max_target_sequence_length teacher_forcing=False indices"

    def _make(self, options: dict[str, Any], name: str | None) -> None:
        super()._make(options, name)
        _lift(self)


class EncoderDecoderInference(Model, compose.EncoderDecoderInference):
    """:class:`capibara.compose.EncoderDecoderInference`, with the decoder's parameters named ``decoder_…``."""

    signature = "cell_type max_input_sequence_length max_target_sequence_length"

    def _make(self, options: dict[str, Any], name: str | None) -> None:
        super()._make(options, name)
        _lift(self)


def _lift(model: Model) -> None:
    """Parameters of the encoder under their own names, those of the decoder under ``decoder_…``.

    What makes outputs of hidden states is the decoder's for both, since nothing reads the encoder's outputs.
    """
    encoder, decoder = (next(c.block for c in model.children if c.name == n) for n in ("encoder", "decoder"))
    last = ("w_out", "bias_out") if "w_out" in encoder.wires else ("w_ho", "bias_o")
    for key in last:
        model.merge_connections(encoder.port(key), decoder.port(key), name=f"decoder_{key}")
    for block, prefix in ((encoder, ""), (decoder, "decoder_")):
        for key, wire in block.wires.items():
            root = wire.find()
            if root.role == "param" and key not in last:
                model._name(f"{prefix}{key}", root)
