"""The blocks of compose that are Mithril's but for the order of arguments, under Mithril's names and arguments.

One line a block: its name; the arguments that its class takes (what compose calls otherwise stands behind a slash);
the ports in the order of ``connect``, where that is not the inputs and then the outputs.
"""

from __future__ import annotations

from typing import Any

from capibara.compose import models
from mithril.connecting import Connectable

TABLE = """
AUC | n_classes is_label_one_hot=True pred label | pred label output
Absolute | input
AbsoluteError | input target
Accuracy | threshold=None is_binary=False is_pred_one_hot=True is_label_one_hot=True pred label | pred label output
Add | left right
ArgMax | axis=None keepdim=False input | input axis keepdim output
ArgMin | axis=None keepdim=False input | input axis keepdim output
AtLeast1D | input
AvgPool1D | kernel_size stride=None padding=0 dilation=1 input | input kernel_size stride padding dilation output
AvgPool2D | kernel_size stride=None padding=0 dilation=1 input | input kernel_size stride padding dilation output
BinaryCrossEntropy | input_type="logits" pos_weight=1.0 input target robust=False \
| input target pos_weight threshold robust output
Buffer | input
CartesianDifference | left right
Ceil | input
Cholesky | input
Clamp | input min_val/low max_val/high | input min_val max_val output
Cosine | input
CrossEntropy | input_type="logits" weights="" input target robust=False categorical=True \
| input target weights categorical threshold robust output
DistanceMatrix | left right | left right norm output
EncoderDistanceMatrix | get_final_distance=True robust=True input1 input2 | input1 input2 norm output
Equal | left right
Exponential | input
F1 | average="micro" n_classes=None threshold=None is_binary=False is_pred_one_hot=True \
is_label_one_hot=True pred label \
| pred label output
Flatten | start_dim/start=0 end_dim/end=-1 input | input start_dim end_dim output
Floor | input
Gelu | approximate=False input | input approximate output
Greater | left right
GreaterEqual | left right
HingeLoss | input target
IsNan | input
Item | input
KLDivergence | input target | input target threshold output
L1 | input | input output
L2 | input | input output
LeakyRelu | slope=0.01 input | input slope output
Length | input
Less | left right
LessEqual | left right
Log | robust=False input | input output threshold
LogicalAnd | left right
LogicalNot | input
LogicalOr | left right
LogicalXOr | left right
MatrixMultiply | left right
Max | axis=None keepdim=False input | input axis keepdim output
MaxPool1D | kernel_size stride=None padding=0 dilation=1 input | input kernel_size stride padding dilation output
MaxPool2D | kernel_size stride=None padding=0 dilation=1 input | input kernel_size stride padding dilation output
Maximum | left right
MDSCore | exact_distances=True robust=True distances pred_distances norm | distances pred_distances norm output
Mean | axis=None keepdim=False input | input axis keepdim output
Metric | threshold=None is_binary=False is_pred_one_hot=True is_label_one_hot=True pred label \
| pred label output pred_formatted label_formatted
Min | axis=None keepdim=False input | input axis keepdim output
Minimum | left right
Modulo | left right
Multiply | left right
NanToNum | nan=0.0 posinf=None neginf=None input | input nan posinf neginf output
Negate | input
NormModifier | input
NotEqual | left right
Ones | shape | shape dtype output
Pad | pad_width/widths input | input pad_width output
PermuteTensor | indices input | input indices output
Precision | average="micro" n_classes=None threshold=None is_binary=False is_pred_one_hot=True \
is_label_one_hot=True pred label \
| pred label output
PrimitiveAvgPool2D | kernel_size stride padding dilation input | input kernel_size stride padding dilation output
PrimitiveMaxPool1D | kernel_size stride padding dilation input | input kernel_size stride padding dilation output
PrimitiveMaxPool2D | kernel_size stride padding dilation input | input kernel_size stride padding dilation output
Prod | axis=None keepdim=False input | input axis keepdim output
QuadHingeLoss | input target
QuadraticFormRegularizer | input kernel | input kernel output
QuantileLoss | quantile=0.5 input target | input target quantile output
RBFKernel | input1 input2 l_scale sigma | input1 input2 l_scale sigma output
RandInt | shape low high | shape low high dtype output
Randn | shape | shape dtype output
Recall | average="micro" n_classes=None threshold=None is_binary=False is_pred_one_hot=True \
is_label_one_hot=True pred label \
| pred label output
Relu | input
SiLU | input
Sigmoid | input
Sign | input
Sine | input
Size | dim=None input | input dim output
Softmax | input axis=-1 | input axis output
Softplus | input
Sqrt | robust=False input | input output threshold
Square | input
SquaredError | input target
Squeeze | input
StableReciprocal | input | input threshold output
Subtract | left right
Sum | axis=None keepdim=False input | input axis keepdim output
SwapAxes | axis1 axis2 input | input axis1 axis2 output
Tanh | input
ToTensor | input | input dtype output
Transpose | axes=None input | input axes output
TransposedDiagonal | input
Trapezoid | x y | y x output
Unique | size input | input output
Variance | axis=None keepdim=False correction=0 input | input axis keepdim correction output
Where | cond input1 input2 | cond input1 input2 output
ZerosLike | input
"""


def _made() -> dict[str, type[Any]]:
    found: dict[str, type[Any]] = {}
    for line in TABLE.strip().splitlines():
        name, signature, *places = (part.strip() for part in line.split("|"))
        base = getattr(models, name)
        members = {
            "__module__": "mithril.models",
            "__doc__": base.__doc__,
            "signature": signature,
            "places": places[0] if places else f"{signature} output",
        }
        found[name] = type(name, (Connectable, base), members)
    return found


SAME = _made()
