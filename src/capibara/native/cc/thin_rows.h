// What lies between products of a few rows: parts of single rows, which are in the caches. Included by the kernels.
#pragma once

#include "vec.h"

namespace CAPIBARA_ISA {

// out = x * inverse * scale, where inverse is one over the root of the mean of squares and epsilon.
static void rows_norm(const float* x, const float* scale, float epsilon, int64_t width, float* out) {
  constexpr int kAbreast = 4;  // sums that do not wait for each other
  Vec totals[kAbreast] = {};
  int64_t j = 0;
  for (; j + kAbreast * kWidth <= width; j += kAbreast * kWidth)
#pragma GCC unroll 4
    for (int c = 0; c < kAbreast; ++c) {
      const Vec part = load(x + j + c * kWidth);
      totals[c] += part * part;
    }
  for (; j + kWidth <= width; j += kWidth) {
    const Vec part = load(x + j);
    totals[0] += part * part;
  }
  float total = sum((totals[0] + totals[1]) + (totals[2] + totals[3]));
  for (; j < width; ++j) total += x[j] * x[j];
  const float inverse = 1.0f / __builtin_sqrtf(total / float(width) + epsilon);
  for (j = 0; j + kWidth <= width; j += kWidth) store(out + j, load(x + j) * splat(inverse) * load(scale + j));
  for (; j < width; ++j) out[j] = x[j] * inverse * scale[j];
}

static void rows_add(const float* a, const float* b, int64_t count, float* out) {
  int64_t j = 0;
  for (; j + kWidth <= count; j += kWidth) store(out + j, load(a + j) + load(b + j));
  for (; j < count; ++j) out[j] = a[j] + b[j];
}

// a * logistic(a) * b.
static inline __attribute__((always_inline)) Vec gated(Vec a, Vec b) {
  const Vec power = a * splat(-1.44269504f);  // log2(e)
  const Vec limit = splat(127.0f);
  // Past the range of exp2 the logistic is 0; a NaN stays one.
  const Vec grown = power > limit ? splat(__builtin_inff()) : exp2(power > limit ? limit : power);
  return a * (splat(1.0f) / (splat(1.0f) + grown)) * b;
}

static void rows_gate(const float* a, const float* b, int64_t count, float* out) {
  int64_t j = 0;
  for (; j + kWidth <= count; j += kWidth) store(out + j, gated(load(a + j), load(b + j)));
  if (j == count) return;
  float left[2][kWidth] = {}, found[kWidth];
  for (int64_t l = j; l < count; ++l) left[0][l - j] = a[l], left[1][l - j] = b[l];
  store(found, gated(load(left[0]), load(left[1])));
  for (int64_t l = j; l < count; ++l) out[l] = found[l - j];
}

}  // namespace CAPIBARA_ISA
