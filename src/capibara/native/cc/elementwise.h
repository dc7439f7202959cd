// Passes over rows between the products of a layer: what the kernels of every instruction set share with the code that
// calls them.
#pragma once

#include <stdint.h>

namespace capibara {

// y = x * inverse * (scale + offset), inverse = 1 / sqrt(mean(x^2) + epsilon), for each row of x [rows, features].
struct RmsNorm {
  int64_t rows, features;
  const float *x, *scale;  // scale [features]
  float offset, epsilon;
  float *y, *inverse;  // [rows, features], [rows]
};

// Of the same: slopes of x, and the sum over the rows of those of scale. `inverse` is what the forward pass gave.
struct RmsNormBackward {
  int64_t rows, features;
  const float *x, *scale, *inverse, *y_slope;
  float offset;
  float *x_slope, *scale_slope;
};

// y = gate * sigmoid(gate) * up; slopes of gate and up from that of y.
struct Gated {
  int64_t count;
  const float *gate, *up, *y_slope;
  float *y, *gate_slope, *up_slope;
};

// Of each head of x [rows, heads, features], a the first and b the second of its first 2 * pairs features:
// a * cos - sign * b * sin, b * cos + sign * a * sin; what comes after them stays. Tables are [rows, pairs].
struct Turned {
  int64_t rows, heads, features, pairs;
  const float *x, *cos, *sin;
  float sign;
  float* y;
};

struct ElementwiseKernels {
  void (*rms_norm)(const RmsNorm&);
  void (*rms_norm_backward)(const RmsNormBackward&);
  void (*gated)(const Gated&);
  void (*gated_backward)(const Gated&);
  void (*turned)(const Turned&);
};

}  // namespace capibara
