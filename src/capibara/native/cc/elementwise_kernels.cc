// Passes over rows between the products of a layer, compiled once per instruction set. Each reads its arrays once.
#include "elementwise.h"

#include "vec.h"

namespace CAPIBARA_ISA {

using capibara::Gated;
using capibara::RmsNorm;
using capibara::RmsNormBackward;
using capibara::Turned;

// The sum of term(first feature) over vectors of a row, and of `rest` over the features that fill none.
template <class Term, class Rest>
static inline __attribute__((always_inline)) float over(int64_t features, Term term, Rest rest) {
  Vec total[4] = {};
  int64_t j = 0;
  for (; j + 4 * kWidth <= features; j += 4 * kWidth)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) total[v] += term(j + v * kWidth);
  for (; j + kWidth <= features; j += kWidth) total[0] += term(j);
  float found = sum((total[0] + total[1]) + (total[2] + total[3]));
  for (; j < features; ++j) found += rest(j);
  return found;
}

static void rms_norm(const RmsNorm& p) {
  for (int64_t i = 0; i < p.rows; ++i) {
    const float* const x = p.x + i * p.features;
    float* const y = p.y + i * p.features;
    const float squares = over(
        p.features, [&](int64_t j) { return load(x + j) * load(x + j); }, [&](int64_t j) { return x[j] * x[j]; });
    const float inverse = 1.0f / __builtin_sqrtf(squares / float(p.features) + p.epsilon);
    p.inverse[i] = inverse;
    int64_t j = 0;
    for (; j + kWidth <= p.features; j += kWidth)
      store(y + j, load(x + j) * inverse * (load(p.scale + j) + p.offset));
    for (; j < p.features; ++j) y[j] = x[j] * inverse * (p.scale[j] + p.offset);
  }
}

static void rms_norm_backward(const RmsNormBackward& p) {
  for (int64_t j = 0; j < p.features; ++j) p.scale_slope[j] = 0;
  for (int64_t i = 0; i < p.rows; ++i) {
    const float* const x = p.x + i * p.features;
    const float* const slope = p.y_slope + i * p.features;
    float* const to = p.x_slope + i * p.features;
    const float inverse = p.inverse[i];
    const float along = over(
        p.features, [&](int64_t j) { return load(x + j) * load(slope + j) * (load(p.scale + j) + p.offset); },
        [&](int64_t j) { return x[j] * slope[j] * (p.scale[j] + p.offset); });
    // The slope of the row's length: what lies along the row grows with it, and is divided by it.
    const float back = along / float(p.features) * inverse * inverse * inverse;
    int64_t j = 0;
    for (; j + kWidth <= p.features; j += kWidth) {
      const Vec row = load(x + j), other = load(slope + j);
      store(p.scale_slope + j, load(p.scale_slope + j) + row * inverse * other);
      store(to + j, other * (load(p.scale + j) + p.offset) * inverse - row * back);
    }
    for (; j < p.features; ++j) {
      p.scale_slope[j] += x[j] * inverse * slope[j];
      to[j] = slope[j] * (p.scale[j] + p.offset) * inverse - x[j] * back;
    }
  }
}

static inline __attribute__((always_inline)) Vec sigmoid(Vec x) {
  const Vec most = splat(127.0f), power = x * -1.44269504f;
  return 1.0f / (1.0f + exp2(power > most ? most : power));  // in this order a NaN stays one
}

// Calls at(i, read, write) for all numbers: read(array) is a vector of them from i on, write(array, vector) stores it.
template <class At>
static inline __attribute__((always_inline)) void each(int64_t count, At at) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth)
    at([&](const float* from) { return load(from + i); }, [&](float* to, Vec x) { store(to + i, x); });
  if (i == count) return;
  const int64_t rest = count - i;
  at(
      [&](const float* from) {
        Vec x{};
        for (int64_t l = 0; l < rest; ++l) x[l] = from[i + l];
        return x;
      },
      [&](float* to, Vec x) {
        for (int64_t l = 0; l < rest; ++l) to[i + l] = x[l];
      });
}

static void gated(const Gated& p) {
  each(p.count, [&](auto read, auto write) {
    const Vec gate = read(p.gate);
    write(p.y, gate * sigmoid(gate) * read(p.up));
  });
}

static void gated_backward(const Gated& p) {
  each(p.count, [&](auto read, auto write) {
    const Vec gate = read(p.gate), up = read(p.up), slope = read(p.y_slope), part = sigmoid(gate);
    const Vec active = gate * part;
    write(p.up_slope, slope * active);
    write(p.gate_slope, slope * up * (part + active * (1.0f - part)));
  });
}

static void turned(const Turned& p) {
  for (int64_t i = 0; i < p.rows; ++i) {
    const float *const cos = p.cos + i * p.pairs, *const sin = p.sin + i * p.pairs;
    for (int64_t h = 0; h < p.heads; ++h) {
      const int64_t at = (i * p.heads + h) * p.features;
      const float *const a = p.x + at, *const b = a + p.pairs;
      float *const to_a = p.y + at, *const to_b = to_a + p.pairs;
      int64_t j = 0;
      for (; j + kWidth <= p.pairs; j += kWidth) {
        const Vec c = load(cos + j), s = load(sin + j) * p.sign, first = load(a + j), second = load(b + j);
        store(to_a + j, first * c - second * s);
        store(to_b + j, second * c + first * s);
      }
      for (; j < p.pairs; ++j) {
        const float s = sin[j] * p.sign, first = a[j], second = b[j];
        to_a[j] = first * cos[j] - second * s;
        to_b[j] = second * cos[j] + first * s;
      }
      for (j = 2 * p.pairs; j < p.features; ++j) to_a[j] = a[j];
    }
  }
}

extern const capibara::ElementwiseKernels kElementwise;
const capibara::ElementwiseKernels kElementwise = {rms_norm, rms_norm_backward, gated, gated_backward, turned};

}  // namespace CAPIBARA_ISA
